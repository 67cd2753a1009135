"""The command line: numbers against the tables and scipy, JSON, files and help; mistakes have their own file."""

import csv
import json
import re
import subprocess
import sys
import types
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize

from dlnsim.cli import BROKEN_PIPE, FAILED_POINTS, commands, main
from dlnsim.cli.files import read_data
from dlnsim.cli.options import COMMANDS
from dlnsim.cli.report import plain
from dlnsim.result import Result

DATA = Path(__file__).parents[1] / "data"
SOLVED = ["mse", "forgetting", "tau", "theta", "residual", "result"]


def strict_json(text):
    def reject(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=reject)


@pytest.fixture
def run(capsys):
    """Run a command that must succeed; stdout."""

    def call(*arguments, code=0):
        assert main([str(a) for a in arguments]) == code
        out, err = capsys.readouterr()
        assert (err == "") == (code == 0)
        return out

    return call


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(3)
    X = rng.standard_normal((6, 15)) / np.sqrt(15)
    beta_pt = np.where(np.arange(15) < 4, 1.0, 0.0)
    return X, X @ (beta_pt * rng.standard_normal(15)), beta_pt


@pytest.fixture
def npz(tmp_path, problem):
    X, y, beta_pt = problem
    path = tmp_path / "task.npz"
    np.savez(path, X=X, y=y, beta_pt=beta_pt)
    return path


def penalty_minimiser(X, y, c):
    """Minimise sum of q_c(beta) on X beta = y: quasi-Newton over the null space, no dual."""
    particular, null = np.linalg.pinv(X) @ y, np.linalg.svd(X)[2][len(X) :].T

    def objective(z):
        beta = particular + null @ z
        value = (beta * np.arcsinh(beta / c) + c - np.hypot(beta, c)).sum() / 2
        return value, null.T @ np.arcsinh(beta / c) / 2

    best = minimize(objective, np.zeros(null.shape[1]), jac=True, options={"gtol": 1e-12, "maxiter": 10000})
    return particular + null @ best.x, best.fun


# --- solve ------------------------------------------------------------------------------------------------


def test_solve_agrees_with_the_table(run):
    with (DATA / "theory_perfect_pretraining.csv").open() as file:
        row = next(r for r in csv.DictReader(file) if float(r["omega"]) > 0 and float(r["alpha_ft"]) < 1)
    names = {"noise_var": "noise_var_ft"}
    options = [
        part
        for name, value in row.items()
        if name not in ("mse", "tau", "theta")
        for part in ("--" + names.get(name, name).replace("_", "-"), value)
    ]
    found = strict_json(run("solve", *options, "--json"))
    assert found["axes"] == []
    for name in ("mse", "tau", "theta"):
        assert found[name] == pytest.approx(float(row[name]), rel=1e-8)


def test_solve_grid_is_the_outer_product_in_the_order_of_the_options(run):
    # The order on the command line does not matter; negative numbers are values, not options.
    grid = ("--alpha-ft", "0.5", "1", "--lambda-pt", "-1", "-1e-1", "0.5", "--noise-var-ft=0.1")
    found = strict_json(run("solve", *grid, "--json"))
    assert found["axes"] == ["lambda_pt", "alpha_ft"]
    assert found["shape"] == [3, 2]
    assert found["parameters"]["lambda_pt"] == [-1, -0.1, 0.5]
    assert found["result"] == [["stuck", "stuck"], ["converged", "diverges"], ["converged", "diverges"]]
    assert found["tau"][0] == [None, None]
    assert found["mse"][1][1] == "inf"
    assert found["mse"][0] == pytest.approx([1, 1])

    heading, columns, *rows, stuck, diverges = run("solve", *grid).splitlines()
    assert "c_pt = 0.001" in heading
    assert columns.split() == [*found["axes"], *SOLVED]
    assert [row.split()[:2] for row in rows[:3]] == [["-1", "0.5"], ["-1", "1"], ["-0.1", "0.5"]]
    assert len({row.index(row.split()[-1]) for row in rows}) == 1
    assert stuck.startswith("# stuck: c_FT = 0")
    assert diverges.startswith("# diverges: ")


