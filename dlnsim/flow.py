"""The path of gradient flow: an ODE with n unknowns, whatever the width of the network.

The weights are never integrated. beta(t) = c sinh(X^T mu(t)) with d mu / dt = 2 (y - X beta) and mu(0) = 0
(theory.md section 1), so that c and lambda are conserved by construction, whatever the tolerance.
"""

from collections.abc import Callable
from typing import cast

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jaxtyping import Array, ArrayLike, Float, Int

from dlnsim.blas import single_threaded_lapack
from dlnsim.errors import ArgumentError
from dlnsim.init import Weights, weights_from_solution
from dlnsim.result import Result, raise_on_failure
from dlnsim.validation import as_float, check_range, is_traced, require_float64


class FlowSolution(eqx.Module):
    """The network along the flow, at the times that were asked for.

    Where the flow stopped early (`result` is CONVERGED) the later entries hold the state at `stop_time`.
    Every number is NaN where `result` is a failure.

    Attributes:
        times: as requested.
        mu: dual variable, beta = c sinh(X^T mu).
        beta: linear predictor.
        weights: the four weight vectors, each of shape (times, D).
        loss: 1/2 ||X beta - y||^2.
        residual: ||X beta - y|| / ||y|| (absolute where y = 0).
        stop_time: where the integration ended: the end of the first step whose residual is within
            `residual_tol`, or the last of `times`. It is at most one step late, never early.
        steps: integrator steps, rejected ones included.
        result: `dlnsim.Result` code: CONVERGED, STOPPED, STUCK, MAX_STEPS or NONFINITE.
    """

    times: Float[Array, " times"]
    mu: Float[Array, "times n"]
    beta: Float[Array, "times D"]
    weights: Weights
    loss: Float[Array, " times"]
    residual: Float[Array, " times"]
    stop_time: Float[Array, ""]
    steps: Int[Array, ""]
    result: Int[Array, ""]


def flow(
    X: Float[ArrayLike, "n D"],
    y: Float[ArrayLike, " n"],
    c: Float[ArrayLike, "..."],
    times: Float[ArrayLike, " times"],
    *,
    lam: Float[ArrayLike, "..."] = 0.0,
    solver: diffrax.AbstractSolver | None = None,
    rtol: float = 1e-10,
    atol: float | None = None,
    residual_tol: float = 0.0,
    max_steps: int = 16384,
    throw: bool = True,
) -> FlowSolution:
    """Gradient flow on 1/2 ||X beta - y||^2 from beta = 0 with equal paths (theory.md section 1).

    The error of each integrator step, in the dual variable nu = mu max_i ||x_i|| and in its 2-norm, is held
    below `atol + rtol |nu|`. That bounds the error of every u_i = x_i . mu, and an error in u is a RELATIVE
    error in beta = c sinh(u) where |u| > 1, and an error relative to c below: small coordinates are as
    accurate as large ones. Over a whole path the errors of the steps add up, to 1 `rtol` at c = 1 and to 40
    at c = 1e-12. The integrator steps exactly onto `times`: an implicit solver interpolates at low order.

    Works under `jit` and `vmap`; there values are not validated and nothing is raised, so check `result`.

    Args:
        X: inputs, one row a sample, n up to a few hundred: an implicit solver factors n x n matrices.
        y: labels.
        c: conserved scale, >= 0 and finite, a scalar or one value a coordinate.
        times: where to record, at least one, strictly increasing, >= 0 and finite. Gradient descent with
            step size eta needs 1 / eta steps for a unit of time.
        lam: relative balance (w^2 - v^2) / c in [-1, 1], a scalar or one value a coordinate. It does not act
            on beta, only on `weights`.
        solver: a diffrax ODE solver with error estimates. The default is Kvaerno5 with a Jacobian a stage, for
            any mixture of scales and any length: a step costs 2 ms at n = 100 and 20 ms at n = 200. Explicit
            `diffrax.Dopri8()` costs 0.3 ms there but has to resolve the fastest rate, so its steps grow with
            the last time: faster up to 1e4 or so for n = 200. On a busy machine the factorisations of the
            default wait for each other's threads unless OPENBLAS_NUM_THREADS=1.
        rtol: relative tolerance on nu, > 0.
        atol: absolute tolerance on nu, > 0; by default `rtol`, lowered where a large c keeps u small.
        residual_tol: stop where `residual` is at most this, >= 0. The default never stops early.
        max_steps: limit on integrator steps, >= 1.
        throw: raise on failure; otherwise return NaN with the code in `result`.

    Returns:
        `FlowSolution`. STUCK if every coordinate with a gradient has c = 0: the origin is a saddle and beta
        stays 0.

    Raises:
        ArgumentError: a shape or a value is outside the range above.
        PrecisionError: float64 is off.
        SolverError: MAX_STEPS or NONFINITE, with `throw=True`.
    """
    require_float64("flow", X, y, c, times, lam)
    X, y = check_data(X, y)
    times = as_float(times)
    _check_times(times)
    c = _per_coordinate("c", c, X.shape[1], "finite and >= 0", lambda x: (x >= 0) & np.isfinite(x))
    lam = _per_coordinate("lam", lam, X.shape[1], "relative, in [-1, 1]", lambda x: np.abs(x) <= 1)
    check_range("rtol", rtol, "finite and > 0", lambda x: (x > 0) & np.isfinite(x))
    if atol is not None:
        check_range("atol", atol, "finite and > 0", lambda x: (x > 0) & np.isfinite(x))
    check_range("residual_tol", residual_tol, "finite and >= 0", lambda x: (x >= 0) & np.isfinite(x))
    if max_steps < 1:
        raise ArgumentError(f"`max_steps` must be >= 1, got {max_steps}")
    solver = _default_solver() if solver is None else solver
    # Arrays, not Python floats: another tolerance is not another compilation.
    tolerances = as_float(rtol), None if atol is None else as_float(atol), as_float(residual_tol)
    problem = (X, y, c, times, lam, solver, *tolerances, max_steps)
    if is_traced(X, y, c, times, lam):
        return _flow(*problem)
    with single_threaded_lapack():
        solution = jax.block_until_ready(_flow(*problem))
    if throw:
        raise_on_failure(solution.result, "flow")
    return solution


