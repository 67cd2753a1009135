"""The initialisation: (c_PT, lambda_PT, gamma_FT), the network's weights, and what the flow conserves."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float

from dlnsim.validation import as_float, broadcast_shape, check_range


class Init(eqx.Module):
    """The three knobs of the two-stage protocol (theory.md sections 1 and 2). Every field broadcasts.

    Attributes:
        c_pt: absolute scale at PT, c = w^2 + v^2 per coordinate, > 0 and finite.
        lambda_pt: RELATIVE scale at PT, (w^2 - v^2) / c_pt, in [-1, 1]; w is the first layer.
        gamma_ft: scale of the readout at FT (both paths are set to gamma_ft / sqrt(2)), >= 0 and finite.

    Raises:
        ArgumentError: a field is out of range or NaN.
    """

    c_pt: Float[Array, "..."] = eqx.field(converter=as_float)
    lambda_pt: Float[Array, "..."] = eqx.field(converter=as_float)
    gamma_ft: Float[Array, "..."] = eqx.field(converter=as_float)

    def __check_init__(self) -> None:
        """Validate concrete fields."""
        check_range("c_pt", self.c_pt, "finite and > 0", lambda x: (x > 0) & np.isfinite(x))
        check_range("lambda_pt", self.lambda_pt, "relative, in [-1, 1]", lambda x: np.abs(x) <= 1)
        check_range("gamma_ft", self.gamma_ft, "finite and >= 0", lambda x: (x >= 0) & np.isfinite(x))
        broadcast_shape(**{name: leaf.shape for name, leaf in vars(self).items()})

    def _fields(self) -> tuple[Float[Array, "..."], ...]:
        return (self.c_pt, self.lambda_pt, self.gamma_ft)

    @property
    def shape(self) -> tuple[int, ...]:
        """The broadcast shape of all fields."""
        return np.broadcast_shapes(*(leaf.shape for leaf in self._fields()))

    @property
    def in_range(self) -> Bool[Array, "..."]:
        """Where every field is in its range; traced values are not checked otherwise."""
        c_ok = (self.c_pt > 0) & jnp.isfinite(self.c_pt)
        return c_ok & (jnp.abs(self.lambda_pt) <= 1) & (self.gamma_ft >= 0) & jnp.isfinite(self.gamma_ft)

    def c_ft(self, beta_pt: ArrayLike) -> Float[Array, "..."]:
        """Scale of the network at the start of fine-tuning.

        c_FT = c_PT (1 + lambda_PT) (1 + sqrt(1 + (beta_PT / c_PT)^2)) + gamma_FT^2 / 2 (theory.md, 2).

        Args:
            beta_pt: the pretrained solution, broadcasts with the fields.

        Returns:
            c_FT >= 0, broadcast shape; 0 exactly where the origin is a saddle of fine-tuning.
        """
        return (1 + self.lambda_pt) * (self.c_pt + jnp.hypot(self.c_pt, as_float(beta_pt))) + self.gamma_ft**2 / 2


class Weights(eqx.Module):
    """The weights of beta = w_plus v_plus - w_minus v_minus; w is the first layer, v the readout."""

    w_plus: Float[Array, "..."]
    w_minus: Float[Array, "..."]
    v_plus: Float[Array, "..."]
    v_minus: Float[Array, "..."]

    @property
    def beta(self) -> Float[Array, "..."]:
        """The linear predictor that the network computes."""
        return self.w_plus * self.v_plus - self.w_minus * self.v_minus

    @property
    def c(self) -> Float[Array, "..."]:
        """Conserved scale, w+ w- + v+ v-."""
        return self.w_plus * self.w_minus + self.v_plus * self.v_minus

    @property
    def imbalance(self) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """Conserved w^2 - v^2 of the plus and of the minus path, each lambda c."""
        return self.w_plus**2 - self.v_plus**2, self.w_minus**2 - self.v_minus**2


def weights_from_solution(beta: ArrayLike, c: ArrayLike, lam: ArrayLike) -> Weights:
    """The weights of a network that started at beta = 0 with scale c and balance lam and now computes beta.

    With u = asinh(beta / c), w0 = sqrt(c (1 + lam) / 2) and v0 = sqrt(c (1 - lam) / 2), the sums w + v and
    the differences w - v of each path scale as exp(+-u / 2) under gradient flow (theory.md section 1).

    Args:
        beta: predictor, any shape.
        c: scale, >= 0, broadcasts (0 only with beta = 0).
        lam: relative balance (w^2 - v^2) / c, in [-1, 1], broadcasts.

    Returns:
        `Weights` of the broadcast shape.
    """
    beta, c, lam = as_float(beta), as_float(c), as_float(lam)
    half_u = jnp.arcsinh(beta / jnp.where(c > 0, c, 1.0)) / 2
    w0, v0 = jnp.sqrt(c * (1 + lam) / 2), jnp.sqrt(c * (1 - lam) / 2)
    # exp, not cosh and sinh: the small weight of a balanced network would be a difference of large ones.
    grow, decay = jnp.exp(half_u) / 2, jnp.exp(-half_u) / 2
    total, difference = w0 + v0, w0 - v0
    return Weights(
        w_plus=total * grow + difference * decay,
        w_minus=total * decay + difference * grow,
        v_plus=total * grow - difference * decay,
        v_minus=total * decay - difference * grow,
    )


def initial_weights(init: Init, dim: int) -> Weights:
    """The network before pretraining: both paths equal, beta = 0.

    Args:
        init: scalar fields, or one value a coordinate.
        dim: number of coordinates D.

    Returns:
        `Weights` with arrays of shape (dim,).
    """
    c, lam = (jnp.broadcast_to(field, (dim,)) for field in (init.c_pt, init.lambda_pt))
    return weights_from_solution(jnp.zeros(dim), c, lam)


def reinitialise(weights: Weights, gamma_ft: ArrayLike) -> Weights:
    """Prepare pretrained weights for fine-tuning: first layers w+ + w-, readouts gamma_ft / sqrt(2).

    Args:
        weights: the pretrained network.
        gamma_ft: readout scale, >= 0, broadcasts.

    Returns:
        `Weights` with beta = 0 and scale `Init.c_ft(weights.beta)`.
    """
    first = weights.w_plus + weights.w_minus
    readout = jnp.broadcast_to(as_float(gamma_ft) / jnp.sqrt(2.0), first.shape)
    return Weights(w_plus=first, w_minus=first, v_plus=readout, v_minus=readout)


def conserved(weights: Weights) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Scale c and relative balance lambda of a network, both constant under gradient flow.

    Args:
        weights: any network that gradient flow reached from beta = 0 with equal paths.

    Returns:
        (c, lam); lam is NaN where c = 0.
    """
    plus, minus = weights.imbalance
    return weights.c, (plus + minus) / 2 / weights.c
