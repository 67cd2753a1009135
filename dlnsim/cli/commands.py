"""The commands on grids of parameters, and the demonstration. jax starts here."""

import contextlib
import importlib
import logging
import math
import os
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

# Both before jax starts a device: it would tell every user without a GPU that there is none.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from tqdm import tqdm  # noqa: E402

from dlnsim.bias import l_order, pretraining_dependence, regime_weights  # noqa: E402
from dlnsim.cli.grid import Grid, init_parameters, task_parameters  # noqa: E402
from dlnsim.cli.options import Bias, Command, Demo, Limit, Simulate, Solve  # noqa: E402
from dlnsim.cli.report import Column, Report, grid_report, names, plain  # noqa: E402
from dlnsim.errors import ArgumentError, DataError  # noqa: E402

_ROUNDING = 1e-18
"""Error of a simulated mse of order 1 that the solver's tolerance leaves; a floor for standard errors."""


def run(name: str, options: Command) -> Report:
    """Run a command in float64.

    Args:
        name: of the command.
        options: from `dlnsim.cli.arguments`.

    Returns:
        `Report`.

    Raises:
        DlnsimError: bad input, or not enough memory.
    """
    jax.config.update("jax_enable_x64", True)
    _keep_compiled_programs()
    try:
        if isinstance(options, Limit):
            from dlnsim.cli.own_data import limit_command

            return limit_command(options)
        return _RUN[name](options)
    except MemoryError as error:
        raise ArgumentError("not enough memory: make the grid, --dim or the data smaller") from error
    except RuntimeError as error:
        # XLA has no class for it, and its wording depends on the device.
        if not any(words in str(error) for words in ("RESOURCE_EXHAUSTED", "Out of memory")):
            raise
        raise ArgumentError("not enough memory: make the grid, --dim or the data smaller") from error


def _keep_compiled_programs() -> None:
    """Let calls of the command line share compiled programs, unless the user has arranged it differently."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "dlnsim")
    # Without a place to write there is no cache, and JAX would warn at every program.
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
        if os.access(folder, os.W_OK):
            jax.config.update("jax_compilation_cache_dir", folder)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def _solve(options: Solve) -> Report:
    from replica import solve

    grid = Grid({**task_parameters(options), **init_parameters(options), "alpha_ft": options.alpha_ft})
    solution = solve(grid.task(), grid.init(), alpha_ft=grid["alpha_ft"], throw=False)
    columns = [Column(name, np.asarray(getattr(solution, name))) for name in ("mse", "forgetting", "tau", "theta")]
    codes = np.asarray(solution.result)
    columns += [Column("residual", np.asarray(solution.residual), ".1e"), Column("result", names(codes))]
    return grid_report("solve", grid, columns, codes=codes)


def _simulate(options: Simulate) -> Report:
    from dlnsim.pipeline import simulate

    if not 0 <= options.seed < 2**63:
        raise ArgumentError(f"`seed` must be an integer in [0, 2^63), got {options.seed}")
    for name in ("dim", "seeds"):
        if not 1 <= getattr(options, name) < 2**31:
            raise ArgumentError(f"`{name}` must be an integer >= 1, got {getattr(options, name)}")
    grid = Grid(
        {
            **task_parameters(options),
            **init_parameters(options),
            "alpha_ft": options.alpha_ft,
            "alpha_pt": options.alpha_pt,
            "noise_var_pt": options.noise_var_pt,
        }
    )
    # disable=None: no bar where stderr is not a terminal.
    total = math.prod(grid.shape) * options.seeds
    with tqdm(total=total, desc="simulate", unit="run", leave=False, disable=None) as bar:
        simulation = simulate(
            grid.task(),
            grid.init(),
            alpha_ft=grid["alpha_ft"],
            alpha_pt=grid["alpha_pt"],
            dim=options.dim,
            seeds=options.seeds,
            key=jax.random.key(options.seed),
            progress=bar.update,
            throw=False,
        )
    columns = []
    for name in ("mse_ft", "forgetting", "mse_pt"):
        mean, standard_error = _over_seeds(np.asarray(getattr(simulation, name)))
        columns += [Column(name, mean, ".4g"), Column(f"{name}_se", standard_error, ".2g")]
    residual = np.maximum(np.asarray(simulation.residual_pt), np.asarray(simulation.residual_ft)).max(-1)
    theory = _theory(grid, simulation.alpha_ft)
    z = (columns[0].values - theory) / np.maximum(columns[1].values, _ROUNDING)
    codes = np.asarray(simulation.result)
    counts = [Counter(names(row).tolist()) for row in codes.reshape(-1, codes.shape[-1])]
    words = [", ".join(f"{count} {code}" for code, count in counter.items()) for counter in counts]
    columns += [
        Column("theory_mse", theory, ".4g"),
        Column("z", z, ".2f"),
        Column("residual", residual, ".1e"),
        Column("results", np.array(words, dtype=object).reshape(grid.shape)),
    ]
    report = grid_report(
        "simulate",
        grid,
        columns,
        settings={"dim": options.dim, "seeds": options.seeds, "seed": options.seed},
        codes=codes,
        notes=[
            "_se: standard error over seeds; z = (mse_ft - theory_mse) / mse_ft_se follows Student's t, heavy-tailed "
            "for few seeds, and heavier still where only some draws recover the teacher",
            *(["theory_mse and z: nan where pretraining is imperfect"] if np.isnan(theory).any() else []),
        ],
        extra={"alpha_ft_used": simulation.alpha_ft, "alpha_pt_used": simulation.alpha_pt},
    )
    return Report(
        report.command,
        {**report.values, "results": np.array(counts, dtype=object).reshape(grid.shape)},
        report.lines,
        report.failures,
    )


def _over_seeds(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard error over the last axis, skipping failed seeds; NaN if too few are left."""
    kept = np.isfinite(values)
    count = kept.sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(kept, values, 0).sum(-1) / count
        variance = np.where(kept, (values - mean[..., None]) ** 2, 0).sum(-1) / (count - 1)
        return mean, np.sqrt(np.where(count > 1, variance, np.nan) / count)


