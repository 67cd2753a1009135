"""The two-stage protocol at finite dimension: pretrain, re-initialise, fine-tune, each flow to its end."""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from dlnsim.blas import single_threaded_lapack
from dlnsim.data import Teacher, group_means, sample_data, sample_teacher
from dlnsim.dual import LimitSolution, problems_at_once, solve_dual
from dlnsim.errors import ArgumentError
from dlnsim.init import Init
from dlnsim.result import Result, raise_on_failure
from dlnsim.task import GROUPS, Task
from dlnsim.validation import as_float, broadcast_shape, check_range, is_traced, require_float64


class Simulation(eqx.Module):
    """Exact end points of both stages, per grid point and seed; NaN where `result` is a failure.

    Errors are means over coordinates, E[(beta - beta*)^2], the quantities that `replica.solve` predicts.

    Attributes:
        mse_pt: error on the PT task after pretraining (0 for perfect pretraining).
        mse_ft: error on the FT task after fine-tuning.
        forgetting: error on the PT task after fine-tuning, E[(beta_FT - beta*_PT)^2].
        mse_pt_by_group: `mse_pt` within each of `dlnsim.GROUPS`; NaN where no coordinate fell in the group.
        mse_ft_by_group: `mse_ft` within each group; NaN likewise.
        forgetting_by_group: `forgetting` within each group; NaN likewise.
        residual_pt: relative residual of the PT solution (0 for perfect pretraining).
        residual_ft: relative residual of the FT solution.
        result: codes of `dlnsim.Result`; a failure of PT is reported before one of FT.
        alpha_ft: FT samples per coordinate actually used, round(alpha_ft D) / D.
        alpha_pt: PT samples per coordinate actually used.
    """

    mse_pt: Float[Array, "... seed"]
    mse_ft: Float[Array, "... seed"]
    forgetting: Float[Array, "... seed"]
    mse_pt_by_group: Float[Array, "... seed 4"]
    mse_ft_by_group: Float[Array, "... seed 4"]
    forgetting_by_group: Float[Array, "... seed 4"]
    residual_pt: Float[Array, "... seed"]
    residual_ft: Float[Array, "... seed"]
    result: Int[Array, "... seed"]
    alpha_ft: Float[Array, "..."]
    alpha_pt: Float[Array, "..."]


def simulate(
    task: Task,
    init: Init,
    *,
    alpha_ft: ArrayLike,
    alpha_pt: ArrayLike = np.inf,
    dim: int,
    seeds: int,
    key: PRNGKeyArray,
    progress: Callable[[int], object] = lambda runs: None,
    throw: bool = True,
) -> Simulation:
    """Draw tasks and data at dimension `dim` and solve both stages exactly (theory.md sections 1 and 2).

    A point's random numbers depend on `key`, its index in the broadcast grid and the seed alone, not on
    batching or device.

    Args:
        task: fields broadcast with everything else.
        init: fields broadcast with everything else.
        alpha_ft: FT samples per coordinate, > 0; n = round(alpha_ft dim), at least 1.
        alpha_pt: PT samples per coordinate, > 0; inf: beta_PT = beta*_PT without training.
        dim: number of coordinates D, >= 1.
        seeds: draws of tasks and data per grid point, >= 1.
        key: from `jax.random.key`.
        progress: called with the number of runs just finished, for a progress bar.
        throw: raise if any run fails; with False it is NaN with its result code.

    Returns:
        `Simulation`, with a trailing axis of length `seeds`.

    Raises:
        ArgumentError: an argument is out of range, or shapes do not broadcast.
        PrecisionError: float64 is not enabled.
        SolverError: a run failed and `throw` is True.
    """
    alpha_ft, alpha_pt = as_float(alpha_ft), as_float(alpha_pt)
    require_float64("dlnsim.simulate", task, init, alpha_ft, alpha_pt)
    if is_traced(task, init, alpha_ft, alpha_pt):
        raise ArgumentError("`simulate` needs concrete arguments, since they set array shapes: call it outside jit")
    check_range("alpha_ft", alpha_ft, "finite and > 0", lambda x: (x > 0) & np.isfinite(x))
    check_range("alpha_pt", alpha_pt, "> 0 (inf for perfect pretraining)", lambda x: x > 0)
    for name, value in (("dim", dim), ("seeds", seeds)):
        if not isinstance(value, int | np.integer) or value < 1:
            raise ArgumentError(f"`{name}` must be an integer >= 1, got {value!r}")
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()):
        raise ArgumentError(f"`key` must be one key from jax.random.key(seed), got {key!r}")
    shape = broadcast_shape(task=task.shape, init=init.shape, alpha_ft=alpha_ft.shape, alpha_pt=alpha_pt.shape)

    def flatten(leaf: Array) -> np.ndarray:
        return np.broadcast_to(np.asarray(leaf), shape).ravel()

    if 0 in shape:
        raise ArgumentError(f"the grid is empty: got shape {shape}")
    points = jax.tree.map(flatten, (task, init))
    n_ft, n_pt = (_samples(flatten(alpha), dim) for alpha in (alpha_ft, alpha_pt))
    room = np.array([(_room(ft, dim), _room(pt, dim)) for ft, pt in zip(n_ft, n_pt, strict=True)])
    # One run at a time on a CPU, whose cores share each product; as many as fit elsewhere.
    abreast = problems_at_once(int(room.max()), dim, math.prod(shape) * seeds)
    parts, order = [], []
    for rows_ft, rows_pt in sorted({*map(tuple, room.tolist())}):
        plan = _Plan(int(dim), rows_ft, rows_pt, abreast is not None)
        members = np.flatnonzero((room == (rows_ft, rows_pt)).all(axis=1))
        runs = np.stack([np.repeat(members, seeds), np.tile(np.arange(seeds), len(members))], axis=1)
        size = min(abreast or 1, len(runs))
        for start in range(0, len(runs), size):
            part = runs[start : start + size]
            point, seed = np.resize(part, (size, 2)).T
            if abreast is None:
                point, seed = point[0], seed[0]
            chosen = jax.tree.map(lambda leaf, point=point: leaf[point], (*points, n_ft, n_pt))
            keys = key if abreast is None else jnp.broadcast_to(key, (size,))
            with single_threaded_lapack():
                solved = jax.block_until_ready(_run(*chosen, point=point, seed=seed, key=keys, plan=plan))
            parts.append([np.asarray(leaf).reshape(size, *leaf.shape[plan.abreast :])[: len(part)] for leaf in solved])
            order.append(part[:, 0] * seeds + part[:, 1])
            progress(len(part))
    back = np.argsort(np.concatenate(order))
    simulation = Simulation(
        *(
            jnp.asarray(np.concatenate(leaves)[back].reshape(*shape, seeds, *leaves[0].shape[1:]))
            for leaves in zip(*parts, strict=True)
        ),
        alpha_ft=jnp.asarray(n_ft.reshape(shape) / dim),
        alpha_pt=jnp.asarray(np.where(n_pt == _PERFECT, np.inf, n_pt / dim).reshape(shape)),
    )
    if throw:
        raise_on_failure(simulation.result, "dlnsim.simulate")
    return simulation


