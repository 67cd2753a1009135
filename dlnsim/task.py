"""The teacher: a pair of sparse tasks, pretraining (PT) and fine-tuning (FT), with overlapping supports."""

from functools import reduce

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float

from dlnsim.errors import ArgumentError
from dlnsim.validation import as_float, broadcast_shape, check_range, is_traced

GROUPS = ("overlap", "new", "pt_only", "none")
"""Coordinate groups, in the order of every `..., group` axis."""

_ROUNDING = 1e-12


class Task(eqx.Module):
    """Sparsities, overlap, amplitude and label noise of the two tasks (theory.md section 2).

    A coordinate is in the PT support with probability `rho_pt`, where beta*_PT = `beta_pt`, and in the FT
    support with probability `rho_ft`, where beta*_FT ~ N(0, 1 / rho_ft). A share `omega` of the FT support
    lies inside the PT support. Every field broadcasts with the others and with those of `Init`.

    Attributes:
        rho_pt: PT sparsity, in [0, 1].
        rho_ft: FT sparsity, in (0, 1].
        omega: share of the FT support inside the PT support, in [0, 1].
        beta_pt: amplitude of the PT teacher on its support, >= 0.
        noise_var_pt: label-noise variance per PT sample, >= 0.
        noise_var_ft: label-noise variance per FT sample, >= 0.

    Raises:
        ArgumentError: a field is out of range, NaN, or the overlap is infeasible.
    """

    rho_pt: Float[Array, "..."] = eqx.field(converter=as_float)
    rho_ft: Float[Array, "..."] = eqx.field(converter=as_float)
    omega: Float[Array, "..."] = eqx.field(converter=as_float)
    beta_pt: Float[Array, "..."] = eqx.field(converter=as_float, default=1.0)
    noise_var_pt: Float[Array, "..."] = eqx.field(converter=as_float, default=0.0)
    noise_var_ft: Float[Array, "..."] = eqx.field(converter=as_float, default=0.0)

    def __check_init__(self) -> None:
        """Validate concrete fields."""
        check_range("rho_pt", self.rho_pt, "a probability in [0, 1]", _unit)
        check_range("rho_ft", self.rho_ft, "a probability in (0, 1]", lambda x: (x > 0) & (x <= 1))
        check_range("omega", self.omega, "a share in [0, 1]", _unit)
        for name in ("beta_pt", "noise_var_pt", "noise_var_ft"):
            check_range(name, getattr(self, name), "finite and >= 0", _non_negative)
        broadcast_shape(**{name: leaf.shape for name, leaf in vars(self).items()})
        if not is_traced(self):
            self._check_overlap()

    def _check_overlap(self) -> None:
        rho_pt, rho_ft, omega = np.broadcast_arrays(*map(np.asarray, (self.rho_pt, self.rho_ft, self.omega)))
        groups = (
            (omega * rho_ft - rho_pt, "omega * rho_ft must not exceed rho_pt"),
            ((1 - omega) * rho_ft - (1 - rho_pt), "(1 - omega) * rho_ft must not exceed 1 - rho_pt"),
        )
        for excess, expected in groups:
            if (excess > _ROUNDING).any():
                at = np.unravel_index(np.argmax(excess), excess.shape)
                raise ArgumentError(
                    f"infeasible overlap: {expected}, got rho_pt = {rho_pt[at]:g}, "
                    f"rho_ft = {rho_ft[at]:g}, omega = {omega[at]:g}"
                )

    def _fields(self) -> tuple[Float[Array, "..."], ...]:
        return (self.rho_pt, self.rho_ft, self.omega, self.beta_pt, self.noise_var_pt, self.noise_var_ft)

    @classmethod
    def from_conditional(
        cls,
        rho_pt: ArrayLike,
        rho_ft_shared: ArrayLike,
        rho_ft_new: ArrayLike,
        beta_pt: ArrayLike = 1.0,
        noise_var_pt: ArrayLike = 0.0,
        noise_var_ft: ArrayLike = 0.0,
    ) -> "Task":
        """Build a task from the paper's own parameters.

        Args:
            rho_pt: PT sparsity, in [0, 1].
            rho_ft_shared: P(in FT support | in PT support) = omega rho_ft / rho_pt, in [0, 1].
            rho_ft_new: P(in FT support | not in PT support) = (1 - omega) rho_ft / (1 - rho_pt), in [0, 1].
            beta_pt: as in `Task`.
            noise_var_pt: as in `Task`.
            noise_var_ft: as in `Task`.

        Returns:
            The same task in terms of (rho_pt, rho_ft, omega).

        Raises:
            ArgumentError: a probability is outside [0, 1] or the FT support is empty.
        """
        rho_pt, shared, new = (as_float(value) for value in (rho_pt, rho_ft_shared, rho_ft_new))
        for name, value in (("rho_pt", rho_pt), ("rho_ft_shared", shared), ("rho_ft_new", new)):
            check_range(name, value, "a probability in [0, 1]", _unit)
        overlap, fresh = rho_pt * shared, (1 - rho_pt) * new
        rho_ft = overlap + fresh
        check_range("rho_ft_shared, rho_ft_new", rho_ft, "such that the FT support is not empty", lambda x: x > 0)
        return cls(rho_pt, rho_ft, overlap / rho_ft, beta_pt, noise_var_pt, noise_var_ft)

    @property
    def shape(self) -> tuple[int, ...]:
        """The broadcast shape of all fields."""
        return np.broadcast_shapes(*(leaf.shape for leaf in self._fields()))

    @property
    def group_weights(self) -> Float[Array, "... 4"]:
        """Fraction of coordinates in each of `GROUPS`; non-negative, sums to 1."""
        rho_pt, rho_ft, omega = jnp.broadcast_arrays(self.rho_pt, self.rho_ft, self.omega)
        overlap, new = omega * rho_ft, (1 - omega) * rho_ft
        return jnp.stack([overlap, new, _clip(rho_pt - overlap), _clip(1 - rho_pt - new)], axis=-1)

    @property
    def in_range(self) -> Bool[Array, "..."]:
        """Where every field is in its range and the overlap feasible; traced values are not checked otherwise."""
        feasible = (self.omega * self.rho_ft <= self.rho_pt + _ROUNDING) & (
            (1 - self.omega) * self.rho_ft <= 1 - self.rho_pt + _ROUNDING
        )
        shares = [(x >= 0) & (x <= 1) for x in (self.rho_pt, self.rho_ft, self.omega)]
        sizes = [(x >= 0) & jnp.isfinite(x) for x in (self.beta_pt, self.noise_var_pt, self.noise_var_ft)]
        return reduce(jnp.logical_and, (*shares, *sizes), feasible & (self.rho_ft > 0))

    @property
    def group_var_ft(self) -> Float[Array, "... 4"]:
        """Variance of beta*_FT in each of `GROUPS`: 1 / rho_ft on the FT support, 0 off it."""
        return (1 / self.rho_ft)[..., None] * jnp.array([1.0, 1.0, 0.0, 0.0])

    @property
    def group_beta_pt(self) -> Float[Array, "... 4"]:
        """The PT teacher beta*_PT in each of `GROUPS`: `beta_pt` on the PT support, 0 off it."""
        return self.beta_pt[..., None] * jnp.array([1.0, 0.0, 1.0, 0.0])


def _unit(x: np.ndarray) -> np.ndarray:
    return (x >= 0) & (x <= 1)


def _non_negative(x: np.ndarray) -> np.ndarray:
    return (x >= 0) & np.isfinite(x)


def _clip(x: Array) -> Array:
    # A feasible group that rounding left at -1e-17 is empty; its derivative is still that of the unclipped weight.
    return x - lax.stop_gradient(jnp.minimum(x, 0.0))
