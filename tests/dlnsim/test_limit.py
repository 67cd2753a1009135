"""End points of the flow against linear programming, weighted least squares and 50-digit arithmetic."""

import functools

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from dlnsim.errors import ArgumentError, PrecisionError, SolverError
from dlnsim.limit import LimitSolution, limit, solve_dual
from dlnsim.result import Result

DECADES = [1e-14, 1e-10, 1e-6, 1e-3, 1.0, 1e4]


def problem(n, dim, seed=0, active=None):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, dim)) / np.sqrt(dim)
    beta = rng.standard_normal(dim)
    if active is not None:
        beta[active:] = 0
    return X, X @ beta


def weighted_min_norm(X, y, c):
    """Argmin of sum beta^2 / c subject to X beta = y, by SVD."""
    root = np.sqrt(c)
    return root * (np.linalg.pinv(X * root) @ y)


def exact(X, y, c, digits=60):
    """Solution of X c sinh(X^T mu) = y by continuation in the targets and Newton, in `digits` digits."""
    with mpmath.workdps(digits):
        A, b, scale = mpmath.matrix(X.tolist()), mpmath.matrix(y.tolist()), [mpmath.mpf(ci) for ci in c]
        n, dim = X.shape
        # Newton on the dual from mu = 0 with the step log(1 + d) / d, which is safe for this function.
        mu = mpmath.zeros(n, 1)
        for _ in range(300):
            u = A.T * mu
            r = b - A * mpmath.matrix([scale[i] * mpmath.sinh(u[i]) for i in range(dim)])
            w = mpmath.diag([scale[i] * mpmath.cosh(u[i]) for i in range(dim)])
            step = mpmath.lu_solve(A * w * A.T, r)
            size = max(abs(x) for x in A.T * step)
            mu += step * (mpmath.log1p(size) / size if size > mpmath.mpf("1e-3") else 1)
            if size < mpmath.mpf(10) ** (-digits // 2):
                u = A.T * mu
                return np.array([float(scale[i] * mpmath.sinh(u[i])) for i in range(dim)])
        raise AssertionError("the reference did not converge")


def row_space_error(X, u):
    """How far u is from the row space of X, relative."""
    Q = np.linalg.qr(X.T)[0]
    return np.abs(u - Q @ (Q.T @ u)).max() / np.abs(u).max()


def check(solution, X, y, c, tol=1e-12):
    """X beta = y, beta = c sinh(X^T mu): the conditions that make a point the end of the flow."""
    beta, u = np.asarray(solution.beta), X.T @ np.asarray(solution.mu)
    assert int(solution.result) == Result.CONVERGED
    assert float(solution.residual) <= tol
    # u is recomputed from mu: n products of size |X| |mu| are rounded, and beta / c = sinh(u) multiplies the
    # error by max(1, 1 / |u|).
    rounding = 20 * X.shape[0] * 2.3e-16 * (np.abs(X.T) @ np.abs(solution.mu)).max()
    expected = np.arcsinh(beta / c)
    np.testing.assert_allclose(u, expected, rtol=1e-13, atol=rounding)


# ---- against independent numbers


@pytest.mark.parametrize("c", [[1e-14] * 4, [1e-3] * 4, [1.0] * 4, [1e4] * 4, [1e-14, 1e4, 1e-3, 1.0]])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_agrees_with_50_digits(seed, c):
    X, y = problem(2, 4, seed)
    c = np.array(c)
    want = exact(X, y, c)
    got = np.asarray(limit(X, y, c).beta)
    # A residual of 1e-14 moves beta by 1e-14 / sigma_min(X), and these X have sigma_min > 1e-2; coordinates
    # far below the largest are fixed through u, which is at most about 40 and rounded to 1e-14.
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12 * np.abs(want).max())


def basis_pursuit(X, y):
    lp = linprog(np.ones(2 * X.shape[1]), A_eq=np.hstack([X, -X]), b_eq=y)
    return lp.x[: X.shape[1]] - lp.x[X.shape[1] :]


