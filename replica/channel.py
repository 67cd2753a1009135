"""The scalar channel of the theory and its quadrature: every expectation of the fixed point, per group.

A coordinate x ~ N(0, var) is seen as z = x + sqrt(tau) V and estimated by the x^ that solves
x^ + (theta / 2) asinh(x^ / c) = z (theory.md section 4). With x^ = c sinh t, z is explicit in t, so that
every expectation is a smooth integral over t and no proximal problem is solved.
"""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int

from dlnsim.init import Init
from dlnsim.task import Task

# |z| <= 9.5 standard deviations: the tail beyond is 2e-21.
_WINDOW = 9.5
# x^ is resolved linearly above the window's end / _LINEAR, logarithmically below (see `nodes_at`).
_LINEAR = _WINDOW / 1.5


class Channel(eqx.Module):
    """One fine-tuning problem in the limit D -> infinity: a mixture of groups, and the sampling.

    Attributes:
        weight: fraction of coordinates in each group, sums to 1.
        var: variance of beta*_FT in each group (0: a point mass at 0).
        c: scale c_FT of each group, > 0.
        beta_pt: PT teacher in each group, for the forgetting.
        noise_var: label-noise variance.
        alpha: samples per coordinate, in (0, 1).
    """

    weight: Float[Array, "... group"]
    var: Float[Array, "... group"]
    c: Float[Array, "... group"]
    beta_pt: Float[Array, "... group"]
    noise_var: Float[Array, "..."]
    alpha: Float[Array, "..."]


class Moments(eqx.Module):
    """Expectations over the channel, per group.

    Attributes:
        response: E[dx^/dz].
        complement: 1 - E[dx^/dz], computed without cancellation.
        shrinkage: E[(z - x^)^2] = (theta / 2)^2 E[t^2].
        bias: E[(x^ - E[x|z])^2]; add `posterior_variance` for the mean squared error.
        power: E[x^2] of the estimate x^.
    """

    response: Float[Array, "... group"]
    complement: Float[Array, "... group"]
    shrinkage: Float[Array, "... group"]
    bias: Float[Array, "... group"]
    power: Float[Array, "... group"]


class Rule(NamedTuple):
    """Nodes t >= 0, sinh t at the nodes, and weights dt of the trapezoid rule; constants for autodiff."""

    t: Float[Array, "... group node"]
    sinh: Float[Array, "... group node"]
    dt: Float[Array, "... group node"]


class Spacing(NamedTuple):
    """Where a trapezoid rule puts its nodes: at multiples of `step` of the variable s (see `nodes_at`)."""

    step: Float[Array, "... group"]
    ratio: Float[Array, "... group"]


def perfect_pretraining(task: Task, init: Init, alpha: Array) -> Channel:
    """The channel of fine-tuning after a perfect PT stage, beta_PT = beta*_PT.

    Args:
        task: any broadcastable fields.
        init: any broadcastable fields.
        alpha: samples per coordinate.

    Returns:
        `Channel` whose leaves broadcast against each other.
    """
    expanded = Init(*(field[..., None] for field in (init.c_pt, init.lambda_pt, init.gamma_ft)))
    beta_pt = task.group_beta_pt
    return Channel(
        weight=task.group_weights,
        var=task.group_var_ft,
        c=expanded.c_ft(beta_pt),
        beta_pt=beta_pt,
        noise_var=task.noise_var_ft,
        alpha=alpha,
    )


def _invert(z: Array, c: Array, theta: Array) -> Array:
    """The t >= 0 with c sinh t + (theta / 2) t close to z, good enough to place nodes."""
    # Both terms are positive and convex, so Newton descends monotonically from either bound.
    t = jnp.minimum(jnp.arcsinh(z / c), 2 * z / theta)
    for _ in range(3):
        sinh = jnp.sinh(t)
        t = t - (c * sinh + theta / 2 * t - z) / (c * jnp.hypot(1.0, sinh) + theta / 2)
    return t


def _asinh(x: Array) -> Array:
    """Compute asinh for 0 <= x < 1e150, to full relative precision; twice as fast as the general one."""
    return jnp.log1p(x + x * x / (1 + jnp.sqrt(1 + x * x)))


