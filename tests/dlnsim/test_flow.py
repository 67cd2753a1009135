"""The flow against the raw weights in scipy, a closed form, an independent minimiser, and its own promises.

Nearly all tests have one shape (n = 5, D = 10, six times): each new shape is four seconds of compilation.
"""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from scipy import integrate, optimize

from dlnsim import (
    ArgumentError,
    Init,
    PrecisionError,
    Result,
    SolverError,
    Weights,
    conserved,
    total_potential,
)
from dlnsim.flow import flow

EPS = np.finfo(float).eps
N, D = 5, 10
TIMES = np.array([0.3, 1.0, 3.0, 8.0, 20.0, 50.0])
MIXED = 10.0 ** np.linspace(-7, 1, D)
"""Scales of eight decades in one network."""


def problem(seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(N, D)) / np.sqrt(D)
    return X, X @ (2 * rng.normal(size=D) * (np.arange(D) < 4))


def scipy_weights(X, y, c, lam):
    """The 4 D weights themselves, moved by minus the gradient of the loss: no c, no lambda, no dual."""

    def loss(stacked):
        w_plus, w_minus, v_plus, v_minus = stacked.reshape(4, D)
        return jnp.sum((X @ (w_plus * v_plus - w_minus * v_minus) - y) ** 2) / 2

    force = jax.jit(lambda stacked: -jax.grad(loss)(stacked))
    w = np.broadcast_to(np.sqrt(c * (1 + lam) / 2), D)
    v = np.broadcast_to(np.sqrt(c * (1 - lam) / 2), D)
    path = integrate.solve_ivp(
        lambda _, stacked: np.asarray(force(stacked)),
        (0, TIMES[-1]),
        np.concatenate([w, w, v, v]),
        method="DOP853",
        t_eval=TIMES,
        rtol=1e-13,
        atol=1e-15,
    )
    return Weights(*np.moveaxis(path.y.T.reshape(-1, 4, D), 1, 0))