def test_solve_takes_the_papers_parameters(run):
    conditional = ("--rho-pt", 0.2, "--rho-ft-shared", 0.25, "--rho-ft-new", 0.0625)
    paper = strict_json(run("solve", *conditional, "--json"))
    ours = strict_json(run("solve", "--rho-pt", 0.2, "--rho-ft", 0.1, "--omega", 0.5, "--json"))
    assert paper["mse"] == pytest.approx(ours["mse"], rel=1e-12)
    assert {"rho_ft_shared", "rho_ft_new"} < paper["parameters"].keys()
    assert "omega" not in paper["parameters"]


def test_failed_points_are_printed_with_their_code(capsys, monkeypatch):
    import replica

    solved = replica.solve

    def fail(*args, **kwargs):
        solution = solved(*args, **kwargs)
        nan = np.full(solution.mse.shape, np.nan)
        return types.SimpleNamespace(
            **{**vars(solution), "mse": nan, "result": np.full(nan.shape, int(Result.QUADRATURE))}
        )

    monkeypatch.setattr(replica, "solve", fail)
    assert main(["solve"]) == FAILED_POINTS
    out, err = capsys.readouterr()
    assert out.splitlines()[2].split()[0] == "nan"
    assert out.splitlines()[2].split()[-1] == "quadrature"
    assert err.startswith("dlnsim solve: 1 of 1 problems failed: quadrature: ")
    assert err.count("\n") == 1


# --- simulate ---------------------------------------------------------------------------------------------


def test_simulate_agrees_with_theory_and_says_so(run):
    arguments = ("simulate", "--dim", 120, "--seeds", 6, "--alpha-ft", 0.401, "--noise-var-pt", 0.1)
    found = strict_json(run(*arguments, "--json"))
    assert found["axes"] == []
    assert found["results"] == {"converged": 6}
    assert found["alpha_ft_used"] == 0.4
    theory = strict_json(run("solve", "--alpha-ft", 0.4, "--json"))["mse"]
    assert found["theory_mse"] == pytest.approx(theory, rel=1e-12)
    assert found["z"] == pytest.approx((found["mse_ft"] - theory) / found["mse_ft_se"])
    assert abs(found["z"]) < 4
    assert found["mse_pt"] == 0
    assert found["residual"] < 1e-11
    assert run(*arguments).splitlines()[2].split()[-2:] == ["6", "converged"]


def test_simulate_trains_an_imperfect_stage_without_theory(run):
    options = ("--dim", 30, "--seeds", 1, "--alpha-ft", 0.5, "--alpha-pt", 0.5)
    found = strict_json(run("simulate", *options, "--json"))
    assert found["theory_mse"] is None
    assert found["z"] is None
    assert found["mse_ft_se"] is None
    assert found["mse_pt"] > 0


def test_mean_and_standard_error_skip_failed_seeds():
    mean, error = commands._over_seeds(np.array([[1.0, 3.0, np.nan], [np.nan, np.nan, 2.0]]))
    assert mean == pytest.approx([2, 2])
    assert error == pytest.approx([1, np.nan], nan_ok=True)


# --- bias -------------------------------------------------------------------------------------------------


def test_bias_against_finite_differences(run):
    init = ("--c-pt", 0.3, "--lambda-pt", -0.4, "--gamma-ft", 0.2)
    found = strict_json(run("bias", "--beta-ft", -0.7, "--beta-pt", 0.5, 2, *init, "--json"))

    def scale(b):
        return 0.3 * 0.6 * (1 + np.sqrt(1 + (b / 0.3) ** 2)) + 0.02

    def log_q(log_a, log_b):
        a, c = np.exp(log_a), scale(np.exp(log_b))
        return np.log((a * np.arcsinh(a / c) + c - np.hypot(a, c)) / 2)

    a, b, h = np.log(0.7), np.log([0.5, 2.0]), 1e-5
    order = (log_q(a + h, b) - log_q(a - h, b)) / (2 * h)
    dependence = (log_q(a, b + h) - log_q(a, b - h)) / (2 * h)
    assert found["c_ft"] == pytest.approx(scale(np.array([0.5, 2.0])))
    assert found["l_order"] == pytest.approx(order, rel=1e-8)
    assert found["pretraining_dependence"] == pytest.approx(dependence, rel=1e-7)
    assert found["a_I"] == pytest.approx(2 - order, rel=1e-7)
    assert np.add(np.add(found["a_I"], found["a_II"]), found["a_III"]) == pytest.approx([1, 1])


