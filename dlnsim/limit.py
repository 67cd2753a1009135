"""The end point of gradient flow on one diagonal linear network, for any design matrix and targets.

Checks, batches and, where X is rank-deficient or ill-conditioned, orthonormal equations around `dlnsim.dual`.
"""

import math
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from dlnsim.blas import single_threaded_lapack
from dlnsim.dual import EPS, TINY, LimitSolution, l2_norm, or_one, problems_at_once, solve_dual
from dlnsim.errors import ArgumentError
from dlnsim.result import Result, raise_on_failure
from dlnsim.validation import as_float, check_range, is_traced, require_float64


def limit(
    X: Float[ArrayLike, "... n D"],
    y: Float[ArrayLike, "... n"],
    c: Float[ArrayLike, "..."],
    *,
    tol: float = 1e-12,
    max_steps: int = 200,
    throw: bool = True,
) -> LimitSolution:
    """End point of gradient flow from beta = 0 (theory.md section 1), on any X and y.

    Where X beta = y has no solution, gradient flow ends at the minimiser of the same penalty among the
    least-squares solutions, and so does this function. Coordinates with c = 0 never move: they stay 0, and
    "solution" and "least squares" then refer to the other columns of X.

    Under `jit` or `vmap` values are not known: nothing is raised, and `solve_dual` is used as it is.

    Args:
        X: design matrix, shape (..., n, D), n and D at least 1.
        y: targets, shape (..., n).
        c: scale at the start, >= 0 and finite: a scalar, or shape (..., D) with D or 1 values a problem.
        tol: relative residual at which a problem counts as converged, > 0.
        max_steps: limit on the number of Hessian factorisations, >= 1.
        throw: raise if any problem fails; otherwise its numbers are NaN and its code says why.

    Returns:
        `LimitSolution`. Codes: CONVERGED; STUCK (beta = 0: y is only visible to coordinates with c = 0);
        MAX_STEPS; NONFINITE (inf or NaN in X or y, or numbers outside the range of float64).

    Raises:
        ArgumentError: shapes do not fit, or c, `tol` or `max_steps` is out of range.
        PrecisionError: float32 numbers, or float64 is not enabled.
        SolverError: `throw` and at least one problem failed.
    """
    require_float64("limit", X, y, c)
    X, y, c = (as_float(value) for value in (X, y, c))
    batch = _check_shapes(X, y, c)
    # One shape and one (not weak) type, whether c is a Python number or an array: one compilation.
    c = jnp.broadcast_to(c, (*c.shape[:-1], X.shape[-1])).astype(jnp.float64)
    check_range("c", c, "finite and >= 0", lambda x: (x >= 0) & np.isfinite(x))
    check_range("tol", tol, "finite and > 0", lambda x: (x > 0) & np.isfinite(x))
    check_range("max_steps", max_steps, "at least 1", lambda x: x >= 1)

    traced = is_traced(X, y, c)
    if traced:
        return _solve_batch(X, y, c, tol, max_steps, batch)
    with single_threaded_lapack():
        solution = jax.block_until_ready(_solve_batch(X, y, c, tol, max_steps, batch))
        solution = _retry_projected(X, y, c, tol, max_steps, solution)
    if throw:
        raise_on_failure(solution.result, "limit")
    return solution


def _check_shapes(X: Array, y: Array, c: Array) -> tuple[int, ...]:
    """The batch shape of X (..., n, D), y (..., n) and c () or (..., D) or (..., 1)."""
    got = f"got X {X.shape}, y {y.shape}, c {c.shape}"
    if X.ndim < 2 or 0 in X.shape:
        raise ArgumentError(f"`X` must have shape (..., n, D) without empty axes, {got}")
    n, dim = X.shape[-2:]
    if y.ndim < 1 or y.shape[-1] != n:
        raise ArgumentError(f"`y` must have shape (..., n) with n = {n} as in X, {got}")
    if c.ndim and c.shape[-1] not in (1, dim):
        raise ArgumentError(f"`c` must be a scalar or have shape (..., D) or (..., 1) with D = {dim}, {got}")
    try:
        return np.broadcast_shapes(X.shape[:-2], y.shape[:-1], c.shape[:-1])
    except ValueError as error:
        raise ArgumentError(f"the batch axes of `X`, `y` and `c` must broadcast, {got}") from error