@pytest.mark.parametrize("lam", [0.0, -0.99, -1.0, 0.7])
@pytest.mark.parametrize("c", [1e-6, 1e-2, 1.0, MIXED], ids=["1e-6", "1e-2", "1", "mixed"])
def test_path_of_the_raw_weights(c, lam):
    X, y = problem()
    raw = scipy_weights(X, y, c, lam)
    path = flow(X, y, c, TIMES, lam=lam, rtol=1e-12)
    size = np.abs(raw.beta) + c
    # Our steps add up to tens of tolerances (see `flow`), scipy's to about 100 of its 1e-13.
    assert np.max(np.abs(path.beta - raw.beta) / size) < 3e-11
    for name in ("w_plus", "w_minus", "v_plus", "v_minus"):
        gap = np.abs(getattr(path.weights, name) - getattr(raw, name))
        assert np.max(gap / np.sqrt(size)) < 3e-11

    # Conserved: c = w+ w- + v+ v- is a difference of products as large as |beta| + c, and so is lambda c. Our
    # path has that rounding alone, eps (|beta| + c), whatever the tolerance; relative to c it is eps |beta| / c,
    # 8e-11 as measured at c = 1e-6. The raw path adds scipy's tolerance.
    for weights, error in ((path.weights, 8 * EPS), (raw, 1e-11)):
        assert np.max(np.abs(weights.c - c) / size) < error
        for imbalance in weights.imbalance:
            assert np.max(np.abs(imbalance - lam * c) / size) < error
    if np.ndim(c) == 0 and c >= 1e-2:
        # Here the rounding is below 1e-13 of c, and so the conserved numbers hold to 1e-10 of themselves.
        for weights in (path.weights, raw):
            c_back, lam_back = conserved(weights)
            np.testing.assert_allclose(c_back, c, rtol=1e-10)
            np.testing.assert_allclose(lam_back, lam, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("scale", [1e-9, 1e-2, 1e5])
def test_recorded_loss_and_residual(scale):
    """Homogeneity: y -> s y, c -> s c, t -> t / s gives beta -> s beta; the tolerances follow."""
    X, y = problem()
    unit = flow(X, y, 0.1, TIMES)
    scaled = flow(X, scale * y, scale * 0.1, TIMES / scale)
    # s is not a power of two, so rounding and the steps differ: the error of two paths, tens of rtol = 1e-10.
    np.testing.assert_allclose(scaled.beta, scale * unit.beta, rtol=2e-9, atol=2e-10 * scale)
    gap = np.asarray(unit.beta) @ X.T - y
    np.testing.assert_allclose(unit.loss, np.sum(gap**2, axis=1) / 2, rtol=1e-12)
    np.testing.assert_allclose(unit.residual, np.linalg.norm(gap, axis=1) / np.linalg.norm(y), rtol=1e-12)
    # Gradient flow: the loss never rises. Strictly, while above rounding.
    assert (np.diff(unit.loss) < 0).all()
    assert (np.asarray(unit.loss) < np.sum(y**2) / 2).all()


def riccati(t, c, x, y):
    """One coordinate, b = y / x: z = exp(u) obeys z' = -x^2 c (z - z+)(z - z-), c z+- = b +- hypot(b, c)."""
    with mpmath.workdps(40):
        t, c, x, y = (mpmath.mpf(float(value)) for value in (t, c, x, y))
        b, root = y / x, mpmath.sqrt((y / x) ** 2 + c**2)
        upper, lower = (b + root) / c, (b - root) / c
        q = (1 - upper) / (1 - lower) * mpmath.exp(-2 * root * x**2 * t)
        z = (upper - q * lower) / (1 - q)
        return float(c * (z - 1 / z) / 2)


@pytest.mark.parametrize("c", [1e-12, 1e-8, 1e-3, 1.0, 1e4])
def test_closed_form_of_one_coordinate(c):
    x, y = 0.7, -1.3
    X, labels = np.zeros((N, D)), np.zeros(N)
    X[0, 0], labels[0] = x, y
    # From the lag (u growing at rate 2 x y) through the sigmoid to the end, for every c.
    lag = np.log1p(1 / c)
    times = np.array([1e-3, 0.1, 0.3, lag / 2 + 0.5, lag + 2, 2 * lag + 20]) / (2 * abs(x * y) + 2 * x**2 * c)
    exact = np.array([riccati(t, c, x, y) for t in times])
    for rtol in (1e-8, 1e-12):
        path = flow(X, labels, c, times, rtol=rtol)
        # Errors are largest on the sigmoid, where those of all steps of the lag appear as a delay: 20 to 41
        # tolerances at c = 1e-8 to 1e-12. Relative to beta, or to c or the end where beta is smaller yet.
        size = np.maximum(np.abs(exact), min(c, abs(y / x)))
        assert np.max(np.abs(path.beta[:, 0] - exact) / size) < 60 * rtol
    # The sigmoid was crossed: the slowest, c = 1, has decayed by exp(-2 sqrt(b^2 + c^2) x^2 t) < 1e-6.
    assert path.residual[-1] < 1e-6
    np.testing.assert_array_equal(path.beta[:, 1:], 0)


def test_tolerance_is_met_and_steps_follow_the_order():
    """Fifth order: a tolerance 1e-4 times as small costs about 10^(4/5) = 6.3 times the steps, and pays."""
    X, y = problem()
    paths = {rtol: flow(X, y, 1e-3, TIMES, rtol=rtol) for rtol in (1e-12, 1e-10, 1e-6)}
    ratio = int(paths[1e-10].steps) / int(paths[1e-6].steps)
    assert 4 < ratio < 8
    size = np.abs(paths[1e-12].beta) + 1e-3
    errors = {rtol: np.max(np.abs(paths[rtol].beta - paths[1e-12].beta) / size) for rtol in (1e-10, 1e-6)}
    assert errors[1e-10] < 1e-9
    assert 1e-9 < errors[1e-6] < 1e-5


def test_explicit_solver_agrees():
    X, y = problem()
    implicit = flow(X, y, 1e-3, TIMES, rtol=1e-11)
    explicit = flow(X, y, 1e-3, TIMES, rtol=1e-11, solver=diffrax.Tsit5())
    size = np.abs(implicit.beta) + 1e-3
    assert np.max(np.abs(implicit.beta - explicit.beta) / size) < 2e-10  # ten tolerances each


def minimiser(X, y, c):
    """The minimum of the potential with X beta = y: scipy on the convex dual of theory.md section 1."""
    mu = np.zeros(N)
    # Continuation from a c so large that the problem is quadratic.
    for scale in c * 10.0 ** np.arange(6, -0.1, -0.5)[:, None]:

        def dual(mu, scale=scale):
            return np.sum(scale * np.cosh(mu @ X)) - mu @ y

        def slope(mu, scale=scale):
            return X @ (scale * np.sinh(mu @ X)) - y

        def curvature(mu, scale=scale):
            return (X * scale * np.cosh(mu @ X)) @ X.T

        with np.errstate(over="ignore", invalid="ignore"):  # trial steps that scipy then rejects
            mu = optimize.minimize(dual, mu, jac=slope, hess=curvature, method="trust-exact").x
    mu = optimize.root(slope, mu, jac=curvature, options={"xtol": 1e-15}).x
    beta = c * np.sinh(mu @ X)
    assert np.linalg.norm(X @ beta - y) < 1e-14 * np.linalg.norm(y)
    return beta


REGIMES = {
    "I": Init(1e-3, -0.999999, 1e-6),
    "II": Init(1e-3, 0.0, 0.0),
    "III": Init(1e-3, 0.0, 10.0),
    "IV": Init(1e-3, -0.99, 0.0),
}


@pytest.mark.parametrize("regime", REGIMES)
def test_end_point_minimises_the_potential(regime):
    X, y = problem(3)
    c = np.asarray(REGIMES[regime].c_ft(np.where(np.arange(D) % 3 == 0, 1.0, 0.0)))
    expected = minimiser(X, y, c)
    late = np.geomspace(1e-2, 1e12, 6)
    end = flow(X, y, c, late)
    size = np.abs(expected).max()
    # The fixed point of an L-stable method is that of the flow, to rounding times the condition number of
    # X diag(sqrt(c^2 + beta^2)) X^T, at most 300 here; the tolerance of the path does not enter.
    assert np.max(np.abs(end.beta[-1] - expected)) < 1e-13 * size
    # Stopped at a residual: an error of that size times sqrt(condition number).
    stopped = flow(X, y, c, late, residual_tol=1e-9)
    assert stopped.result == Result.CONVERGED
    assert stopped.residual[-1] <= 1e-9
    assert np.max(np.abs(stopped.beta[-1] - expected)) < 2e-8 * size
    # A minimum, not only a stationary point of someone's dual: every feasible step away raises Q.
    least = total_potential(end.beta[-1], c)
    null = np.linalg.svd(X)[2][N:]
    for direction in np.vstack([null, -null]):
        assert total_potential(np.asarray(end.beta[-1]) + 1e-3 * size * direction, c) > least


def test_stop_holds_the_state_and_says_when():
    X, y = problem()
    late = np.array([0.0, 1.0, 10.0, 1e4, 1e6, 1e8])
    tol = 1e-3
    stopped = flow(X, y, 0.01, late, residual_tol=tol)
    assert stopped.result == Result.CONVERGED
    end = float(stopped.stop_time)
    assert 10.0 < end < 1e4
    # The first saved times were before the stop, untouched by it; the later ones are all the stopped state.
    running = flow(X, y, 0.01, late)
    np.testing.assert_array_equal(stopped.beta[0], 0)
    np.testing.assert_allclose(stopped.beta[1:3], running.beta[1:3], rtol=1e-12)
    np.testing.assert_array_equal(stopped.beta[3:], np.broadcast_to(stopped.beta[3], (3, D)))
    # The state is that of the flow at `stop_time`, and the residual was above `tol` a step (say 5 %) before.
    there = flow(X, y, 0.01, [0.0, 1.0, 10.0, 0.95 * end, end, 2 * end])
    np.testing.assert_allclose(there.beta[4], stopped.beta[3], rtol=1e-8)
    assert stopped.residual[-1] <= tol < there.residual[3]
    assert running.result == Result.STOPPED
    assert running.stop_time == 1e8
    # The times themselves are kept as requested.
    np.testing.assert_array_equal(stopped.times, late)


def test_small_initialisation_does_not_stop_at_the_start():
    """At c = 1e-12 the predictor rests for a long while, which a steady-state event takes for the end."""
    X, y = problem()
    path = flow(X, y, 1e-12, np.array([0.0, 0.1, 1.0, 1e2, 1e4, 1e8]), residual_tol=1e-6)
    assert path.residual[1] > 1 - 1e-10
    assert path.result == Result.CONVERGED
    assert path.residual[-1] <= 1e-6


def test_stuck_and_partly_dead_networks():
    X, y = problem()
    stuck = flow(X, y, 0.0, TIMES)
    assert stuck.result == Result.STUCK
    np.testing.assert_array_equal(stuck.beta, 0)
    np.testing.assert_array_equal(stuck.residual, 1)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(stuck.weights))
    # Dead coordinates of a live network are as if they were not there, however far their u runs.
    c = np.where(np.arange(D) < 6, 0.1, 0.0)
    late = np.geomspace(1.0, 1e9, 6)
    part, rest = flow(X, y, c, late), flow(np.where(c > 0, X, 0), y, 0.1, late)
    assert part.result == Result.STOPPED
    np.testing.assert_array_equal(part.beta[:, 6:], 0)
    np.testing.assert_allclose(part.beta[:, :6], rest.beta[:, :6], rtol=1e-8)
    assert (part.residual < 1e-8).any()
    # No labels: the origin is the minimum.
    rest = flow(X, np.zeros(N), 0.1, TIMES)
    assert rest.result == Result.CONVERGED
    np.testing.assert_array_equal(rest.beta, 0)