def test_bias_prints_no_negative_zero_and_names_the_dead_origin(run):
    out = run("bias", "--beta-pt", 0, "--lambda-pt", -1, 0)
    assert "-0 " not in out
    assert "# c_ft = 0" in out


# --- limit ------------------------------------------------------------------------------------------------


def test_limit_agrees_with_scipy(run, npz, problem, tmp_path):
    X, y, beta_pt = problem
    out = tmp_path / "solution.npz"
    options = ("--c-pt", 0.1, "--lambda-pt", -0.5, "--gamma-ft", 0.1)
    found = strict_json(run("limit", npz, *options, "--out", out, "--json"))
    c = 0.1 * 0.5 * (1 + np.sqrt(1 + (beta_pt / 0.1) ** 2)) + 0.005
    beta, penalty = penalty_minimiser(X, y, c)
    with np.load(out) as stored:
        arrays = dict(stored)
    assert arrays["beta"] == pytest.approx(beta, abs=1e-6)
    assert arrays["c"] == pytest.approx(c)
    assert found["Q"] == pytest.approx(penalty, rel=1e-8)
    assert found["l1"] == pytest.approx(np.abs(beta).sum(), rel=1e-6)
    assert found["l2"] == pytest.approx(np.linalg.norm(beta), rel=1e-6)
    assert found["linf"] == pytest.approx(np.abs(beta).max(), rel=1e-6)
    assert found["active"] == (np.abs(beta) > 1e-3 * np.abs(beta).max()).sum()
    assert found["result"] == "converged"
    assert max(found["residual"], found["misfit"]) < 1e-11
    share = (beta * np.arcsinh(beta / c) + c - np.hypot(beta, c)) / 2 / penalty
    for name in ("l_order", "pretraining_dependence"):
        assert found[name] == pytest.approx((share * arrays[name]).sum(), rel=1e-5)
    assert -1 < found["pretraining_dependence"] < -0.1

    # One solution is the pretraining of the next.
    again = strict_json(run("limit", npz, "--beta-pt", out, "--json"))
    (tmp_path / "beta.csv").write_text("\n".join(map(repr, arrays["beta"].tolist())))
    np.save(tmp_path / "beta.npy", arrays["beta"])
    for name in ("beta.csv", "beta.npy"):
        assert strict_json(run("limit", npz, "--beta-pt", tmp_path / name, "--json")) == again


@pytest.mark.parametrize("header", [True, False])
def test_limit_reads_csv(run, npz, problem, tmp_path, header):
    X, y, _ = problem
    names = ",".join([f"x{i}" for i in range(15)] + ["target"]) + "\r\n"
    rows = "\r\n".join(",".join(map(repr, [*x, t])) for x, t in zip(X.tolist(), y.tolist(), strict=True))
    path = tmp_path / "Task.CSV"
    path.write_text("\ufeff" + names * header + rows + "\r\n\r\n", encoding="utf-8")
    read = read_data(path)
    np.testing.assert_array_equal(read[0], X)
    np.testing.assert_array_equal(read[1], y)
    found = [strict_json(run("limit", source, "--c", 0.01, "--json")) for source in (path, npz)]
    assert found[0].pop("data") != found[1].pop("data")
    assert found[0] == found[1]
    assert found[0]["pretraining_dependence"] is None
    text = run("limit", npz, "--c", 0.01)
    assert "share of Q" in text
    assert "beta_pt in" in text