@pytest.mark.parametrize("shape", [(10, 30), (20, 30)])
@pytest.mark.parametrize("seed", range(5))
def test_tiny_scale_has_the_least_l1_norm_up_to_entropy(shape, seed):
    X, y = problem(*shape, seed)
    want = basis_pursuit(X, y)
    got, c = np.asarray(limit(X, y, 1e-14).beta), 1e-14

    def entropy(beta):
        size = np.abs(beta[beta != 0])
        return (size * np.log(size)).sum()

    # q(x) = (|x| (log(2 / c) - 1) + |x| log |x|) / 2 + O(c), and ours has the least Q: the l1 norm can exceed
    # the minimum by the difference in entropy over 31.9, a few per mille. The approach to the l1 solution is
    # logarithmic in c.
    excess = np.abs(got).sum() - np.abs(want).sum()
    # 1e-9 is the tolerance of the linear program.
    assert excess >= -1e-9
    assert excess <= (entropy(want) - entropy(got)) / (np.log(2 / c) - 1) + 1e-9


def test_tiny_scale_recovers_a_sparse_teacher():
    X, y = problem(40, 100, 3, active=4)
    want = basis_pursuit(X, y)
    error = [np.abs(np.asarray(limit(X, y, c).beta) - want).max() for c in (1e-14, 1e-10)]
    # Off the support |beta| ~ c^s with the slack s of the dual constraint, here s = 0.57: 1e-8 at c = 1e-14,
    # 2e-6 at 1e-10. X beta = y passes that on to the support, amplified by about 2.
    assert error[0] < 5e-8
    assert 50 < error[1] / error[0] < 1000


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_large_scale_is_weighted_least_norm(spread):
    X, y = problem(10, 30)
    c = 1e4 * 10 ** (spread * np.random.default_rng(1).random(30))
    want = weighted_min_norm(X, y, c)
    # q = x^2 / (4 c) (1 - x^2 / (12 c^2) + ...): the correction is (1 / 1e4)^2 / 6 relative.
    np.testing.assert_allclose(limit(X, y, c).beta, want, rtol=1e-7, atol=1e-7 * np.abs(want).max())


# ---- decades and shapes


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    shape=st.sampled_from([(1, 1), (1, 12), (5, 5), (5, 12), (20, 30), (29, 30)]),
    seed=st.integers(0, 10**6),
    log_c=st.floats(-14, 4),
    kind=st.sampled_from(["scalar", "mixed", "extremes"]),
    log_y=st.floats(-6, 6),
    active=st.sampled_from([1, 5, None]),
)
def test_any_scale_converges(shape, seed, log_c, kind, log_y, active):
    n, dim = shape
    X, y = problem(n, dim, seed, active)
    y = y * 10**log_y
    rng = np.random.default_rng(seed)
    c = {
        "scalar": 10**log_c,
        "mixed": 10 ** rng.uniform(-14, 4, dim),
        "extremes": np.where(rng.random(dim) < 0.5, 1e-14, 1e4),
    }[kind]
    solution = limit(X, y, c)
    assert float(solution.residual) <= 1e-12
    # The same in the user's rows; |X beta| is rounded with the largest |X_ij beta_j|.
    floor = 1e-15 * dim * (np.abs(X) @ np.abs(solution.beta)).max() / np.linalg.norm(y)
    assert float(solution.misfit) <= 5e-12 + floor
    u = np.arcsinh(np.asarray(solution.beta) / c)
    # 1e-13 of the largest dual variable, amplified by the condition of Q, is 1e-11.
    if n < dim:
        assert row_space_error(X, u) < 1e-11


@pytest.mark.parametrize("c", DECADES)
@pytest.mark.parametrize("active", [1, 4])
def test_more_samples_than_the_teacher_needs(c, active):
    X, y = problem(40, 100, 5, active)
    check(limit(X, y, c), X, y, c)


def test_correlated_columns():
    X, y = problem(20, 30)
    X = X + 3 * np.random.default_rng(1).standard_normal((20, 1))
    for c in DECADES:
        check(limit(X, y, c), X, y, c)


