"""Weights and what the flow conserves: round trips over decades, re-initialisation, and every message."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlnsim import (
    ArgumentError,
    Init,
    Weights,
    conserved,
    initial_weights,
    reinitialise,
    weights_from_solution,
)

EPS = np.finfo(float).eps

decades = st.floats(-12, 12).map(lambda exponent: 10.0**exponent)
signed = st.one_of(st.just(0.0), st.builds(lambda x, sign: sign * x, decades, st.sampled_from([-1.0, 1.0])))
balance = st.one_of(st.sampled_from([-1.0, 0.0, 1.0]), st.floats(-1, 1), st.floats(-15, -1).map(lambda x: -1 + 10.0**x))


@jax.jit
def round_trip(beta, c, lam):
    weights = weights_from_solution(beta, c, lam)
    return weights, weights.beta, weights.imbalance, conserved(weights)


@settings(max_examples=500, deadline=None)
@given(beta=signed, c=decades, lam=balance)
def test_weights_round_trip(beta, c, lam):
    weights, beta_back, imbalances, (c_back, lam_back) = round_trip(beta, c, lam)
    # The weights are about sqrt(|beta| + c), so any product of two rounds at eps (|beta| + c): c is buried
    # where beta > c / eps, beta where c > beta / eps. sinh(asinh(s)) costs eps log(s) more, at most 56 eps.
    size = abs(beta) + c
    tolerance = (16 + 2 * np.arcsinh(abs(beta) / c)) * EPS * size
    assert abs(beta_back - beta) <= tolerance
    assert abs(c_back - c) <= tolerance
    assert abs(lam_back * c_back - lam * c) <= tolerance
    for imbalance in imbalances:
        assert abs(imbalance - lam * c) <= tolerance
    # Not by luck of a scale: the weights really are that large.
    squares = sum(float(leaf) ** 2 for leaf in jax.tree.leaves(weights))
    assert squares >= size


@pytest.mark.parametrize("lam", [-1.0, -0.3, 0.0, 1.0])
def test_origin_has_equal_paths(lam):
    weights = weights_from_solution(0.0, 0.7, lam)
    np.testing.assert_array_equal(weights.w_plus, weights.w_minus)
    np.testing.assert_array_equal(weights.v_plus, weights.v_minus)
    np.testing.assert_allclose(weights.w_plus, np.sqrt(0.7 * (1 + lam) / 2), rtol=2 * EPS)
    np.testing.assert_allclose(weights.v_plus, np.sqrt(0.7 * (1 - lam) / 2), rtol=2 * EPS)


def test_balanced_weights_keep_their_small_member():
    """lambda = 0: w- = sqrt(c / 2) exp(-u / 2), a difference of large numbers in any cosh-sinh form."""
    c, u = 1e-10, 45.0
    weights = weights_from_solution(c * np.sinh(u), c, 0.0)
    # asinh(sinh(u)) is off by eps u at most, and exp doubles nothing: 45 / 2 eps.
    np.testing.assert_allclose(weights.w_minus, np.sqrt(c / 2) * np.exp(-u / 2), rtol=30 * EPS)
    np.testing.assert_array_equal(weights.v_minus, weights.w_minus)


def test_zero_scale_is_the_zero_network():
    weights = weights_from_solution(0.0, 0.0, 0.5)
    assert all(leaf == 0 for leaf in jax.tree.leaves(weights))
    c, lam = conserved(weights)
    assert c == 0
    assert jnp.isnan(lam)


def test_flow_field_conserves():
    """The gradient of ANY function of beta is orthogonal to those of c and of both imbalances."""
    weights = weights_from_solution(jnp.array([2.0, -0.3]), jnp.array([0.1, 3.0]), jnp.array([-0.8, 0.4]))
    velocity = jax.grad(lambda w: jnp.sum(jnp.sin(w.beta) + w.beta**3))(weights)
    for quantity in (lambda w: w.c, lambda w: w.imbalance[0], lambda w: w.imbalance[1]):
        _, drift = jax.jvp(quantity, (weights,), (velocity,))
        # Terms of size |velocity| |weights| < 100 cancel.
        np.testing.assert_allclose(drift, 0, atol=100 * EPS)


def test_initial_weights():
    weights = initial_weights(Init(0.5, -0.2, 0.0), 3)
    assert weights.w_plus.shape == (3,)
    np.testing.assert_array_equal(weights.beta, 0)
    np.testing.assert_allclose(weights.w_plus**2 + weights.v_plus**2, 0.5, rtol=4 * EPS)
    np.testing.assert_allclose(weights.w_plus**2 - weights.v_plus**2, -0.2 * 0.5, rtol=10 * EPS)
    per_coordinate = initial_weights(Init(jnp.array([0.5, 2.0]), 0.0, 0.0), 2)
    np.testing.assert_allclose(per_coordinate.c, [0.5, 2.0], rtol=4 * EPS)


@settings(max_examples=200, deadline=None)
@given(beta=signed, c=decades, lam=balance, gamma=st.one_of(st.just(0.0), decades))
def test_reinitialise_agrees_with_c_ft(beta, c, lam, gamma):
    fresh, c_ft = reinitialised(beta, c, lam, gamma)
    assert fresh.beta == 0
    assert fresh.w_plus == fresh.w_minus
    np.testing.assert_allclose(fresh.v_plus, gamma / np.sqrt(2), rtol=2 * EPS)
    # w+ + w- has no cancellation for lambda >= 0; below, the parts sqrt(1 + lam) +- sqrt(1 - lam) nearly
    # cancel and leave eps (|beta| + c) sqrt(1 + lam), squared and crossed.
    first = c_ft - gamma**2 / 2
    size = abs(beta) + c
    slack = (16 + 2 * np.arcsinh(abs(beta) / c)) * EPS
    assert abs(fresh.c - c_ft) <= slack * (np.sqrt(max(first, 0.0) * size) + c_ft) + (slack**2) * size


@jax.jit
def reinitialised(beta, c, lam, gamma):
    return reinitialise(weights_from_solution(beta, c, lam), gamma), Init(c, lam, gamma).c_ft(beta)


def test_c_ft_by_hand():
    # c (1 + lam)(1 + sqrt(1 + (beta / c)^2)) + gamma^2 / 2 with a 3-4-5 triangle: 3 * 1.5 * (1 + 5/3) + 2.
    np.testing.assert_allclose(Init(3.0, 0.5, 2.0).c_ft(4.0), 14.0, rtol=2 * EPS)
    np.testing.assert_allclose(Init(3.0, 0.5, 2.0).c_ft(-4.0), 14.0, rtol=2 * EPS)
    assert Init(3.0, -1.0, 0.0).c_ft(4.0) == 0
    # beta / c overflows, c_FT does not.
    np.testing.assert_allclose(Init(1e-300, 0.0, 0.0).c_ft(1e200), 1e200, rtol=2 * EPS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((0.0, 0.0, 0.0), "`c_pt` must be finite and > 0, got 0"),
        ((-1.0, 0.0, 0.0), "`c_pt` must be finite and > 0, got -1"),
        ((np.inf, 0.0, 0.0), "`c_pt` must be finite and > 0, got inf"),
        ((np.nan, 0.0, 0.0), "`c_pt` must be finite and > 0, got nan"),
        ((1.0, 1.5, 0.0), "`lambda_pt` must be relative, in \\[-1, 1\\], got 1.5"),
        ((1.0, np.nan, 0.0), "`lambda_pt` must be relative, in \\[-1, 1\\], got nan"),
        ((1.0, 0.0, -2.0), "`gamma_ft` must be finite and >= 0, got -2"),
        ((1.0, 0.0, np.inf), "`gamma_ft` must be finite and >= 0, got inf"),
        (([1.0, 2.0], [0.0, 0.0, 0.0], 0.0), r"must broadcast together, got c_pt \(2,\), lambda_pt \(3,\)"),
        (("much", 0.0, 0.0), "expected a number or an array of numbers, got 'much'"),
    ],
)
def test_init_messages(fields, message):
    with pytest.raises(ArgumentError, match=message):
        Init(*fields)


def test_init_broadcasts_and_passes_through_jit_and_vmap():
    init = Init(jnp.ones((2, 1)), jnp.zeros(3), 0.5)
    assert init.shape == (2, 3)
    np.testing.assert_allclose(jax.jit(lambda i: i.c_ft(0.0))(init), np.full((2, 3), 2.125), rtol=2 * EPS)
    batch = Init(jnp.array([1.0, 2.0]), jnp.zeros(2), jnp.zeros(2))
    np.testing.assert_array_equal(jax.vmap(lambda i: i.c_ft(0.0))(batch), [2.0, 4.0])
    assert jax.tree.structure(init) == jax.tree.structure(Init(1.0, 0.0, 0.0))


def test_weights_are_a_pytree():
    weights = Weights(*(jnp.full(2, value) for value in (1.0, 2.0, 3.0, 4.0)))
    doubled = jax.tree.map(lambda leaf: 2 * leaf, weights)
    # beta = 1 * 3 - 2 * 4 and c = 1 * 2 + 3 * 4, both of second degree.
    np.testing.assert_array_equal(weights.beta, [-5.0, -5.0])
    np.testing.assert_array_equal(doubled.beta, [-20.0, -20.0])
    np.testing.assert_array_equal(weights.c, [14.0, 14.0])
    np.testing.assert_array_equal(weights.imbalance, [[-8.0, -8.0], [-12.0, -12.0]])