_PERFECT = 0


def _samples(alpha: np.ndarray, dim: int) -> np.ndarray:
    finite = np.where(np.isfinite(alpha), alpha, 0.0)
    return np.where(np.isfinite(alpha), np.maximum(np.rint(finite * dim), 1), _PERFECT).astype(int)


def _room(samples: int, dim: int) -> int:
    """Rows to allocate for that many samples: four sizes an octave share their compiled programs.

    Rows beyond the samples are zero, which changes nothing as long as both are at most D or both above.
    """
    step = max(1, 1 << max(int(samples) - 1, 0).bit_length() >> 3)
    rows = -(-int(samples) // step) * step
    return min(rows, dim) if samples <= dim else rows


def _run(
    task: Task,
    init: Init,
    n_ft: ArrayLike,
    n_pt: ArrayLike,
    point: ArrayLike,
    seed: ArrayLike,
    key: Array,
    plan: "_Plan",
) -> tuple[Array, ...]:
    """One run, or several abreast (every argument but the last two with a leading axis).

    Drawing and solving are programs of their own: in one, XLA on a CPU would draw X again in every product with X.
    """
    teacher, pt_key, ft_key = plan.program(_teacher, dim=plan.dim)(task, point, seed, key)
    beta_pt, trained = teacher.beta_pt, None
    if plan.rows_pt != _PERFECT:
        X, y = plan.program(_data, rows=plan.rows_pt)(pt_key, teacher.beta_pt, n_pt, task.noise_var_pt)
        trained = plan.program(solve_dual)(X, y, init.c_pt)
        beta_pt = trained.beta
    X, y = plan.program(_data, rows=plan.rows_ft)(ft_key, teacher.beta_ft, n_ft, task.noise_var_ft)
    fine_tuned = plan.program(solve_dual)(X, y, plan.program(_scale)(init, beta_pt))
    return plan.program(_measure)(teacher, beta_pt, trained, fine_tuned)


class _Plan(NamedTuple):
    dim: int
    rows_ft: int
    rows_pt: int
    abreast: bool

    def program(self, stage: Callable, **static: int) -> Callable:
        return _compiled(stage, self.abreast, **static)


@lru_cache(maxsize=512)
def _compiled(stage: Callable, abreast: bool, **static: int) -> Callable:
    with_static = partial(stage, **static)
    return jax.jit(jax.vmap(with_static) if abreast else with_static)


def _teacher(task: Task, point: Array, seed: Array, key: Array, *, dim: int) -> tuple[Teacher, Array, Array]:
    own_key = jax.random.fold_in(jax.random.fold_in(key, point), seed)
    teacher_key, pt_key, ft_key = jax.random.split(own_key, 3)
    return sample_teacher(teacher_key, task, dim), pt_key, ft_key


def _data(key: Array, beta: Array, samples: Array, noise_var: Array, *, rows: int) -> tuple[Array, Array]:
    X, y = sample_data(key, beta, rows, noise_var)
    used = jnp.arange(rows) < samples
    return jnp.where(used[:, None], X, 0.0), jnp.where(used, y, 0.0)


def _scale(init: Init, beta_pt: Array) -> Array:
    return init.c_ft(beta_pt)


def _measure(
    teacher: Teacher, beta_pt: Array, trained: LimitSolution | None, fine_tuned: LimitSolution
) -> tuple[Array, ...]:
    errors = (
        (beta_pt - teacher.beta_pt) ** 2,
        (fine_tuned.beta - teacher.beta_ft) ** 2,
        (fine_tuned.beta - teacher.beta_pt) ** 2,
    )
    residual_pt, result = jnp.asarray(0.0), fine_tuned.result
    if trained is not None:
        residual_pt = trained.residual
        result = jnp.where(trained.result == Result.CONVERGED, result, trained.result)
    return (
        *(error.mean() for error in errors),
        *(group_means(error, teacher.group, len(GROUPS)) for error in errors),
        residual_pt,
        fine_tuned.residual,
        result,
    )
