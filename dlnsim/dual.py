"""The dual solver behind `dlnsim.limit`: one problem of full rank, pure and jittable.

Gradient flow from beta = 0 ends at the minimiser of sum_i q_{c_i}(beta_i) subject to X beta = y (theory.md
section 1): beta = c sinh(u), u = X^T mu, where mu minimises the convex dual sum_i c_i cosh(u_i) - mu . y.

The solver is Newton's method with two savings. Along any direction the dual costs O(D) to minimise exactly,
against O(n^2 D) for the Hessian X diag(c cosh u) X^T; and its third derivative is at most |du| times its
second, so a Newton step cut to log(1 + d) / d, d = max |du|, never needs backtracking. Every factorisation
therefore preconditions several nonlinear conjugate-gradient steps, and is renewed only when they slow down.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import cho_solve, solve_triangular
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from dlnsim.result import FAILURES, Result

EPS = float(np.finfo(np.float64).eps)
_INNER_STEPS = 40  # conjugate-gradient steps that one factorisation may serve
_PATIENCE = 12  # factorisations without a new best residual before giving up: roundoff, or no solution
TINY = 1e-300


class LimitSolution(eqx.Module):
    """End point of gradient flow; `...` is the broadcast batch shape of X, y and c.

    Attributes:
        beta: the solution c sinh(X^T mu); NaN where `result` is a failure.
        mu: dual variables, beta = c sinh(X^T mu): the integral of 2 (y - X beta) over the
            flow or, where the data are inconsistent and that diverges, its part in the range of X; NaN likewise.
        residual: relative residual, recomputed from `beta`, of the equations that were solved: of X beta = y
            with every row of X scaled to norm 1 or, where X was found rank-deficient or ill-conditioned, of
            V^T beta = S^-1 U^T y with X = U S V^T, whose solutions are the least-squares solutions.
        misfit: ||X beta - y|| / ||y|| (0 for y = 0): how well the data are fitted, whatever was solved.
        steps: number of Hessian factorisations.
        result: codes of `dlnsim.result.Result`.
    """

    beta: Float[Array, "... D"]
    mu: Float[Array, "... n"]
    residual: Float[Array, "..."]
    misfit: Float[Array, "..."]
    steps: Int[Array, "..."]
    result: Int[Array, "..."]


@jax.jit
def solve_dual(
    X: Float[Array, "n D"],
    y: Float[Array, " n"],
    c: Float[Array, "#D"],
    tol: Float[ArrayLike, ""] = 1e-12,
    max_steps: Int[ArrayLike, ""] = 200,
) -> LimitSolution:
    """The core of `limit`: one problem, no checks, pure; for use inside `jit`, `vmap` and `lax.map`.

    X, restricted to the coordinates with c > 0, must have full rank: full row rank where n <= D, full column
    rank where n > D, which a QR factorisation reduces to the D least-squares equations. Where it is not of
    full rank, or its condition number (with rows of norm 1) exceeds about 1e5, the code is MAX_STEPS; `limit`
    on known values then goes on to orthonormal equations.

    Args:
        X: design matrix.
        y: targets.
        c: scale, >= 0, one value a coordinate or one for all.
        tol: relative residual of the equations to reach.
        max_steps: limit on the number of Hessian factorisations.

    Returns:
        `LimitSolution` without batch dimensions.
    """
    n, dim = X.shape
    # Coordinates with c = 0 never move: without their columns, rank and scale of X are those of the flow.
    moving = jnp.where(c > 0, X, 0.0)
    if n > dim:
        Q, A = jnp.linalg.qr(moving)
        target = Q.T @ y
    else:
        Q, A, target = jnp.eye(0), moving, y
    largest = or_one(jnp.max(jnp.abs(A), axis=1))
    norm = or_one(l2_norm(A / largest[:, None]))
    A = A / largest[:, None] / norm[:, None]
    target = target / largest / norm
    length = largest * norm
    # A row of R that is pure roundoff must not be blown up to an equation.
    deficient = (n > dim) & (jnp.min(length) < 10 * n * EPS * jnp.max(length))
    # beta, c and y share one unit, in which the targets are of order 1.
    unit = or_one(jnp.max(jnp.abs(target)))
    c_unit = jnp.broadcast_to(c, (dim,)) / unit
    in_range = jnp.all((c_unit < 1e290) & ((c_unit > 1e-290) | (c == 0))) & jnp.isfinite(unit)
    finite = jnp.all(jnp.isfinite(X)) & jnp.all(jnp.isfinite(y)) & in_range
    live = jnp.any(moving != 0)

    state = _newton(A, target / unit, c_unit, tol, jnp.where(finite & live, max_steps, 0), deficient)

    beta = state.beta * unit
    unit_y = or_one(jnp.max(jnp.abs(y)))
    blind = ~live & jnp.any(X.T @ (y / unit_y) != 0)
    error = jnp.where(live, state.error, jnp.where(blind, 1.0, 0.0))
    code = jnp.where(error <= tol, Result.CONVERGED, jnp.where(blind, Result.STUCK, Result.MAX_STEPS))
    ok = finite & jnp.all(jnp.isfinite(beta)) & jnp.isfinite(error)
    code = jnp.where(ok, code, Result.NONFINITE)
    failed = jnp.isin(code, jnp.array(FAILURES))
    mu = state.mu / norm / largest
    return LimitSolution(
        beta=jnp.where(failed, jnp.nan, beta),
        mu=jnp.where(failed, jnp.nan, Q @ mu if n > dim else mu),
        residual=error,
        misfit=l2_norm((X @ beta - y) / unit_y) / or_one(l2_norm(y / unit_y)),
        steps=state.steps,
        result=code,
    )


class _State(NamedTuple):
    u: Float[Array, " D"]
    mu: Float[Array, " n"]
    beta: Float[Array, " D"]
    r: Float[Array, " n"]
    error: Float[Array, ""]
    best: Float[Array, ""]
    stale: Int[Array, ""]
    steps: Int[Array, ""]
    singular: Bool[Array, ""]


def _newton(A: Array, y: Array, c: Array, tol: ArrayLike, max_steps: Array, singular: Array) -> _State:
    """Newton's method on the dual; A has rows of norm 1, y is of order 1, and A, y and c are finite."""
    n, dim = A.shape
    scale = jnp.maximum(l2_norm(y), TINY)

    def measure(u: Array) -> tuple[Array, Array, Array]:
        beta = _times_sinh(c, u)
        r = y - A @ beta
        return beta, r, l2_norm(r) / scale

    def outer(state: _State) -> _State:
        # The first Hessian is that of equal scales: its pivots show the rank of X, whatever the range of c.
        first = state.steps == 0
        weights = jnp.where(first, 1.0, _times_cosh(c, state.u))
        weakest, solve = _factorise(A, weights, state.r, state.stale > 1)
        singular = first & (weakest < max(1e-11, 10 * n * EPS))

        def inner(carry: tuple) -> tuple:
            state, p, p_u, _, step = carry
            d = solve(state.r)
            d_u = d @ A
            top = jnp.maximum(jnp.max(jnp.abs(d_u)), TINY)
            directions, directions_u = jnp.stack([d / top, p]), jnp.stack([d_u / top, p_u])
            a = _minimise_along(directions_u, -directions @ state.r, state.u, c)
            p, p_u = a @ directions, a @ directions_u
            beta, r, error = measure(state.u + p_u)
            new = state._replace(u=state.u + p_u, mu=state.mu + p, beta=beta, r=r, error=error)
            # Below the tolerance, steps only polish: to 1 % of it, or to the roundoff floor.
            keep = (state.error <= tol) & ~(error < state.error)
            moved = jnp.max(jnp.abs(p_u))
            go = (error > tol / 100) & ((moved > 1) | (error < 0.3 * state.error)) & ~keep
            new = jax.tree.map(lambda old, new: jnp.where(keep, old, new), state, new)
            unit = jnp.where(moved > 0, moved, 1.0)
            return new, p / unit, p_u / unit, go, step + 1

        state = state._replace(steps=state.steps + 1, singular=singular)
        carry = (state, jnp.zeros(n), jnp.zeros(dim), ~singular, 0)
        state = lax.while_loop(lambda carry: carry[3] & (carry[4] < _INNER_STEPS), inner, carry)[0]
        improved = state.error < 0.9 * state.best
        return state._replace(best=jnp.minimum(state.best, state.error), stale=jnp.where(improved, 0, state.stale + 1))

    def unfinished(state: _State) -> Array:
        # False for a NaN error too.
        return (state.error > tol) & (state.steps < max_steps) & (state.stale < _PATIENCE) & ~state.singular

    u = jnp.zeros(dim)
    beta, r, error = measure(u)
    zero = jnp.zeros((), int)
    start = _State(u, jnp.zeros(n), beta, r, error, jnp.array(jnp.inf), zero, zero, singular)
    return lax.while_loop(unfinished, outer, start)


