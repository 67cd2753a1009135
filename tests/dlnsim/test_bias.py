"""The inductive bias against 50-digit arithmetic, its bounds over 24 decades, the corners of the triangle."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlnsim import (
    Init,
    init_elasticity,
    l_order,
    potential,
    pretraining_dependence,
    regime_weights,
    total_potential,
)

EPS = np.finfo(float).eps
mpmath.mp.dps = 50

decades = st.floats(-13, 13).map(lambda exponent: 10.0**exponent)
balance = st.one_of(st.just(-1.0), st.just(1.0), st.floats(-1, 1), st.floats(-15, -1).map(lambda x: -1 + 10.0**x))


def exact_potential(x, c):
    """theory.md section 1, as it stands there: it cancels, and 50 digits pay for that."""
    root_k = 2 * mpmath.mpf(c)
    s = 2 * x / root_k
    return root_k / 4 * (1 - mpmath.sqrt(1 + s**2) + s * mpmath.asinh(s))


def exact_l_order(x, c):
    x = mpmath.mpf(x)
    return mpmath.diff(lambda t: mpmath.log(exact_potential(x * mpmath.exp(t), c)), 0)


def exact_c_ft(init, b):
    c, lam, gamma = (mpmath.mpf(float(field)) for field in (init.c_pt, init.lambda_pt, init.gamma_ft))
    return c * (1 + lam) * (1 + mpmath.sqrt(1 + (b / c) ** 2)) + gamma**2 / 2


def exact_dependence(x, b, init):
    """d log q / d log b by differentiation, through c_FT(b)."""
    x, b = mpmath.mpf(x), mpmath.mpf(b)
    return mpmath.diff(lambda t: mpmath.log(exact_potential(x, exact_c_ft(init, b * mpmath.exp(t)))), 0)


SCALES = 10.0 ** np.arange(-12, 12.5, 0.5)
"""beta / c over 24 decades."""


@pytest.mark.parametrize("c", [1e-12, 0.3, 1e9])
def test_potential_to_rounding(c):
    beta = SCALES * c
    exact = np.array([float(exact_potential(mpmath.mpf(float(x)), c)) for x in beta])
    # A handful of operations, one subtraction that at most doubles the relative error: 1e-13 is 450 eps.
    np.testing.assert_allclose(potential(beta, c), exact, rtol=1e-13)
    np.testing.assert_array_equal(potential(-beta, c), potential(beta, c))


def test_total_potential_is_the_sum():
    beta = np.array([[0.0, 1.0, -2.0], [3.0, 0.0, 0.0]])
    c = np.array([1.0, 2.0, 0.5])
    # q(0) = 0; q_c(1) at c = 2 is asinh(1/2)/2 - sqrt(5)/2 + 1; etc., by hand from theory.md section 1.
    hand = lambda x, c: (x * np.arcsinh(x / c) - np.hypot(x, c) + c) / 2  # noqa: E731
    expected = [hand(1, 2) + hand(2, 0.5), hand(3, 1)]
    np.testing.assert_allclose(total_potential(beta, c), expected, rtol=1e-14)


def test_potential_slope_is_half_asinh():
    """q' = asinh(x / c) / 2 (theory.md section 1): the dual of the flow."""
    x = jnp.array([-30.0, -1.0, -1e-5, 1e-9, 2.0, 1e8])
    slope = jax.vmap(jax.grad(potential), (0, None))(x, 0.7)
    # autodiff adds terms of the size of the slope, no cancellation: a few eps.
    np.testing.assert_allclose(slope, np.arcsinh(x / 0.7) / 2, rtol=20 * EPS)


def test_l_order_is_the_exact_exponent():
    exact = np.array([float(exact_l_order(float(s), 1.0) - 1) for s in SCALES])
    np.testing.assert_allclose(l_order(SCALES, 1.0), 1 + exact, rtol=4 * EPS)
    # The excess itself, to full relative precision: at lambda = -1 and beta_PT = 0 it is the weight a_III.
    excess = regime_weights(SCALES, 0.0, Init(1.0, -1.0, 2**0.5))[..., 2]
    # c_FT = gamma^2 / 2 is off 1 by the rounding of sqrt(2): 4 eps, and the excess moves by less.
    np.testing.assert_allclose(excess, exact, rtol=1e-14)


