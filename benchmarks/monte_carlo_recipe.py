"""The baseline of our speed claims: the Monte-Carlo recipe that users solve the fixed point with today.

It draws 80,000 coordinates once (group, teacher, channel noise) and iterates the two equations of theory.md
section 4 on them, damped, to a relative tolerance of 1e-6. It is meant to be fair: everything is vectorised,
the proximal equation is solved by a Newton iteration that cannot diverge, and each one starts from the last.

    python benchmarks/monte_carlo_recipe.py [ROW ...]      # rows of the table, default one in 28
"""

import csv
import sys
import time
from pathlib import Path

import numpy as np

TABLE = Path(__file__).parents[1] / "tests" / "data" / "theory_perfect_pretraining.csv"


def draw_coordinates(rho_pt, rho_ft, omega, beta_pt, samples, rng):
    """Sample (beta_PT, x, v) a coordinate; the groups' sizes are those of the draw, not the nominal ones."""
    overlap = omega * rho_ft
    sizes = np.array([overlap, rho_ft - overlap, rho_pt - overlap, 1 - rho_pt - rho_ft + overlap])
    if (sizes < -1e-12).any():
        raise ValueError(f"`rho_pt`, `rho_ft`, `omega` must leave no group negative, got sizes {sizes}")
    sizes = np.clip(sizes, 0, None)
    group = rng.choice(4, size=samples, p=sizes / sizes.sum())
    in_pt, in_ft = (group == 0) | (group == 2), group <= 1
    x = np.where(in_ft, rng.normal(0, rho_ft**-0.5, samples), 0.0)
    return np.where(in_pt, beta_pt, 0.0), x, rng.standard_normal(samples)


def solve_proximal(size, c, theta, t):
    """Solve c sinh t + (theta / 2) t = size >= 0 by Newton's method; then x^ = c sinh t.

    Each term alone bounds t from above. The left side is convex, so from any start the second iterate lies
    above the root, and from there Newton's method goes down to it without overshooting.
    """
    upper = np.minimum(np.arcsinh(size / c), 2 * size / theta)
    t = np.minimum(t, upper)
    for _ in range(100):
        step = (c * np.sinh(t) + theta / 2 * t - size) / (c * np.cosh(t) + theta / 2)
        t = np.clip(t - step, 0, upper)
        if np.max(np.abs(step) - 1e-10 * t) <= 1e-14:
            break
    return t


def monte_carlo_point(
    rho_pt,
    rho_ft,
    omega,
    c_pt,
    lambda_pt,
    gamma_ft,
    alpha_ft,
    *,
    beta_pt=1.0,
    noise_var_ft=0.0,
    samples=80_000,
    damping=0.25,
    tol=1e-6,
    max_iterations=2_000,
    seed=0,
):
    """Fixed point and test error after perfect pretraining, from one draw of `samples` coordinates.

    Both updates are the undamped state evolution, of which the share `damping` of the old value is kept:
        tau <- (noise + mean (x^ - x)^2) / alpha,      theta <- theta * mean(dx^/dz) / alpha.
    The second is the usual theta = reg + theta mean(dx^/dz) / alpha at vanishing regularisation. One point in
    20 of the table (small alpha_ft, lambda_pt near -1) falls into a cycle at damping 0.25, so more of the old
    value is kept, as a user would do, whenever 50 iterations have not halved the change.

    Returns:
        dict(mse, tau, theta, iterations, converged, seconds); `converged` is False where the cap was reached
        before both undamped relative changes fell to `tol`, and the numbers are then the last iterate's.
    """
    started = time.perf_counter()
    if not 0 < alpha_ft < 1:
        raise ValueError(f"`alpha_ft` must be in (0, 1), got {alpha_ft}")
    rng = np.random.default_rng(seed)
    beta, x, v = draw_coordinates(rho_pt, rho_ft, omega, beta_pt, samples, rng)
    c = (1 + lambda_pt) * (c_pt + np.hypot(c_pt, beta)) + gamma_ft**2 / 2
    if (c <= 0).any():
        raise ValueError("c_FT = 0: fine-tuning is stuck at the origin and has no fixed point to iterate to")

    tau = (noise_var_ft + np.mean(x**2)) / alpha_ft
    theta = np.sqrt(tau)
    t = np.full(samples, np.inf)
    converged, iterations, mse, earlier = False, 0, np.nan, np.inf
    while not converged and iterations < max_iterations:
        iterations += 1
        z = x + np.sqrt(tau) * v
        t = solve_proximal(np.abs(z), c, theta, t)
        slope = c * np.cosh(t)
        mse = np.mean((np.copysign(c * np.sinh(t), z) - x) ** 2)
        tau_new = (noise_var_ft + mse) / alpha_ft
        theta_new = theta * np.mean(slope / (slope + theta / 2)) / alpha_ft
        change = max(abs(tau_new / tau - 1), abs(theta_new / theta - 1))
        converged = change <= tol
        if iterations % 50 == 0:
            damping = damping if change < earlier / 2 else (1 + damping) / 2
            earlier = change
        tau = damping * tau + (1 - damping) * tau_new
        theta = damping * theta + (1 - damping) * theta_new
    seconds = time.perf_counter() - started
    return dict(
        mse=float(mse),
        tau=float(tau),
        theta=float(theta),
        iterations=iterations,
        converged=bool(converged),
        seconds=seconds,
    )


def main(chosen):
    with TABLE.open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    point = ("rho_pt", "rho_ft", "omega", "c_pt", "lambda_pt", "gamma_ft", "alpha_ft")
    print(("{:>10}" * 11).format("row", *point[1:], "mse", "rel_error", "iterations", "seconds"))
    for index in chosen or range(13, len(rows), 28):
        row = rows[index]
        result = monte_carlo_point(
            *(row[name] for name in point), beta_pt=row["beta_pt"], noise_var_ft=row["noise_var"]
        )
        error = result["mse"] / row["mse"] - 1
        note = "" if result["converged"] else "  not converged"
        print(
            f"{index:>10}" + "".join(f"{row[name]:>10g}" for name in point[1:]),
            f"{result['mse']:>9.3e} {error:>+9.1e} {result['iterations']:>9} {result['seconds']:>9.2f}{note}",
        )


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
