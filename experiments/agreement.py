"""How well theory, simulation and published values agree: pooled z-scores and worst deviations."""

import math

import numpy as np
import xarray as xr
from scipy import stats


def pooled_z_scores(simulation: xr.Dataset) -> dict[str, float | int]:
    """Pool (mean over seeds - theory) / standard error over all grid points.

    With few seeds z is Student-t, not normal: its variance is (n - 1) / (n - 3). The theory holds for D -> infinity,
    so z also carries a bias of order sqrt(seeds / D).

    Args:
        simulation: from `published_grid.simulation`, at least 4 seeds for a finite expected variance.

    Returns:
        Number of points, mean z, its standard error, standard deviation of z divided by the one expected, share of
        |z| beyond the 2-sigma-equivalent point of the t-distribution (expected 0.0455), and the worst |z|.
    """
    z, seeds = z_scores(simulation)
    z = z[np.isfinite(z)]
    expected = math.sqrt((seeds - 1) / (seeds - 3)) if seeds > 3 else math.nan
    return {
        "points": int(z.size),
        "seeds": seeds,
        "mean_z": float(z.mean()),
        "mean_z_se": float(z.std() / math.sqrt(z.size)),
        "std_ratio": float(z.std() / expected),
        "share_beyond_2": float((np.abs(z) > student_quantile(seeds - 1)).mean()),
        "worst_abs_z": float(np.abs(z).max()),
    }


def z_scores(simulation: xr.Dataset) -> tuple[np.ndarray, int]:
    """Return z of every grid point, and the number of seeds behind each."""
    seeds = simulation.sizes["seed"]
    mean, spread = simulation.mse.mean("seed"), simulation.mse.std("seed", ddof=1)
    return ((mean - simulation.theory_mse) / (spread / math.sqrt(seeds))).values.ravel(), seeds


def student_quantile(degrees: int) -> float:
    """The t beyond which, on both sides together, lies what lies beyond 2 sigma of a normal (4.55 %)."""
    return float(stats.t.isf(stats.norm.sf(2.0), degrees))


def published_deviations(published: xr.Dataset) -> dict[str, float | int]:
    """Relative deviations of the published Monte-Carlo curves and z-scores of published gradient descent."""
    curves = published.where(published.source == "replica_mc", drop=True)
    descent = published.where(published.source == "gradient_descent", drop=True)
    relative = np.abs(curves.value / curves.theory_mse - 1)
    sampled = np.abs(curves.value / curves.theory_mse_emp - 1)
    z = (descent.value - descent.theory_mse) / descent.se
    return {
        "curve_points": int(relative.size),
        "curve_median_deviation": float(relative.median()),
        "curve_worst_deviation": float(relative.max()),
        "curve_median_deviation_sampled_support": float(sampled.median()),
        "curve_worst_deviation_sampled_support": float(sampled.max()),
        "descent_points": int(z.size),
        "descent_worst_abs_z": float(np.abs(z).max()),
    }
