"""The main job: theory curves, exact simulations and published values on one grid, and how they agree.

Every function returns an `xarray.Dataset` with named axes; `collect` puts them into one Zarr store.
"""

import platform
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

import replica
from dlnsim import Init, Task, l_order, pretraining_dependence, regime_weights, simulate
from dlnsim.errors import DataError
from experiments.spec import Spec

GRID = ("omega", "c_pt", "lambda_pt", "gamma_ft")
Progress = Callable[[int], object]


def _grid_point_arrays(*axes: tuple[float, ...]) -> list[np.ndarray]:
    return list(np.meshgrid(*axes, indexing="ij", sparse=True))


def _problem(spec: Spec, alpha: tuple[float, ...]) -> tuple[Task, Init, np.ndarray, dict]:
    axes = (spec.task.omega, spec.init.c_pt, spec.init.lambda_pt, spec.init.gamma_ft, alpha)
    omega, c_pt, lambda_pt, gamma_ft, alpha_ft = _grid_point_arrays(*axes)
    task = Task(spec.task.rho_pt, spec.task.rho_ft, omega, spec.task.beta_pt, 0.0, spec.task.noise_var_ft)
    coords = dict(zip((*GRID, "alpha_ft"), map(list, axes), strict=True))
    return task, Init(c_pt, lambda_pt, gamma_ft), alpha_ft, coords


def theory(spec: Spec) -> xr.Dataset:
    """Solve every theory curve of the grid.

    Returns:
        mse, forgetting, tau, theta, residual, steps and result over (omega, c_pt, lambda_pt, gamma_ft, alpha_ft).
    """
    task, init, alpha_ft, coords = _problem(spec, spec.theory.alpha_ft)
    solution = replica.solve(task, init, alpha_ft=alpha_ft, throw=False)
    names = ("mse", "forgetting", "tau", "theta", "residual", "error", "steps", "result")
    variables = {name: (tuple(coords), np.asarray(getattr(solution, name))) for name in names}
    return xr.Dataset(variables, coords, {"rho_pt": spec.task.rho_pt, "rho_ft": spec.task.rho_ft})


def simulation(spec: Spec, progress: Progress = lambda count: None) -> xr.Dataset:
    """Simulate the grid exactly at finite D, with the theory's values at the sample numbers actually used.

    Args:
        spec: the experiment.
        progress: called with the number of finished runs.

    Returns:
        mse and forgetting (with `seed`), result, residual and `theory` over the grid and alpha_ft.
    """
    plan = spec.simulation
    task, init, alpha_ft, coords = _problem(spec, plan.alpha_ft)
    stacked = simulate(
        task,
        init,
        alpha_ft=alpha_ft,
        dim=plan.dim,
        seeds=plan.seeds,
        key=jax.random.key(plan.seed),
        progress=progress,
        throw=False,
    )
    used = np.asarray(stacked.alpha_ft)[(0,) * len(GRID)]
    predicted = replica.solve(task, init, alpha_ft=used, throw=False)
    dims = (*GRID, "alpha_ft")
    return xr.Dataset(
        {
            "mse": ((*dims, "seed"), np.asarray(stacked.mse_ft)),
            "forgetting": ((*dims, "seed"), np.asarray(stacked.forgetting)),
            "residual": ((*dims, "seed"), np.asarray(stacked.residual_ft)),
            "result": ((*dims, "seed"), np.asarray(stacked.result)),
            "theory_mse": (dims, np.asarray(predicted.mse)),
            "theory_forgetting": (dims, np.asarray(predicted.forgetting)),
        },
        coords | {"alpha_ft": used, "seed": np.arange(plan.seeds)},
        {"dim": plan.dim},
    )