@pytest.mark.slow
def test_nearly_singular_weights():
    X, y = problem(900, 2000, 0, 5)
    solution = limit(X, y, 1e-14)
    assert float(solution.residual) <= 1e-12
    assert float(solution.misfit) <= 1e-12


# ---- edge cases


@pytest.mark.parametrize("c", [1e-14, 1e-3, 1e4])
def test_square_design_has_one_solution(c):
    X, y = problem(5, 5, 4)
    np.testing.assert_allclose(limit(X, y, c).beta, np.linalg.solve(X, y), rtol=1e-9)


@pytest.mark.parametrize("c", [1e-14, 1e-3, 1e4])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_more_samples_than_coordinates(c, noise):
    X, y = problem(40, 30, 2)
    y = y + noise * np.random.default_rng(7).standard_normal(40)
    solution = limit(X, y, c)
    want = np.linalg.lstsq(X, y)[0]
    np.testing.assert_allclose(solution.beta, want, rtol=1e-10)
    assert float(solution.residual) <= 1e-12
    np.testing.assert_allclose(
        solution.misfit, np.linalg.norm(X @ want - y) / np.linalg.norm(y), rtol=1e-10, atol=1e-13
    )


@pytest.mark.parametrize("c", [1e-10, 1e-2, 1e4])
@pytest.mark.parametrize("shape", [(10, 30), (40, 30)])
def test_rank_deficient_projects(c, shape):
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((shape[0], 6)), rng.standard_normal((6, 30))
    X, y = left @ right, rng.standard_normal(shape[0])
    solution = limit(X, y, c)
    # The same problem in six independent equations.
    reduced = limit(right, np.linalg.lstsq(left, y)[0], c)
    np.testing.assert_allclose(solution.beta, reduced.beta, rtol=1e-9, atol=1e-10)
    best = np.linalg.norm(X @ np.linalg.pinv(X) @ y - y) / np.linalg.norm(y)
    np.testing.assert_allclose(solution.misfit, best, rtol=1e-10)
    assert float(solution.residual) <= 1e-12
    np.testing.assert_allclose(X.T @ solution.mu, np.arcsinh(solution.beta / c), atol=1e-10)


