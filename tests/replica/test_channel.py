"""The scalar channel against scipy: adaptive integrals over z, the proximal equation solved by bracketing."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import dblquad, quad
from scipy.optimize import brentq
from scipy.special import roots_legendre
from scipy.stats import norm

from dlnsim import Init, Task
from replica import solve
from replica.channel import (
    Channel,
    moments,
    nodes_at,
    perfect_pretraining,
    posterior_variance,
    quadrature,
    spacing,
)
from replica.iteration import FINEST

EPS = np.finfo(float).eps
FIELDS = ("response", "complement", "shrinkage", "bias", "power")


def proximal_t(z, c, theta):
    """The t with c sinh t + (theta / 2) t = z >= 0: Newton descends from the bound of either term alone."""
    t = np.minimum(np.arcsinh(z / c), 2 * z / theta)
    for _ in range(60):
        t = t - (c * np.sinh(t) + theta / 2 * t - z) / (c * np.cosh(t) + theta / 2)
    return t


def scalar_t(z, c, theta):
    """The same of one number, by bracketing; the bound may be the root, and round below it."""
    top = min(np.arcsinh(z / c), 2 * z / theta) * (1 + 4 * EPS)
    return brentq(lambda t: c * np.sinh(t) + theta / 2 * t - z, 0, top, xtol=1e-300, rtol=4 * EPS)


def pieces(tau, theta, var, c):
    """Ends of intervals of z >= 0 on which the integrands are smooth, and the proximal t with them."""
    sd = np.sqrt(var + tau)
    # Below, across and above the near-kink of small c t varies by a few units a piece.
    t = np.linspace(0, proximal_t(12 * sd, c, theta), 17)[1:-1]
    return np.unique(np.r_[0, np.minimum(c * np.sinh(t) + theta / 2 * t, 12 * sd), np.arange(1, 13) * sd])


def integrands(z, t, tau, theta, var, c):
    """What `Moments` averages over z, in the order of its fields."""
    slope, curve = theta / 2, c * np.cosh(t)
    shrink = slope * t
    estimate, posterior_mean_gap = c * np.sinh(t), tau / (var + tau) * z - shrink
    return np.stack([curve / (curve + slope), slope / (curve + slope), shrink**2, posterior_mean_gap**2, estimate**2])


def scipy_moments(tau, theta, var, c, order=40):
    """E over z ~ N(0, var + tau), by Gauss-Legendre rules of scipy on each piece."""
    ends = pieces(tau, theta, var, c)
    node, weight = roots_legendre(order)
    half = np.diff(ends)[:, None] / 2
    z = ((ends[:-1] + ends[1:])[:, None] / 2 + half * node).ravel()
    density = 2 * norm.pdf(z, scale=np.sqrt(var + tau)) * (half * weight).ravel()
    values = integrands(z, proximal_t(z, c, theta), tau, theta, var, c)
    return dict(zip(FIELDS, values @ density, strict=True))


def one_group(var, c):
    return Channel(*(jnp.asarray(value) for value in ([1.0], [var], [c], [0.0], 0.0, 0.5)))


def rule_moments(tau, theta, var, c, nodes):
    channel = one_group(var, c)
    m = moments(tau, theta, channel, quadrature(tau, theta, channel, nodes))
    return {name: float(value[0]) for name, value in vars(m).items()}


CASES = [
    (tau, theta, var, c)
    for tau in (1e-8, 1e-2, 10.0)
    for theta in (1e-6, 0.3, 50.0)
    for var in (0.0, 1.0, 200.0)
    for c in (1e-12, 1e-3, 1.0, 1e5)
]


@pytest.mark.parametrize("case", CASES[::27])
def test_the_reference_itself_against_adaptive_integration(case):
    tau, theta, var, c = case
    sd = np.sqrt(var + tau)

    def integrand(z, k):
        return integrands(z, scalar_t(z, c, theta), *case)[k] * 2 * norm.pdf(z / sd) / sd

    ends = pieces(*case)
    for k, expected in enumerate(scipy_moments(*case).values()):
        parts = [quad(integrand, a, b, args=(k,), epsabs=1e-11 * expected, epsrel=1e-10) for a, b in pairwise(ends)]
        value, error = np.sum(parts, axis=0)
        assert abs(value - expected) <= max(error, 1e-12 * expected), FIELDS[k]
        assert error < 1e-9 * expected  # the sum of what was asked of quad


@pytest.mark.parametrize("case", CASES)
def test_every_field_against_scipy(case):
    expected, coarser = scipy_moments(*case), scipy_moments(*case, order=30)
    for name, value in rule_moments(*case, FINEST).items():
        # The square in `bias` is that of a difference of terms as large as theta t / 2, whose roundoff
        # counts in proportion; 1e-12 is the roundoff of exp(-z^2 / 2 V) and of t up to 40.
        size = np.sqrt(expected["shrinkage"] / expected[name]) if name == "bias" else 1.0
        tolerance = 1e-12 + 8 * EPS * size
        np.testing.assert_allclose(coarser[name], expected[name], rtol=tolerance, err_msg=name)
        np.testing.assert_allclose(value, expected[name], rtol=tolerance, err_msg=name)


@pytest.mark.parametrize(("tau", "theta", "var", "c"), [(0.3, 0.8, 4.0, 0.1), (2.0, 1.0, 1.0, 1e-2)])
def test_error_as_an_integral_over_signal_and_noise(tau, theta, var, c):
    # Nothing of the decomposition by the posterior of x: a plain integral over (x, V).
    def integrand(v, u):
        x = np.sqrt(var) * u
        z = x + np.sqrt(tau) * v
        estimate = np.copysign(c * np.sinh(scalar_t(abs(z), c, theta)), z)
        return (estimate - x) ** 2 * np.exp(-(u**2 + v**2) / 2) / (2 * np.pi)

    expected = dblquad(integrand, -8, 8, -8, 8, epsabs=1e-8, epsrel=1e-7)[0]
    channel = one_group(var, c)
    got = rule_moments(tau, theta, var, c, FINEST)["bias"] + float(posterior_variance(tau, channel)[0])
    np.testing.assert_allclose(got, expected, rtol=2e-7)  # the request to dblquad; tails beyond 8 are 1e-15


def random_cases(count, seed):
    rng = np.random.default_rng(seed)
    tau, theta, c = (10 ** rng.uniform(a, b, count) for a, b in ((-20, 4), (-10, 4), (-14, 8)))
    return tau, theta, rng.choice([0.0, 1.0, 10.0, 200.0], count), c


def test_identities_over_decades():
    cases = random_cases(3000, seed=0)
    # theory.md section 4 keeps c / sqrt(V) above 1e-22 and theta asinh(sd / c) within 100 sd.
    m, residual = jax.vmap(_identities)(*map(jnp.asarray, cases))
    np.testing.assert_allclose(m.response + m.complement, 1, rtol=1e-12)  # 192 nodes, one weight each
    # Stein's identity, with the mse from the posterior decomposition; relative to its largest term.
    np.testing.assert_allclose(residual, 0, atol=1e-12)


def _identities(tau, theta, var, c):
    channel = Channel(*(jnp.asarray(x) for x in ([1.0], [var], [c], [0.0], 0.0, 0.5)))
    m = moments(tau, theta, channel, quadrature(tau, theta, channel, FINEST))
    mse = m.bias + posterior_variance(tau, channel)
    right = -tau + 2 * tau * m.response + m.shrinkage
    return m, (mse - right)[0] / jnp.maximum(tau, jnp.maximum(m.shrinkage, mse))[0]


@jax.jit
def _by_node_count(channel, tau, theta, counts):
    def one(count):
        rule = nodes_at(spacing(tau, theta, channel, count), jnp.arange(64))
        return moments(tau, theta, channel, rule._replace(dt=rule.dt * (jnp.arange(64) < count)))

    return jax.vmap(one)(counts)


def error_by_node_count(c):
    tau, theta, var = 0.5, 0.7, 2.0
    channel, counts = one_group(var, c), np.arange(2, 65, 2)
    exact = scipy_moments(tau, theta, var, c)
    got = vars(_by_node_count(channel, tau, theta, counts))
    error = np.max([np.abs(got[name][:, 0] / exact[name] - 1) for name in FIELDS], axis=0)
    return counts, error, float(spacing(tau, theta, channel, 1).step[0])


@pytest.mark.parametrize("c", [1e-12, 1e-6, 1e-2])
def test_error_falls_geometrically_in_the_nodes(c):
    counts, error, end = error_by_node_count(c)
    # A strip of half-width pi / 2 in s: the error is exp(-pi^2 n / s_end) up to powers of n.
    above = error > 1e-11
    assert above.sum() >= 4
    assert -np.polyfit(counts[above], np.log(error[above]), 1)[0] > 0.8 * np.pi**2 / end
    assert error[counts * np.pi**2 / end > 40].max(initial=0) < 1e-11  # exp(-40) is far below roundoff


@pytest.mark.parametrize("c", [1e3, 1e6])
def test_error_of_a_linear_estimate_is_that_of_a_gaussian(c):
    counts, error, _ = error_by_node_count(c)
    # Steps of h = 9.5 / n standard deviations; Poisson: 2 exp(-2 (pi / h)^2) for the mass and, for a second
    # moment, that times (2 pi / h)^2.
    wave = 2 * np.pi * counts / 9.5
    assert (error < 2.1 * np.maximum(1, wave**2) * np.exp(-(wave**2) / 2) + 2e-12).all()


def test_solved_points_satisfy_both_equations_by_scipy():
    rng = np.random.default_rng(5)
    for _ in range(15):
        rho_pt, shared, new = rng.uniform(0.05, 0.5), rng.uniform(), rng.uniform(0, 0.3)
        task = Task.from_conditional(rho_pt, shared, new, noise_var_ft=rng.choice([0.0, 0.1]))
        lam = rng.choice([-0.999, -0.5, 0.9])
        init = Init(10 ** rng.uniform(-7, 1), lam, rng.choice([0.0, 0.3]))
        alpha = rng.uniform(0.05, 0.9)
        s = solve(task, init, alpha_ft=alpha)
        tau, theta = float(s.tau), float(s.theta)
        channel = perfect_pretraining(task, init, jnp.asarray(alpha))
        weight, var, c = (np.asarray(leaf) for leaf in (channel.weight, channel.var, channel.c))
        groups = [scipy_moments(tau, theta, *vc) for vc in zip(var, c, strict=True)]
        response = weight @ [g["response"] for g in groups]
        mse = weight @ [-tau + 2 * tau * g["response"] + g["shrinkage"] for g in groups]
        # Stein's form of the mse subtracts tau once: its error is that of tau, not of mse.
        assert abs(response / alpha - 1) < 2e-11
        assert abs(mse + float(task.noise_var_ft) - alpha * tau) < 2e-11 * tau
        assert abs(mse - float(s.mse)) < 2e-11 * tau
