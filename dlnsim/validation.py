"""Checks of concrete arguments before any compute. Traced arguments pass: jit sees shapes, not values."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike

from dlnsim.errors import ArgumentError, PrecisionError


def is_traced(*trees: object) -> bool:
    """True if any leaf is a JAX tracer, so that its value is not known."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(trees))


def as_float(value: ArrayLike) -> Array:
    """Convert to a floating JAX array (float64 where enabled)."""
    try:
        if is_traced(value):
            return jnp.asarray(value, dtype=float)
        # Inside jit a constant would become a tracer, and its range could not be checked.
        with jax.ensure_compile_time_eval():
            return jnp.asarray(value, dtype=float)
    except (TypeError, ValueError) as error:
        if isinstance(value, jax.Array):
            raise
        raise ArgumentError(f"expected a number or an array of numbers, got {value!r}") from error


def check_range(name: str, value: ArrayLike, expected: str, ok: Callable[[np.ndarray], np.ndarray]) -> None:
    """Raise unless `ok(value)` holds for every element; NaN never passes.

    Args:
        name: the argument, as the user wrote it.
        value: concrete or traced array; traced values are not checked.
        expected: the range in words, completing "must be ...".
        ok: elementwise predicate.

    Raises:
        ArgumentError: "`name` must be ..., got ...".
    """
    if is_traced(value):
        return
    array = np.asarray(value)
    with np.errstate(invalid="ignore"):
        bad = np.isnan(array) | ~ok(array)
    if bad.any():
        got = float(array[bad].ravel()[0])
        raise ArgumentError(f"`{name}` must be {expected}, got {got:g}")


def broadcast_shape(**shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The common shape of named arguments.

    Raises:
        ArgumentError: they do not broadcast; the message lists them with their shapes.
    """
    try:
        return np.broadcast_shapes(*shapes.values())
    except ValueError as error:
        names = ", ".join(f"`{name}`" for name in shapes)
        got = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ArgumentError(f"{names} must broadcast together, got {got}") from error


def require_float64(what: str, *trees: object) -> None:
    """Raise `PrecisionError` if any floating leaf is narrower than float64 or x64 is off.

    The library never switches precision itself; see the message for the remedy.
    """
    narrow = any(
        jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != jnp.float64
        for leaf in jax.tree.leaves(trees)
        if isinstance(leaf, jax.Array | np.ndarray)
    )
    if narrow or not jax.config.read("jax_enable_x64"):
        raise PrecisionError(
            f"{what} needs float64: call `jax.config.update('jax_enable_x64', True)` before making arrays"
        )