@pytest.mark.parametrize("lam", [-1.0, -0.9, 0.0, 1.0])
@pytest.mark.parametrize("gamma", [0.3, 1e-4])
def test_dependence_is_the_exact_derivative(lam, gamma):
    for c_pt in (1e-9, 1e-2, 10.0):
        init = Init(c_pt, lam, gamma)
        for beta_ft in (1e-8, 1.0, 1e8):
            for beta_pt in (1e-6, 1.0, 1e3):
                exact = float(exact_dependence(beta_ft, beta_pt, init))
                # lam = -0.9 is rounded in 1 + lam alike on both sides. Relative, down to PD = 1e-20.
                np.testing.assert_allclose(pretraining_dependence(beta_ft, beta_pt, init), exact, rtol=1e-13, atol=0)


def test_autodiff_agrees():
    """l and PD against JAX's own derivatives of `potential`."""
    init = Init(0.03, -0.4, 0.2)

    def log_q(log_ft, log_pt):
        return jnp.log(potential(jnp.exp(log_ft), init.c_ft(jnp.exp(log_pt))))

    for ft, pt in ((0.5, 1.2), (1e-3, 3.0), (20.0, 0.01)):
        l_ad, pd_ad = jax.grad(log_q, (0, 1))(jnp.log(ft), jnp.log(pt))
        # log and exp cost eps |log x| < 10 eps.
        np.testing.assert_allclose(l_order(ft, init.c_ft(pt)), l_ad, rtol=1e-14)
        np.testing.assert_allclose(pretraining_dependence(ft, pt, init), pd_ad, rtol=1e-13)


@jax.jit
def everything(beta_ft, beta_pt, c_pt, lam, gamma):
    init = Init(c_pt, lam, gamma)
    return (
        l_order(beta_ft, init.c_ft(beta_pt)),
        pretraining_dependence(beta_ft, beta_pt, init),
        regime_weights(beta_ft, beta_pt, init),
        init_elasticity(beta_pt, init),
    )


@settings(max_examples=500, deadline=None)
@given(
    beta_ft=st.one_of(st.just(0.0), decades),
    beta_pt=st.one_of(st.just(0.0), decades),
    c_pt=decades,
    lam=balance,
    gamma=st.one_of(st.just(0.0), decades),
)
def test_bounds_everywhere(beta_ft, beta_pt, c_pt, lam, gamma):
    order, dependence, weights, e = map(np.asarray, everything(beta_ft, beta_pt, c_pt, lam, gamma))
    # Exact bounds where one number is asked; sums of two rounded numbers may miss by an eps.
    assert 1 <= order <= 2
    assert -1 <= dependence <= 0
    assert 1 - EPS <= order + dependence <= 2
    assert (weights >= 0).all()
    assert abs(weights.sum() - 1) <= 4 * EPS
    # Weights are (2 - l, -PD, l + PD - 1) up to the rounding of l, which is of size 1.
    np.testing.assert_allclose(weights, [2 - order, -dependence, order + dependence - 1], atol=4 * EPS)
    assert 0 <= e <= 1 + 2 * EPS


def test_order_two_is_never_exceeded():
    """A dense scan where beta / c is about 1e-8: rounding once put l at 2 + 4e-16 and a_I below 0."""
    s = jnp.geomspace(1e-9, 1e-3, 200_001)
    assert float(l_order(s, 1.0).max()) <= 2
    assert float(regime_weights(s, 1.0, Init(1e-3, 0.0, 0.0)).min()) >= 0


def test_l_order_falls_with_beta():
    order = np.asarray(l_order(SCALES, 1.0))
    # Strictly where 2 - l = s^2 / 6 is above rounding.
    assert (np.diff(order) <= 0).all()
    assert (np.diff(order[SCALES > 1e-6]) < 0).all()


def test_limits_of_l_order():
    assert l_order(1.0, 0.0) == 1  # c -> 0 at fixed beta
    assert l_order(0.0, 1.0) == 2
    # Leading corrections: 2 - l = s^2 / 6 and l - 1 = 1 / (log 2s - 1), next orders s^4 and 1 / s.
    np.testing.assert_allclose(2 - l_order(1e-3, 1.0), 1e-6 / 6, rtol=1e-6)
    np.testing.assert_allclose(l_order(1e12, 1.0), 1 + 1 / (np.log(2e12) - 1), rtol=1e-12)


