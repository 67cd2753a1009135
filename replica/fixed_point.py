"""The solver of the fixed-point equations for a batch of problems.

One loop, one block of quadrature nodes a step: each lane works through the phases of `replica.iteration` at its own
pace, then takes the next problem. The program is compiled once for all of them.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int

from dlnsim.result import Result
from replica.channel import Channel
from replica.equations import equations, solve_2x2
from replica.iteration import FINEST, TOLERANCE, Phase, State, advance, begin, choose

LANES = 256
"""Problems in work at a time; the memory of the solver is that of its lanes, whatever the size of the grid."""


class Outcome(NamedTuple):
    """The solution of every problem of a batch."""

    p: Float[Array, "problem 2"]
    residual: Float[Array, " problem"]
    error: Float[Array, " problem"]
    steps: Int[Array, " problem"]
    result: Int[Array, " problem"]


def solve_all(channels: Channel, count: ArrayLike, first: Phase = Phase.COARSE) -> Outcome:
    """Solve a batch of problems: Newton on a coarse rule, then on a fine one, and a check on a still finer one.

    Where the check fails the finest rule takes over, and where Newton fails there, nested bisection. `LANES`
    problems are in work at a time; a lane that is done takes the next one from the queue, so that a problem costs
    what it needs and no easy one waits for a hard one.

    Args:
        channels: leaves with a leading problem axis; 0 < alpha < 1 and every c > 0.
        count: how many of them to solve, the rest being padding; traced, so that shapes can be shared.
        first: the phase to begin with (BISECT skips Newton).

    Returns:
        `Outcome`; result is CONVERGED, QUADRATURE or NONFINITE.
    """
    size = channels.alpha.shape[0]
    lanes = min(LANES, size)

    def take(problem: Array) -> tuple[Channel, State]:
        channel = jax.tree.map(lambda leaf: leaf[jnp.minimum(problem, size - 1)], channels)
        return channel, jax.vmap(lambda one: begin(one, first))(channel)

    def body(carry: tuple) -> tuple:
        problem, waiting, channel, state, done = carry
        state = jax.vmap(advance)(state, channel)
        finished = state.phase == Phase.DONE
        # Lanes that found the queue empty hold a problem number beyond the end: their writes are dropped.
        done = jax.tree.map(
            lambda all_, lane: all_.at[jnp.where(finished, problem, size)].set(lane, mode="drop"),
            done,
            (state.p, state.residual, state.error, state.steps),
        )
        following = waiting + jnp.cumsum(finished) - 1
        problem = jnp.where(finished, following, problem)
        fresh_channel, fresh = take(problem)
        pick = jax.vmap(choose)
        # An empty queue leaves the lane where it is, done.
        reload = finished & (problem < count)
        return (
            problem,
            waiting + finished.sum(),
            pick(reload, fresh_channel, channel),
            pick(reload, fresh, state),
            done,
        )

    def unfinished(carry: tuple) -> Array:
        # A problem that is not finite is done as soon as it is taken: the queue may still hold others.
        return jnp.any((carry[0] < count) | (carry[3].phase != Phase.DONE))

    first_lanes = jnp.arange(lanes)
    nothing = (jnp.zeros((size, 2)), *(jnp.full(size, jnp.inf) for _ in range(2)), jnp.zeros(size, int))
    channel, state = take(first_lanes)
    state = state._replace(phase=jnp.where(first_lanes < count, state.phase, int(Phase.DONE)))
    carry = (first_lanes, jnp.asarray(lanes), channel, state, nothing)
    p, residual, error, steps = lax.while_loop(unfinished, body, carry)[-1]
    result = jnp.where(residual <= TOLERANCE, Result.CONVERGED, Result.QUADRATURE)
    result = jnp.where(jnp.isfinite(residual), result, Result.NONFINITE)
    return Outcome(p, residual, error, steps, result)


def root(channels: Channel, count: ArrayLike) -> tuple[Float[Array, "problem 2"], Outcome]:
    """The solutions with implicit derivatives of every order with respect to the channels, in both modes.

    Args:
        channels: as in `solve_all`.
        count: as in `solve_all`.

    Returns:
        (p, outcome) where p carries the derivatives; outcome's integers come as floats.
    """
    frozen = lax.stop_gradient(channels)

    def solve(_: object, __: Array) -> tuple[Array, Outcome]:
        outcome = solve_all(frozen, count)
        # Auxiliary outputs of custom_root need a tangent type, which integers lack.
        return outcome.p, jax.tree.map(lambda leaf: leaf.astype(float), outcome)

    def tangent_solve(jacobian: Callable[[Array], Array], right: Array) -> Array:
        # Problems do not interact: two products with the Jacobian show all of its 2 x 2 blocks.
        columns = [jacobian(jnp.broadcast_to(unit, right.shape)) for unit in jnp.eye(2)]
        return jax.vmap(solve_2x2)(jnp.stack(columns, axis=-1), right)

    def residual(p: Array) -> Array:
        return jax.vmap(lambda q, channel: equations(q, channel, FINEST))(p, channels)

    return lax.custom_root(residual, jnp.zeros((channels.alpha.shape[0], 2)), solve, tangent_solve, has_aux=True)