def published(spec: Spec) -> xr.Dataset:
    """The published values with the theory at their parameters.

    The published Monte-Carlo curves sampled one support each (columns `rho_*_emp`): `theory_mse` is the theory
    at the nominal sparsities, `theory_mse_emp` at the sampled ones.

    Returns:
        One `row` a published value.

    Raises:
        DataError: a table is missing or lacks a column.
    """
    parameters = ("rho_pt", "rho_ft", "omega", "c_pt", "lambda_pt", "gamma_ft", "alpha_ft")
    sampled = ("rho_pt_emp", "rho_ft_emp")
    monte_carlo = _read_table(spec.published.replica_mc, (*parameters, *sampled, "mse", "mse_rel_se"))
    descent = _read_table(spec.published.gradient_descent, (*parameters, "mse_mean", "mse_se"))
    rows = [
        *({"source": "replica_mc", "value": r["mse"], "se": r["mse"] * r["mse_rel_se"], **r} for r in monte_carlo),
        *({"source": "gradient_descent", "value": r["mse_mean"], "se": r["mse_se"], **r} for r in descent),
    ]
    columns = {
        name: np.array([row.get(name, row.get(fallback)) for row in rows])
        for name, fallback in (
            *((name, name) for name in ("source", "value", "se", *parameters)),
            ("rho_pt_emp", "rho_pt"),
            ("rho_ft_emp", "rho_ft"),
        )
    }
    init = Init(columns["c_pt"], columns["lambda_pt"], columns["gamma_ft"])
    for name, suffix in (("theory_mse", ""), ("theory_mse_emp", "_emp")):
        rho_pt, rho_ft = columns["rho_pt" + suffix], columns["rho_ft" + suffix]
        # A sampled FT support inside the PT support cannot exceed it, whatever the columns' rounding says.
        omega = np.minimum(columns["omega"], rho_pt / rho_ft) if suffix else columns["omega"]
        solution = replica.solve(Task(rho_pt, rho_ft, omega), init, alpha_ft=columns["alpha_ft"], throw=False)
        columns[name] = np.asarray(solution.mse)
    columns["source"] = _strings(columns["source"])
    return xr.Dataset({name: ("row", values) for name, values in columns.items()})


def _strings(values: Iterable[str]) -> np.ndarray:
    # Zarr format 3 specifies strings of variable length, not NumPy's of fixed length.
    return np.array(list(values), dtype=object)


def _read_table(path: Path, columns: tuple[str, ...]) -> list[dict[str, float]]:
    try:
        header, *lines = (line.split(",") for line in path.read_text(encoding="utf-8").split())
        rows = [dict(zip(header, map(float, values), strict=True)) for values in lines]
    except OSError as error:
        raise DataError(f"cannot read the published table {path}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path} must be a CSV table of numbers with a header line: {error}") from error
    missing = [name for name in columns if name not in header]
    if missing:
        raise DataError(f"{path} lacks the column `{missing[0]}`")
    if not rows:
        raise DataError(f"{path} must have at least one row of numbers")
    return rows


def phase_diagrams(spec: Spec) -> xr.Dataset:
    """Map l-order, pretraining dependence and regime weights over lambda_PT and, in turn, beta_PT, c_PT, gamma_FT.

    Returns:
        l_order, pretraining_dependence (diagram, x, lambda_pt) and weights (..., regime); `x` holds the values of
        the diagram's own axis.
    """
    plan = spec.phase_diagram
    # Even in log(1 + lambda), where the regimes change.
    one_plus_lambda = np.logspace(-6, np.log10(2), plan.num)
    lambda_pt = np.minimum(one_plus_lambda - 1, 1.0)
    decades = {"beta_pt": (-4, 2), "c_pt": (-6, 2), "gamma_ft": (-4, 1.5)}
    fields = []
    for name, (low, high) in decades.items():
        x = np.logspace(low, high, plan.num)
        fixed = {"beta_pt": plan.beta_pt, "c_pt": plan.c_pt, "gamma_ft": plan.gamma_ft} | {name: x[:, None]}
        init = Init(fixed["c_pt"], lambda_pt, fixed["gamma_ft"])
        beta_pt = fixed["beta_pt"]
        shape = (plan.num, plan.num)
        fields.append(
            (
                x,
                np.broadcast_to(l_order(plan.beta_ft, init.c_ft(beta_pt)), shape),
                np.broadcast_to(pretraining_dependence(plan.beta_ft, beta_pt, init), shape),
                np.broadcast_to(regime_weights(plan.beta_ft, beta_pt, init), (*shape, 3)),
            )
        )
    x, order, dependence, weights = (np.stack(field) for field in zip(*fields, strict=True))
    dims = ("diagram", "x", "lambda_pt")
    return xr.Dataset(
        {
            "l_order": (dims, order),
            "pretraining_dependence": (dims, dependence),
            "weights": ((*dims, "regime"), weights),
            "x_value": (("diagram", "x"), x),
            "one_plus_lambda": ("lambda_pt", one_plus_lambda),
        },
        {"diagram": _strings(decades), "lambda_pt": lambda_pt, "regime": _strings(("I", "II", "III"))},
        {name: getattr(plan, name) for name in ("beta_ft", "beta_pt", "c_pt", "gamma_ft")},
    )