def spacing(tau: Array, theta: Array, channel: Channel, nodes: ArrayLike) -> Spacing:
    """Lay out a rule that covers |z| <= 9.5 standard deviations of each group.

    Args:
        tau: effective noise variance, > 0.
        theta: effective regularisation, > 0.
        channel: one problem (fields of shape (group,) or scalar).
        nodes: number of nodes a group, concrete or traced.

    Returns:
        `Spacing`; it carries no derivative, since moving a node of a converged rule changes nothing.
    """
    tau, theta, var, c = lax.stop_gradient((tau, theta, channel.var, channel.c))
    t_end = _invert(_WINDOW * jnp.sqrt(var + tau), c, theta)
    x_end = c * jnp.sinh(t_end)
    ratio = c / jnp.maximum(x_end / _LINEAR, c)
    # sinh(s_end) = sinh(x_end / S) / ratio, where S = c / ratio and x_end / S <= _LINEAR.
    return Spacing(jnp.arcsinh(jnp.sinh(x_end / c * ratio) / ratio) / nodes, ratio)


def nodes_at(layout: Spacing, index: Int[Array, " node"]) -> Rule:
    """Nodes of the trapezoid rule in s, where x^ = S asinh((c / S) sinh s), s >= 0 (all integrands are even).

    In t itself the Gaussian cut-off exp(-(c e^t)^2 / 8 V) limits the strip of analyticity to pi / 4. With S
    near the standard deviation of z the estimate is linear in s where the Gaussian cuts off and logarithmic
    where asinh(x^ / c) varies; the strip is pi / 2 wide and the error falls as exp(-pi^2 / h): 64 nodes give
    machine precision for c / sqrt(V) > 1e-6, and 192 meet a tolerance of 1e-11 down to about 1e-24.

    Args:
        layout: from `spacing`.
        index: which nodes, counted from s = 0.

    Returns:
        `Rule` restricted to those nodes.
    """
    step, ratio = layout.step[..., None], layout.ratio[..., None]
    # expm1, since s is tiny where c >> |z|.
    growth = jnp.expm1(step * index)
    sinh_s = (growth + growth / (1 + growth)) / 2
    slope = ratio * sinh_s
    sinh_t = _asinh(slope) / ratio
    dt_ds = jnp.sqrt((1 + sinh_s**2) / ((1 + slope**2) * (1 + sinh_t**2)))
    # The mirror image s < 0 counts twice every node but the one at 0.
    return Rule(_asinh(sinh_t), sinh_t, step * jnp.where(index == 0, 1.0, 2.0) * dt_ds)


def quadrature(tau: Array, theta: Array, channel: Channel, nodes: int) -> Rule:
    """The whole rule with a fixed number of nodes; arguments as in `spacing`."""
    return nodes_at(spacing(tau, theta, channel, nodes), jnp.arange(nodes))


def moments(tau: Array, theta: Array, channel: Channel, rule: Rule) -> Moments:
    """All expectations of the channel on the given nodes; no sum cancels.

    The error is evaluated conditionally on z: x | z has mean (var / V) z and the variance of
    `posterior_variance`, V = var + tau, and x^ - (var / V) z = (tau / V) z - (theta / 2) t.

    Args:
        tau: effective noise variance, > 0.
        theta: effective regularisation, > 0.
        channel: one problem.
        rule: from `quadrature` or `nodes_at`, at (tau, theta); with part of the nodes the sums
            are partial.

    Returns:
        `Moments`, differentiable in tau, theta and the channel.
    """
    c, total = channel.c[..., None], (channel.var + tau)[..., None]
    half = theta / 2
    estimate = c * rule.sinh
    c_cosh = c * jnp.sqrt(1 + rule.sinh**2)
    shrink = half * rule.t
    z = estimate + shrink
    density = jnp.exp(-(z**2) / (2 * total)) / jnp.sqrt(2 * jnp.pi * total) * rule.dt
    mass = density * (c_cosh + half)
    return Moments(
        response=(density * c_cosh).sum(-1),
        complement=(density * half).sum(-1),
        shrinkage=(mass * shrink**2).sum(-1),
        bias=(mass * (tau / total * z - shrink) ** 2).sum(-1),
        power=(mass * estimate**2).sum(-1),
    )


def posterior_variance(tau: Array, channel: Channel) -> Float[Array, "... group"]:
    """Variance of x given z in each group, var tau / (var + tau): the error that no estimate can avoid."""
    return channel.var * tau / (channel.var + tau)
