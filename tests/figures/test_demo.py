"""The demonstration: what it writes, that a second run replaces the first, and that a failed one leaves no trace."""

import json
import shutil
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

from dlnsim.errors import ArgumentError, DataError
from figures import best_lambda, demo, theory_curves

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("phase_diagrams", "theory_and_simulation", "published", "best_lambda")
FILES = [f"{name}.{ending}" for name in NAMES for ending in ("png", "pdf")] + ["results.zarr", "summary.json"]
GROUPS = ["best_lambda", "phase_diagrams", "published", "simulation", "theory"]
# Solves are of 32 or 4 points, which keeps the number of compiled programs small.
TOML = """
[task]
rho_pt = 0.1
rho_ft = 0.1
omega = [0.0, 0.5]
[init]
c_pt = [1e-3]
lambda_pt = [-0.99, 0.0]
gamma_ft = [0.0]
[theory]
alpha_ft = { start = 0.05, stop = 0.4, num = 8 }
[simulation]
alpha_ft = [0.3]
dim = 60
seeds = 4
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
omega = [0.25, 0.75]
alpha_ft = [0.1, 0.3]
num_lambda = 8
"""


def write_config(folder, text=TOML):
    path = folder / "tiny.toml"
    tables = (("replica_mc", "published_replica_mc.csv"), ("gradient_descent", "published_gd.csv"))
    lines = [f"{key} = {json.dumps(str(EXAMPLES / name))}" for key, name in tables]
    path.write_text("\n".join([text, "[published]", *lines]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """One run of the tiny experiment: its folder, the summary returned, and its configuration."""
    folder = tmp_path_factory.mktemp("demo")
    config = write_config(folder)
    out = folder / "deep" / "results"
    return out, demo.run(config, out), config


def listing(folder):
    """Every file below the folder with its content."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def open_store(out):
    return xr.open_datatree(out / "results.zarr", engine="zarr", consolidated=False)


# --- what a run leaves --------------------------------------------------------------------------------


def test_writes_every_file_and_nothing_else(first):
    out, summary, _ = first
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
    assert summary["out"] == str(out)
    assert sorted(summary["files"]) == sorted(FILES)


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_images(first, name):
    out = first[0]
    image = matplotlib.image.imread(out / f"{name}.png")
    assert image.ndim == 3
    # At 200 dots an inch the smallest figure is 1000 x 500.
    assert min(image.shape[:2]) > 400
    # Something is drawn: ink on paper.
    assert image[..., :3].min() < 0.2
    assert image[..., :3].max() > 0.99
    pdf = (out / f"{name}.pdf").read_bytes()
    assert pdf.startswith(b"%PDF")
    assert pdf.rstrip().endswith(b"%%EOF")
    assert b"CreationDate" not in pdf


def test_store_holds_the_data_and_what_made_them(first):
    out, summary, _ = first
    with open_store(out) as tree:
        assert sorted(tree.children) == GROUPS
        for name in (
            "version_dlnsim",
            "version_jax",
            "version_jaxlib",
            "version_numpy",
            "python",
            "platform",
            "device",
        ):
            assert tree.attrs[name]
        assert tree.attrs["precision"] == "float64"
        stored = json.loads(tree.attrs["summary"])
        assert stored == {key: value for key, value in summary.items() if key not in ("out", "files")}
        theory, simulation = tree["theory"].to_dataset().load(), tree["simulation"].to_dataset().load()
        assert theory.mse.dims == ("omega", "c_pt", "lambda_pt", "gamma_ft", "alpha_ft")
        assert theory.mse.shape == (2, 1, 2, 1, 8)
        assert simulation.mse.dtype == np.float64
        assert simulation.attrs["dim"] == 60
        # Coordinates come back: this is the row rho 0.1 / 0.1, omega 0.5 of the authors' figure 1, at alpha 0.05.
        at = theory.mse.sel(omega=0.5, c_pt=1e-3, lambda_pt=0.0, gamma_ft=0.0)
        assert 0.9 < float(at.sel(alpha_ft=0.05)) < 1.2
        assert tree["published"].to_dataset().source.values.tolist().count("gradient_descent") == 3
        assert tree["phase_diagrams"].to_dataset().diagram.values.tolist() == ["beta_pt", "c_pt", "gamma_ft"]


def test_summary_is_what_was_returned_and_what_was_stored(first):
    out, summary, _ = first

    def reject(name):
        raise AssertionError(f"{name} is not JSON")

    written = json.loads((out / "summary.json").read_text(encoding="utf-8"), parse_constant=reject)
    assert written == {key: value for key, value in summary.items() if key not in ("out", "files")}
    assert written["theory"]["points"] == 32
    assert written["theory"]["unsolved"] == written["simulation"]["unsolved"] == 0
    assert (written["simulation"]["runs"], written["simulation"]["points"], written["simulation"]["dim"]) == (16, 4, 60)
    assert (written["published"]["curve_points"], written["published"]["descent_points"]) == (29, 3)
    assert set(written["seconds"]) == {*GROUPS, "figures", "total"}
    with open_store(out) as tree:
        assert written["theory"]["worst_residual"] == float(tree["theory"].residual.max())
        assert written["best_lambda"]["largest_gain"] == float(tree["best_lambda"].gain.max())
    assert written["theory"]["worst_residual"] < 1e-9
    assert written["best_lambda"]["largest_gain"] > 1


# --- a second run -------------------------------------------------------------------------------------


def test_a_second_run_replaces_the_first(first, tmp_path):
    out = tmp_path / "results"
    shutil.copytree(first[0], out)
    before = listing(out)
    (out / "notes.txt").write_text("mine", encoding="utf-8")
    (out / "results.zarr" / "stale").write_text("of the first run", encoding="utf-8")
    summary = demo.run(write_config(tmp_path, TOML.replace("seeds = 4", "seeds = 5")), out)
    after = listing(out)
    assert sorted(path.name for path in out.iterdir()) == sorted([*FILES, "notes.txt"])
    assert after["notes.txt"] == b"mine"
    assert "results.zarr/stale" not in after
    assert summary["simulation"]["seeds"] == 5
    assert json.loads(after["summary.json"])["simulation"]["seeds"] == 5
    with open_store(out) as tree:
        assert tree["simulation"].sizes["seed"] == 5
        assert json.loads(tree.attrs["summary"])["simulation"]["runs"] == 20
    # What depends on the seeds is new, and equal data give equal files.
    assert after["theory_and_simulation.png"] != before["theory_and_simulation.png"]
    for name in ("phase_diagrams", "published", "best_lambda"):
        for ending in ("png", "pdf"):
            assert after[f"{name}.{ending}"] == before[f"{name}.{ending}"]


class HalfwayError(Exception):
    pass


@pytest.mark.parametrize("error", [HalfwayError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["_draw", "_store"])
def test_a_failed_run_leaves_the_earlier_results(first, monkeypatch, where, error):
    out, _, config = first
    before = listing(out)
    reached = []

    def fail(*arguments):
        reached.append([path.name for path in out.iterdir() if path.name.startswith(".demo-")])
        # Half of the work is done.
        next(a for a in arguments if isinstance(a, Path)).joinpath("half").mkdir(parents=True)
        raise error("in the middle")

    # The numbers do not matter here.
    monkeypatch.setattr(demo, "_make", lambda spec, seconds: {})
    monkeypatch.setattr(demo, "_draw", lambda data, folder: [])
    monkeypatch.setattr(demo, "_summarise", lambda data, seconds: {})
    monkeypatch.setattr(demo, where, fail)
    with pytest.raises(error):
        demo.run(config, out)
    assert len(reached) == 1
    assert len(reached[0]) == 1
    assert listing(out) == before
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)


# --- what is refused ----------------------------------------------------------------------------------


def test_unwritable_folder(first, tmp_path):
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DataError, match=r"cannot write to .*file") as caught:
            demo.run(first[2], out)
        assert len(str(caught.value).splitlines()) == 1
    assert (tmp_path / "file").read_text(encoding="utf-8") == "not a folder"


def test_folder_without_permission(first, tmp_path, monkeypatch):
    """Root may write anywhere, so the refusal is the operating system's own, played back."""

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(demo.tempfile, "mkdtemp", refuse)
    with pytest.raises(DataError, match=r"cannot write to .*: Permission denied"):
        demo.run(first[2], tmp_path)


def test_wrong_specification_makes_no_folder(tmp_path, monkeypatch):
    out = tmp_path / "out"
    with pytest.raises(ArgumentError, match=r"`simulation\.seeds` must be"):
        demo.run(write_config(tmp_path, TOML.replace("seeds = 4", "seeds = true")), out)
    with pytest.raises(DataError, match="cannot read the specification"):
        demo.run(tmp_path / "none.toml", out)
    monkeypatch.setattr(demo, "DEFAULT_SPEC", tmp_path / "none.toml")
    with pytest.raises(DataError, match="--config"):
        demo.run(None, out)
    assert not out.exists()


def test_quick_takes_the_coarser_experiment(tmp_path, monkeypatch):
    specs = []

    class Enough(Exception):  # noqa: N818
        pass

    def make(spec, seconds):
        specs.append(spec)
        raise Enough

    monkeypatch.setattr(demo, "_make", make)
    for quick in (False, True):
        with pytest.raises(Enough):
            demo.run(None, tmp_path, quick=quick)
    full = demo.load(demo.DEFAULT_SPEC)
    assert specs == [full, full.quick()]
    assert list(tmp_path.iterdir()) == []


# --- drawing grids of other shapes --------------------------------------------------------------------


def grid_data(c_pt, lambda_pt):
    grid = {"omega": [0.0, 0.5], "c_pt": c_pt, "lambda_pt": lambda_pt, "gamma_ft": [0.0, 1.0, 10.0]}
    alpha = np.array([0.1, 0.2])
    shape = (*map(len, grid.values()), 2)
    rng = np.random.default_rng(0)
    theory = xr.Dataset(
        {"mse": ((*grid, "alpha_ft"), rng.uniform(0.1, 1, shape))},
        grid | {"alpha_ft": alpha},
        {"rho_pt": 0.1, "rho_ft": 0.1},
    )
    simulation = xr.Dataset(
        {"mse": ((*grid, "alpha_ft", "seed"), rng.uniform(0.1, 1, (*shape, 4)))},
        grid | {"alpha_ft": alpha},
        {"dim": 100},
    )
    return theory, simulation


def published_data():
    """Three values on the grid (two at omega = 0.5, gamma = 0), and four beside it in one parameter each."""
    rows = [
        # source, rho_pt, omega, c_pt, lambda_pt, gamma_ft, value
        ("replica_mc", 0.1, 0.5, 1e-3, 0.0, 0.0, 0.21),
        ("gradient_descent", 0.1, 0.5, 1e-3, 0.0, 0.0, 0.22),
        ("replica_mc", 0.1, 0.0, 1e-3, 0.0, 10.0, 0.23),
        ("replica_mc", 0.2, 0.5, 1e-3, 0.0, 0.0, 0.31),
        ("replica_mc", 0.1, 0.4, 1e-3, 0.0, 0.0, 0.32),
        ("replica_mc", 0.1, 0.5, 7.0, 0.0, 0.0, 0.33),
        ("replica_mc", 0.1, 0.5, 1e-3, 0.7, 0.0, 0.34),
    ]
    names = ("source", "rho_pt", "omega", "c_pt", "lambda_pt", "gamma_ft", "value")
    columns = {name: ("row", np.array(c)) for name, c in zip(names, zip(*rows, strict=True), strict=True)}
    return xr.Dataset(columns | {"rho_ft": ("row", np.full(7, 0.1)), "alpha_ft": ("row", np.full(7, 0.15))})


def test_panels_hold_their_curve_and_the_published_values_on_the_grid():
    theory, simulation = grid_data([1e-3], [0.0])
    figure = theory_curves.draw_grid(theory, simulation, published_data())
    panels = figure.axes
    assert len(panels) == 6
    overlaid = {}
    for number, axes in enumerate(panels):
        at = {"omega": [0.0, 0.5][number // 3], "gamma_ft": [0.0, 1.0, 10.0][number % 3], "c_pt": 1e-3, "lambda_pt": 0}
        np.testing.assert_array_equal(axes.lines[0].get_ydata(), theory.mse.sel(at))
        # Error bars are kept as objects.
        drawn = axes.lines[1].get_ydata().astype(float)
        np.testing.assert_allclose(drawn, simulation.mse.sel(at).mean("seed"), rtol=1e-14)
        for line in axes.lines:
            if line.get_marker() in ("x", "+") and len(line.get_ydata()):
                overlaid[number, line.get_marker()] = list(line.get_ydata())
    assert overlaid == {(3, "x"): [0.21], (3, "+"): [0.22], (2, "x"): [0.23]}


def test_long_axes_are_drawn():
    theory, simulation = grid_data(list(np.geomspace(1e-6, 1, 8)), list(np.linspace(-0.9, 0.9, 6)))
    figure = theory_curves.draw_grid(theory, simulation, published_data())
    # A theory line and a simulated line each, and two overlays.
    assert [len(axes.lines) for axes in figure.axes] == [2 * 8 * 6 + 2] * 6


@pytest.mark.parametrize(("omega", "alpha"), [([0.5], [0.1, 0.2]), ([0.5], [0.1]), ([0.0, 1.0], [0.1, 0.2])])
def test_small_and_flat_maps_are_drawn(tmp_path, omega, alpha):
    shape = (len(omega), len(alpha))
    data = xr.Dataset(
        {
            "lambda_pt": (("omega", "alpha_ft"), np.zeros(shape)),
            "gain": (("omega", "alpha_ft"), np.ones(shape)),
            "at_edge": (("omega", "alpha_ft"), np.zeros(shape, dtype=bool)),
        },
        {"omega": omega, "alpha_ft": alpha},
    )
    figure = best_lambda.draw(data)
    assert isinstance(figure, Figure)
    figure.savefig(tmp_path / "map.png")
    assert matplotlib.image.imread(tmp_path / "map.png").shape[1] > 400
