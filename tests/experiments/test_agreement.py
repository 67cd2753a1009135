"""Measures of agreement: against scipy, against normal data, and against sums done by hand."""

import math

import numpy as np
import pytest
import xarray as xr
from scipy import integrate, stats

from experiments.agreement import pooled_z_scores, published_deviations, student_quantile, z_scores


def dataset(mse, theory):
    return xr.Dataset({"mse": (("point", "seed"), mse), "theory_mse": ("point", theory)})


@pytest.fixture(scope="module")
def normal():
    """20,000 points of 8 normal runs each, of known mean and of very different spreads."""
    rng = np.random.default_rng(0)
    theory = rng.uniform(0.1, 2.0, 20_000)
    spread = theory * 10 ** rng.uniform(-3, 0, theory.size)
    return dataset(theory[:, None] + spread[:, None] * rng.standard_normal((theory.size, 8)), theory)


@pytest.mark.parametrize("degrees", range(1, 51))
def test_student_quantile(degrees):
    # Student's density from its formula, and the normal tail from erfc: not the distributions of scipy.stats.
    log_norm = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(degrees * math.pi) / 2
    beyond, _ = integrate.quad(
        lambda t: math.exp(log_norm - (degrees + 1) / 2 * math.log1p(t * t / degrees)),
        student_quantile(degrees),
        math.inf,
        epsabs=0,
        epsrel=1e-10,
    )
    assert 2 * beyond == pytest.approx(math.erfc(2 / math.sqrt(2)), rel=1e-9)


def test_normal_data_agree_with_their_mean(normal):
    pooled = pooled_z_scores(normal)
    n = 20_000
    assert (pooled["points"], pooled["seeds"]) == (n, 8)
    # z is Student's t with 7 degrees: kurtosis 5, so the standard error of std_ratio is sqrt((5 - 1) / 4 n).
    # Everywhere 4 standard errors.
    assert pooled["std_ratio"] == pytest.approx(1, abs=4 / math.sqrt(n))
    p = 2 * stats.norm.sf(2)
    assert pooled["share_beyond_2"] == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / n))
    assert pooled["mean_z_se"] == pytest.approx(math.sqrt(7 / 5 / n), rel=4 / math.sqrt(n))
    assert abs(pooled["mean_z"]) < 4 * pooled["mean_z_se"]
    # The largest of n draws: beyond it 1 / n of the distribution, give or take a factor e^6 (once in 400).
    beyond = 2 * stats.t.sf(pooled["worst_abs_z"], 7) * n
    assert math.exp(-6) < beyond < 6


def test_a_wrong_theory_shows(normal):
    error = normal.mse.std("seed", ddof=1) / math.sqrt(8)
    shifted = pooled_z_scores(normal.assign(theory_mse=normal.theory_mse - 0.5 * error))
    # The standard error of every point is the observed one, so that each z moves by exactly 0.5.
    assert shifted["mean_z"] == pytest.approx(pooled_z_scores(normal)["mean_z"] + 0.5, rel=1e-9)
    z, seeds = z_scores(normal)
    expected = (normal.mse.mean("seed") - normal.theory_mse) / error
    np.testing.assert_allclose(z, expected, rtol=1e-12)
    assert seeds == 8


def test_two_points_by_hand():
    # Mean 2.5, sample variance 5 / 3, standard error sqrt(5 / 12).
    pooled = pooled_z_scores(dataset([[1.0, 2, 3, 4], [4.0, 3, 2, 1]], [2.0, 2.5]))
    z = 0.5 / math.sqrt(5 / 12)
    assert pooled == pytest.approx(
        {
            "points": 2,
            "seeds": 4,
            "mean_z": z / 2,
            "mean_z_se": z / 2 / math.sqrt(2),
            "std_ratio": z / 2 / math.sqrt(3),
            "share_beyond_2": 0.0,
            "worst_abs_z": z,
        }
    )
    # 3 degrees of freedom put the limit at 3.31: theory 0.36 below the mean gives z = 3.32, 0.35 gives 3.23.
    shift = np.array([3.32, -3.29]) * math.sqrt(5 / 12)
    assert pooled_z_scores(dataset([[1.0, 2, 3, 4], [4.0, 3, 2, 1]], 2.5 - shift))["share_beyond_2"] == 0.5


def test_points_without_a_number_are_left_out():
    mse = [[1.0, 2, 3, 4], [np.nan] * 4, [1.0, np.nan, 3, 4], [2.0, 2, 2, 2]]
    pooled = pooled_z_scores(dataset(mse, [2.0, 2.0, np.nan, 1.0]))
    assert pooled["points"] == 1
    assert pooled["worst_abs_z"] == pytest.approx(0.5 / math.sqrt(5 / 12))


def test_three_seeds_have_no_expected_variance():
    pooled = pooled_z_scores(dataset([[1.0, 2, 3], [1.0, 2, 4]], [2.0, 2.0]))
    assert math.isnan(pooled["std_ratio"])
    assert pooled["worst_abs_z"] == pytest.approx((1 / 3) / math.sqrt(7 / 9))


def test_published_deviations_by_hand():
    published = xr.Dataset(
        {
            "source": ("row", np.array(["replica_mc", "gradient_descent", "replica_mc", "replica_mc"], dtype=object)),
            "value": ("row", [1.1, 2.0, 0.7, 1.0]),
            "se": ("row", [9.0, 0.5, 9.0, 9.0]),
            "theory_mse": ("row", [1.0, 3.0, 1.0, 1.0]),
            "theory_mse_emp": ("row", [1.0, 9.0, 0.7, 0.8]),
        }
    )
    assert published_deviations(published) == pytest.approx(
        {
            "curve_points": 3,
            "curve_median_deviation": 0.1,
            "curve_worst_deviation": 0.3,
            "curve_median_deviation_sampled_support": 0.1,
            "curve_worst_deviation_sampled_support": 0.25,
            "descent_points": 1,
            "descent_worst_abs_z": 2.0,
        },
        abs=1e-12,
    )