def _default_solver() -> diffrax.AbstractSolver:
    # A Jacobian a stage. With diffrax's own choice, one a step, the root finder fails where beta grows by a
    # factor e within a few steps: half of the steps are rejected and ten times as many are needed.
    return diffrax.Kvaerno5(root_finder=diffrax.with_stepsize_controller_tols(optx.Chord)())


@eqx.filter_jit
def _flow(
    X: Array,
    y: Array,
    c: Array,
    times: Array,
    lam: Array,
    solver: diffrax.AbstractSolver,
    rtol: Array,
    atol: Array | None,
    residual_tol: Array,
    max_steps: int,
) -> FlowSolution:
    # Traced input was not validated, and norms overflow: integrate zeros rather than reject NaN steps up to
    # the limit.
    finite = jnp.isfinite(jnp.array([jnp.linalg.norm(X), jnp.linalg.norm(y), c.sum()])).all()
    X, y, c = (jnp.where(finite, array, 0.0) for array in (X, y, c))
    y_norm = jnp.linalg.norm(y)
    y_unit = _positive(y_norm)
    column = _positive(jnp.linalg.norm(X, axis=0).max())
    # A typical beta of the solution, ||X||_F beta = ||y||, and so a typical u, 1 or smaller.
    typical = y_norm / _positive(jnp.linalg.norm(X))
    scale = _positive(jnp.maximum(c.max(), typical))
    if atol is None:
        atol = rtol * _positive(typical / scale)
    # With time in units of 1 / speed, d nu / dt and nu are of the same size: the root finder, which works on
    # the former, takes its tolerances from the step control, which works on the latter. A power of two, so
    # that `times` change unit without rounding.
    speed = jnp.ldexp(1.0, jnp.frexp(2 * column**2 * scale)[1])
    clock = times * speed

    def predictor(nu: Array) -> Array:
        # Where c = 0 beta stays 0, yet u grows without bound, and 0 * sinh(inf) is NaN.
        return c * jnp.sinh(jnp.where(c > 0, nu @ X / column, 0.0))

    def rate(s: ArrayLike, nu: Array, args: None) -> Array:
        return 2 * column / speed * (y - X @ predictor(nu))

    def relative_residual(beta: Array) -> Array:
        return jnp.linalg.norm(beta @ X.T - y, axis=-1) / y_unit

    controller = diffrax.PIDController(rtol=rtol, atol=atol, norm=optx.two_norm)
    solved = diffrax.diffeqsolve(
        diffrax.ODETerm(rate),
        solver,
        t0=0.0,
        t1=clock[-1],
        dt0=None,
        y0=jnp.zeros_like(y),
        saveat=diffrax.SaveAt(subs=(diffrax.SubSaveAt(ts=clock), diffrax.SubSaveAt(t1=True))),
        stepsize_controller=diffrax.ClipStepSizeController(controller, step_ts=clock),
        event=diffrax.Event(lambda s, nu, args, **_: relative_residual(predictor(nu)) <= residual_tol),
        max_steps=max_steps,
        throw=False,
    )
    (saved_at, end_time), (saved, end) = cast(tuple, solved.ts), cast(tuple, solved.ys)  # one item per SubSaveAt
    # diffrax marks the times after an event by inf: the flow has ended there, at the event's state.
    nu = jnp.where(jnp.isfinite(saved_at)[:, None], saved, end)
    beta = jax.vmap(predictor)(nu)
    residual = relative_residual(beta)

    pull = y @ X != 0
    stuck = pull.any() & ~(pull & (c > 0)).any()
    ended = solved.result
    in_time = (ended == diffrax.RESULTS.successful) | (ended == diffrax.RESULTS.event_occurred)
    # The integrator also runs out of steps when rounding or overflow makes every step fail.
    result = jnp.select(
        [~finite | ~jnp.isfinite(residual).all(), ~in_time, stuck, residual[-1] <= residual_tol],
        [Result.NONFINITE, Result.MAX_STEPS, Result.STUCK, Result.CONVERGED],
        Result.STOPPED,
    )
    failed = (result == Result.MAX_STEPS) | (result == Result.NONFINITE)
    nu, beta, residual, stop_time, lam = jax.tree.map(
        lambda leaf: jnp.where(failed, jnp.nan, leaf), (nu, beta, residual, end_time[0] / speed, lam)
    )
    return FlowSolution(
        times=times,
        mu=nu / column,
        beta=beta,
        weights=weights_from_solution(beta, c, lam),
        loss=(residual * y_unit) ** 2 / 2,
        residual=residual,
        stop_time=stop_time,
        steps=solved.stats["num_steps"],
        result=result,
    )


