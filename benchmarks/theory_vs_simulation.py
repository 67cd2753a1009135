"""Theory against exact simulation on the published grid: pooled z-scores at several D, and how their bias falls.

    python benchmarks/theory_vs_simulation.py [--dims 500 1000 2000] [--seeds 8 6 4] [--alphas 0.157] [--key 0]

z = (mean over seeds - theory) / standard error. With S seeds its variance is that of Student's t,
(S - 1) / (S - 3), where the runs are normal. A relative bias of a / D, at a spread of s / sqrt(D) a run, is a
mean z of (a / s) sqrt(S / D): the printed slope a / s must not depend on D. Points whose runs spread by more
than half their mean (exact recovery in some draws) are counted apart, on the logarithm: their means are ruled by
rare draws. Each combination is printed as it is done; --alphas and --dims take up where a run stopped.
"""

import argparse
import time

import jax
import numpy as np

from dlnsim import Init, Task, simulate
from dlnsim.result import FAILURES
from replica import solve

jax.config.update("jax_enable_x64", True)

GRID = dict(omega=[0.0, 0.5, 1.0], c=[1e-6, 1e-3, 1.0], lam=[-0.99, 0.0, 0.99], gamma=[0.0, 1.0, 10.0])
HEADER = ("alpha", "D", "seeds", "group", "points", "mean z", "+-", "var / t", ">2", "slope", "bias D", "+-", "seconds")


def compare(alpha, dim, seeds, key):
    """Simulate the grid; return (runs, theory, failures), runs of shape (point, seed)."""
    omega, c, lam, gamma = np.meshgrid(*GRID.values(), indexing="ij", sparse=True)
    task, init = Task(0.1, 0.1, omega), Init(c, lam, gamma)
    s = simulate(task, init, alpha_ft=alpha, dim=dim, seeds=seeds, key=key, throw=False)
    theory = np.asarray(solve(task, init, alpha_ft=s.alpha_ft).mse).ravel()
    failures = int(np.isin(s.result, FAILURES).sum())
    return np.asarray(s.mse_ft).reshape(theory.size, seeds), theory, failures


def summarise(runs, theory, dim):
    """Mean z and its error, variance over that of t, share beyond 2, slope, D x relative bias and its error."""
    seeds = runs.shape[1]
    se = runs.std(1, ddof=1) / np.sqrt(seeds)
    z = (runs.mean(1) - theory) / se
    ratio = z.var(ddof=1) / ((seeds - 1) / (seeds - 3)) if seeds > 3 else np.nan
    # The plain mean over points: weights from the estimated errors would favour draws that lie low.
    bias = dim * (runs.mean(1) / theory - 1).mean()
    error = dim * np.sqrt(((se / theory) ** 2).sum()) / len(theory)
    mean_error = z.std(ddof=1) / np.sqrt(z.size)
    return z.mean(), mean_error, ratio, (np.abs(z) > 2).mean(), z.mean() / np.sqrt(seeds / dim), bias, error


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[500, 1000, 2000])
    parser.add_argument("--seeds", type=int, nargs="+", default=[8, 6, 4], help="one for all, or one for each D")
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.059, 0.157])
    parser.add_argument("--key", type=int, default=0)
    args = parser.parse_args()
    seeds = args.seeds * len(args.dims) if len(args.seeds) == 1 else args.seeds
    if len(seeds) != len(args.dims) or min(seeds) < 2:
        parser.error("--seeds needs one number >= 2, or one for each of --dims")
    print(("{:>8}" * len(HEADER)).format(*HEADER))
    fits = []
    for dim, count in zip(args.dims, seeds, strict=True):
        for alpha in args.alphas:
            started = time.perf_counter()
            # A key of its own for every combination, whatever the others are.
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(args.key), dim), round(1e6 * alpha))
            runs, theory, failures = compare(alpha, dim, count, key)
            seconds = time.perf_counter() - started
            ok = np.isfinite(runs).all(1)
            steep = runs.std(1, ddof=1) > 0.5 * runs.mean(1)
            for name, chosen in (("regular", ok & ~steep), ("steep", ok & steep)):
                if chosen.sum() < 3:
                    continue
                # For runs that range over decades: log runs, compared on the scale of their spread.
                shown = runs[chosen], theory[chosen]
                if name == "steep":
                    shown = tuple(
                        1 + np.log(part / theory[chosen].reshape(-1, *[1] * (part.ndim - 1))) for part in shown
                    )
                numbers = summarise(*shown, dim)
                print(
                    f"{alpha:8g}{dim:8}{count:8}{name:>8}{chosen.sum():8}",
                    *(f"{x:7.2f}" for x in numbers),
                    f"{seconds:7.0f}",
                    flush=True,
                )
                if name == "regular":
                    fits.append((dim, count, *numbers))
            if failures:
                print(f"  {failures} runs failed", flush=True)
    dims, counts, mean, error = np.array(fits).T[:4]
    x = np.sqrt(counts / dims)
    slope = (x * mean / error**2).sum() / (x**2 / error**2).sum()
    chi2 = (((mean - slope * x) / error) ** 2).sum()
    print(f"regular points, mean z = slope sqrt(seeds / D): slope {slope:.2f}, chi2 {chi2:.1f} of {len(fits) - 1} left")


if __name__ == "__main__":
    main()
