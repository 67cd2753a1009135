"""One problem's way to its fixed point: the phases of the solver and a step of each.

A problem works through `_SCHEDULE`, each phase on a quadrature rule of its own, one block of nodes at a time: Newton on
a coarse rule, then on a fine one, and a check on a still finer one. Where the check fails the finest rule takes over,
and where Newton fails there, nested bisection.
"""

from enum import IntEnum
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from replica.channel import Channel
from replica.equations import BLOCK, Point, Sums, add_block, linearised, no_sums, solve_2x2, starting_point

TOLERANCE = 1e-11
"""Largest relative residual of either equation, on the checking rule, that counts as converged."""
FINEST = 6 * BLOCK
"""Nodes of the rule behind derivatives and predictions, and of the last resort of the solver."""

_BISECTIONS = 45
_REACH = 100.0  # theta lies within e^+-100 standard deviations, tau above e^-100 c^2

_Tree = TypeVar("_Tree")


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
    block: Int[Array, ""]
    sums: Sums


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
    tau = jnp.stack([jnp.where(theta_done & up, state.p[0], low[0]), jnp.where(theta_done & ~up, state.p[0], high[0])])
    theta = jnp.stack([jnp.where(up, ratio, low[1]), jnp.where(up, high[1], ratio)])
    theta = jnp.where(theta_done, jnp.array([-_REACH, _REACH]), theta)
    log_tau = jnp.mean(tau)
    low, high = jnp.stack([tau[0], theta[0]]), jnp.stack([tau[1], theta[1]])
    return state._replace(p=jnp.stack([log_tau, jnp.mean(theta) + log_tau / 2]), low=low, high=high)


def begin(channel: Channel, first: Phase) -> State:
    """Return the state before the first evaluation; DONE at once where the channel is not finite."""
    free, inf, zero = jnp.full(2, jnp.inf), jnp.asarray(jnp.inf), jnp.asarray(0)
    start = starting_point(channel)
    phase = jnp.where(jnp.isfinite(start).all(), int(first), int(Phase.DONE))
    state = State(start, phase, zero, zero, -free, free, inf, inf, zero, no_sums())
    return _at_bisection(state, channel) if first == Phase.BISECT else state


def _at_bisection(state: State, channel: Channel) -> State:
    low, high = _bracket(channel)
    middle = (low + high) / 2
    return state._replace(p=jnp.stack([middle[0], middle[1] + middle[0] / 2]), low=low, high=high)


def advance(state: State, channel: Channel) -> State:
    """Sum one block of nodes and, where that completes the rule, take one step of the phase."""
    table = jax.tree.map(lambda *column: jnp.array(column), *_SCHEDULE.values())
    stage = jax.tree.map(lambda column: column[state.phase], table)
    sums = add_block(state.sums, state.p, channel, state.block, jnp.maximum(stage.blocks, 1))
    summed = state._replace(block=state.block + 1, sums=sums)
    stepped = _step(state._replace(block=jnp.asarray(0), sums=no_sums()), channel, stage, sums)
    return choose(state.block + 1 >= stage.blocks, stepped, summed)


def _step(state: State, channel: Channel, stage: _Stage, sums: Sums) -> State:
    f, jac = linearised(state.p, channel, sums)
    err = jnp.max(jnp.abs(f))
    checking = (state.phase == Phase.CHECK) | (state.phase == Phase.FINAL_CHECK)
    bisecting = state.phase == Phase.BISECT
    moved = choose(bisecting, _bisect(state, f), choose(checking, state, _newton(state, f, jac)))

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
    free = jnp.full(2, jnp.inf)
    fresh = moved._replace(
        p=jnp.where(restart, starting_point(channel), moved.p), in_phase=jnp.asarray(0), low=-free, high=free
    )
    moved = choose(after != state.phase, fresh, moved)
    return choose((after == Phase.BISECT) & ~bisecting, _at_bisection(fresh, channel), moved)


def choose(condition: Array, yes: _Tree, no: _Tree) -> _Tree:
    """Return one of two equal trees, leaf by leaf."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
