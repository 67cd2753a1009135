"""The main job: solve, simulate, compare, store and draw the published grid."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xarray as xr
from tqdm import tqdm

from dlnsim.errors import DataError
from dlnsim.result import FAILURES
from experiments import agreement, published_grid
from experiments.spec import Spec, load
from figures import best_lambda, phase_diagrams, theory_curves
from figures.style import save, style

DEFAULT_SPEC = Path(__file__).parents[1] / "examples" / "published_grid.toml"
STORE = "results.zarr"


def run(config: Path | None, out: Path, quick: bool = False) -> dict:
    """Run the published-grid experiment and write its figures, store and summary.

    Everything is made beside `out` and moved into it at the end: an interrupted run leaves an earlier result as it
    was, and two runs at once do not mix.

    Args:
        config: specification, see `experiments.spec`; None: the authors' experiment 1.
        out: folder for the results, made if missing.
        quick: coarser and smaller.

    Returns:
        The summary that `summary.json` holds.

    Raises:
        DataError: the specification or a published table cannot be read, or `out` cannot be written.
        ArgumentError: the specification is wrong.
    """
    if config is None and not DEFAULT_SPEC.exists():
        raise DataError("the default specification is part of the source tree; name one with --config FILE")
    spec = load(config or DEFAULT_SPEC)
    spec = spec.quick() if quick else spec
    with _folder(out) as folder:
        seconds: dict[str, float] = {}
        data = _make(spec, seconds)
        started = time.perf_counter()
        files = _draw(data, folder)
        seconds["figures"] = time.perf_counter() - started
        summary = _summarise(data, seconds)
        _store(data, folder / STORE, {"summary": json.dumps(summary), **published_grid.provenance()})
        (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        names = [path.name for path in files] + [STORE, "summary.json"]
    summary["out"] = str(out)
    summary["files"] = names
    return summary


@contextmanager
def _folder(out: Path) -> Iterator[Path]:
    try:
        out.mkdir(parents=True, exist_ok=True)
        for left in out.glob(".demo-*-*"):
            if not _runs(left.name.split("-")[1]):
                shutil.rmtree(left, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".demo-{os.getpid()}-", dir=out))
    except OSError as error:
        raise DataError(f"cannot write to {out}: {error.strerror}") from error
    try:
        yield temporary
        for path in sorted(temporary.iterdir()):
            target = out / path.name
            if target.is_dir():
                # A folder cannot be replaced at once: the old one steps aside first.
                target.rename(temporary / f".old-{path.name}")
            path.rename(target)
    except OSError as error:
        raise DataError(f"cannot write to {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _runs(pid: str) -> bool:
    """Whether the run that made a temporary folder still goes on; a killed one cannot clean up after itself."""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _make(spec: Spec, seconds: dict[str, float]) -> dict[str, xr.Dataset]:
    data = {}
    grid = len(spec.task.omega) * len(spec.init.c_pt) * len(spec.init.lambda_pt) * len(spec.init.gamma_ft)
    runs = grid * len(spec.simulation.alpha_ft) * spec.simulation.seeds
    parts = {
        "phase_diagrams": (len(spec.init.c_pt), published_grid.phase_diagrams),
        "published": (1, published_grid.published),
        "theory": (grid * len(spec.theory.alpha_ft), published_grid.theory),
        "best_lambda": (
            len(spec.best_lambda.omega) * len(spec.best_lambda.alpha_ft) * spec.best_lambda.num_lambda,
            published_grid.best_lambda,
        ),
    }
    for name, (points, make) in parts.items():
        with _stage(name, points, seconds) as bar:
            data[name] = make(spec)
            bar.update(points)
    with _stage("simulation", runs, seconds) as bar:
        data["simulation"] = published_grid.simulation(spec, bar.update)
    return data


@contextmanager
def _stage(name: str, total: int, seconds: dict[str, float]) -> Iterator[tqdm]:
    started = time.perf_counter()
    # disable=None: silent where the output is not a terminal.
    with tqdm(total=total, desc=f"{name:>15}", unit="point", disable=None) as bar:
        yield bar
    seconds[name] = time.perf_counter() - started


def _draw(data: dict[str, xr.Dataset], folder: Path) -> list[Path]:
    with style():
        drawn = {
            "phase_diagrams": phase_diagrams.draw(data["phase_diagrams"]),
            "theory_and_simulation": theory_curves.draw_grid(data["theory"], data["simulation"], data["published"]),
            "published": theory_curves.draw_published(data["published"]),
            "best_lambda": best_lambda.draw(data["best_lambda"]),
        }
        return [path for name, figure in drawn.items() for path in save(figure, folder, name)]


def _store(data: dict[str, xr.Dataset], path: Path, attributes: dict[str, str]) -> None:
    tree = xr.DataTree.from_dict(dict(data))
    tree.attrs = attributes
    # Consolidated metadata is not part of Zarr format 3, and warns.
    tree.to_zarr(path, zarr_format=3, consolidated=False)


def _summarise(data: dict[str, xr.Dataset], seconds: dict[str, float]) -> dict:
    theory, simulation = data["theory"], data["simulation"]
    failures = [int(code) for code in FAILURES]
    return {
        "theory": {
            "points": int(theory.mse.size),
            "unsolved": int(np.isin(theory.result, failures).sum()),
            "worst_residual": float(theory.residual.max()),
            "worst_error_estimate": float(theory.error.max()),
        },
        "simulation": {
            "dim": simulation.attrs["dim"],
            "runs": int(simulation.mse.size),
            "unsolved": int(np.isin(simulation.result, failures).sum()),
            "worst_residual": float(simulation.residual.max()),
            **agreement.pooled_z_scores(simulation),
        },
        "published": agreement.published_deviations(data["published"]),
        "best_lambda": {
            "largest_gain": float(data["best_lambda"].gain.max()),
            "median_gain": float(data["best_lambda"].gain.median()),
        },
        "seconds": {name: round(value, 2) for name, value in seconds.items()}
        | {"total": round(sum(seconds.values()), 2)},
    }