@partial(jax.jit, static_argnames=("batch",))
def _solve_batch(X: Array, y: Array, c: Array, tol: Array, max_steps: Array, batch: tuple[int, ...]) -> LimitSolution:
    stacks, indices = _problems(X, y, c, batch)

    def one(index: list[Array]) -> LimitSolution:
        # Without the barrier XLA fuses the selection of X into every product with X: 5 times slower on a CPU.
        X, y, c = lax.optimization_barrier(tuple(stack[i] for stack, i in zip(stacks, index, strict=True)))
        return solve_dual(X, y, c, tol, max_steps)

    size = problems_at_once(X.shape[-2], X.shape[-1], len(indices[0]))
    solution = lax.map(one, indices, batch_size=size)
    return jax.tree.map(lambda leaf: leaf.reshape(*batch, *leaf.shape[1:]), solution)


def _problems(
    X: Array | np.ndarray, y: Array | np.ndarray, c: Array | np.ndarray, batch: tuple[int, ...]
) -> tuple[list, list[np.ndarray]]:
    """Flat stacks of X, y and c, and which element of each a problem uses: a grid over c does not copy X."""
    tails = X.shape[-2:], y.shape[-1:], c.shape[-1:]
    stacks = [a.reshape(-1, *tail) for a, tail in zip((X, y, c), tails, strict=True)]
    shapes = X.shape[:-2], y.shape[:-1], c.shape[:-1]
    return stacks, [np.broadcast_to(np.arange(math.prod(shape)).reshape(shape), batch).ravel() for shape in shapes]


def _retry_projected(X: Array, y: Array, c: Array, tol: float, max_steps: int, first: LimitSolution) -> LimitSolution:
    """Solve again, on the host and one by one, what failed before the step limit."""
    result, steps = np.asarray(first.result), np.asarray(first.steps)
    retry = np.flatnonzero((result == Result.MAX_STEPS) & (steps < max_steps))
    if not retry.size:
        return first
    stacks, indices = _problems(np.asarray(X), np.asarray(y), np.asarray(c), result.shape)
    leaves = jax.tree.map(np.array, first)
    for k in retry:
        X_k, y_k, c_k = (stack[index[k]] for stack, index in zip(stacks, indices, strict=True))
        at = np.unravel_index(k, result.shape)
        solution = _solve_projected(X_k, y_k, c_k, tol, max_steps - int(steps[at]))
        solution = eqx.tree_at(lambda s: s.steps, solution, solution.steps + steps[at])
        for leaf, value in zip(jax.tree.leaves(leaves), jax.tree.leaves(solution), strict=True):
            leaf[at] = value
    return jax.tree.map(jnp.asarray, leaves)


def _solve_projected(X: np.ndarray, y: np.ndarray, c: np.ndarray, tol: float, max_steps: int) -> LimitSolution:
    """Solve the least-squares equations V^T beta = S^-1 U^T y, X = U S V^T on the columns with c > 0."""
    moving = np.where(c > 0, X, 0.0)
    largest = or_one(np.abs(moving).max(axis=1))
    length = largest * or_one(l2_norm(moving / largest[:, None]))
    # First with rows of norm 1, so that small rows count; if the equations contradict each other, in the
    # metric of the loss.
    for unit in (np.asarray(length), np.full(len(y), length.max())):
        U, S, Vt = np.linalg.svd(moving / unit[:, None], full_matrices=False)
        target = y / unit
        roundoff = max(X.shape) * EPS
        inverse = np.where(roundoff * S[0] < S, 1 / np.maximum(S, TINY), 0.0)
        seen = U.T @ target * (inverse > 0)
        size = np.abs(target).max()
        if np.abs(target - U @ seen).max() <= 10 * roundoff * size:
            break
    seen = np.where(np.abs(seen).max() > roundoff * size, seen, 0.0)
    # Directions without a singular value become empty equations, which keeps the shape (one compilation).
    solution = solve_dual(np.where(inverse[:, None] > 0, Vt, 0.0), inverse * seen, c, tol, max_steps)
    mu = U @ (inverse * solution.mu) / unit
    unit_y = np.abs(y).max()
    misfit = l2_norm((X @ np.asarray(solution.beta) - y) / unit_y) / l2_norm(y / unit_y)
    return eqx.tree_at(lambda s: (s.mu, s.misfit), solution, (mu, misfit))
