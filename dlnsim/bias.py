"""Inductive bias of gradient flow: the potential q, the l-order and the pretraining dependence.

All functions are elementwise, broadcast, and are accurate over the whole float64 range (theory.md section 3).
With s = beta_FT / c_FT, q is c_FT times a function of s alone; forms that cancel at small s are avoided.
"""

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from dlnsim.init import Init
from dlnsim.validation import as_float


def potential(beta_ft: ArrayLike, c_ft: ArrayLike) -> Float[Array, "..."]:
    """The penalty q_k(beta) whose sum gradient flow minimises, with sqrt(k) = 2 c_FT.

    q_k(x) = (sqrt(k) / 4) [1 - sqrt(1 + 4 x^2 / k) + (2 x / sqrt(k)) asinh(2 x / sqrt(k))].

    Args:
        beta_ft: solution, any real.
        c_ft: scale at the start of fine-tuning, >= 0.

    Returns:
        q >= 0, broadcast shape; infinite at c_FT = 0 unless beta_FT = 0, since such a coordinate cannot move.
    """
    beta, c = jnp.broadcast_arrays(jnp.abs(as_float(beta_ft)), as_float(c_ft))
    s = jnp.where(beta > 0, beta / jnp.where(beta > 0, c, 1.0), 0.0)
    q = jnp.where(jnp.isinf(s), jnp.inf, beta / 2 * (jnp.arcsinh(s) - _slope_deficit(jnp.where(jnp.isinf(s), 1.0, s))))
    return jnp.where((c >= 0) & ~jnp.isnan(beta), q, jnp.nan)


def total_potential(beta_ft: ArrayLike, c_ft: ArrayLike) -> Float[Array, "..."]:
    """Q_k(beta) = sum over the last axis of `potential`; the minimised objective of fine-tuning."""
    return potential(beta_ft, c_ft).sum(axis=-1)


def l_order(beta_ft: ArrayLike, c_ft: ArrayLike) -> Float[Array, "..."]:
    """Local exponent of the penalty, l = d log q / d log |beta_FT|: 1 is sparse (l1), 2 is ridge-like (l2).

    Args:
        beta_ft: fine-tuned solution, any real.
        c_ft: scale at the start of fine-tuning, >= 0 (0 returns the limit c -> 0, which is 1).

    Returns:
        l in [1, 2], broadcast shape.
    """
    return 1 + _excess(beta_ft, c_ft)


def init_elasticity(beta_pt: ArrayLike, init: Init) -> Float[Array, "..."]:
    """How strongly pretraining sets the scale, e = d log c_FT / d log |beta_PT|.

    Args:
        beta_pt: pretrained solution, any real.
        init: the initialisation.

    Returns:
        e in [0, 1], broadcast shape. At lambda_pt = -1 and gamma_ft = 0, where c_FT = 0, the limit
        lambda_pt -> -1 is returned.
    """
    return _elasticities(beta_pt, init)[0]


def pretraining_dependence(beta_ft: ArrayLike, beta_pt: ArrayLike, init: Init) -> Float[Array, "..."]:
    """PD = d log q / d log |beta_PT| = (1 - l) e: 0 ignores pretraining, -1 follows it.

    Args:
        beta_ft: fine-tuned solution, any real.
        beta_pt: pretrained solution, any real.
        init: the initialisation.

    Returns:
        PD in [-1, 0] with l + PD in [1, 2], broadcast shape.
    """
    # 0 - x, since -x would print as -0 where nothing depends on pretraining.
    return 0.0 - _excess(beta_ft, init.c_ft(beta_pt)) * init_elasticity(beta_pt, init)


def regime_weights(beta_ft: ArrayLike, beta_pt: ArrayLike, init: Init) -> Float[Array, "... 3"]:
    """Barycentric weights of (l, PD) in the triangle of regimes.

    Args:
        beta_ft: fine-tuned solution, any real.
        beta_pt: pretrained solution, any real.
        init: the initialisation.

    Returns:
        (a_I, a_II, a_III) = (2 - l, -PD, l + PD - 1) on a last axis: sparse, pretraining-dependent ridge,
        plain ridge. All >= 0, sum 1. Regime IV is where a_I and a_II are both substantial.
    """
    excess = _excess(beta_ft, init.c_ft(beta_pt))
    e, e_complement = _elasticities(beta_pt, init)
    return jnp.stack(jnp.broadcast_arrays(1 - excess, excess * e, excess * e_complement), axis=-1)


def _slope_deficit(s: Array) -> Array:
    """(sqrt(1 + s^2) - 1) / s without cancellation, for s >= 0."""
    return s / (1 + jnp.hypot(1.0, s))


def _excess(beta_ft: ArrayLike, c_ft: ArrayLike) -> Array:
    """The excess l - 1 in [0, 1], to full relative precision."""
    beta, c = jnp.broadcast_arrays(jnp.abs(as_float(beta_ft)), as_float(c_ft))
    s = jnp.where(beta > 0, beta / jnp.where(c > 0, c, 1.0), 0.0)
    # Below 1e-8 the excess is 1 - s^2 / 6 = 1 to double precision, and s may be subnormal.
    safe = jnp.where(s > 1e-8, s, 1.0)
    deficit = _slope_deficit(safe)
    excess = deficit / (jnp.arcsinh(safe) - deficit)
    # Rounding puts the quotient up to 4e-16 above 1, and the weight a_I = 1 - excess below 0.
    excess = jnp.where(s > 1e-8, jnp.minimum(excess, 1.0), 1.0)
    excess = jnp.where((c == 0) | jnp.isinf(s), 0.0, excess)
    return jnp.where((c >= 0) & ~jnp.isnan(beta), excess, jnp.nan)


def _elasticities(beta_pt: ArrayLike, init: Init) -> tuple[Array, Array]:
    """The elasticity e and 1 - e, each without cancellation."""
    b = jnp.abs(as_float(beta_pt))
    hyp = jnp.hypot(init.c_pt, b)
    first_layer = 1 + init.lambda_pt
    # The square, not gamma_ft: below 1e-162 it underflows and c_FT is 0 all the same.
    readout = init.gamma_ft**2 / 2
    dead = (first_layer == 0) & (readout == 0)
    first_layer = jnp.where(dead, 1.0, first_layer)
    c_ft = first_layer * (init.c_pt + hyp) + readout
    from_beta = first_layer * b * (b / hyp)
    from_init = first_layer * init.c_pt * (1 + init.c_pt / hyp) + readout
    return from_beta / c_ft, from_init / c_ft
