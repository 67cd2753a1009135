"""The public solver: the reference tables, the authors' own curves, and what its interface promises."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlnsim import ArgumentError, Init, PrecisionError, Result, SolverError, Task
from replica import solve
from replica.channel import perfect_pretraining
from replica.fixed_point import solve_all
from replica.iteration import TOLERANCE, Phase

DATA = Path(__file__).parents[1] / "data"
FIRST = (Phase.COARSE, Phase.BISECT)
PARAMETERS = ("c_pt", "lambda_pt", "gamma_ft", "rho_pt", "rho_ft", "omega", "noise", "alpha", "beta_pt")
MIDDLE = np.array([0.05, -0.6, 0.3, 0.3, 0.2, 0.4, 0.1, 0.35, 1.3])


def table(name):
    return np.genfromtxt(DATA / name, delimiter=",", names=True)


def from_row(rows):
    return Task(rows["rho_pt"], rows["rho_ft"], rows["omega"]), Init(rows["c_pt"], rows["lambda_pt"], rows["gamma_ft"])


def mse(p):
    c_pt, lambda_pt, gamma, rho_pt, rho_ft, omega, noise, alpha, beta_pt = p
    task = Task(rho_pt, rho_ft, omega, beta_pt, 0.0, noise)
    return solve(task, Init(c_pt, lambda_pt, gamma), alpha_ft=alpha).mse


mse_at = jax.jit(jax.vmap(mse))


# --- numbers made elsewhere ---------------------------------------------------------------------------


def test_reference_table():
    rows = table("theory_perfect_pretraining.csv")
    assert rows.size == 224
    task = Task(rows["rho_pt"], rows["rho_ft"], rows["omega"], rows["beta_pt"], 0.0, rows["noise_var"])
    _, init = from_row(rows)
    s = solve(task, init, alpha_ft=rows["alpha_ft"])
    for name in ("mse", "tau", "theta"):
        # The table is good to about 2e-10 (its digits to 1e-11).
        np.testing.assert_allclose(getattr(s, name), rows[name], rtol=1e-9, err_msg=name)


def test_published_gradient_descent():
    rows = table("published_gd.csv")
    s = solve(*from_row(rows), alpha_ft=rows["alpha_ft"])
    # 14 runs at D = 5000: Student's t with 13 degrees of freedom exceeds 3.4 once in 200.
    assert (np.abs(s.mse - rows["mse_mean"]) < 3.4 * rows["mse_se"]).all()


def sampling_error(row, tau, theta, samples=80_000, seed=0):
    """Relative standard error of the mse of a fixed point on one draw of `samples` coordinates.

    The drawn equations differ from ours by means over coordinates of f, and the root by J^-1 times that.
    """
    rng = np.random.default_rng(seed)
    rho_pt, rho_ft, omega, alpha = (row[name] for name in ("rho_pt", "rho_ft", "omega", "alpha_ft"))
    inside = omega * rho_ft
    sizes = np.array([inside, rho_ft - inside, rho_pt - inside, 1 - rho_pt - rho_ft + inside]).clip(0)
    group = rng.choice(4, samples, p=sizes / sizes.sum())
    x = np.where(group < 2, rng.normal(0, rho_ft**-0.5, samples), 0)
    beta, v = np.where(group % 2 == 0, 1.0, 0.0), rng.standard_normal(samples)
    c = (1 + row["lambda_pt"]) * (row["c_pt"] + np.hypot(row["c_pt"], beta)) + row["gamma_ft"] ** 2 / 2

    def equations(log_tau, log_theta):
        tau, half = np.exp(log_tau), np.exp(log_theta) / 2
        z = x + np.sqrt(tau) * v
        t = np.minimum(np.arcsinh(np.abs(z) / c), np.abs(z) / half)
        for _ in range(30):
            t -= (c * np.sinh(t) + half * t - np.abs(z)) / (c * np.cosh(t) + half)
        slope = c * np.cosh(t)
        return np.stack(
            [slope / (slope + half) / alpha - 1, (np.copysign(c * np.sinh(t), z) - x) ** 2 / tau / alpha - 1]
        )

    at, h = np.log([tau, theta]), 1e-4
    f = equations(*at)
    jacobian = np.stack([(equations(*(at + d)) - equations(*(at - d))).mean(1) / (2 * h) for d in h * np.eye(2)], 1)
    return np.sqrt(np.diag(np.linalg.solve(jacobian, np.linalg.solve(jacobian, np.cov(f)).T) / samples))[0]


def test_published_monte_carlo_curves():
    rows = table("published_replica_mc.csv")
    s = solve(*from_row(rows), alpha_ft=rows["alpha_ft"])
    se = np.array([sampling_error(*row) for row in zip(rows, s.tau, s.theta, strict=True)])
    # Their empirical sparsities, 0.0989125 for 0.1 and so on, are those of 80,000 drawn coordinates. One draw
    # serves each curve, so that 29 rows are 5 independent curves: 3.3 standard errors are exceeded once in
    # 200 by any of 5. Rounded to the printed 6 digits.
    z = np.log(rows["mse"] / s.mse) / se
    assert np.abs(z).max() < 3.3


# --- interface ----------------------------------------------------------------------------------------


def test_broadcasting_is_a_loop():
    task = Task(0.2, [0.1, 0.15], [[0.2], [0.9], [1.0]], noise_var_ft=[[0.0], [0.3], [0.0]])
    init, alpha = Init(0.01, -0.5, [0.0, 1.0]), np.array([[[0.2]], [[1.5]]])
    s = solve(task, init, alpha_ft=alpha)
    assert s.mse.shape == (2, 3, 2)
    assert s.mse_by_group.shape == s.forgetting_by_group.shape == (2, 3, 2, 4)
    one = jax.jit(lambda *leaves: solve(Task(*leaves[:3], 1.0, 0.0, leaves[3]), Init(*leaves[4:7]), alpha_ft=leaves[7]))
    leaves = np.broadcast_arrays(task.rho_pt, task.rho_ft, task.omega, task.noise_var_ft, *vars(init).values(), alpha)
    for at in np.ndindex(s.mse.shape):
        alone = one(*(leaf[at] for leaf in leaves))
        for name, value in vars(alone).items():
            # Summation order differs between batch sizes; derived numbers are products of such sums.
            np.testing.assert_allclose(getattr(s, name)[at], value, rtol=1e-12, atol=1e-12, err_msg=name)


def random_points(count, seed):
    rng = np.random.default_rng(seed)
    rho_pt, shared, new = rng.uniform(0.05, 0.6, count), rng.uniform(0.05, 1, count), rng.uniform(0, 0.4, count)
    rho_ft = rho_pt * shared + (1 - rho_pt) * new
    return np.stack(
        [
            10 ** rng.uniform(-8, 1.5, count),
            -1 + 10 ** rng.uniform(-4, 0.3, count),
            rng.choice([0.0, 0.3, 3.0], count),
            rho_pt,
            rho_ft,
            rho_pt * shared / rho_ft,
            rng.choice([0.0, 0.1, 10.0], count),
            rng.uniform(0.01, 0.99, count),
            rng.choice([0.0, 1.0, 5.0], count),
        ],
        axis=1,
    )


def test_chunks_do_not_show():
    points = random_points(1300, seed=1)  # two whole chunks of 512 and a part
    chosen = np.r_[0, 511, 512, 1023, 1024, 1299, np.arange(5, 1300, 61)]
    grid = mse_at(points)
    alone = jnp.stack([mse_at(points[k : k + 1])[0] for k in chosen])
    np.testing.assert_allclose(grid[chosen], alone, rtol=1e-12)


def test_bisection_agrees_with_newton():
    p = random_points(40, seed=2)

    def channel(p):
        task = Task(p[3], p[4], p[5], p[8], 0.0, p[6])
        return perfect_pretraining(task, Init(p[0], p[1], p[2]), p[7])

    channels = jax.vmap(channel)(p)
    newton, other = (jax.jit(lambda ch, first=first: solve_all(ch, 40, first))(channels) for first in FIRST)
    np.testing.assert_array_equal(newton.result, Result.CONVERGED)
    np.testing.assert_array_equal(other.result, Result.CONVERGED)
    assert (other.steps > 1000).all()  # it did bisect
    # log tau and log theta, each known to the estimated error of its run; 1e-12 for roundoff.
    gap = np.abs(newton.p - other.p).max(-1)
    assert (gap < 1e-12 + 10 * (newton.error + other.error)).all()
    assert gap.max() < 1e-9


def differences(p, i, h):
    """First and second derivative of log mse along parameter i from values alone: fourth-order stencils."""
    steps = np.arange(-2, 3)
    values = np.log(mse_at(p + h * steps[:, None] * np.eye(p.size)[i]))
    return (values @ [1, -8, 0, 8, -1]) / (12 * h), (values @ [-1, 16, -30, 16, -1]) / (12 * h * h)


def log_mse(p):
    return jnp.log(mse(p))


def test_first_derivatives():
    forward, reverse = jax.jit(lambda p: (jax.jacfwd(log_mse)(p), jax.grad(log_mse)(p)))(MIDDLE)
    for i, name in enumerate(PARAMETERS):
        expected, _ = differences(MIDDLE, i, 2e-3 * MIDDLE[i])
        # Truncation (2e-3)^4 = 2e-11 and roundoff 1e-14 / 2e-3, relative to a scale of 1 / p.
        for value, mode in ((forward, "forward"), (reverse, "reverse")):
            message = f"{mode} {name}"
            np.testing.assert_allclose(value[i], expected, rtol=1e-8, atol=1e-9 / abs(MIDDLE[i]), err_msg=message)


@pytest.mark.slow  # half a minute of compilation on a busy machine
def test_second_derivatives():
    second = jax.jit(jax.hessian(log_mse))(MIDDLE)
    for i, name in enumerate(PARAMETERS):
        _, expected = differences(MIDDLE, i, 2e-3 * MIDDLE[i])
        # Roundoff 1e-14 / (2e-3)^2 = 3e-9, relative to a scale of 1 / p^2.
        np.testing.assert_allclose(second[i, i], expected, rtol=1e-6, atol=1e-7 / MIDDLE[i] ** 2, err_msg=name)
    np.testing.assert_allclose(second, second.T, rtol=1e-9, atol=1e-9)


def test_float32_is_refused():
    with jax.enable_x64(False), pytest.raises(PrecisionError, match=r"replica\.solve needs float64"):
        solve(Task(0.1, 0.1, 0.5), Init(0.1, 0.0, 0.0), alpha_ft=0.5)
    narrow = Task(jnp.float32(0.1), 0.1, 0.5)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
    with pytest.raises(PrecisionError, match=r"replica\.solve needs float64"):
        solve(narrow, Init(0.1, 0.0, 0.0), alpha_ft=0.5)


def test_pretraining_samples_must_be_known():
    with pytest.raises(ArgumentError, match="`alpha_pt` must be concrete"):
        jax.jit(lambda a: solve(Task(0.1, 0.1, 0.5), Init(0.1, 0.0, 0.0), alpha_ft=0.5, alpha_pt=a))(2.0)
    with pytest.raises(ArgumentError, match="`noise_var_pt` must be concrete for a finite `alpha_pt`"):
        jax.jit(lambda v: solve(Task(0.1, 0.1, 0.5, 1.0, v), Init(0.1, 0.0, 0.0), alpha_ft=0.5, alpha_pt=2.0))(0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(alpha_ft=0.0), r"`alpha_ft` must be finite and > 0, got 0"),
        (dict(alpha_ft=np.inf), r"`alpha_ft` must be finite and > 0, got inf"),
        (dict(alpha_ft=[0.5, np.nan]), r"`alpha_ft` must be finite and > 0, got nan"),
        (dict(alpha_ft=0.5, alpha_pt=-1.0), r"`alpha_pt` must be > 0 \(inf for perfect pretraining\), got -1"),
        (dict(alpha_ft=[0.5, 0.6, 0.7]), r"must broadcast together, got task \(2,\), init \(\), alpha_ft \(3,\)"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        solve(Task([0.1, 0.2], 0.1, 0.5), Init(0.1, 0.0, 0.0), **arguments)


def test_a_failure_raises_or_is_nan():
    # c_FT of 1e-60 lies beyond the finest quadrature rule.
    arguments = Task(0.1, 0.1, 0.5, beta_pt=0.0), Init([1e-60, 1e-3], 0.0, 0.0)
    with pytest.raises(SolverError, match=r"1 of 2 problems failed \(first at index \(0,\)\): quadrature"):
        solve(*arguments, alpha_ft=0.3)
    s = solve(*arguments, alpha_ft=0.3, throw=False)
    np.testing.assert_array_equal(s.result, [Result.QUADRATURE, Result.CONVERGED])
    np.testing.assert_array_equal(np.isnan(s.mse), [True, False])


def test_empty_grid():
    s = solve(Task(np.ones(0), 0.1, 0.5), Init(0.1, 0.0, 0.0), alpha_ft=0.3)
    assert s.mse.shape == (0,)
    assert s.mse_by_group.shape == (0, 4)


def logarithmic(low, high):
    return st.floats(np.log10(low), np.log10(high)).map(lambda e: 10.0**e)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    c_pt=logarithmic(1e-8, 30),
    above_minus_one=logarithmic(1e-4, 2),
    gamma=st.one_of(st.just(0.0), logarithmic(1e-3, 10)),
    noise=st.one_of(st.just(0.0), logarithmic(1e-6, 10)),
    rho_pt=logarithmic(0.005, 1),
    shared=st.floats(0, 1),
    new=st.floats(0, 1),
    alpha=st.floats(0.01, 2),
)
@example(1e-8, 1e-4, 0.0, 0.0, 0.005, 1.0, 0.0, 0.01)
@example(30.0, 2.0, 10.0, 10.0, 1.0, 1.0, 1.0, 0.999999)
def test_every_point_converges(c_pt, above_minus_one, gamma, noise, rho_pt, shared, new, alpha):
    rho_ft = rho_pt * shared + (1 - rho_pt) * new
    if rho_ft < 0.005:
        new, rho_ft = 0.5, rho_pt * shared + (1 - rho_pt) * 0.5
    if rho_ft < 0.005 or (alpha == 1 and noise > 0):
        return
    omega = rho_pt * shared / rho_ft
    task = Task(rho_pt, rho_ft, omega, noise_var_ft=noise)
    s = solve(task, Init(c_pt, min(above_minus_one - 1, 1.0), gamma), alpha_ft=alpha)
    assert s.result == Result.CONVERGED
    assert s.residual <= TOLERANCE
    assert np.isfinite(s.mse)
    weights = np.array([omega * rho_ft, (1 - omega) * rho_ft])
    weights = np.r_[weights, rho_pt - weights[0], 1 - rho_pt - weights[1]]  # from theory.md section 2
    # 4 eps for the weights' rounding, in units of the largest group error.
    np.testing.assert_allclose(weights @ s.mse_by_group, s.mse, rtol=1e-12, atol=4e-16 * s.mse_by_group.max())
    # The equation itself, to the accepted residual in units of its largest term.
    np.testing.assert_allclose(s.tau * alpha, noise + s.mse, rtol=0, atol=2e-11 * max(s.tau, 0))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("alpha_ft", jnp.nan), ("alpha_ft", jnp.inf), ("rho_pt", jnp.nan), ("rho_pt", 1.5), ("rho_ft", 2.0)),
        *(("omega", -0.5), ("c_pt", 0.0), ("c_pt", -1e-3), ("lambda_pt", 3.0), ("gamma_ft", -1.0)),
        ("noise_var_ft", jnp.nan),
    ],
)
def test_traced_values_out_of_range_are_nan_with_a_code(name, value):
    good = dict(
        rho_pt=0.1, rho_ft=0.1, omega=0.5, noise_var_ft=0.0, c_pt=1e-3, lambda_pt=0.0, gamma_ft=0.1, alpha_ft=0.3
    )
    solution = _traced(good | {name: value})
    assert int(solution.result) == Result.INVALID
    assert np.isnan(solution.mse)


@jax.jit
def _traced(p):
    task = Task(p["rho_pt"], p["rho_ft"], p["omega"], noise_var_ft=p["noise_var_ft"])
    return solve(task, Init(p["c_pt"], p["lambda_pt"], p["gamma_ft"]), alpha_ft=p["alpha_ft"], throw=False)


@pytest.mark.parametrize(
    ("rho_pt", "omega", "direction"), [(0.1, 1.0, (0.0, -1.0)), (0.1, 1.0, (1.0, 0.0)), (0.0, 0.0, (1.0, 0.0))]
)
def test_derivatives_where_a_group_is_empty(rho_pt, omega, direction):
    def mse(step):
        task = Task(rho_pt + step * direction[0], 0.1, omega + step * direction[1])
        return solve(task, Init(1e-3, -0.5, 0.1), alpha_ft=0.3).mse

    # One-sided, into the feasible region; third order, so that h^3 = 1e-12 leaves rounding, 1e-11 / h.
    h = 1e-4
    difference = (-11 * mse(0.0) + 18 * mse(h) - 9 * mse(2 * h) + 2 * mse(3 * h)) / (6 * h)
    np.testing.assert_allclose(jax.grad(mse)(0.0), difference, rtol=1e-5)


@pytest.mark.parametrize("omega", [0.0, 0.5, 1.0])
def test_divergence_does_not_turn_into_nan_where_a_group_is_empty(omega):
    solution = solve(Task(0.1, 0.1, omega, noise_var_ft=0.1), Init(1e-3, 0.0, 0.0), alpha_ft=1.0)
    assert int(solution.result) == Result.DIVERGES
    assert np.isinf(solution.mse)
    assert np.isinf(solution.forgetting)


def test_bad_points_do_not_end_the_queue():
    # More of them than there are lanes: every lane is done at once while good points still wait.
    alpha = jnp.where(jnp.arange(700) < 600, jnp.nan, 0.3)
    alone = solve(Task(0.1, 0.1, 0.5), Init(1e-3, 0.0, 0.1), alpha_ft=0.3)
    c_pt = jnp.where(jnp.arange(700) < 600, jnp.nan, 1e-3)

    @jax.jit
    def traced(alpha, c_pt):
        return solve(Task(0.1, 0.1, 0.5), Init(c_pt, 0.0, 0.1), alpha_ft=alpha, throw=False)

    solution = traced(alpha, c_pt)
    np.testing.assert_array_equal(solution.result, [Result.INVALID] * 600 + [Result.CONVERGED] * 100)
    np.testing.assert_allclose(solution.mse[600:], alone.mse, rtol=1e-12)
