"""The two fixed-point equations of one problem and their Jacobian.

Unknowns are p = (log tau, log theta). The equations (theory.md section 4, 0 < alpha < 1) are
    E[dx^/dz] = alpha,        alpha tau = noise + E[(x^ - x)^2],
written as log ratios, so that residuals are relative errors over any number of decades.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from replica.channel import Channel, Spacing, moments, nodes_at, posterior_variance, spacing

BLOCK = 32
"""Nodes summed at once; every rule is a whole number of blocks."""

Point = Float[Array, "2"]


def _sums(p: Point, channel: Channel, layout: Spacing, index: Array) -> Float[Array, "4"]:
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
    tau_ratio = jnp.where(alpha < 0.5, (noise + mse) / (alpha * tau), (noise + shrinkage) / ((1 - alpha) * tau))
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


class Sums(NamedTuple):
    """Sums of a rule over its blocks so far, and their derivatives with respect to p."""

    value: Float[Array, "4"]
    tangent: Float[Array, "2 4"]


def no_sums() -> Sums:
    """Before the first block."""
    return Sums(jnp.zeros(4), jnp.zeros((2, 4)))


def add_block(sums: Sums, p: Point, channel: Channel, block: Int[Array, ""], blocks: ArrayLike) -> Sums:
    """Add one block of `BLOCK` nodes of a rule with `blocks` blocks.

    Args:
        sums: of the blocks before.
        p: (log tau, log theta).
        channel: one problem.
        block: which one, from 0.
        blocks: how many the rule has, > 0; traced, so that one program serves every rule.

    Returns:
        `Sums` with this block.
    """
    layout = spacing(jnp.exp(p[0]), jnp.exp(p[1]), channel, blocks * BLOCK)
    index = block * BLOCK + jnp.arange(BLOCK)
    value, push = jax.linearize(lambda q: _sums(q, channel, layout, index), p)
    return Sums(sums.value + value, sums.tangent + jax.vmap(push)(jnp.eye(2)))


def linearised(p: Point, channel: Channel, sums: Sums) -> tuple[Point, Float[Array, "2 2"]]:
    """`equations` and their Jacobian from the sums of all blocks.

    Returns:
        (f, jac) with jac[i, j] = d f_i / d p_j.
    """
    f, push = jax.linearize(lambda q, s: _log_ratios(q, s, channel), p, sums.value)
    return f, jax.vmap(push, out_axes=1)(jnp.eye(2), sums.tangent)


def solve_2x2(matrix: Float[Array, "2 2"], right: Point) -> Point:
    """Solve matrix x = right."""
    # Cramer: LAPACK called once a point would cost more than the quadrature.
    a, b, c, d = matrix[0, 0], matrix[0, 1], matrix[1, 0], matrix[1, 1]
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