@pytest.mark.parametrize("gap", [0.0, 1.0])
@pytest.mark.parametrize("c", [1e-10, 1e-3, 1e4])
def test_duplicated_rows(gap, c):
    X, y = problem(10, 30)
    X[-3:], y[-3:] = X[:3], y[:3] + gap
    got = limit(X, y, c)
    # Contradicting copies: least squares takes their mean.
    want = np.r_[y[:3] + gap / 2, y[3:7], y[:3] + gap / 2]
    np.testing.assert_allclose(X @ got.beta, want, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(got.misfit, np.linalg.norm(want - y) / np.linalg.norm(y), rtol=1e-10, atol=1e-12)
    assert row_space_error(X[:7], np.arcsinh(np.asarray(got.beta) / c)) < 1e-11


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_row_of_zeros(value):
    X, y = problem(10, 30)
    X[4], y[4] = 0, value
    got = limit(X, y, 1e-3)
    y[4] = 0
    np.testing.assert_allclose(X @ got.beta, y, rtol=1e-11, atol=1e-12)
    assert row_space_error(np.delete(X, 4, 0), np.arcsinh(np.asarray(got.beta) / 1e-3)) < 1e-11


def test_zero_targets_and_zero_design():
    X, y = problem(5, 12)
    for got in (limit(X, 0 * y, 1.0), limit(0 * X, y, 1.0), limit(X, 0 * y, 0.0)):
        assert int(got.result) == Result.CONVERGED
        assert float(got.residual) == 0
        np.testing.assert_array_equal(got.beta, np.zeros(12))
    assert float(limit(0 * X, y, 1.0).misfit) == 1


def test_targets_outside_the_range_of_the_design():
    X, y = np.ones((5, 1)) * problem(5, 12)[0][0], np.array([1.0, -1.0, 2.0, -2.0, 0.0])
    got = limit(X, y, 0.1)
    np.testing.assert_array_equal(got.beta, np.zeros(12))
    assert int(got.result) == Result.CONVERGED
    assert float(got.misfit) == 1


def test_no_scale_is_stuck():
    X, y = problem(5, 12)
    got = limit(X, y, 0.0)
    assert int(got.result) == Result.STUCK
    np.testing.assert_array_equal(got.beta, np.zeros(12))
    assert float(got.residual) == 1


@pytest.mark.parametrize("moving", [20, 3])
def test_some_coordinates_without_scale(moving):
    # With 20 the others fit; with 3 of them against 10 targets they do least squares.
    X, y = problem(10, 30)
    c = np.where(np.arange(30) < moving, 1e-3, 0.0)
    got = limit(X, y, c)
    beta, part = np.asarray(got.beta), X[:, :moving]
    np.testing.assert_array_equal(beta[moving:], 0.0)
    assert float(got.residual) <= 1e-12
    np.testing.assert_allclose(part @ beta[:moving], part @ np.linalg.lstsq(part, y)[0], rtol=1e-10, atol=1e-12)
    if moving > 10:
        assert row_space_error(part, np.arcsinh(beta[:moving] / 1e-3)) < 1e-11


@pytest.mark.parametrize(("size_x", "size_y"), [(1e-150, 1e-150), (1e150, 1e150), (1e-100, 1.0), (1.0, 1e-150)])
@pytest.mark.parametrize("c", [1e-14, 1e-3, 1e4])
def test_badly_scaled_data(size_x, size_y, c):
    X, y = problem(5, 12)
    got = limit(size_x * X, size_y * y, c)
    assert float(got.residual) <= 1e-12
    assert float(got.misfit) <= 1e-12
    # The problem is invariant under X, y, c -> a X, b y, (b / a) c up to the unit of beta.
    if size_x == size_y:
        np.testing.assert_allclose(got.beta, limit(X, y, c).beta, rtol=1e-10, atol=1e-12)


def test_badly_scaled_rows():
    X, y = problem(5, 12)
    rows = 10.0 ** np.array([-150, -3, 0, 7, 150])
    got = limit(rows[:, None] * X, rows * y, 1e-3)
    np.testing.assert_allclose(got.beta, limit(X, y, 1e-3).beta, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_not_finite(value):
    X, y = problem(5, 12)
    bad_x, bad_y = X.copy(), y.copy()
    bad_x[1, 2] = bad_y[1] = value
    for args in ((bad_x, y), (X, bad_y)):
        got = limit(*args, 1.0, throw=False)
        assert int(got.result) == Result.NONFINITE
        assert np.isnan(got.beta).all()
        assert np.isnan(got.mu).all()
        with pytest.raises(SolverError, match="rescale the data"):
            limit(*args, 1.0)


def test_out_of_the_range_of_floats():
    X, y = problem(5, 12)
    got = limit(1e-200 * X, 1e200 * y, 1.0, throw=False)
    assert int(got.result) == Result.NONFINITE


def test_step_limit():
    X, y = problem(20, 30)
    got = limit(X, y, 1e-14, max_steps=1, throw=False)
    assert int(got.result) == Result.MAX_STEPS
    assert int(got.steps) == 1
    assert np.isnan(got.beta).all()
    with pytest.raises(SolverError, match=r"^limit: 1 of 1 problems failed: max_steps: [^\n]*$"):
        limit(X, y, 1e-14, max_steps=1)


def test_roundoff_above_the_tolerance_is_not_converged():
    X, y = problem(20, 30)
    assert int(limit(X, y, 1e-6, tol=1e-18, throw=False).result) == Result.MAX_STEPS


# ---- batches, transformations, arguments


def test_batch_equals_single_problems():
    xs, ys = zip(*(problem(5, 12, seed) for seed in range(3)), strict=True)
    X, y = np.stack(xs), np.stack(ys)
    c = 10.0 ** np.linspace(-14, 4, 2 * 12).reshape(2, 1, 12)
    batch = limit(X, y, c)
    assert batch.beta.shape == (2, 3, 12)
    assert batch.mu.shape == (2, 3, 5)
    assert batch.residual.shape == batch.misfit.shape == batch.steps.shape == batch.result.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            one = limit(X[j], y[j], c[i, 0])
            np.testing.assert_allclose(batch.beta[i, j], one.beta, rtol=1e-10, atol=1e-13)
    column = limit(X[0], y[0], np.array([[1e-6], [1.0]]))
    np.testing.assert_allclose(column.beta[1], limit(X[0], y[0], 1.0).beta, rtol=1e-10, atol=1e-13)


def test_one_failure_leaves_the_others_alone():
    X, y = problem(5, 12)
    bad = np.stack([y, np.full(5, np.nan), 2 * y])
    got = limit(X, bad, 1e-3, throw=False)
    np.testing.assert_array_equal(got.result, [Result.CONVERGED, Result.NONFINITE, Result.CONVERGED])
    assert np.isfinite(np.asarray(got.beta)[[0, 2]]).all()
    with pytest.raises(SolverError, match=r"1 of 3 problems failed \(first at index \(1,\)\): nonfinite"):
        limit(X, bad, 1e-3)


def test_core_and_limit_under_jit_and_vmap():
    X, y = problem(5, 12)
    scales = jnp.array([1e-14, 1e-3, 1e4])
    want = limit(X, y, scales[:, None])
    core = jax.jit(jax.vmap(lambda c: solve_dual(jnp.asarray(X), jnp.asarray(y), c[None])))(scales)
    whole = jax.jit(functools.partial(limit, X, y))(scales[:, None])
    for got in (core, whole):
        assert isinstance(got, LimitSolution)
        np.testing.assert_allclose(got.beta, want.beta, rtol=1e-10, atol=1e-13)
        np.testing.assert_array_equal(got.result, Result.CONVERGED)


@pytest.mark.parametrize("shape", [(5, 12), (12, 5)])
def test_core_does_not_accept_rank_deficient_designs_silently(shape):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((shape[0], 3)) @ rng.standard_normal((3, shape[1]))
    got = solve_dual(jnp.asarray(X), jnp.asarray(rng.standard_normal(shape[0])), jnp.ones(1))
    assert int(got.result) == Result.MAX_STEPS
    assert np.isnan(got.beta).all()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((np.ones(3), np.ones(3), 1.0), r"`X` must have shape \(\.\.\., n, D\)"),
        ((np.ones((0, 3)), np.ones(0), 1.0), "without empty axes"),
        ((np.ones((2, 3)), np.ones(3), 1.0), r"`y` must have shape \(\.\.\., n\) with n = 2"),
        ((np.ones((2, 3)), 1.0, 1.0), r"`y` must have shape"),
        ((np.ones((2, 3)), np.ones(2), np.ones(2)), r"`c` must be a scalar or have shape .* D = 3"),
        ((np.ones((4, 2, 3)), np.ones((5, 2)), 1.0), "must broadcast"),
        ((np.ones((2, 3)), np.ones(2), -1.0), "`c` must be finite and >= 0, got -1"),
        ((np.ones((2, 3)), np.ones(2), np.nan), "`c` must be finite and >= 0, got nan"),
        ((np.ones((2, 3)), np.ones(2), np.inf), "`c` must be finite and >= 0, got inf"),
        (("a", np.ones(2), 1.0), "expected a number"),
    ],
)
def test_bad_arguments(args, message):
    with pytest.raises(ArgumentError, match=message):
        limit(*args)


@pytest.mark.parametrize("options", [{"tol": 0.0}, {"tol": np.nan}, {"max_steps": 0}])
def test_bad_options(options):
    (name,) = options
    with pytest.raises(ArgumentError, match=f"`{name}` must be"):
        limit(np.ones((1, 2)), np.ones(1), 1.0, **options)


def test_single_precision_is_refused():
    with pytest.raises(PrecisionError, match="limit needs float64"):
        limit(np.ones((1, 2), np.float32), np.ones(1), 1.0)