def best_lambda(spec: Spec) -> xr.Dataset:
    """The lambda_PT that minimises the predicted error at every (omega, alpha_ft), and its gain over lambda = 0.

    The minimum over a grid even in log(1 + lambda) is refined by the parabola through its neighbours and then
    solved again, so that the error reported is that of a solved point.

    Returns:
        lambda_pt, mse, gain, mse_default over (omega, alpha_ft), and `at_edge` where the best value is an end of
        the grid.
    """
    plan = spec.best_lambda
    log_grid = np.linspace(np.log(1e-6), np.log(2.0), plan.num_lambda)
    omega, alpha_ft, log_lambda = _grid_point_arrays(plan.omega, plan.alpha_ft, tuple(log_grid))

    def error(omega: np.ndarray, alpha_ft: np.ndarray, log_lambda: np.ndarray | float) -> np.ndarray:
        task = Task(spec.task.rho_pt, spec.task.rho_ft, omega, spec.task.beta_pt, 0.0, spec.task.noise_var_ft)
        init = Init(plan.c_pt, np.minimum(np.expm1(log_lambda), 1.0), plan.gamma_ft)
        return np.asarray(replica.solve(task, init, alpha_ft=alpha_ft, throw=False).mse)

    mse = error(omega, alpha_ft, log_lambda)
    best = np.argmin(np.nan_to_num(mse, nan=np.inf), axis=-1)
    inner = np.clip(best, 1, plan.num_lambda - 2)
    left, middle, right = (
        np.log(np.take_along_axis(mse, (inner + step)[..., None], axis=-1)[..., 0]) for step in (-1, 0, 1)
    )
    curvature = left - 2 * middle + right
    shift = np.where((best == inner) & (curvature > 0), (left - right) / (2 * np.where(curvature > 0, curvature, 1)), 0)
    refined = log_grid[best] + np.clip(shift, -0.5, 0.5) * (log_grid[1] - log_grid[0])
    default = error(omega[..., 0], alpha_ft[..., 0], 0.0)
    # The best of the points solved. Without an interior minimum that is the grid's end, and is reported as such.
    candidates = np.stack([refined, log_grid[best], 0 * refined])
    errors = np.stack([error(omega[..., 0], alpha_ft[..., 0], refined), np.nanmin(mse, axis=-1), default])
    chosen = np.argmin(np.nan_to_num(errors, nan=np.inf), axis=0)[None]
    solved = np.take_along_axis(errors, chosen, axis=0)[0]
    log_best = np.take_along_axis(candidates, chosen, axis=0)[0]
    dims = ("omega", "alpha_ft")
    return xr.Dataset(
        {
            "lambda_pt": (dims, np.minimum(np.expm1(log_best), 1.0)),
            "mse": (dims, solved),
            "mse_default": (dims, default),
            "gain": (dims, default / solved),
            "at_edge": (dims, (chosen[0] < 2) & ((best == 0) | (best == plan.num_lambda - 1))),
        },
        {"omega": list(plan.omega), "alpha_ft": list(plan.alpha_ft)},
    )


def provenance() -> dict[str, str]:
    """What is needed to make the numbers again: versions, platform, device."""
    packages = ("dlnsim", "jax", "jaxlib", "numpy")
    device = jax.devices()[0]
    return {f"version_{name}": version(name) for name in packages} | {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": f"{device.platform} {device.device_kind}",
        "precision": str(jnp.ones(()).dtype),
    }