def test_corner_one_is_approached_logarithmically():
    """lambda -> -1 with gamma = 0: (l, PD) -> (1, 0), as 1 / log(1 / c_FT)."""
    beta_ft, beta_pt, c_pt = 1.3, 0.8, 0.1
    previous = 2.0
    for gap in 10.0 ** -np.arange(2, 16, 2.0):
        init = Init(c_pt, gap - 1, 0.0)
        c_ft = float(init.c_ft(beta_pt))
        order = float(l_order(beta_ft, c_ft))
        asymptote = 1 + 1 / (np.log(2 * beta_ft / c_ft) - 1)
        # asinh and the slope deficit differ from their limits by c_FT / beta, and l - 1 is below 1.
        assert abs(order - asymptote) < c_ft / beta_ft + 4 * EPS
        assert 1 < order < previous
        # gamma = 0: e = 1 - c_PT / sqrt(c_PT^2 + b^2), whatever lambda; rounding of 1 + lambda cancels.
        e = 1 - c_pt / np.hypot(c_pt, beta_pt)
        np.testing.assert_allclose(pretraining_dependence(beta_ft, beta_pt, init), (1 - order) * e, rtol=1e-13)
        previous = order


def test_corner_two():
    """c_PT -> 0, lambda > -1, gamma = 0, c_FT >> beta_FT: (2, -1), errors s^2 / 6 and c_PT / b."""
    for lam in (-0.99, 0.0, 1.0):
        init, beta_pt = Init(1e-9, lam, 0.0), 2.0
        beta_ft = 1e-4 * float(init.c_ft(beta_pt))
        order = float(l_order(beta_ft, init.c_ft(beta_pt)))
        dependence = float(pretraining_dependence(beta_ft, beta_pt, init))
        # Both differences from integers carry the rounding of the integer, 4e-16 of 2e-9.
        np.testing.assert_allclose(2 - order, 1e-8 / 6, rtol=1e-6)
        np.testing.assert_allclose(1 + dependence, 1e-8 / 6 + 1e-9 / beta_pt, rtol=1e-6)


@pytest.mark.parametrize("init", [Init(1e6, 0.0, 0.0), Init(1e-3, 0.0, 1e6), Init(1e-3, -1.0, 1e6)])
def test_corner_three(init):
    """c_PT or gamma -> infinity: (2, 0)."""
    beta_ft, beta_pt = 0.7, 1.5
    c_ft = init.c_ft(beta_pt)
    s = beta_ft / float(c_ft)
    # s < 1e-6: 2 - l = s^2 / 6 < 2e-13, plus the rounding of l itself.
    assert s < 1e-6
    assert 0 <= 2 - float(l_order(beta_ft, c_ft)) < s**2 / 6 + 4 * EPS
    # e = (1 + lam) b^2 / (hyp c_FT) <= b^2 / c_PT^2 or 2 b / (gamma^2 / 2), both below 1e-11.
    assert -1e-11 < float(pretraining_dependence(beta_ft, beta_pt, init)) <= 0
    assert float(regime_weights(beta_ft, beta_pt, init)[2]) > 1 - 2e-11


def test_q_becomes_l1():
    """lambda -> -1: Q -> sum |beta| (log(2 |beta| / c) - 1) / 2, and so an l1 norm up to 1 / log."""
    rng = np.random.default_rng(0)
    beta = rng.normal(size=8)
    for gap in (1e-6, 1e-10, 1e-14):
        init = Init(1e-2, gap - 1, 0.0)
        c = float(init.c_ft(0.0))
        leading = np.sum(np.abs(beta) * (np.log(2 * np.abs(beta) / c) - 1)) / 2
        total = float(total_potential(beta, c))
        # The next term is c / 2 a coordinate, then c^2 / (8 beta).
        np.testing.assert_allclose(total - 8 * c / 2, leading, rtol=1e-13, atol=c**2 / np.abs(beta).min())
        ratio = total / (np.log(1 / c) / 2) / np.abs(beta).sum()
        spread = np.abs(np.log(2 * np.abs(beta)) - 1).max()
        assert abs(ratio - 1) < spread / np.log(1 / c)