def _theory(grid: Grid, alpha_ft: jax.Array) -> np.ndarray:
    """The predicted mse at the sample numbers used; NaN where pretraining is imperfect."""
    from replica import solve

    predicted = solve(grid.task(), grid.init(), alpha_ft=alpha_ft, throw=False).mse
    perfect = np.isinf(grid["alpha_pt"]) | ((grid["alpha_pt"] >= 1) & (grid["noise_var_pt"] == 0))
    return np.where(perfect, predicted, np.nan)


def _bias(options: Bias) -> Report:
    grid = Grid({**init_parameters(options), "beta_ft": options.beta_ft, "beta_pt": options.beta_pt})
    for name in ("beta_ft", "beta_pt"):
        bad = [value for value in grid.parameters[name] if not np.isfinite(value)]
        if bad:
            raise ArgumentError(f"`{name}` must be finite, got {bad[0]:g}")
    init, beta_ft, beta_pt = grid.init(), grid["beta_ft"], grid["beta_pt"]
    c_ft = np.broadcast_to(init.c_ft(beta_pt), grid.shape)
    weights = np.broadcast_to(regime_weights(beta_ft, beta_pt, init), (*grid.shape, 3))
    columns = [
        Column("c_ft", c_ft),
        Column("l_order", np.asarray(l_order(beta_ft, c_ft))),
        Column("pretraining_dependence", np.asarray(pretraining_dependence(beta_ft, beta_pt, init))),
        *(Column(name, weights[..., i]) for i, name in enumerate(("a_I", "a_II", "a_III"))),
    ]
    notes = ["c_ft = 0: the flow stays at 0; shown is the limit c_ft -> 0"] if (c_ft == 0).any() else []
    return grid_report("bias", grid, columns, notes=notes)


def _demo(options: Demo) -> Report:
    if options.config is not None and not options.config.is_file():
        raise DataError(f"`config` must be a TOML file, got {options.config}, which does not exist")
    if options.out.exists() and not options.out.is_dir():
        raise DataError(f"`out` must be a folder, got the file {options.out}")
    try:
        run_demo = importlib.import_module("figures.demo").run
    except ModuleNotFoundError as error:
        raise DataError(
            f"the demonstration needs the module {error.name}, which is not installed: "
            "reinstall dlnsim, or install the missing package"
        ) from error
    # Only the summary may reach stdout if a program reads it.
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        summary = run_demo(config=options.config, out=options.out, quick=options.quick)
    return Report("demo", summary, list(_flat(plain(summary))))


def _flat(values: Mapping[str, Any], indent: str = "") -> list[str]:
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{key}:", *_flat(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {value:.6g}" if isinstance(value, float) else f"{indent}{key}: {value}")
    return lines


_RUN: dict[str, Any] = {"solve": _solve, "simulate": _simulate, "bias": _bias, "demo": _demo}
