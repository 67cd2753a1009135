"""The two fixed-point equations of one problem and their solver; everything is per point and vmapped above.

Unknowns are p = (log tau, log theta). The equations (theory.md section 4, 0 < alpha < 1) are
    E[dx^/dz] = alpha,        alpha tau = noise + E[(x^ - x)^2],
written as log ratios, so that residuals are relative errors over any number of decades.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from dlnsim.result import Result
from replica.channel import Channel, moments, nodes_at, posterior_variance, spacing

BLOCK = 32
"""Nodes summed at once; every rule is a whole number of blocks."""
TOLERANCE = 1e-11
"""Largest relative residual of either equation, on the checking rule, that counts as converged."""
FINEST = 160
"""Nodes of the rule behind derivatives and predictions, and of the last resort of the solver."""

_MAX_NEWTON = 30
_BISECTIONS = 60

Point = Float[Array, "2"]


class Phase(IntEnum):
    """What the solver does next; each phase ends in the next one down, or in DONE."""

    COARSE = 0
    FINE = 1
    CHECK = 2
    FINEST = 3
    BISECT = 4
    FINAL_CHECK = 5
    DONE = 6


# Blocks of nodes in each phase. A check uses half as many nodes again as the rule it checks.
_BLOCKS = (1, 2, 3, 5, 5, 7, 0)
# Newton stops when both residuals are below this; a last, quadratically convergent step is then taken.
_NEWTON_TOLERANCE = (1e-4, 1e-6, 0.0, 1e-6, 0.0, 0.0, 0.0)


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


def _sums(p: Point, channel: Channel, layout: tuple, index: Array) -> Float[Array, "4"]:
    m = moments(jnp.exp(p[0]), jnp.exp(p[1]), channel, nodes_at(layout, index))
    by_group = jnp.stack([m.response, m.complement, m.shrinkage, m.bias])
    return jnp.sum(channel.weight * by_group, axis=-1)


def _log_ratios(p: Point, sums: Float[Array, "4"], channel: Channel) -> Point:
    # The first is a log odds ratio, to stay sharp as alpha -> 1. Stein's identity
    # E[(x^ - x)^2] = -tau + 2 tau E[dx^/dz] + E[(z - x^)^2] turns the second into
    # (1 - alpha) tau = noise + E[(z - x^)^2], which is the sharper of the two for alpha > 1/2.
    response, complement, shrinkage, bias = sums
    tau, alpha, noise = jnp.exp(p[0]), channel.alpha, channel.noise_var
    mse = bias + jnp.sum(channel.weight * posterior_variance(tau, channel), -1)
    odds = jnp.log(response / alpha) - jnp.log(complement / (1 - alpha))
    tau_ratio = jnp.where(
        alpha < 0.5, (noise + mse) / (alpha * tau), (noise + shrinkage) / ((1 - alpha) * tau)
    )
    return jnp.stack([odds, jnp.log(tau_ratio)])


def equations(p: Point, channel: Channel, nodes: int) -> Point:
    """Both fixed-point equations as log ratios: zero at the solution, differentiable in p and the channel.

    Args:
        p: (log tau, log theta).
        channel: one problem.
        nodes: quadrature nodes a group.

    Returns:
        Log of the odds of E[dx^/dz] over those of alpha; log of the ratio of the sides of the tau equation.
    """
    layout = spacing(jnp.exp(p[0]), jnp.exp(p[1]), channel, nodes)
    return _log_ratios(p, _sums(p, channel, layout, jnp.arange(nodes)), channel)


def _linearised(p: Point, channel: Channel, blocks: Int[Array, ""]) -> tuple[Point, Float[Array, "2 2"]]:
    """`equations` and their Jacobian for a traced number of blocks, so that one program serves every rule."""
    layout = spacing(jnp.exp(p[0]), jnp.exp(p[1]), channel, blocks * BLOCK)
    basis = jnp.eye(2)

    def add_block(k: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        index = k * BLOCK + jnp.arange(BLOCK)
        value, push = jax.linearize(lambda q: _sums(q, channel, layout, index), p)
        return sums[0] + value, sums[1] + jax.vmap(push)(basis)

    sums, tangents = lax.fori_loop(0, blocks, add_block, (jnp.zeros(4), jnp.zeros((2, 4))))
    f, push = jax.linearize(lambda q, s: _log_ratios(q, s, channel), p, sums)
    return f, jax.vmap(push, out_axes=1)(basis, tangents)


def _solve_2x2(matrix: Float[Array, "2 2"], right: Point) -> Point:
    # Cramer: LAPACK called once a point would cost more than the quadrature.
    (a, b), (c, d) = matrix
    return jnp.stack([d * right[0] - b * right[1], a * right[1] - c * right[0]]) / (a * d - b * c)


def starting_point(channel: Channel) -> Point:
    """The tau of an estimate that learns nothing, and a rough theta for it."""
    alpha = channel.alpha
    tau = (channel.noise_var + jnp.sum(channel.weight * channel.var, -1)) / alpha
    sd = jnp.sqrt(tau)
    # Linear shrinkage has theta = 2 c (1 / alpha - 1); a soft threshold of a few sd has theta asinh(sd / c).
    c = jnp.exp(jnp.sum(channel.weight * jnp.log(channel.c), -1))
    odds = 1 / alpha - 1
    strength = jnp.where(sd > c, jnp.minimum(odds, -jnp.log(alpha)), odds)
    return jnp.stack([jnp.log(tau), jnp.log(2 * strength * sd / jnp.arcsinh(sd / c))])


def _newton(state: State, f: Point, jac: Float[Array, "2 2"]) -> State:
    """One step along the curve E[dx^/dz] = alpha, with a bracket on log tau.

    Far from the curve only log theta moves (the first equation is monotone in it). Near it both move, and tau
    stays in the bracket that the sign of the second equation, extrapolated to the curve, has established.
    """
    p, low, high = state.p, state.low[0], state.high[0]
    near = jnp.abs(f[0]) < 1.0
    on_curve = f[1] - jac[1, 1] * f[0] / jac[0, 1]
    slope = jac[1, 0] - jac[1, 1] * jac[0, 0] / jac[0, 1]
    trusted = near & (jnp.abs(f[0]) < 0.3 * jnp.abs(on_curve))
    low = jnp.where(trusted & (on_curve > 0), jnp.maximum(low, p[0]), low)
    high = jnp.where(trusted & (on_curve < 0), jnp.minimum(high, p[0]), high)
    # The crossing is downwards: a wrong-signed slope says only which way to go.
    step = jnp.clip(jnp.where(slope < 0, -on_curve / slope, jnp.sign(on_curve) * jnp.inf), -4.0, 4.0)
    log_tau = p[0] + step
    outside = (log_tau <= low) | (log_tau >= high)
    log_tau = jnp.where(outside & jnp.isfinite(high - low), (low + high) / 2, log_tau)
    log_tau = jnp.where(near, log_tau, p[0])
    log_theta = p[1] + jnp.clip(-(f[0] + jac[0, 0] * (log_tau - p[0])) / jac[0, 1], -3.0, 3.0)
    return state._replace(
        p=jnp.stack([log_tau, log_theta]), low=state.low.at[0].set(low), high=state.high.at[0].set(high)
    )


def _bracket(channel: Channel) -> tuple[Point, Point]:
    """Ends of log tau, and of log theta relative to log(tau) / 2, beyond which no solution lies."""
    top = starting_point(channel)[0] - jnp.log1p(-channel.alpha) + 20.0
    floor = 2 * jnp.log(jnp.min(jnp.where(channel.weight > 0, channel.c, jnp.inf)))
    return jnp.stack([jnp.minimum(floor, top) - 100.0, -100.0]), jnp.stack([top, 100.0])


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
    theta = jnp.where(theta_done, jnp.array([-100.0, 100.0]), theta)
    log_tau = jnp.mean(tau)
    low, high = jnp.stack([tau[0], theta[0]]), jnp.stack([tau[1], theta[1]])
    return state._replace(p=jnp.stack([log_tau, jnp.mean(theta) + log_tau / 2]), low=low, high=high)


def solve_point(channel: Channel, first: Phase = Phase.COARSE) -> tuple[State, Int[Array, ""]]:
    """Solve one problem: Newton on a coarse rule, on a fine one, and a check on a still finer one.

    Where the check fails the finest rule takes over, and where Newton fails there, nested bisection.

    Args:
        channel: one problem with 0 < alpha < 1 and every c > 0.
        first: the phase to begin with (BISECT skips Newton).

    Returns:
        (state, result): result is CONVERGED, MAX_STEPS, QUADRATURE or NONFINITE.
    """
    start = starting_point(channel)
    unbounded = jnp.full(2, jnp.inf)
    low, high = _bracket(channel)
    middle = (low + high) / 2
    bisect_from = jnp.stack([middle[0], middle[1] + middle[0] / 2])
    blocks, tolerance = jnp.array(_BLOCKS), jnp.array(_NEWTON_TOLERANCE)

    def body(state: State) -> State:
        f, jac = _linearised(state.p, channel, blocks[state.phase])
        err = jnp.max(jnp.abs(f))
        phase, count = state.phase, state.in_phase + 1
        bisecting = phase == Phase.BISECT
        checking = (phase == Phase.CHECK) | (phase == Phase.FINAL_CHECK)
        moved = jax.tree.map(
            lambda a, b, c: jnp.where(bisecting, a, jnp.where(checking, b, c)),
            _bisect(state, f),
            state,
            _newton(state, f, jac),
        )

        found = err <= tolerance[phase]
        lost = ~found & (count >= _MAX_NEWTON)
        bisected = count >= _BISECTIONS * (_BISECTIONS + 1)
        following = jnp.array(
            [
                Phase.FINE,
                Phase.CHECK,
                Phase.DONE,
                Phase.FINAL_CHECK,
                Phase.FINAL_CHECK,
                Phase.DONE,
                Phase.DONE,
            ]
        )
        on_failure = jnp.array(
            [Phase.FINEST, Phase.FINEST, Phase.FINEST, Phase.BISECT, Phase.DONE, Phase.DONE, Phase.DONE]
        )
        passed = jnp.where(checking, err <= TOLERANCE, jnp.where(bisecting, bisected, found))
        failed = jnp.where(checking, ~passed, ~bisecting & lost)
        after = jnp.where(passed, following[phase], jnp.where(failed, on_failure[phase], phase))
        after = jnp.where(
            jnp.isfinite(err) | bisecting, after, jnp.where(phase < Phase.BISECT, Phase.BISECT, Phase.DONE)
        )

        changed = after != phase
        to_bisect = changed & (after == Phase.BISECT)
        p = jnp.where(to_bisect, bisect_from, jnp.where(failed & (phase < Phase.CHECK), start, moved.p))
        return State(
            p=p,
            phase=after,
            steps=state.steps + 1,
            in_phase=jnp.where(changed, 0, count),
            low=jnp.where(changed, jnp.where(to_bisect, low, -unbounded), moved.low),
            high=jnp.where(changed, jnp.where(to_bisect, high, unbounded), moved.high),
            residual=jnp.where(checking, err, state.residual),
            # What the residual on the finer rule means for log tau.
            error=jnp.where(checking, jnp.abs(_solve_2x2(jac, f)[0]), state.error),
        )

    inf, zero = jnp.asarray(jnp.inf), jnp.asarray(0)
    sane = jnp.isfinite(start).all()
    begin = jnp.where(sane, int(first), int(Phase.DONE))
    state = State(start, begin, zero, zero, -unbounded, unbounded, inf, inf)
    if first == Phase.BISECT:
        state = state._replace(p=bisect_from, low=low, high=high)
    state = lax.while_loop(lambda s: s.phase != Phase.DONE, body, state)
    result = jnp.where(state.residual <= TOLERANCE, Result.CONVERGED, Result.QUADRATURE)
    result = jnp.where(sane & jnp.isfinite(state.residual), result, Result.NONFINITE)
    return state, result


def root(channel: Channel) -> tuple[Point, State, Int[Array, ""]]:
    """The solution with implicit derivatives of every order with respect to the channel, in both modes.

    Args:
        channel: one problem with 0 < alpha < 1 and every c > 0.

    Returns:
        (p, state, result); only p carries derivatives.
    """
    frozen = lax.stop_gradient(channel)

    def solve(_: object, __: Point) -> tuple[Point, tuple]:
        state, result = solve_point(frozen)
        # Auxiliary outputs of custom_root need a tangent type, which integers lack.
        return state.p, (state.residual, state.error, state.steps.astype(float), result.astype(float))

    def tangent_solve(jacobian: Callable[[Point], Point], right: Point) -> Point:
        return _solve_2x2(jax.vmap(jacobian, out_axes=1)(jnp.eye(2)), right)

    def residual(p: Point) -> Point:
        return equations(p, channel, FINEST)

    return lax.custom_root(residual, jnp.zeros(2), solve, tangent_solve, has_aux=True)
