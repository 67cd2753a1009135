"""Limits of the theory that have closed forms or an independent scalar state evolution."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

from dlnsim import Init, Result, Task
from replica import solve
from replica.iteration import TOLERANCE

EPS = np.finfo(float).eps


# --- as many samples as unknowns ----------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.7])
def test_least_squares(noise):
    alpha = np.array([1 + 1e-9, 1.3, 2.0, 50.0])
    s = solve(Task(0.2, 0.1, 0.5, noise_var_ft=noise), Init(0.01, 0.3, 0.2), alpha_ft=alpha)
    np.testing.assert_allclose(s.mse, noise / (alpha - 1), rtol=4 * EPS)
    np.testing.assert_allclose(s.mse_by_group, np.repeat(s.mse[:, None], 4, axis=1), rtol=4 * EPS)
    np.testing.assert_array_equal(s.theta, 0)
    np.testing.assert_array_equal(s.result, Result.CONVERGED)
    # E[(beta - beta*_PT)^2] = E[beta*_FT^2] + mse + E[beta*_PT^2] = 1 + mse + rho_pt.
    np.testing.assert_allclose(s.forgetting, 1.2 + noise / (alpha - 1), rtol=8 * EPS)


def test_one_sample_per_unknown():
    s = solve(Task(0.2, 0.1, 0.5, noise_var_ft=np.array([0, 0.7])), Init(0.01, 0.3, 0.2), alpha_ft=1.0)
    np.testing.assert_array_equal(s.mse, [0, np.inf])
    np.testing.assert_array_equal(s.result, [Result.CONVERGED, Result.DIVERGES])


def test_continuity_at_one_sample_per_unknown():
    gap = np.array([1e-4, 1e-5, 1e-6, 1e-8])
    below = solve(Task(0.2, 0.1, 0.5), Init(0.01, 0.3, 0.2), alpha_ft=1 - gap)
    # Without noise E[(z - x^)^2] = (1 - alpha) tau = (theta / 2)^2 E[t^2] and 1 - alpha = (theta / 2)
    # E[1 / (c cosh t + theta / 2)], so that tau and mse are linear in 1 - alpha, up to relative terms in gap.
    ratio = np.asarray(below.mse / gap)
    np.testing.assert_allclose(ratio, ratio[-1], rtol=1e-2)
    assert np.abs(ratio[:-1] / ratio[-1] - 1)[1:] @ [1, 10] < 30 * np.abs(ratio[0] / ratio[-1] - 1)
    above = solve(Task(0.2, 0.1, 0.5), Init(0.01, 0.3, 0.2), alpha_ft=1 + gap)
    np.testing.assert_array_equal(above.mse, 0)

    # With noise |alpha - 1| mse -> noise from both sides. Below, the excess of (1 - alpha) tau over noise is
    # (theta / 2)^2 E[t^2], and theta / 2 is about gap * c cosh t: of the order of sqrt(gap) or less.
    noisy = Task(0.2, 0.1, 0.5, noise_var_ft=0.7)
    for side in (-1, 1):
        mse = solve(noisy, Init(0.01, 0.3, 0.2), alpha_ft=1 + side * gap).mse
        np.testing.assert_allclose(mse * gap, 0.7, rtol=np.sqrt(gap).max())
        np.testing.assert_allclose(mse[-1] * gap[-1], 0.7, rtol=np.sqrt(gap[-1]))


# --- the origin ---------------------------------------------------------------------------------------


def test_the_saddle_is_an_answer():
    s = solve(Task(0.3, 0.1, 0.5, beta_pt=2.0), Init(0.1, -1.0, 0.0), alpha_ft=np.array([0.2, 0.9, 1.5]))
    # c_FT = 0 has no fixed point to converge to whatever the number of samples.
    np.testing.assert_array_equal(s.result, Result.STUCK)
    np.testing.assert_allclose(s.mse, 1, rtol=4 * EPS)  # E[x^2] = 1
    np.testing.assert_allclose(s.mse_by_group, np.tile([10.0, 10, 0, 0], (3, 1)), rtol=4 * EPS)
    np.testing.assert_allclose(s.forgetting, 0.3 * 4, rtol=4 * EPS)


# --- l1: lambda_pt -> -1 ------------------------------------------------------------------------------


def soft_threshold_error(rho, alpha, noise):
    """State evolution of basis pursuit: x ~ rho N(0, 1 / rho), threshold k sqrt(tau), P(active) = alpha."""
    # Conditional on z ~ N(0, V): eta(z) - (v / V) z, plus the posterior variance.
    groups = ((rho, 1 / rho), (1 - rho, 0.0))

    def state(tau):
        def active(k):
            return sum(w * 2 * norm.sf(k * np.sqrt(tau / (v + tau))) for w, v in groups) - alpha

        k = brentq(active, 0, 40, xtol=1e-14)
        mse = 0.0
        for w, v in groups:
            V = v + tau

            def square(z, v=v, V=V, k=k):
                eta = max(z - k * np.sqrt(tau), 0.0)
                return 2 * (eta - v / V * z) ** 2 * norm.pdf(z / np.sqrt(V)) / np.sqrt(V)

            cut = k * np.sqrt(tau)
            ends = np.unique([0, cut, cut + 3 * np.sqrt(tau), cut + 12 * np.sqrt(V)])
            mse += w * (v * tau / V + sum(quad(square, *ends[i : i + 2])[0] for i in range(len(ends) - 1)))
        return mse

    tau = np.exp(brentq(lambda s: np.log((noise + state(np.exp(s))) / alpha) - s, np.log(1e-6 + noise), 5, xtol=1e-12))
    return alpha * tau - noise


@pytest.mark.parametrize(
    ("rho", "alpha", "noise"), [(0.1, 0.2, 0.0), (0.1, 0.3, 0.1), (0.3, 0.5, 0.0), (0.3, 0.2, 1.0)]
)
def test_l1_limit(rho, alpha, noise):
    # x^ + (theta / 2) asinh(x^ / c) = z is a soft threshold of (theta / 2) log(2 / c) up to log|x^| / log c:
    # mse = l1 + a / L + b / L^2 + ..., so the limit is reached by extrapolation in 1 / L only.
    L = np.linspace(20, 52, 9)  # c down to 1e-23, where the solver's finest rule still suffices
    c_ft = 2 * np.exp(-L)
    lam = -1 + 1e-6
    s = solve(Task(0.0, rho, 0.0, 0.0, noise_var_ft=noise), Init(c_ft / 2e-6, lam, 0.0), alpha_ft=alpha)
    expected = soft_threshold_error(rho, alpha, noise)
    by_degree = [np.polynomial.Polynomial.fit(1 / L, s.mse, degree)(0.0) for degree in (2, 3, 4)]
    # The last change of the extrapolation is a bound on its error while the changes shrink.
    changes = np.abs(np.diff(by_degree))
    assert changes[1] < changes[0] < 0.02 * expected
    assert abs(by_degree[-1] - expected) < changes[1] + changes[0] / 5
    assert abs(s.mse[-1] - expected) > 5 * abs(by_degree[-1] - expected)  # no accident of a wide tolerance


def test_exact_recovery_by_l1():
    # Above the l1 transition (alpha about 0.33 at rho = 0.1; 0.6 is far above) the error vanishes with c.
    c = np.array([1e-6, 1e-12, 1e-18])
    mse = solve(Task(0.0, 0.1, 0.0, 0.0), Init(c, -0.5, 0.0), alpha_ft=0.6).mse
    assert (np.diff(np.log(mse)) / np.diff(np.log(c)) > 0.5).all()


# --- l2: large scales ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("c_pt", "gamma"), [(1e9, 0.0), (1e-3, 1e5)])
@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_ridgeless_limit(c_pt, gamma, noise):
    alpha = np.array([0.01, 0.3, 0.7, 0.99])
    s = solve(Task(0.2, 0.1, [[0.0], [1.0]], noise_var_ft=noise), Init(c_pt, 0.0, gamma), alpha_ft=alpha)
    expected = (1 - alpha) + noise * alpha / (1 - alpha)
    # Corrections are (x / c)^2 with c >= 5e9 / 1.01: the solver's own error remains, and c_FT of a PT
    # coordinate exceeds that of another by 1 / c.
    np.testing.assert_allclose(s.mse, [expected, expected], rtol=2e-9 if gamma else 2e-10)


def weighted_ridgeless_error(weight, var, c, alpha, noise):
    """min sum x^2 / c_i on the data: x^ = s_i z with s_i = c_i / (c_i + theta / 2) and E[s] = alpha."""
    c = c / c.max()

    def excess(log_theta):
        return weight @ (c / (c + np.exp(log_theta))) - alpha

    theta = np.exp(brentq(excess, -80, 80, xtol=1e-14, rtol=4 * EPS))
    s = c / (c + theta)
    tau = (noise + weight @ ((1 - s) ** 2 * var)) / (alpha - weight @ s**2)
    return weight @ (s**2 * tau + (1 - s) ** 2 * var)


@pytest.mark.parametrize("noise", [0.0, 0.4])
@pytest.mark.parametrize("ratio", [1.0, 30.0, 1e4])
def test_weighted_l2_limit(ratio, noise):
    c_pt, rho_pt, rho_ft, omega = 1e8, 0.3, 0.2, np.array([0.0, 0.5, 1.0])
    task = Task(rho_pt, rho_ft, omega, ratio * c_pt, noise_var_ft=noise)
    for alpha in (0.1, 0.6):
        s = solve(task, Init(c_pt, 0.5, 0.0), alpha_ft=alpha)
        for k in range(3):
            inside, outside = omega[k] * rho_ft, (1 - omega[k]) * rho_ft
            weight = np.array([inside, outside, rho_pt - inside, 1 - rho_pt - outside])
            var = np.array([1 / rho_ft, 1 / rho_ft, 0, 0])
            c = 1 + np.sqrt(1 + np.array([ratio, 0, ratio, 0]) ** 2)
            # Corrections are (x / c)^2 < 1e-14; the solver's residual is amplified by 1 / (1 - s) at most.
            expected = weighted_ridgeless_error(weight, var, c, alpha, noise)
            np.testing.assert_allclose(s.mse[k], expected, rtol=1e-10)


@pytest.mark.parametrize("noise", [0.0, 0.4])
@pytest.mark.parametrize("omega", [0.0, 0.5, 1.0])
def test_regime_two(omega, noise):
    # c_pt -> 0 at gamma = 0: off the PT support nothing moves, on it ridgeless regression with alpha / rho_pt
    # samples per coordinate, to which the signal outside is noise. c_FT >> |x| asks for a large PT teacher.
    rho_pt, alpha = 0.4, np.array([0.05, 0.2, 0.39])
    s = solve(Task(rho_pt, 0.2, omega, 1e8, noise_var_ft=noise), Init(1e-8, 0.0, 0.0), alpha_ft=alpha)
    share = alpha / rho_pt
    expected = omega * (1 - share) + (noise + 1 - omega) * share / (1 - share) + (1 - omega)
    # Coordinates outside take a share c_FT / (theta / 2) = 2e-8 / 2.6e6 of the samples, which is nothing; an
    # accepted residual of TOLERANCE is amplified by 1 / (1 - share).
    assert (np.abs(s.mse / expected - 1) < 2 * TOLERANCE / (1 - share)).all()


# --- consequences -------------------------------------------------------------------------------------


def test_nothing_pretrained_is_a_single_task():
    omega, c, lam = np.array([0.0, 0.3, 1.0]), 0.02, -0.7
    one = solve(Task(0.2, 0.1, omega, beta_pt=0.0), Init(c, lam, 0.1), alpha_ft=0.25)
    np.testing.assert_allclose(one.mse, one.mse[0], rtol=1e-12)  # groups of equal c merge, up to roundoff
    # lambda_pt enters through c (1 + lambda_pt) alone, and rho_pt not at all.
    two = solve(Task(0.7, 0.1, 0.4, beta_pt=0.0), Init(c * 0.3 / 1.9, 0.9, 0.1), alpha_ft=0.25)
    np.testing.assert_allclose(two.mse, one.mse[0], rtol=1e-12)


def test_large_scales_forget_the_pretraining():
    for init in (Init(1e6, 0.5, 0.0), Init(1e-3, 0.5, 1e3)):
        mse = solve(Task(0.2, 0.1, jnp.array([0.0, 1.0])), init, alpha_ft=0.3).mse
        # c_FT differs between the supports by at most (1 + lambda) beta_pt = 1.5 in 5e5.
        np.testing.assert_allclose(mse[0], mse[1], rtol=6e-6)
