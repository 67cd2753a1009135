"""The solver of the fixed-point equations of one problem; vmapped above.

One loop, one evaluation of the equations a step: a lane of a batch works through the phases of `_SCHEDULE` at
its own pace, on the quadrature rule of its phase, and the program is compiled once for all of them.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from dlnsim.result import Result
from replica.channel import Channel
from replica.equations import BLOCK, Point, equations, linearised, solve_2x2, starting_point

TOLERANCE = 1e-11
"""Largest relative residual of either equation, on the checking rule, that counts as converged."""
FINEST = 6 * BLOCK
"""Nodes of the rule behind derivatives and predictions, and of the last resort of the solver."""

_BISECTIONS = 45
_REACH = 100.0  # theta lies within e^+-100 standard deviations, tau above e^-100 c^2


class Phase(IntEnum):
    """What the solver does next."""

    COARSE = 0
    FINE = 1
    CHECK = 2
    FINEST = 3
    BISECT = 4
    POLISH = 5
    FINAL_CHECK = 6
    DONE = 7


class _Stage(NamedTuple):
    blocks: int
    tolerance: float  # of both residuals; Newton then takes a last, quadratically convergent step
    max_steps: int
    passed: Phase
    failed: Phase


# A check uses half as many nodes again as the rule that it checks.
_SCHEDULE = {
    Phase.COARSE: _Stage(1, 1e-4, 40, Phase.FINE, Phase.FINE),
    Phase.FINE: _Stage(2, 1e-6, 40, Phase.CHECK, Phase.FINEST),
    Phase.CHECK: _Stage(3, TOLERANCE, 1, Phase.DONE, Phase.FINEST),
    Phase.FINEST: _Stage(6, 1e-6, 40, Phase.FINAL_CHECK, Phase.BISECT),
    Phase.BISECT: _Stage(3, 0.0, _BISECTIONS * (_BISECTIONS + 2), Phase.POLISH, Phase.POLISH),
    Phase.POLISH: _Stage(6, 1e-6, 10, Phase.FINAL_CHECK, Phase.FINAL_CHECK),
    Phase.FINAL_CHECK: _Stage(9, TOLERANCE, 1, Phase.DONE, Phase.DONE),
    Phase.DONE: _Stage(0, 0.0, 0, Phase.DONE, Phase.DONE),
}


class State(NamedTuple):
    """Everything that the solver carries from one evaluation of the equations to the next."""

    p: Point
    phase: Int[Array, ""]
    steps: Int[Array, ""]
    in_phase: Int[Array, ""]
    low: Point
    high: Point
    residual: Float[Array, ""]
    error: Float[Array, ""]


def _newton(state: State, f: Point, jac: Float[Array, "2 2"]) -> State:
    """One step along the curve E[dx^/dz] = alpha, with a bracket on log tau.

    Far from the curve only log theta moves, bracketed, since the first equation is monotone in it. Near it
    both move, and tau stays in the bracket that the sign of the second equation on the curve has set up.
    """
    p, low, high = state.p, state.low, state.high
    to_curve = -f[0] / jac[0, 1]
    near = (jnp.abs(f[0]) < 1.0) & (jnp.abs(to_curve) < 2.0)
    on_curve = f[1] + jac[1, 1] * to_curve
    slope = jac[1, 0] - jac[1, 1] * jac[0, 0] / jac[0, 1]
    trusted = jnp.stack([near & (jnp.abs(f[0]) < 0.3 * jnp.abs(on_curve)), ~near])
    sign = jnp.stack([on_curve, f[0]])
    low = jnp.where(trusted & (sign > 0), jnp.maximum(low, p), low)
    high = jnp.where(trusted & (sign < 0), jnp.minimum(high, p), high)
    # The crossing is downwards: a wrong-signed slope says only which way to go. The cap grows, since exact
    # recovery lies a hundred e-folds down.
    cap = 4.0 + 2.0 * state.in_phase
    step = jnp.where(slope < 0, -on_curve / slope, jnp.sign(on_curve) * jnp.inf)
    log_tau = _inside(p[0], jnp.clip(step, -cap, cap), low[0], high[0])
    log_tau = jnp.where(near, log_tau, p[0])
    step = jnp.clip(to_curve - jac[0, 0] / jac[0, 1] * (log_tau - p[0]), -3.0, 3.0)
    log_theta = jnp.where(near, p[1] + step, _inside(p[1], step, low[1], high[1]))
    # The theta bracket belongs to one tau.
    low, high = (
        low.at[1].set(jnp.where(near, -jnp.inf, low[1])),
        high.at[1].set(jnp.where(near, jnp.inf, high[1])),
    )
    return state._replace(p=jnp.stack([log_tau, log_theta]), low=low, high=high)


def _inside(x: Array, step: Array, low: Array, high: Array) -> Array:
    outside = (x + step <= low) | (x + step >= high)
    # A converged step from an end of the bracket must not be replaced by half the bracket.
    bisect = outside & jnp.isfinite(high - low) & (jnp.abs(step) > 1e-6)
    return jnp.where(bisect, (low + high) / 2, x + step)


def _bracket(channel: Channel) -> tuple[Point, Point]:
    """Ends of log tau, and of log theta relative to log(tau) / 2, beyond which no solution lies."""
    top = starting_point(channel)[0] - jnp.log1p(-channel.alpha) + 20.0
    floor = 2 * jnp.log(jnp.min(jnp.where(channel.weight > 0, channel.c, jnp.inf)))
    return jnp.stack([jnp.minimum(floor, top) - _REACH, -_REACH]), jnp.stack([top, _REACH])


def _bisect(state: State, f: Point) -> State:
    """One step of nested bisection, which cannot fail.

    E[dx^/dz] falls with theta, so halving the theta bracket `_BISECTIONS` times puts the point on the curve;
    there the tau equation crosses zero once, downwards, so its sign halves the tau bracket.
    """
    low, high = state.low, state.high
    theta_done = (state.in_phase + 1) % (_BISECTIONS + 1) == 0
    ratio = state.p[1] - state.p[0] / 2
    up = f[jnp.where(theta_done, 1, 0)] > 0
    tau = jnp.stack(
        [jnp.where(theta_done & up, state.p[0], low[0]), jnp.where(theta_done & ~up, state.p[0], high[0])]
    )
    theta = jnp.stack([jnp.where(up, ratio, low[1]), jnp.where(up, high[1], ratio)])
    theta = jnp.where(theta_done, jnp.array([-_REACH, _REACH]), theta)
    log_tau = jnp.mean(tau)
    low, high = jnp.stack([tau[0], theta[0]]), jnp.stack([tau[1], theta[1]])
    return state._replace(p=jnp.stack([log_tau, jnp.mean(theta) + log_tau / 2]), low=low, high=high)


def solve_point(channel: Channel, first: Phase = Phase.COARSE) -> tuple[State, Int[Array, ""]]:
    """Solve one problem: Newton on a coarse rule, then on a fine one, and a check on a still finer one.

    Where the check fails the finest rule takes over, and where Newton fails there, nested bisection.

    Args:
        channel: one problem with 0 < alpha < 1 and every c > 0.
        first: the phase to begin with (BISECT skips Newton).

    Returns:
        (state, result): result is CONVERGED, QUADRATURE or NONFINITE.
    """
    start = starting_point(channel)
    ends = _bracket(channel)
    middle = (ends[0] + ends[1]) / 2
    bisection = (jnp.stack([middle[0], middle[1] + middle[0] / 2]), *ends)
    table = jax.tree.map(lambda *column: jnp.array(column), *_SCHEDULE.values())

    def body(state: State) -> State:
        stage = jax.tree.map(lambda column: column[state.phase], table)
        f, jac = linearised(state.p, channel, stage.blocks)
        err = jnp.max(jnp.abs(f))
        checking = (state.phase == Phase.CHECK) | (state.phase == Phase.FINAL_CHECK)
        bisecting = state.phase == Phase.BISECT
        moved = _choose(bisecting, _bisect(state, f), _choose(checking, state, _newton(state, f, jac)))

        passed = err <= stage.tolerance
        failed = ~passed & ((state.in_phase + 1 >= stage.max_steps) | (jnp.isnan(err) & ~bisecting))
        after = jnp.where(passed, stage.passed, jnp.where(failed, stage.failed, state.phase))
        moved = moved._replace(
            phase=after,
            steps=state.steps + 1,
            in_phase=state.in_phase + 1,
            residual=jnp.where(checking, err, state.residual),
            # What the residual on the finer rule means for log tau.
            error=jnp.where(checking, jnp.abs(solve_2x2(jac, f)[0]), state.error),
        )
        restart = failed & (after <= Phase.FINEST) & ~checking
        fresh = moved._replace(
            p=jnp.where(restart, start, moved.p), in_phase=jnp.asarray(0), low=-free, high=free
        )
        moved = _choose(after != state.phase, fresh, moved)
        return _choose((after == Phase.BISECT) & ~bisecting, _place(fresh, bisection), moved)

    free, inf, zero = jnp.full(2, jnp.inf), jnp.asarray(jnp.inf), jnp.asarray(0)
    sane = jnp.isfinite(start).all()
    state = State(start, jnp.where(sane, int(first), int(Phase.DONE)), zero, zero, -free, free, inf, inf)
    if first == Phase.BISECT:
        state = _place(state, bisection)
    state = lax.while_loop(lambda s: s.phase != Phase.DONE, body, state)
    result = jnp.where(state.residual <= TOLERANCE, Result.CONVERGED, Result.QUADRATURE)
    return state, jnp.where(sane & jnp.isfinite(state.residual), result, Result.NONFINITE)


def _choose(condition: Array, yes: State, no: State) -> State:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def _place(state: State, where: tuple[Point, Point, Point]) -> State:
    return state._replace(p=where[0], low=where[1], high=where[2])


def root(channel: Channel) -> tuple[Point, tuple[Array, Array, Array, Array]]:
    """The solution with implicit derivatives of every order with respect to the channel, in both modes.

    Args:
        channel: one problem with 0 < alpha < 1 and every c > 0.

    Returns:
        (p, (residual, error, steps, result)); only p carries derivatives, the rest are floats.
    """
    frozen = lax.stop_gradient(channel)

    def solve(_: object, __: Point) -> tuple[Point, tuple]:
        state, result = solve_point(frozen)
        # Auxiliary outputs of custom_root need a tangent type, which integers lack.
        return state.p, (state.residual, state.error, state.steps.astype(float), result.astype(float))

    def tangent_solve(jacobian: Callable[[Point], Point], right: Point) -> Point:
        return solve_2x2(jax.vmap(jacobian, out_axes=1)(jnp.eye(2)), right)

    def residual(p: Point) -> Point:
        return equations(p, channel, FINEST)

    return lax.custom_root(residual, jnp.zeros(2), solve, tangent_solve, has_aux=True)