def _factorise(A: Array, w: Array, r: Array, refine: Array) -> tuple[Array, Callable[[Array], Array]]:
    """The least pivot of A diag(w) A^T (rows and columns scaled to diagonal 1), and a solver for it.

    The Hessian is shifted until it is positive definite in floating point. That is enough as a rule: weak
    directions are those in which the residual is small too, and it is recomputed at every step. Where it is
    not enough (weights of 1e-14 and 1e4 side by side), `refine` asks for the triangular factor of a QR
    factorisation of sqrt(w) A^T by repeated Cholesky (shifted CholeskyQR: Fukaya et al., SIAM J. Sci. Comput.
    42, A477, 2020), whose accuracy is that of the square root of the Hessian.
    """
    n = A.shape[0]
    top = jnp.maximum(jnp.max(w), TINY)
    root = A * jnp.sqrt(w / top)
    norm = or_one(l2_norm(root))
    root = root / norm[:, None]

    def cholesky(hessian: Array, shift: Array) -> Array:
        return lax.linalg.cholesky(hessian.at[jnp.diag_indices(n)].add(shift), symmetrize_input=False)

    def shifted(root: Array) -> Array:
        hessian = root @ root.T
        start = jnp.array(n * EPS / 100), jnp.full((n, n), jnp.nan)
        return lax.while_loop(
            lambda carry: jnp.isnan(carry[1][-1, -1]) & (carry[0] < 1),
            lambda carry: (100 * carry[0], cholesky(hessian, 100 * carry[0])),
            start,
        )[1]

    def weakest(lower: Array) -> Array:
        # An empty row is harmless (0 = 0) unless it contradicts itself.
        empty = ~jnp.any(root != 0, axis=1)
        return jnp.nan_to_num(jnp.min(jnp.where(empty, (r == 0) * 1.0, jnp.diagonal(lower) ** 2)))

    def again(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        root, last, total, passes = carry
        root = solve_triangular(last, root, lower=True)
        last = shifted(root)
        return root, last, total @ last, passes + 1

    lower = shifted(root)
    total = lax.while_loop(
        lambda carry: refine & (carry[3] < 4) & (weakest(carry[1]) < 0.1),
        again,
        (root, lower, lower, jnp.array(1)),
    )[2]
    return weakest(lower), lambda r: cho_solve((total, True), r / norm) / norm / top


def _minimise_along(V: Float[Array, "2 D"], slope: Float[Array, "2"], u: Array, c: Array) -> Float[Array, "2"]:
    """Minimise sum c cosh(u + a V) + (linear terms) over a, given its slope at a = 0, by damped Newton.

    The second direction may be zero or a multiple of the first; it is then left out.
    """

    def body(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        a, _, step = carry
        du = a @ V
        # beta(u + du) - beta(u) as a product: the difference would cancel near convergence.
        g = slope + V @ (2 * _times_cosh(c, u + du / 2) * jnp.sinh(du / 2))
        wV = _times_cosh(c, u + du) * V
        h00, h01, h11 = wV[0] @ V[0], wV[0] @ V[1], wV[1] @ V[1]
        ratio = h01 / h00
        left = h11 - ratio * h01
        e1 = jnp.where(left > 1e-10 * h11, -(g[1] - ratio * g[0]) / or_one(left), 0.0)
        e = jnp.stack([-(g[0] + h01 * e1) / h00, e1])
        size = jnp.max(jnp.abs(e @ V))
        # log(1 + d) / d is the step that generalised self-concordance makes safe.
        return a + e * jnp.where(size > 0.3, jnp.log1p(size) / size, 1.0), size, step + 1

    carry = (jnp.zeros(2), jnp.array(jnp.inf), jnp.array(0))
    return lax.while_loop(lambda carry: (carry[1] > 1e-3) & (carry[2] < 60), body, carry)[0]


def _times_cosh(c: Array, u: Array) -> Array:
    # (c h) h: c is tiny exactly where cosh(u) is huge.
    h = jnp.exp(jnp.abs(u) / 2)
    return c * h * h / 2 + c / h / h / 2


def _times_sinh(c: Array, u: Array) -> Array:
    h = jnp.exp(jnp.abs(u) / 2)
    small = c * jnp.sinh(jnp.clip(u, -1, 1))
    return jnp.where(jnp.abs(u) < 1, small, jnp.sign(u) * (c * h * h / 2 - c / h / h / 2))


def l2_norm(x: Array | np.ndarray) -> Array:
    """Euclidean norm along the last axis."""
    return jnp.sqrt(jnp.sum(x**2, axis=-1))


def or_one(x: Array | np.ndarray) -> Array:
    """The value where positive, else 1: a divisor that is safe for empty rows."""
    return jnp.where(x > 0, x, 1.0)


def problems_at_once(n: int, dim: int, problems: int) -> int | None:
    """Problems to solve together: one on a CPU, where products use all cores; else a quarter of memory."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return None
    memory = (device.memory_stats() or {}).get("bytes_limit", 8 * 2**30)
    # Live at once: X, its normalised and weighted copies, the Hessian, its scaled copy and two factors.
    return max(1, min(problems, int(memory / 4 / (8 * (4 * n * dim + 4 * n * n)))))
