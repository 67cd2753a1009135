"""The published-grid experiment on tiny grids: axes, tables, independent solves and closed forms."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

import replica
from dlnsim import ArgumentError, DataError, Init, Result, Task, simulate
from experiments import published_grid
from experiments.spec import load

ROOT = Path(__file__).parents[2]
GRID = ("omega", "c_pt", "lambda_pt", "gamma_ft", "alpha_ft")
# Most solves are of 32 points, which share one compiled program.
TOML = """
[task]
rho_pt = 0.1
rho_ft = 0.1
omega = [0.0, 0.5]
[init]
c_pt = [1e-3, 1.0]
lambda_pt = [-0.99, 0.0]
gamma_ft = [0.0, 1.0]
[theory]
alpha_ft = [0.304, 0.059]
[simulation]
alpha_ft = [0.29, 0.331]
dim = 60
seeds = 4
seed = 5
[phase_diagram]
num = 31
beta_ft = 1.0
beta_pt = 1.0
c_pt = 1e-3
lambda_pt = 0.0
gamma_ft = 0.0
[best_lambda]
c_pt = 1e-3
gamma_ft = 0.0
omega = [0.25, 1.0]
alpha_ft = [0.1]
num_lambda = 16
[published]
replica_mc = "published_replica_mc.csv"
gradient_descent = "published_gd.csv"
"""


def replace(spec, part, **values):
    return dataclasses.replace(spec, **{part: dataclasses.replace(getattr(spec, part), **values)})


def write_spec(folder):
    for name in ("published_replica_mc.csv", "published_gd.csv"):
        (folder / name).write_bytes((ROOT / "examples" / name).read_bytes())
    path = folder / "tiny.toml"
    path.write_text(TOML, encoding="utf-8")
    return load(path)


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return write_spec(tmp_path_factory.mktemp("spec"))


def flat_problem(spec, data):
    """The grid of a data set as one list of points, from its own coordinates."""
    points = data.mse.isel(seed=0) if "seed" in data.mse.dims else data.mse
    points = points.stack(point=GRID)
    omega, c_pt, lambda_pt, gamma_ft, alpha_ft = (points[name].values for name in GRID)
    t = spec.task
    task = Task(t.rho_pt, t.rho_ft, omega, t.beta_pt, 0.0, t.noise_var_ft)
    return task, Init(c_pt, lambda_pt, gamma_ft), alpha_ft


# --- theory -------------------------------------------------------------------------------------------


def test_theory_is_the_reference_table(spec):
    data = published_grid.theory(spec)
    assert dict(data.sizes) == dict.fromkeys(GRID, 2)
    for name, part in zip(GRID, ("task", "init", "init", "init", "theory"), strict=True):
        assert tuple(data[name].values) == getattr(getattr(spec, part), name)
    assert data.attrs == {"rho_pt": 0.1, "rho_ft": 0.1}
    assert (data.result == Result.CONVERGED).all()
    rows = np.genfromtxt(ROOT / "tests/data/theory_perfect_pretraining.csv", delimiter=",", names=True)
    rows = rows[(rows["rho_ft"] == 0.1) & (rows["noise_var"] == 0) & (rows["beta_pt"] == 1)]
    rows = rows[np.all([np.isin(rows[name], data[name]) for name in GRID], axis=0)]
    # The table varies one of c_pt, lambda_pt and gamma_ft at a time: 4 choices, 2 overlaps, 2 alphas.
    assert rows.size == 16
    for row in rows:
        at = data.sel({name: row[name] for name in GRID})
        for name in ("mse", "tau", "theta"):
            # The table is good to about 2e-10 (its digits to 1e-11).
            assert float(at[name]) == pytest.approx(row[name], rel=1e-9)


# --- simulation ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def noisy(spec):
    """A task whose every field matters, its simulation and the counts given to `progress`."""
    spec = replace(spec, "task", beta_pt=2.0, noise_var_ft=0.3)
    counts = []
    return spec, published_grid.simulation(spec, counts.append), counts


def test_simulation_names_the_samples_used(noisy):
    spec, data, counts = noisy
    # round(0.29 * 60) = 17 and round(0.331 * 60) = 20 samples.
    np.testing.assert_allclose(data.alpha_ft, [17 / 60, 20 / 60], rtol=1e-15)
    assert data.mse.dims == (*GRID, "seed")
    assert data.sizes["seed"] == 4
    assert data.attrs == {"dim": 60}
    for name, axis in (("omega", spec.task.omega), *((n, getattr(spec.init, n)) for n in GRID[1:4])):
        assert tuple(data[name].values) == axis
    assert sum(counts) == data.mse.size == 2**5 * 4


def test_theory_beside_the_simulation_is_at_the_samples_used(noisy):
    spec, data, _ = noisy
    task, init, alpha_ft = flat_problem(spec, data)
    at_used = replica.solve(task, init, alpha_ft=alpha_ft)
    theory = data[["theory_mse", "theory_forgetting"]].stack(point=GRID)
    # The same equations at the same numbers; only their place in the batch differs.
    np.testing.assert_allclose(theory.theory_mse, at_used.mse, rtol=1e-12)
    np.testing.assert_allclose(theory.theory_forgetting, at_used.forgetting, rtol=1e-12)
    # At the nominal sample numbers the errors are others, by several per thousand.
    nominal = np.where(alpha_ft < 0.3, 0.29, 0.331)
    away = np.abs(np.asarray(replica.solve(task, init, alpha_ft=nominal).mse) / np.asarray(at_used.mse) - 1)
    assert away.min() > 1e-3


def test_simulation_solves_the_point_its_coordinates_name(noisy):
    spec, data, _ = noisy
    task, init, alpha_ft = flat_problem(spec, data)
    # Random numbers depend on key, place in the grid and seed alone, and a list in the same order has the same places.
    flat = simulate(task, init, alpha_ft=alpha_ft, dim=60, seeds=4, key=jax.random.key(5))
    stacked = data.stack(point=GRID).transpose("point", "seed")
    np.testing.assert_allclose(stacked.mse, flat.mse_ft, rtol=1e-12)
    np.testing.assert_allclose(stacked.forgetting, flat.forgetting, rtol=1e-12)
    assert (data.result == Result.CONVERGED).all()
    assert float(data.residual.max()) <= 1e-12
    assert np.unique(data.mse).size == data.mse.size


# --- published values ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(spec):
    return published_grid.published(spec)


def test_published_rows_carry_their_table(published):
    assert published.source.values.tolist() == ["replica_mc"] * 29 + ["gradient_descent"] * 3
    curves = np.genfromtxt(ROOT / "examples/published_replica_mc.csv", delimiter=",", names=True)
    descent = np.genfromtxt(ROOT / "examples/published_gd.csv", delimiter=",", names=True)
    np.testing.assert_array_equal(published.value, [*curves["mse"], *descent["mse_mean"]])
    np.testing.assert_allclose(published.se, [*curves["mse"] * curves["mse_rel_se"], *descent["mse_se"]], rtol=1e-14)
    for name in ("rho_pt", "rho_ft", *GRID):
        np.testing.assert_array_equal(published[name], [*curves[name], *descent[name]])
    np.testing.assert_array_equal(published.rho_pt_emp, [*curves["rho_pt_emp"], *descent["rho_pt"]])


def test_published_rows_agree_with_the_theory(published):
    descent = published.where(published.source == "gradient_descent", drop=True)
    assert (np.abs(descent.value - descent.theory_mse) < 3 * descent.se).all()
    # No support was given for these runs: nominal and sampled are one.
    np.testing.assert_allclose(descent.theory_mse_emp, descent.theory_mse, rtol=1e-12)
    curves = published.where(published.source == "replica_mc", drop=True)
    nominal, sampled = (np.abs(curves.value / curves[name] - 1) for name in ("theory_mse", "theory_mse_emp"))
    # Taking the sampled sparsities explains more than half of the deviation; no curve is off by a factor of two.
    assert float(sampled.mean()) < 0.6 * float(nominal.mean())
    assert float(nominal.max()) < 0.5
    assert float(sampled.median()) < 0.04


def corrupt(path, how):
    text = path.read_text(encoding="utf-8")
    header, first, *rest = text.splitlines()
    if how == "missing":
        path.unlink()
    elif how == "a folder":
        path.unlink()
        path.mkdir()
    elif how == "not utf-8":
        path.write_bytes(b"\xff\xfe" + text.encode())
    else:
        new = {
            "empty": "",
            "no rows": header,
            "no header": "\n".join([first, *rest]),
            "a word": "\n".join([header, first.replace("0.1", "high", 1), *rest]),
            "a short row": "\n".join([header, first.rsplit(",", 1)[0], *rest]),
            "a long row": "\n".join([header, first + ",1", *rest]),
            "without omega": text.replace("omega", "overlap", 1),
            "without values": text.replace("mse", "error"),
        }[how]
        assert new != text
        path.write_text(new, encoding="utf-8")


HOW = ["missing", "a folder", "not utf-8", "empty", "no rows", "no header", "a word", "a short row", "a long row"]


@pytest.mark.parametrize("table", ["published_replica_mc.csv", "published_gd.csv"])
@pytest.mark.parametrize("how", [*HOW, "without omega", "without values"])
def test_wrong_tables(tmp_path, table, how):
    spec = write_spec(tmp_path)
    corrupt(tmp_path / table, how)
    with pytest.raises(DataError) as caught:
        published_grid.published(spec)
    assert str(tmp_path / table) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    if how.startswith("without"):
        assert ("lacks the column `omega`" if how == "without omega" else "lacks the column `mse") in str(caught.value)


def test_impossible_values_in_a_table(tmp_path):
    spec = write_spec(tmp_path)
    path = tmp_path / "published_gd.csv"
    path.write_text(path.read_text(encoding="utf-8").replace("0.1,0.1,0.5", "0.1,0.1,1.5", 1), encoding="utf-8")
    with pytest.raises(ArgumentError, match="`omega` must be a share"):
        published_grid.published(spec)


# --- phase diagrams -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def diagrams(spec):
    return published_grid.phase_diagrams(spec)


def test_phase_diagrams_are_the_closed_forms(diagrams):
    assert diagrams.l_order.dims == ("diagram", "x", "lambda_pt")
    assert diagrams.sizes == {"diagram": 3, "x": 31, "lambda_pt": 31, "regime": 3}
    assert diagrams.lambda_pt[0] == pytest.approx(-1 + 1e-6, abs=1e-12)
    assert float(diagrams.lambda_pt[-1]) == 1
    np.testing.assert_allclose(1 + diagrams.lambda_pt, diagrams.one_plus_lambda, rtol=1e-9)
    ends = {"beta_pt": (1e-4, 1e2), "c_pt": (1e-6, 1e2), "gamma_ft": (1e-4, 10**1.5)}
    for name, (low, high) in ends.items():
        at = diagrams.sel(diagram=name)
        x = at.x_value.values
        np.testing.assert_allclose(x, np.geomspace(low, high, 31), rtol=1e-12)
        p = {"beta_pt": 1.0, "c_pt": 1e-3, "gamma_ft": 0.0} | {name: x[:, None]}
        w = 1 + at.lambda_pt.values
        c_ft = w * (p["c_pt"] + np.hypot(p["c_pt"], p["beta_pt"])) + p["gamma_ft"] ** 2 / 2
        # With s = beta_FT / c_FT and beta_FT = 1: q' = asinh(s) / 2 and q = (asinh(s) - (sqrt(1 + s^2) - 1) / s) / 2.
        s = 1 / c_ft
        order = np.arcsinh(s) / (np.arcsinh(s) - (np.sqrt(1 + s**2) - 1) / s)
        # At the smallest s, 1 / 900, these differences lose 6 digits.
        np.testing.assert_allclose(at.l_order, order, rtol=1e-9)
        elasticity = w * p["beta_pt"] ** 2 / np.hypot(p["c_pt"], p["beta_pt"]) / c_ft
        np.testing.assert_allclose(at.pretraining_dependence, (1 - order) * elasticity, atol=1e-9)


def test_weights_are_barycentric(diagrams):
    weights = diagrams.weights
    np.testing.assert_allclose(weights.sum("regime"), 1, rtol=1e-14)
    assert float(weights.min()) >= 0
    np.testing.assert_allclose(weights.sel(regime="I"), 2 - diagrams.l_order, atol=1e-14)
    np.testing.assert_allclose(weights.sel(regime="II"), -diagrams.pretraining_dependence, atol=1e-14)


def test_corners_of_the_phase_diagrams(diagrams):
    weights = diagrams.weights
    # c_FT = 400 and 2 x 500: l = 2 but for (beta_FT / c_FT)^2, and all of c_FT comes from the part that grew.
    assert float(weights.sel(diagram="beta_pt", regime="II")[-1, -1]) > 0.999
    assert float(weights.sel(diagram="gamma_ft", regime="III")[-1, 0]) > 0.999
    # Pretraining that found nothing leaves nothing to depend on.
    assert float(weights.sel(diagram="beta_pt", regime="II")[0].max()) < 0.02
    # lambda -> -1: c_FT = 2e-6 and less; to ridge it keeps 1 / (log(2 / c_FT) - 1), a logarithm away from 0.
    for name in ("beta_pt", "c_pt", "gamma_ft"):
        corner = diagrams.sel(diagram=name).isel(x=0, lambda_pt=0)
        assert float(corner.weights.sel(regime="I")) > 0.9
        assert float(corner.l_order) < 1.1


def test_phase_diagrams_hold_fixed_what_the_specification_says(spec, diagrams):
    held = published_grid.phase_diagrams(replace(spec, "phase_diagram", gamma_ft=30.0))
    assert float(held.sel(diagram="c_pt").weights.sel(regime="III")[0].min()) > 0.99
    softer = published_grid.phase_diagrams(replace(spec, "phase_diagram", beta_ft=1e4))
    assert (softer.l_order < diagrams.l_order).all()


# --- the best lambda ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def best(spec):
    return published_grid.best_lambda(spec)


def test_best_lambda_beats_a_dense_grid(spec, best):
    lambda_pt = np.append(np.minimum(np.expm1(np.linspace(np.log(1e-6), np.log(2), 95)), 1), 0.0)
    for omega in best.omega.values:
        parts = [
            replica.solve(Task(0.1, 0.1, omega), Init(1e-3, part, 0.0), alpha_ft=0.1).mse
            for part in np.split(lambda_pt, 3)
        ]
        dense = np.concatenate(parts).min()
        found = float(best.mse.sel(omega=omega, alpha_ft=0.1))
        # A parabola through steps of h = 1 in log(1 + lambda) misses the minimum of f = log mse by h^2 f3 / 6 f2
        # (f2, f3: second and third derivative) and its error by h^4 f3^2 / 72 f2; f bends by 0.01 over a few steps.
        assert found <= dense * (1 + 1e-4)
        # Nor is it below what can be reached: dense steps of 0.15 cost at most 0.08^2 f2 / 2.
        assert found >= dense * (1 - 1e-4)


def test_best_lambda_reports_a_solved_point(best):
    omega, alpha_ft = best.omega.values[:, None], best.alpha_ft.values
    assert best.mse.dims == ("omega", "alpha_ft")
    assert best.mse.shape == (2, 1)
    at_best = replica.solve(Task(0.1, 0.1, omega), Init(1e-3, best.lambda_pt.values, 0.0), alpha_ft=alpha_ft).mse
    default = replica.solve(Task(0.1, 0.1, omega), Init(1e-3, 0.0, 0.0), alpha_ft=alpha_ft).mse
    # 1 + lambda near 1e-6 keeps ten digits, and the error hardly depends on it.
    np.testing.assert_allclose(best.mse, at_best, rtol=1e-9)
    np.testing.assert_allclose(best.mse_default, default, rtol=1e-12)
    np.testing.assert_allclose(best.gain, best.mse_default / best.mse, rtol=1e-14)
    assert (best.gain >= 1).all()


def test_best_lambda_says_where_the_search_ended(best):
    # Full overlap and few samples: the more the network follows pretraining the better, up to lambda = 1.
    assert bool(best.at_edge.sel(omega=1.0, alpha_ft=0.1))
    assert float(best.lambda_pt.sel(omega=1.0, alpha_ft=0.1)) == 1
    inner = best.sel(omega=0.25, alpha_ft=0.1)
    assert not bool(inner.at_edge)
    assert -1 + 1e-5 < float(inner.lambda_pt) < -0.99


def test_the_default_counts_among_the_candidates(spec):
    """A coarse search may miss the default's neighbourhood; the gain is at least 1 all the same."""
    found = published_grid.best_lambda(replace(spec, "best_lambda", omega=(0.75,), alpha_ft=(0.1,), num_lambda=3))
    assert found.gain.item() == 1
    assert found.lambda_pt.item() == 0
    assert not found.at_edge.item()


def test_provenance_names_what_made_the_numbers():
    facts = published_grid.provenance()
    assert facts["version_jax"] == jax.__version__
    assert facts["version_numpy"] == np.__version__
    assert facts["precision"] == "float64"
    assert facts["device"].startswith(jax.default_backend())
    assert all(isinstance(value, str) and value for value in facts.values())
