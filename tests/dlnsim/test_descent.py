"""Discrete descent against the flow (first order), exact identities of minibatches, and every result code."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dlnsim import ArgumentError, Init, Result, SolverError, Weights, initial_weights
from dlnsim.descent import descent
from dlnsim.flow import flow

EPS = np.finfo(float).eps
N, D = 6, 10
INIT = Init(0.1, 0.3, 0.0)


def problem(seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(N, D)) / np.sqrt(D)
    return X, X @ (2 * rng.normal(size=D) * (np.arange(D) < 4)), initial_weights(INIT, D)


def numpy_descent(X, y, weights, eta, steps):
    """Gradient descent written by hand: four lines of the chain rule, nothing of JAX."""
    wp, wm, vp, vm = map(np.array, (weights.w_plus, weights.w_minus, weights.v_plus, weights.v_minus))
    for _ in range(steps):
        g = eta * X.T @ (X @ (wp * vp - wm * vm) - y)
        wp, wm, vp, vm = wp - g * vp, wm + g * vm, vp - g * wp, vm + g * wm
    return wp, wm, vp, vm


def test_sgd_is_gradient_descent():
    X, y, start = problem()
    trained = descent(X, y, start, optax.sgd(0.1), steps=50)
    by_hand = numpy_descent(X, y, start, 0.1, 50)
    for got, expected in zip(jax.tree.leaves(trained.weights), by_hand, strict=True):
        # 50 steps of a contracting iteration, each rounded at eps.
        np.testing.assert_allclose(got, expected, rtol=0, atol=200 * EPS)
    wp, wm, vp, vm = by_hand
    np.testing.assert_allclose(trained.beta, wp * vp - wm * vm, atol=400 * EPS, rtol=0)


@pytest.mark.parametrize(("momentum", "counts"), [(0.0, [400, 800, 1600]), (0.8, [4000, 8000, 16000])])
def test_flow_at_first_order(momentum, counts):
    """The error is proportional to the step size, at flow time steps * eta / (1 - momentum)."""
    X, y, start = problem()
    end = 4.0
    exact = flow(X, y, INIT.c_pt, [end], lam=INIT.lambda_pt).beta[-1]
    errors = []
    for steps in counts:
        eta = end / steps * (1 - momentum)
        trained = descent(X, y, start, optax.sgd(eta, momentum=momentum), steps=steps, record_every=steps)
        errors.append(float(jnp.linalg.norm(trained.beta - exact)))
    slope = np.polyfit(np.log(counts), np.log(errors), 1)[0]
    # The next order bends the slope by about eta times the largest rate of the flow, a few per cent here.
    assert 0.9 < -slope < 1.1
    # And the limit is the flow: errors fall in proportion down to a small one.
    assert errors[-1] < 0.01 * float(jnp.linalg.norm(exact))


def test_records():
    X, y, start = problem()
    every = descent(X, y, start, optax.adam(0.01), steps=12)
    third = descent(X, y, start, optax.adam(0.01), steps=12, record_every=3)
    np.testing.assert_array_equal(third.step, [0, 3, 6, 9, 12])
    np.testing.assert_array_equal(every.step, np.arange(13))
    # The same operations, compiled into another loop: a rounding apart.
    np.testing.assert_allclose(third.loss, every.loss[::3], rtol=1e-13)
    np.testing.assert_allclose(third.beta, every.beta, rtol=1e-12)
    # At the start beta = 0 exactly; at the end the record is that of the returned weights.
    np.testing.assert_allclose(every.loss[0], np.sum(y**2) / 2, rtol=4 * EPS)
    np.testing.assert_allclose(every.residual[0], 1, rtol=4 * EPS)
    gap = X @ np.asarray(every.beta) - y
    np.testing.assert_allclose(every.loss[-1], gap @ gap / 2, rtol=1e-13)
    np.testing.assert_allclose(every.residual[-1], np.linalg.norm(gap) / np.linalg.norm(y), rtol=1e-13)
    np.testing.assert_allclose(every.beta, every.weights.beta, rtol=0, atol=2 * EPS)  # fused multiply-add


def averaging(eta, every):
    """Moves once in `every` steps, by the mean gradient (optax.MultiSteps takes that mean in float32)."""

    def update(gradient, state, weights=None):
        total, count = jax.tree.map(jnp.add, state[0], gradient), state[1] + 1
        move = count % every == 0
        updates = jax.tree.map(lambda leaf: jnp.where(move, -eta / every * leaf, 0), total)
        return updates, (jax.tree.map(lambda leaf: jnp.where(move, 0, leaf), total), count)

    return optax.GradientTransformation(lambda weights: (jax.tree.map(jnp.zeros_like, weights), 0), update)


def test_one_epoch_of_batches_is_the_full_gradient():
    """Without replacement, scaled by n / batch: the mean over an epoch at fixed weights is exact."""
    X, y, start = problem()
    full = descent(X, y, start, optax.sgd(0.05), steps=4)
    for batch_size in (1, 3):
        epoch = N // batch_size
        batched = descent(
            X,
            y,
            start,
            averaging(0.05, epoch),
            steps=4 * epoch,
            batch_size=batch_size,
            key=jax.random.key(7),
        )
        # Sums of six gradients in another order, four times.
        np.testing.assert_allclose(batched.beta, full.beta, rtol=0, atol=10 * EPS)


def test_first_batch_is_unbiased():
    """A batch size that does not divide n: the mean over keys is the full step, within its standard error."""
    X, y, start = problem()
    optimizer = optax.sgd(0.05)
    full = descent(X, y, start, optimizer, steps=1).weights.w_plus - start.w_plus

    def first_step(key):
        trained = descent(X, y, start, optimizer, steps=1, batch_size=4, key=key, throw=False)
        return trained.weights.w_plus - start.w_plus

    draws = np.asarray(jax.vmap(first_step)(jax.random.split(jax.random.key(0), 4000)))
    error = draws.std(axis=0) / np.sqrt(len(draws))
    # Fixed keys, ten coordinates. Without the scaling n / batch the mean would be a third short: 20 errors.
    assert (np.abs(draws.mean(axis=0) - full) < 4 * error).all()
    assert (np.abs(np.asarray(full)).max() / 3) > 20 * error.max()
    # 15 subsets of 4 out of 6, all of them drawn.
    assert len(np.unique(draws.round(12), axis=0)) == 15


def test_batch_of_everything_is_the_full_batch():
    X, y, start = problem()
    full = descent(X, y, start, optax.sgd(0.1, momentum=0.5), steps=30)
    batch = descent(X, y, start, optax.sgd(0.1, momentum=0.5), steps=30, batch_size=N, key=jax.random.key(1))
    # Another order of the sum over samples in each of 30 steps.
    np.testing.assert_allclose(batch.beta, full.beta, rtol=0, atol=200 * EPS)
    np.testing.assert_allclose(batch.loss, full.loss, rtol=1e-11)


def test_keys_reproduce():
    X, y, start = problem()
    optimizer = optax.sgd(0.05)

    def losses(key):
        return descent(X, y, start, optimizer, steps=30, batch_size=2, key=key, throw=False).loss

    keys = jax.random.split(jax.random.key(3), 3)
    batch = jax.jit(jax.vmap(losses))(keys)
    for row, key in zip(batch, keys, strict=True):
        # Randomness depends on the key alone, not on the batching of runs.
        np.testing.assert_allclose(row, losses(key), rtol=1e-11)
    assert len(np.unique(np.asarray(batch[:, -1]))) == 3


def test_epochs_are_reshuffled_permutations():
    """X = 1: sample i touches coordinate i alone, so the optimiser can write down who was drawn when."""
    epochs = 3

    def write_down(gradient, count, weights=None):
        # Base-(steps + 1) clock: each coordinate sums the steps (1, 2, ...) at which its sample was drawn.
        stamp = jax.tree.map(lambda leaf: jnp.where(leaf != 0, (count + 1.0) * 64.0 ** (count // N), 0), gradient)
        return stamp, count + 1

    optimizer = optax.GradientTransformation(lambda weights: 0, write_down)
    # Readouts alone are live at the start, w_plus collects; labels so large that no stamp can fit them.
    zero = jnp.zeros(N)
    start = Weights(zero, zero, zero + 1e-30, zero)
    trained = descent(
        np.eye(N), np.full(N, 1e90), start, optimizer, steps=epochs * N, batch_size=1, key=jax.random.key(5)
    )
    stamps = np.asarray(trained.weights.w_plus).astype(int)
    orders = np.array([(stamps // 64**epoch) % 64 - epoch * N for epoch in range(epochs)])
    # Every sample once an epoch, in three different orders.
    np.testing.assert_array_equal(np.sort(orders, axis=1), np.tile(np.arange(1, N + 1), (epochs, 1)))
    assert len(np.unique(orders, axis=0)) == epochs


def test_converged():
    X, y, start = problem()
    trained = descent(X, y, start, optax.sgd(0.2), steps=6000, record_every=6000, residual_tol=1e-8)
    assert trained.result == Result.CONVERGED
    assert trained.residual[-1] <= 1e-8
    short = descent(X, y, start, optax.sgd(0.2), steps=60, record_every=60, residual_tol=1e-8)
    assert short.result == Result.STOPPED
    assert short.residual[-1] > 1e-8


def test_divergence_is_nan_and_raises():
    X, y, start = problem()
    with pytest.raises(SolverError, match="descent: 1 of 1 problems failed: nonfinite"):
        descent(X, y, start, optax.sgd(50.0), steps=100)
    diverged = descent(X, y, start, optax.sgd(50.0), steps=100, throw=False)
    assert diverged.result == Result.NONFINITE
    numbers = (diverged.weights, diverged.beta, diverged.loss, diverged.residual)
    assert all(jnp.isnan(leaf).all() for leaf in jax.tree.leaves(numbers))
    np.testing.assert_array_equal(diverged.step, np.arange(101))


def test_one_diverging_run_does_not_spoil_a_batch():
    X, y, start = problem()

    def train(eta):
        return descent(X, y, start, optax.sgd(eta), steps=100, record_every=100)

    batch = jax.vmap(train)(jnp.array([0.1, 50.0]))
    np.testing.assert_array_equal(batch.result, [Result.STOPPED, Result.NONFINITE])
    # An eigenmode of 100 steps amplifies nothing here: rounding only.
    np.testing.assert_allclose(batch.beta[0], train(0.1).beta, rtol=1e-11)
    assert jnp.isnan(batch.beta[1]).all()


def test_saddle_is_stuck():
    X, y, _ = problem()
    zero = Weights(*(jnp.zeros(D) for _ in range(4)))
    trained = descent(X, y, zero, optax.sgd(0.1, momentum=0.9), steps=20)
    assert trained.result == Result.STUCK
    np.testing.assert_array_equal(trained.beta, 0)
    # One live coordinate is enough to move.
    nudged = Weights(zero.w_plus.at[0].set(0.1), zero.w_minus, zero.v_plus, zero.v_minus)
    moved = descent(X, y, nudged, optax.sgd(0.1), steps=20)
    assert moved.result == Result.STOPPED
    assert moved.beta[0] != 0
    # At a minimum every gradient is 0 too, and that is convergence.
    assert descent(X, np.zeros(N), zero, optax.sgd(0.1), steps=1).result == Result.CONVERGED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"X": np.ones(5)}, r"`X` must be a matrix with one row a sample"),
        ({"y": np.ones(4)}, r"`y` must have one label a row of X, shape \(6,\), got shape \(4,\)"),
        ({"y": np.full(6, np.nan)}, "`y` must be finite, got nan"),
        (
            {"weights": initial_weights(INIT, 3)},
            r"`weights.w_plus` must have shape \(10,\), got shape \(3,\)",
        ),
        ({"weights": Weights(*np.full((4, 10), np.inf))}, "`weights.w_plus` must be finite, got inf"),
        ({"steps": 0}, "`steps` must be >= 1, got 0"),
        ({"record_every": 0}, "`record_every` must be >= 1, got 0"),
        ({"record_every": 3}, "`steps` must be a multiple of record_every = 3, got 10"),
        ({"batch_size": 7, "key": 0}, r"`batch_size` must be in \[1, 6\], the number of samples, got 7"),
        ({"batch_size": 0, "key": 0}, r"`batch_size` must be in \[1, 6\], the number of samples, got 0"),
        ({"batch_size": 2}, "`key` must be given with `batch_size`, got None"),
        ({"residual_tol": -1.0}, "`residual_tol` must be finite and >= 0, got -1"),
    ],
)
def test_messages(change, message):
    X, y, start = problem()
    arguments = {"X": X, "y": y, "weights": start, "optimizer": optax.sgd(0.1), "steps": 10}
    with pytest.raises(ArgumentError, match=message):
        descent(**(arguments | change))