def test_limit_reports_a_dead_origin(run, npz):
    found = strict_json(run("limit", npz, "--lambda-pt", -1, "--json"))
    assert found["result"] == "stuck"
    assert found["l1"] == found["Q"] == found["active"] == 0
    assert found["l_order"] is None


def test_a_failed_solve_writes_nothing(capsys, npz, tmp_path, monkeypatch):
    from dlnsim.cli import own_data

    monkeypatch.setattr(own_data, "limit", lambda *a, throw: own_data_limit(*a, max_steps=1, throw=throw))
    from dlnsim.limit import limit as own_data_limit

    out = tmp_path / "solution.npz"
    assert main(["limit", str(npz), "--c", "1e-9", "--out", str(out), "--json"]) == FAILED_POINTS
    text, err = capsys.readouterr()
    assert strict_json(text)["result"] == "max_steps"
    assert strict_json(text)["l1"] is None
    assert err.startswith("dlnsim limit: 1 of 1 problems failed: max_steps: ")
    assert not out.exists()


# --- demo -------------------------------------------------------------------------------------------------


@pytest.fixture
def demo(monkeypatch):
    """A stand-in for `figures.demo`; the calls it received."""
    calls = []

    def stand_in(**kwargs):
        calls.append(kwargs)
        print("working")
        return {"points": np.int64(3), "worst": {"z": np.float64("nan")}, "folder": kwargs["out"]}

    module = types.ModuleType("figures.demo")
    module.run = stand_in
    monkeypatch.setitem(sys.modules, "figures.demo", module)
    return calls


def test_demo_passes_its_options_on(demo, run, capsys):
    assert run("demo").splitlines() == ["working", "points: 3", "worst:", "  z: None", "folder: demo_output"]
    assert main(["demo", "--quick", "--out", "elsewhere", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "working\n"
    assert strict_json(out) == {
        "command": "demo",
        "points": 3,
        "worst": {"z": None},
        "folder": "elsewhere",
    }
    assert demo[0] == {"config": None, "out": Path("demo_output"), "quick": False}
    assert demo[1] == {"config": None, "out": Path("elsewhere"), "quick": True}


# --- the program ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_help_gives_ranges_defaults_and_an_example(run, name):
    text = run(name, "--help")
    words = " ".join(text.replace("│", " ").split())
    assert f"Example: dlnsim {name} " in words
    # A margin of at most a frame and a space: the options themselves, not their mention in a text.
    options = re.findall(r"^\W{0,2}--[a-z]", text, re.MULTILINE)
    assert len(options) == len(fields(COMMANDS[name])) - (name == "limit")
    assert words.count("(default: ") == len(options)
    assert max(map(len, text.splitlines())) <= 80
    if name != "demo":
        assert "Absolute scale at pretraining, c = w^2 + v^2 per coordinate: finite, > 0. (default: 0.001)" in words


def test_alone_it_prints_help(run):
    assert run() == run("--help") == run("-h")
    assert all(name in run() for name in COMMANDS)
    assert run("--version").startswith("dlnsim 0.")


def test_json_knows_every_number():
    values = {"a": np.float64("-inf"), "b": [np.int64(1), True, None], "c": -0.0, "d": Path("x"), "e": {1}}
    assert plain(values) == {"a": "-inf", "b": [1, True, None], "c": 0, "d": "x", "e": "{1}"}
    assert str(plain(-0.0)) == "0.0"


def python(*arguments, **kwargs):
    return subprocess.Popen(
        [sys.executable, "-m", "dlnsim", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


def test_as_a_program_it_turns_float64_on_and_stays_quiet():
    process = python("bias", "--beta-ft", "1e-9", "1", "--json")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert strict_json(out)["l_order"][0] == pytest.approx(2, abs=1e-12)


def test_a_closed_pipe_is_quiet():
    process = python("bias")
    process.stdout.close()
    process.stdout = None
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == BROKEN_PIPE