def check_data(X: ArrayLike, y: ArrayLike) -> tuple[Float[Array, "n D"], Float[Array, " n"]]:
    """Convert and check the data of a regression.

    Args:
        X: inputs (n, D), finite, n and D >= 1.
        y: labels (n,), finite.

    Returns:
        (X, y) as floating arrays.

    Raises:
        ArgumentError: a wrong shape, inf or NaN.
    """
    X, y = as_float(X), as_float(y)
    if X.ndim != 2 or 0 in X.shape:
        raise ArgumentError(f"`X` must be a matrix with one row a sample, shape (n, D), got shape {X.shape}")
    if y.shape != X.shape[:1]:
        raise ArgumentError(f"`y` must have one label a row of X, shape {X.shape[:1]}, got shape {y.shape}")
    check_range("X", X, "finite", np.isfinite)
    check_range("y", y, "finite", np.isfinite)
    return X, y


def _positive(x: Array) -> Array:
    return jnp.where(x > 0, x, 1.0)


def _check_times(times: Array) -> None:
    if times.ndim != 1 or times.size == 0:
        raise ArgumentError(f"`times` must be a list of at least one time, got shape {times.shape}")
    check_range("times", times, "finite and >= 0", lambda x: (x >= 0) & np.isfinite(x))
    if is_traced(times):
        return
    # In numpy: under jit even a slice of known values would be traced.
    known = np.asarray(times)
    late = known[1:] <= known[:-1]
    if late.any():
        at = int(np.argmax(late)) + 1
        raise ArgumentError(
            f"`times` must be strictly increasing, got {times[at]:g} after {times[at - 1]:g} at index {at}"
        )


def _per_coordinate(
    name: str, value: ArrayLike, dim: int, expected: str, ok: Callable[[np.ndarray], np.ndarray]
) -> Array:
    value = as_float(value)
    if value.shape not in ((), (1,), (dim,)):
        raise ArgumentError(f"`{name}` must be a scalar or have shape ({dim},), got shape {value.shape}")
    check_range(name, value, expected, ok)
    return jnp.broadcast_to(value, (dim,))
