"""The same network trained step by step: any optax optimiser, full batch or minibatches.

The discrete counterpart of `dlnsim.flow`: k steps of `optax.sgd(eta)` follow the flow to time k eta with an
error of first order in eta; with momentum m, to time k eta / (1 - m).
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Float, Int, Key

from dlnsim.errors import ArgumentError
from dlnsim.flow import check_data
from dlnsim.init import Weights
from dlnsim.result import Result, raise_on_failure
from dlnsim.validation import as_float, check_range, is_traced


class DescentSolution(eqx.Module):
    """The trained network and how the loss fell. Every number is NaN where `result` is a failure.

    Attributes:
        weights: final weights, each of shape (D,).
        beta: final predictor.
        step: how many steps were done at each record: 0, record_every, ..., steps.
        loss: 1/2 ||X beta - y||^2 over ALL samples, at each record.
        residual: ||X beta - y|| / ||y|| (absolute where y = 0), at each record.
        result: `dlnsim.Result` code: CONVERGED, STOPPED (out of steps), STUCK or NONFINITE (diverged).
    """

    weights: Weights
    beta: Float[Array, " D"]
    step: Int[Array, " records"]
    loss: Float[Array, " records"]
    residual: Float[Array, " records"]
    result: Int[Array, ""]


def descent(
    X: Float[ArrayLike, "n D"],
    y: Float[ArrayLike, " n"],
    weights: Weights,
    optimizer: optax.GradientTransformation,
    *,
    steps: int,
    batch_size: int | None = None,
    key: Key[Array, ""] | None = None,
    record_every: int = 1,
    residual_tol: float = 1e-6,
    throw: bool = True,
) -> DescentSolution:
    """Minimise 1/2 ||X beta - y||^2 over the weights, step by step (theory.md section 1).

    Minibatches are drawn without replacement within an epoch: each epoch is a fresh permutation of the
    samples cut into n // batch_size batches, and the n % batch_size samples left over sit this epoch out. The
    loss of a batch is scaled by n / batch_size, so that the mean of its gradient is the gradient of the full
    loss and the step size keeps its meaning.

    Works under `jit` and `vmap` (over keys, data or weights); there values are not validated and nothing is
    raised, so check `result`. Make the optimiser once and pass it again: a new one is a new compilation.

    Args:
        X: inputs, one row a sample.
        y: labels.
        weights: the network at the start, four arrays of shape (D,).
        optimizer: any optax transformation; it sees `Weights` as its parameters.
        steps: optimiser steps, >= 1, a multiple of `record_every`.
        batch_size: samples a step, in [1, n]; None is all of them, in order.
        key: `jax.random.key`, needed with `batch_size`.
        record_every: steps between two records, >= 1.
        residual_tol: CONVERGED if the last residual is at most this, >= 0.
        throw: raise on failure; otherwise return NaN with the code in `result`.

    Returns:
        `DescentSolution` with steps / record_every + 1 records, the first before any step. STUCK if every
        gradient is 0 at the start and beta is not a minimum: the saddle c = 0 of theory.md section 2.

    Raises:
        ArgumentError: a shape or a value is outside the range above, or `key` is missing.
        SolverError: the iteration diverged, with `throw=True`.
    """
    X, y = check_data(X, y)
    weights = _check_weights(weights, X.shape[1])
    for name, value in (("steps", steps), ("record_every", record_every)):
        if value < 1:
            raise ArgumentError(f"`{name}` must be >= 1, got {value}")
    if steps % record_every:
        raise ArgumentError(f"`steps` must be a multiple of record_every = {record_every}, got {steps}")
    if batch_size is not None and not 1 <= batch_size <= len(y):
        raise ArgumentError(f"`batch_size` must be in [1, {len(y)}], the number of samples, got {batch_size}")
    if batch_size is not None and key is None:
        raise ArgumentError("`key` must be given with `batch_size`, got None: pass jax.random.key(seed)")
    check_range("residual_tol", residual_tol, "finite and >= 0", lambda x: (x >= 0) & np.isfinite(x))
    tol = as_float(residual_tol)
    solution = _descent(X, y, weights, optimizer, key, tol, steps, batch_size, record_every)
    if throw and not is_traced(solution.result):
        raise_on_failure(solution.result, "descent")
    return solution


@eqx.filter_jit
def _descent(
    X: Array,
    y: Array,
    weights: Weights,
    optimizer: optax.GradientTransformation,
    key: Array | None,
    residual_tol: Array,
    steps: int,
    batch_size: int | None,
    record_every: int,
) -> DescentSolution:
    n = y.size
    epoch_steps = 1 if batch_size is None else n // batch_size

    def loss(network: Weights, rows: Array, labels: Array) -> Array:
        return jnp.sum((rows @ network.beta - labels) ** 2) / 2 * (n / labels.size)

    def batch(index: Array, order: Array | None) -> tuple[Array, Array, Array | None]:
        if batch_size is None:
            return X, y, None
        epoch, place = index // epoch_steps, index % epoch_steps
        shuffled = jax.lax.cond(
            place == 0,
            lambda key, order: jax.random.permutation(jax.random.fold_in(key, epoch), n),
            lambda key, order: order,
            key,
            order,
        )
        chosen = jax.lax.dynamic_slice_in_dim(shuffled, place * batch_size, batch_size)
        return X[chosen], y[chosen], shuffled

    def step(carry: tuple, index: Array) -> tuple[tuple, None]:
        network, state, order = carry
        rows, labels, order = batch(index, order)
        updates, state = optimizer.update(jax.grad(loss)(network, rows, labels), state, network)
        return (optax.apply_updates(network, updates), state, order), None

    def stretch(carry: tuple, indices: Array) -> tuple[tuple, Array]:
        carry, _ = jax.lax.scan(step, carry, indices)
        return carry, loss(carry[0], X, y)

    order = None if batch_size is None else jnp.arange(n)
    indices = jnp.arange(steps).reshape(-1, record_every)
    state = optimizer.init(weights)  # pyright: ignore[reportArgumentType]  # takes any pytree
    (final, *_), losses = jax.lax.scan(stretch, (weights, state, order), indices)
    losses = jnp.concatenate([loss(weights, X, y)[None], losses])

    y_norm = jnp.linalg.norm(y)
    residual = jnp.sqrt(2 * losses) / jnp.where(y_norm > 0, y_norm, 1.0)
    gradient = jax.tree.leaves(jax.grad(loss)(weights, X, y))
    pull = (y - X @ weights.beta) @ X
    stuck = (pull != 0).any() & jnp.stack([(leaf == 0).all() for leaf in gradient]).all()
    # A weight can overflow where its partner is 0: the loss alone would not show it.
    finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in (*jax.tree.leaves(final), losses)]).all()
    result = jnp.select(
        [~finite, stuck, residual[-1] <= residual_tol],
        [Result.NONFINITE, Result.STUCK, Result.CONVERGED],
        Result.STOPPED,
    )
    final, losses, residual = jax.tree.map(lambda leaf: jnp.where(finite, leaf, jnp.nan), (final, losses, residual))
    step_count = jnp.arange(0, steps + 1, record_every)
    return DescentSolution(final, final.beta, step_count, losses, residual, result)


def _check_weights(weights: Weights, dim: int) -> Weights:
    weights = jax.tree.map(as_float, weights)
    for name, leaf in vars(weights).items():
        if leaf.shape != (dim,):
            raise ArgumentError(f"`weights.{name}` must have shape ({dim},), got shape {leaf.shape}")
        check_range(f"weights.{name}", leaf, "finite", np.isfinite)
    return weights
