"""The specification: the shipped file holds the documented grid, and every mistake is named in one line."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from dlnsim.errors import ArgumentError, DataError
from experiments.spec import load

EXAMPLE = Path(__file__).parents[2] / "examples" / "published_grid.toml"


@pytest.fixture
def edited(tmp_path):
    """Load the shipped specification with one piece of text replaced."""

    def call(old, new):
        text = EXAMPLE.read_text(encoding="utf-8")
        assert text.count(old) >= 1, f"{old!r} is not in the shipped file"
        for table in EXAMPLE.parent.glob("*.csv"):
            (tmp_path / table.name).write_bytes(table.read_bytes())
        path = tmp_path / "spec.toml"
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        return load(path)

    return call


# --- what is right ------------------------------------------------------------------------------------


def test_shipped_file_holds_experiment_1():
    spec = load(EXAMPLE)
    assert (spec.task.rho_pt, spec.task.rho_ft, spec.task.beta_pt, spec.task.noise_var_ft) == (0.1, 0.1, 1.0, 0.0)
    assert spec.task.omega == (0.0, 0.5, 1.0)
    assert spec.init.c_pt == (1e-6, 1e-3, 1.0)
    assert spec.init.lambda_pt == (-0.99, 0.0, 0.99)
    assert spec.init.gamma_ft == (0.0, 1.0, 10.0)
    np.testing.assert_allclose(spec.theory.alpha_ft, 0.01 + 0.49 * np.arange(80) / 79, rtol=1e-14)
    assert spec.simulation.alpha_ft == (0.05, 0.15, 0.3, 0.45)
    assert (spec.simulation.dim, spec.simulation.seeds, spec.simulation.seed) == (1000, 8, 0)
    assert dataclasses.astuple(spec.phase_diagram) == (201, 1.0, 1.0, 1e-3, 0.0, 0.0)
    assert (spec.best_lambda.c_pt, spec.best_lambda.gamma_ft, spec.best_lambda.num_lambda) == (1e-3, 0.0, 49)
    np.testing.assert_allclose(spec.best_lambda.omega, np.arange(41) / 40, atol=1e-15)
    np.testing.assert_allclose(spec.best_lambda.alpha_ft, 0.02 + 0.48 * np.arange(41) / 40, rtol=1e-14)


def test_published_tables_lie_beside_the_file(edited, tmp_path):
    spec = load(EXAMPLE)
    assert spec.published.replica_mc == EXAMPLE.parent / "published_replica_mc.csv"
    assert spec.published.replica_mc.is_file()
    assert spec.published.gradient_descent.is_file()
    mine = tmp_path / "tables" / "mine.csv"
    mine.parent.mkdir()
    mine.touch()
    for relative_or_absolute in ("tables/mine.csv", str(mine)):
        assert edited('"published_gd.csv"', f'"{relative_or_absolute}"').published.gradient_descent == mine


def test_numbers_become_the_type_of_their_key(edited):
    assert edited("omega = [0.0, 0.5, 1.0]", "omega = 0.5").task.omega == (0.5,)
    whole = edited("omega = [0.0, 0.5, 1.0]", "omega = [0, 1]").task.omega
    assert whole == (0.0, 1.0)
    assert all(isinstance(value, float) for value in whole)
    dim = edited("dim = 1000", "dim = 500.0").simulation.dim
    assert dim == 500
    assert isinstance(dim, int)


def test_optional_keys_have_defaults(edited):
    spec = edited("beta_pt = 1.0\nnoise_var_ft = 0.0\n", "")
    assert (spec.task.beta_pt, spec.task.noise_var_ft) == (1.0, 0.0)
    assert edited("seed = 0\n", "seed = 3\n").simulation.seed == 3
    assert edited("\nseed = 0\n", "\n").simulation.seed == 0


def test_quick_is_coarser_and_otherwise_the_same():
    spec = load(EXAMPLE)
    quick = spec.quick()
    assert (quick.simulation.dim, quick.simulation.seeds) == (400, 4)
    assert quick.simulation.alpha_ft == spec.simulation.alpha_ft[:2]
    assert quick.phase_diagram == dataclasses.replace(spec.phase_diagram, num=101)
    assert quick.best_lambda.num_lambda == 25
    for name in ("omega", "alpha_ft"):
        axis, whole = getattr(quick.best_lambda, name), getattr(spec.best_lambda, name)
        assert len(axis) == 21
        assert set(axis) <= set(whole)
        assert (axis[0], axis[-1]) == (whole[0], whole[-1])
    for part in ("task", "init", "theory", "published"):
        assert getattr(quick, part) == getattr(spec, part)
    assert spec == load(EXAMPLE)


def test_quick_never_makes_a_small_experiment_larger(edited):
    small = edited("dim = 1000\nseeds = 8", "dim = 60\nseeds = 4").quick()
    assert (small.simulation.dim, small.simulation.seeds) == (60, 4)
    assert edited("num = 201", "num = 31").quick().phase_diagram.num == 31
    assert edited("num_lambda = 49", "num_lambda = 9").quick().best_lambda.num_lambda == 9


# --- what is wrong ------------------------------------------------------------------------------------

LINE = "alpha_ft = { start = 0.01, stop = 0.5, num = 80 }"
OMEGA = "omega = [0.0, 0.5, 1.0]"
MISTAKES = [
    # unknown keys: at the top, in a table, in a line of values
    ("[task]", "[tusk]\na = 1\n[task]", "unknown key `tusk`"),
    ("[task]", "omega = 1\n[task]", "unknown key `omega`"),
    ("rho_ft = 0.1", "rho_ft = 0.1\nrho = 0.1", "unknown key `task.rho`"),
    (LINE, "alpha_ft = { start = 0, stop = 1, num = 3, step = 1 }", "unknown key `theory.alpha_ft.step`"),
    # missing keys, likewise
    ("[theory]\n" + LINE, "", "missing key `theory`"),
    ("rho_ft = 0.1\n", "", "missing key `task.rho_ft`"),
    ("seeds = 8\n", "", "missing key `simulation.seeds`"),
    (LINE, "alpha_ft = { start = 0.01, stop = 0.5 }", "missing key `theory.alpha_ft.num`"),
    # a table where a number belongs, and the other way round
    ("[theory]\n" + LINE, "", "missing key `theory`"),
    ("[theory]", "[[theory]]", "`theory` must be a table"),
    ("rho_pt = 0.1", "rho_pt = { start = 0.1 }", "`task.rho_pt` must be a finite number"),
    ("rho_pt = 0.1", "rho_pt = [0.1]", "`task.rho_pt` must be a finite number"),
    (OMEGA, "omega = [[0.0], [0.5]]", "`task.omega` must be a finite number"),
    # strings, booleans and dates are no numbers
    ("rho_pt = 0.1", 'rho_pt = "0.1"', "`task.rho_pt` must be a finite number, got '0.1'"),
    ("rho_pt = 0.1", "rho_pt = true", "`task.rho_pt` must be a finite number, got True"),
    ("rho_pt = 0.1", "rho_pt = 1979-05-27", "`task.rho_pt` must be a finite number"),
    (OMEGA, 'omega = "0.5"', "`task.omega` must be a finite number, got '0.5'"),
    (OMEGA, 'omega = "a\\nb"', "`task.omega` must be a finite number"),
    (OMEGA, 'omega = [0.0, "0.5"]', "`task.omega` must be a finite number, got '0.5'"),
    (OMEGA, "omega = [0.0, false]", "`task.omega` must be a finite number, got False"),
    (OMEGA, "omega = true", "`task.omega` must be a finite number, got True"),
    ("dim = 1000", 'dim = "1000"', "`simulation.dim` must be a non-negative integer, got '1000'"),
    ("dim = 1000", "dim = true", "`simulation.dim` must be a non-negative integer, got True"),
    ('"published_gd.csv"', "3", "`published.gradient_descent` must be a path, got 3"),
    ('"published_gd.csv"', "true", "`published.gradient_descent` must be a path, got True"),
    # not finite, not whole, not representable
    ("rho_pt = 0.1", "rho_pt = nan", "`task.rho_pt` must be a finite number, got nan"),
    ("rho_pt = 0.1", "rho_pt = -inf", "`task.rho_pt` must be a finite number, got -inf"),
    ("rho_pt = 0.1", "rho_pt = 1" + "0" * 400, "`task.rho_pt` must be a finite number"),
    (OMEGA, "omega = [0.0, nan]", "`task.omega` must be a finite number, got nan"),
    (OMEGA, "omega = inf", "`task.omega` must be a finite number, got inf"),
    (LINE, "alpha_ft = { start = 0.01, stop = inf, num = 80 }", "`theory.alpha_ft.stop` must be a finite number"),
    ("dim = 1000", "dim = inf", "`simulation.dim` must be a non-negative integer, got inf"),
    ("dim = 1000", "dim = nan", "`simulation.dim` must be a non-negative integer, got nan"),
    ("dim = 1000", "dim = 10.5", "`simulation.dim` must be a non-negative integer, got 10.5"),
    ("dim = 1000", "dim = -1", "`simulation.dim` must be a non-negative integer, got -1"),
    ("dim = 1000", "dim = 1" + "0" * 400, "`simulation.dim` must be a non-negative integer"),
    # nothing to do
    (OMEGA, "omega = []", "`task.omega` must have at least one value"),
    (LINE, "alpha_ft = []", "`theory.alpha_ft` must have at least one value"),
    (LINE, "alpha_ft = { start = 0.01, stop = 0.5, num = 0 }", "`theory.alpha_ft.num` must be at least 1"),
    ("dim = 1000", "dim = 0", "`simulation.dim` must be at least 1, got 0"),
    ("seeds = 8", "seeds = 3", "`simulation.seeds` must be at least 4, got 3"),
    ("num = 201", "num = 1", "`phase_diagram.num` must be at least 2, got 1"),
    ("num_lambda = 49", "num_lambda = 2", "`best_lambda.num_lambda` must be at least 3, got 2"),
]


@pytest.mark.parametrize(("old", "new", "message"), MISTAKES)
def test_mistakes_are_named(edited, old, new, message):
    with pytest.raises(ArgumentError) as caught:
        edited(old, new)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_unknown_key_named_is_always_the_same(edited):
    with pytest.raises(ArgumentError, match=r"unknown key `task\.aa`: expected one of rho_pt, rho_ft, omega, beta_pt"):
        edited("rho_ft = 0.1", "rho_ft = 0.1\nzz = 1\naa = 1\nmm = 1")


@pytest.mark.parametrize(
    "content", [b"rho_pt = ", b"[task\n", b"a = 1\na = 2\n", b"\xff\xfe", b"# caf\xe9\n", b"a = 1" + b"0" * 5000]
)
def test_not_a_toml_file(tmp_path, content):
    path = tmp_path / "spec.toml"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load(path)
    assert f"{path} is not a TOML file" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_empty_file_lacks_every_table(tmp_path):
    path = tmp_path / "spec.toml"
    path.touch()
    with pytest.raises(ArgumentError, match="missing key `best_lambda`"):
        load(path)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(DataError, match=r"cannot read the specification .*none\.toml: No such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(DataError, match="cannot read the specification"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("lambda_pt = [-0.99, 0.0, 0.99]", "lambda_pt = [-2.0]", "lambda_pt"),
        ("c_pt = [1e-6, 1e-3, 1.0]", "c_pt = [0.0]", "c_pt"),
        ("omega = [0.0, 0.5, 1.0]", "omega = [0.0, 0.0]", "task.omega"),
        ("rho_ft = 0.1", "rho_ft = 0.95", "rho_ft"),
        ("alpha_ft = [0.05, 0.15, 0.3, 0.45]", "alpha_ft = [-0.1]", "simulation.alpha_ft"),
        ('"published_gd.csv"', '"nowhere.csv"', "published.gradient_descent"),
    ],
)
def test_ranges_are_checked_before_anything_runs(edited, old, new, name):
    with pytest.raises((ArgumentError, DataError), match=re.escape(name)):
        edited(old, new)
