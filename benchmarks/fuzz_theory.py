"""Random parameters against the solver: how many points fail, and how well the others are solved.

    python benchmarks/fuzz_theory.py [--count 10000] [--seed 0]

The first domain is the promised one, the second reaches as far as parameters are accepted; there a failure is
allowed, but must be reported as such and not as a wrong number.
"""

import argparse
import time

import jax
import numpy as np

from dlnsim import Init, Result, Task
from dlnsim.result import FAILURES
from replica import solve

jax.config.update("jax_enable_x64", True)

FIELDS = ("c_pt", "lambda_pt", "gamma_ft", "rho_pt", "rho_ft", "omega", "noise", "beta_pt", "alpha")


def logarithmic(rng, low, high, count, zeros=0.0):
    values = 10 ** rng.uniform(np.log10(low), np.log10(high), count)
    return np.where(rng.uniform(size=count) < zeros, 0.0, values)


def draw(rng, count, wide):
    """A dict of FIELDS; rho_ft and omega follow from P(in FT support | in or out of the PT support)."""
    rho_pt = np.minimum(1.0, logarithmic(rng, 1e-6 if wide else 0.005, 1.0, count))
    shared, new = rng.uniform(size=(2, count)) ** rng.choice([0.3, 1, 3], (2, count))
    shared = np.where(rng.uniform(size=count) < 0.2, rng.choice([0.0, 1.0], count), shared)
    new = np.where(rng.uniform(size=count) < 0.2, 0.0, new)
    rho_ft = rho_pt * shared + (1 - rho_pt) * new
    low = rho_ft < (1e-6 if wide else 0.005)
    shared = np.where(low, 1.0, shared)
    rho_ft = rho_pt * shared + (1 - rho_pt) * new
    # lambda + 1 down to 1e-4 (1e-10): c_FT, not lambda itself, is what the fixed point sees.
    lambda_pt = np.minimum(-1 + logarithmic(rng, 1e-10 if wide else 1e-4, 2, count), 1.0)
    return dict(
        c_pt=logarithmic(rng, 1e-20, 1e8, count) if wide else logarithmic(rng, 1e-8, 30, count),
        lambda_pt=lambda_pt,
        gamma_ft=logarithmic(rng, 1e-6, 1e4, count, 0.4) if wide else logarithmic(rng, 1e-3, 10, count, 0.4),
        rho_pt=rho_pt,
        rho_ft=rho_ft,
        omega=np.clip(rho_pt * shared / rho_ft, 0, 1),
        noise=logarithmic(rng, 1e-12, 1e6, count, 0.4) if wide else logarithmic(rng, 1e-4, 10, count, 0.4),
        beta_pt=logarithmic(rng, 1e-6, 1e6, count, 0.1) if wide else np.ones(count),
        alpha=np.where(
            rng.uniform(size=count) < 0.1,
            1 - logarithmic(rng, 1e-9, 0.1, count),
            logarithmic(rng, 1e-5, 5.0, count) if wide else rng.uniform(0.01, 2.0, count),
        ),
    )


def report(name, p, batch):
    """Solve in batches, print a line for each, then a summary and the worst points as keyword arguments."""
    parts, started = [], time.perf_counter()
    count = p["alpha"].size
    for low in range(0, count, batch):
        q = {field: p[field][low : low + batch] for field in FIELDS}
        task = Task(q["rho_pt"], q["rho_ft"], q["omega"], q["beta_pt"], 0.0, q["noise"])
        init = Init(q["c_pt"], q["lambda_pt"], q["gamma_ft"])
        s = solve(task, init, alpha_ft=q["alpha"], throw=False)
        parts.append(jax.tree.map(np.asarray, s))
        unsolved = np.isin(parts[-1].result, FAILURES).sum()
        print(
            f"  {low + len(q['alpha']):>8} points, {time.perf_counter() - started:7.1f} s, {unsolved} unsolved",
            flush=True,
        )
    s = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    failed = np.isin(s.result, FAILURES)
    solved = (s.result == Result.CONVERGED) & (p["alpha"] < 1)
    print(
        f"{name}: "
        + ", ".join(f"{Result(int(k))} {n}" for k, n in zip(*np.unique(s.result, return_counts=True), strict=True))
    )
    print(f"  unsolved {failed.sum()} of {count}; {solved.sum()} of the rest have 0 < alpha < 1")
    print(f"  worst residual {s.residual[solved].max():.2e}, worst error estimate {s.error[solved].max():.2e}")
    print("  steps, quantiles 50 / 90 / 99 / 100 %:", *np.quantile(s.steps[solved], [0.5, 0.9, 0.99, 1]).astype(int))
    # Consistency that no residual shows: the mse is what the tau equation says, and never negative.
    gap = (
        np.abs(s.tau * p["alpha"] - p["noise"] - s.mse)[solved]
        / (s.tau * np.maximum(p["alpha"], 1 - p["alpha"]))[solved]
    )
    print(
        f"  worst |alpha tau - noise - mse| / tau {gap.max():.2e}; negative or NaN mse: {(~(s.mse[solved] >= 0)).sum()}"
    )
    for k in np.flatnonzero(failed)[:8]:
        print(
            f"  {Result(int(s.result[k]))} ({s.residual[k]:.1e}):", ", ".join(f"{f}={float(p[f][k])!r}" for f in FIELDS)
        )
    return failed.sum()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000, help="points in each domain")
    parser.add_argument("--batch", type=int, default=2_500, help="points a call (a line is printed for each)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for k, name in enumerate(("promised domain", "wide domain")):
        report(name, draw(np.random.default_rng([args.seed, k]), args.count, wide=k == 1), args.batch)


if __name__ == "__main__":
    main()