def test_least_squares_where_no_beta_fits():
    """Five samples of three coordinates: the flow ends at least squares, and that is no failure."""
    X, _ = problem()
    X[:, 3:] = 0
    y = np.array([1.0, -2.0, 0.5, 3.0, 1.5])
    end = flow(X, y, 0.5, np.geomspace(1.0, 1e4, 6), residual_tol=1e-8)
    assert end.result == Result.STOPPED
    # An error of the path of tens of tolerances 1e-10.
    np.testing.assert_allclose(end.beta[-1, :3], np.linalg.lstsq(X[:, :3], y)[0], rtol=5e-9)


def test_failures_are_nan_and_raise():
    X, y = problem()
    with pytest.raises(SolverError, match=r"flow: 1 of 1 problems failed: max_steps: .* raise `max_steps`"):
        flow(X, y, 1e-3, TIMES, max_steps=4)
    failed = flow(X, y, 1e-3, TIMES, max_steps=4, throw=False)
    assert failed.result == Result.MAX_STEPS
    assert failed.steps == 4
    numbers = (failed.mu, failed.beta, failed.weights, failed.loss, failed.residual, failed.stop_time)
    assert all(jnp.isnan(leaf).all() for leaf in jax.tree.leaves(numbers))
    overflow = flow(X, 1e200 * y, 1e-3, TIMES, throw=False)
    assert overflow.result == Result.NONFINITE
    assert jnp.isnan(overflow.beta).all()
    with pytest.raises(SolverError, match="nonfinite"):
        flow(X, 1e200 * y, 1e-3, TIMES)