@pytest.mark.parametrize("lam", [-0.9, 0.0, 0.7])
def test_q_becomes_weighted_l2(lam):
    """c_PT -> 0, gamma = 0: Q -> sum a^2 / b / (4 (1 + lambda))."""
    rng = np.random.default_rng(1)
    b = rng.uniform(0.5, 2, size=8)
    init = Init(1e-10, lam, 0.0)
    a = 1e-5 * (1 + lam) * rng.normal(size=8)
    expected = np.sum(a**2 / b) / (4 * (1 + lam))
    # c_FT = (1 + lam)(b + c_PT + ...): relative error c_PT / b = 2e-10; s^2 / 12 < 1e-10.
    np.testing.assert_allclose(total_potential(a, init.c_ft(b)), expected, rtol=1e-9)


@pytest.mark.parametrize("init", [Init(1e6, -0.5, 0.0), Init(1e-2, 0.0, 1e4)])
def test_q_becomes_l2(init):
    """Large c_PT or gamma: Q -> ||beta||^2 / (4 c) with c = 2 c_PT (1 + lambda) + gamma^2 / 2."""
    rng = np.random.default_rng(2)
    beta_ft, beta_pt = rng.normal(size=(2, 8))
    c = 2 * float(init.c_pt) * (1 + float(init.lambda_pt)) + float(init.gamma_ft) ** 2 / 2
    # Corrections: (b / c_PT)^2 ~ 1e-12, or |b| (1 + lam) / c ~ 2e-8 * 3; s^2 / 12 ~ 1e-13.
    total = total_potential(beta_ft, init.c_ft(beta_pt))
    np.testing.assert_allclose(total, np.sum(beta_ft**2) / (4 * c), rtol=1e-7)


def test_gradients_are_finite_at_zero():
    def outputs(ft, pt, lam):
        init = Init(0.1, lam, 0.2)
        q, order, dependence, weights, e = potential(ft, init.c_ft(pt)), *everything(ft, pt, 0.1, lam, 0.2)
        return jnp.array([q, order, dependence, *weights, e])

    grid = np.array([(ft, pt, lam) for ft in (0.0, 1.0) for pt in (0.0, 1.0) for lam in (-1.0, -0.5, 1.0)])
    gradients = jax.jit(jax.vmap(jax.jacrev(outputs, (0, 1))))(*grid.T)
    by_ft, by_pt = map(np.asarray, gradients)
    assert np.isfinite(by_ft).all()
    assert np.isfinite(by_pt).all()
    # Everything is even in both arguments and smooth at 0.
    assert (by_ft[grid[:, 0] == 0] == 0).all()
    assert (by_pt[grid[:, 1] == 0] == 0).all()


def test_dead_initialisation_returns_the_limit():
    """lambda = -1 and gamma = 0, also where gamma^2 underflows: the limit lambda -> -1, never NaN."""
    near = pretraining_dependence(1.0, 2.0, Init(0.5, -1 + 1e-15, 0.0))
    for gamma in (0.0, 1e-170):
        dead = Init(0.5, -1.0, gamma)
        # e = 1 - c_PT / hyp at gamma = 0; the limit of l is 1, and so of PD 0.
        np.testing.assert_allclose(init_elasticity(2.0, dead), 1 - 0.5 / np.hypot(0.5, 2), rtol=4 * EPS)
        np.testing.assert_array_equal(regime_weights(1.0, 2.0, dead), [1, 0, 0])
        assert pretraining_dependence(1.0, 2.0, dead) == 0
    assert -0.05 < near < 0


def test_broadcasting_and_jit():
    init = Init(jnp.array([[0.1], [1.0]]), 0.0, 0.0)
    beta_ft, beta_pt = jnp.ones((3, 1, 1)), jnp.ones(4)
    assert pretraining_dependence(beta_ft, beta_pt, init).shape == (3, 2, 4)
    weights = jax.jit(regime_weights)(beta_ft, beta_pt, init)
    assert weights.shape == (3, 2, 4, 3)
    np.testing.assert_allclose(weights, regime_weights(beta_ft, beta_pt, init), rtol=10 * EPS)


def test_nan_and_negative_scales_stay_visible():
    init = Init(1e-3, 0.0, 0.0)
    assert np.isnan(l_order(jnp.nan, 1.0))
    assert np.isnan(l_order(1.0, jnp.nan))
    assert np.isnan(l_order(1.0, -1.0))
    assert np.isnan(potential(1.0, -1.0))
    assert np.isnan(regime_weights(1.0, jnp.nan, init)).all()
    # A coordinate that cannot move has an infinite penalty.
    assert potential(1.0, 0.0) == np.inf
    assert potential(0.0, 0.0) == 0