def test_one_bad_problem_does_not_spoil_a_batch():
    X, y = problem()
    labels = jnp.stack([y, jnp.full(N, jnp.nan), 2 * y, y])
    scales = jnp.array([0.1, 0.1, 1.0, 0.0])
    batch = eqx.filter_jit(jax.vmap(lambda y, c: flow(X, y, c, TIMES)))(labels, scales)
    np.testing.assert_array_equal(batch.result, [Result.STOPPED, Result.NONFINITE, Result.STOPPED, Result.STUCK])
    assert jnp.isnan(batch.beta[1]).all()
    assert jnp.isnan(batch.weights.w_plus[1]).all()
    for index, factor, c in ((0, 1, 0.1), (2, 2, 1.0)):
        # vmap changes the order of sums, and so the steps: the error of the path, ten tolerances.
        alone = flow(X, factor * y, c, TIMES)
        np.testing.assert_allclose(batch.beta[index], alone.beta, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"times": []}, r"`times` must be a list of at least one time, got shape \(0,\)"),
        ({"times": 3.0}, r"`times` must be a list of at least one time, got shape \(\)"),
        ({"times": [1.0, 1.0]}, "`times` must be strictly increasing, got 1 after 1 at index 1"),
        ({"times": [0.0, 3.0, 2.0]}, "`times` must be strictly increasing, got 2 after 3 at index 2"),
        ({"times": [-1.0, 1.0]}, "`times` must be finite and >= 0, got -1"),
        ({"times": [1.0, np.inf]}, "`times` must be finite and >= 0, got inf"),
        ({"times": [np.nan]}, "`times` must be finite and >= 0, got nan"),
        ({"X": np.ones(5)}, r"`X` must be a matrix with one row a sample, shape \(n, D\), got shape \(5,\)"),
        ({"X": np.ones((0, 3)), "y": np.ones(0)}, r"`X` must be a matrix .* got shape \(0, 3\)"),
        ({"X": np.full((5, 10), np.nan)}, "`X` must be finite, got nan"),
        ({"y": np.ones(4)}, r"`y` must have one label a row of X, shape \(5,\), got shape \(4,\)"),
        ({"y": np.full(5, np.inf)}, "`y` must be finite, got inf"),
        ({"y": "five"}, "expected a number or an array of numbers, got 'five'"),
        ({"c": -1.0}, "`c` must be finite and >= 0, got -1"),
        ({"c": np.ones(3)}, r"`c` must be a scalar or have shape \(10,\), got shape \(3,\)"),
        ({"lam": 1.5}, r"`lam` must be relative, in \[-1, 1\], got 1.5"),
        ({"lam": np.ones((2, 10))}, r"`lam` must be a scalar or have shape \(10,\), got shape \(2, 10\)"),
        ({"rtol": 0.0}, "`rtol` must be finite and > 0, got 0"),
        ({"atol": -1e-9}, "`atol` must be finite and > 0, got -1e-09"),
        ({"residual_tol": -1.0}, "`residual_tol` must be finite and >= 0, got -1"),
        ({"max_steps": 0}, "`max_steps` must be >= 1, got 0"),
    ],
)
def test_messages(change, message):
    X, y = problem()
    with pytest.raises(ArgumentError, match=message):
        flow(**({"X": X, "y": y, "c": 0.1, "times": TIMES} | change))


def test_single_precision_is_refused():
    X, y = problem()
    with pytest.raises(PrecisionError, match="flow needs float64"):
        flow(X.astype(np.float32), y, 0.1, TIMES)
