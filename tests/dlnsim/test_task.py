"""Tasks: the arithmetic of supports against hand numbers, both parametrisations, and every message."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlnsim import GROUPS, ArgumentError, Task

EPS = np.finfo(float).eps


def test_groups_by_hand():
    task = Task(rho_pt=0.4, rho_ft=0.2, omega=0.75, beta_pt=3.0)
    assert GROUPS == ("overlap", "new", "pt_only", "none")
    # overlap 0.75 * 0.2, new 0.25 * 0.2, PT only 0.4 - 0.15, none 1 - 0.4 - 0.05.
    np.testing.assert_allclose(task.group_weights, [0.15, 0.05, 0.25, 0.55], rtol=4 * EPS)
    np.testing.assert_allclose(task.group_var_ft, [5, 5, 0, 0], rtol=2 * EPS)
    np.testing.assert_array_equal(task.group_beta_pt, [3, 0, 3, 0])
    # Unit signal power of FT, rho_PT beta_PT^2 of PT.
    np.testing.assert_allclose(task.group_weights @ task.group_var_ft, 1, rtol=4 * EPS)
    np.testing.assert_allclose(task.group_weights @ task.group_beta_pt**2, 0.4 * 9, rtol=4 * EPS)


@pytest.mark.parametrize(
    ("fields", "weights"),
    [
        ((0.3, 0.3, 1.0), [0.3, 0, 0, 0.7]),  # the same support
        ((0.3, 0.7, 0.0), [0, 0.7, 0.3, 0]),  # complements
        ((0.0, 0.5, 0.0), [0, 0.5, 0, 0.5]),  # nothing was pretrained
        ((1.0, 0.5, 1.0), [0.5, 0, 0.5, 0]),  # dense PT
        ((1.0, 1.0, 1.0), [1, 0, 0, 0]),
    ],
)
def test_degenerate_supports(fields, weights):
    groups = Task(*fields).group_weights
    np.testing.assert_allclose(groups, weights, rtol=2 * EPS, atol=0)  # empty groups are exactly empty


def test_rounding_does_not_make_a_group_negative():
    # 0.1 * 3 = 0.30000000000000004 > 0.3 in floating point.
    task = Task(rho_pt=0.3, rho_ft=0.1 * 3, omega=1.0)
    assert task.group_weights[2] == 0


@settings(max_examples=300, deadline=None)
@given(rho_pt=st.floats(0, 1), shared=st.floats(0, 1), new=st.floats(0, 1))
def test_from_conditional_round_trip(rho_pt, shared, new):
    if rho_pt * shared + (1 - rho_pt) * new < 1e-300:
        with pytest.raises(ArgumentError, match="such that the FT support is not empty"):
            Task.from_conditional(rho_pt, 0.0, 0.0)
        return
    task = Task.from_conditional(rho_pt, shared, new)
    expected = [rho_pt * shared, (1 - rho_pt) * new, rho_pt * (1 - shared), (1 - rho_pt) * (1 - new)]
    # Four groups of products, each rounded on the scale of 1; groups below 1e-12 are declared empty.
    np.testing.assert_allclose(task.group_weights, expected, atol=1.0e-12 + 4 * EPS, rtol=0)
    np.testing.assert_allclose(task.group_weights.sum(), 1, atol=2.1e-12)
    # And back by the definitions of theory.md section 2.
    if rho_pt > 1e-3:
        np.testing.assert_allclose(task.omega * task.rho_ft / task.rho_pt, shared, atol=4 * EPS / 1e-3)
    if rho_pt < 1 - 1e-3:
        back = (1 - task.omega) * task.rho_ft / (1 - task.rho_pt)
        np.testing.assert_allclose(back, new, atol=4 * EPS / 1e-3)


def test_from_conditional_passes_the_rest():
    task = Task.from_conditional(0.5, 0.2, 0.1, beta_pt=2.0, noise_var_pt=0.3, noise_var_ft=0.4)
    fields = [task.rho_ft, task.omega, task.beta_pt, task.noise_var_pt, task.noise_var_ft]
    np.testing.assert_allclose(fields, [0.15, 2 / 3, 2.0, 0.3, 0.4], rtol=4 * EPS)


UNIT = r"a probability in \[0, 1\], got"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rho_pt": -0.1}, f"`rho_pt` must be {UNIT} -0.1"),
        ({"rho_pt": 1.1}, f"`rho_pt` must be {UNIT} 1.1"),
        ({"rho_pt": np.nan}, f"`rho_pt` must be {UNIT} nan"),
        ({"rho_ft": 0.0}, r"`rho_ft` must be a probability in \(0, 1\], got 0"),
        ({"rho_ft": 2.0}, r"`rho_ft` must be a probability in \(0, 1\], got 2"),
        ({"omega": 1.5}, r"`omega` must be a share in \[0, 1\], got 1.5"),
        ({"omega": [0.5, -1.0]}, r"`omega` must be a share in \[0, 1\], got -1"),
        ({"beta_pt": -1.0}, "`beta_pt` must be finite and >= 0, got -1"),
        ({"beta_pt": np.inf}, "`beta_pt` must be finite and >= 0, got inf"),
        ({"noise_var_pt": -1.0}, "`noise_var_pt` must be finite and >= 0, got -1"),
        ({"noise_var_ft": np.nan}, "`noise_var_ft` must be finite and >= 0, got nan"),
        ({"rho_pt": 0.1}, "infeasible overlap: omega \\* rho_ft must not exceed rho_pt, got rho_pt = 0.1"),
        (
            {"rho_pt": 0.9, "omega": 0.0},
            r"infeasible overlap: \(1 - omega\) \* rho_ft must not exceed 1 - rho",
        ),
        ({"rho_pt": [0.5, 0.1], "omega": [[0.5], [0.9]]}, "rho_pt = 0.1, rho_ft = 0.4, omega = 0.9"),
        ({"rho_pt": [0.5, 0.5], "omega": [0.5, 0.5, 0.5]}, r"broadcast together, got rho_pt \(2,\)"),
        ({"rho_pt": "half"}, "expected a number or an array of numbers, got 'half'"),
    ],
)
def test_task_messages(fields, message):
    with pytest.raises(ArgumentError, match=message):
        Task(**({"rho_pt": 0.5, "rho_ft": 0.4, "omega": 0.5} | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((1.5, 0.1, 0.1), f"`rho_pt` must be {UNIT} 1.5"),
        ((0.5, -0.1, 0.1), f"`rho_ft_shared` must be {UNIT} -0.1"),
        ((0.5, 0.1, 1.1), f"`rho_ft_new` must be {UNIT} 1.1"),
        ((1.0, 0.0, 1.0), "`rho_ft_shared, rho_ft_new` must be such that the FT support is not empty, got 0"),
    ],
)
def test_from_conditional_messages(fields, message):
    with pytest.raises(ArgumentError, match=message):
        Task.from_conditional(*fields)


def test_grid_is_a_broadcast():
    task = Task(rho_pt=jnp.array([[0.3], [0.6]]), rho_ft=0.2, omega=jnp.array([0.0, 0.5, 1.0]))
    assert task.shape == (2, 3)
    assert task.group_weights.shape == (2, 3, 4)
    for i, rho_pt in enumerate((0.3, 0.6)):
        for j, omega in enumerate((0.0, 0.5, 1.0)):
            np.testing.assert_array_equal(task.group_weights[i, j], Task(rho_pt, 0.2, omega).group_weights)


def test_task_passes_through_jit_and_vmap():
    omegas = jnp.array([0.0, 0.5, 1.0])
    batch = jax.vmap(lambda omega: Task(0.5, 0.2, omega).group_weights)(omegas)
    np.testing.assert_array_equal(batch, Task(0.5, 0.2, omegas).group_weights)
    task = Task(0.5, 0.2, 0.3)
    returned = jax.jit(lambda t: t)(task)
    assert jax.tree.structure(returned) == jax.tree.structure(task)
    assert float(returned.omega) == 0.3
    # d overlap / d omega = rho_ft: tasks are differentiable.
    slope = jax.jacfwd(lambda omega: Task(0.5, 0.2, omega).group_weights)(0.3)
    np.testing.assert_allclose(slope, [0.2, -0.2, -0.2, 0.2], rtol=2 * EPS)


def test_constants_inside_jit_are_checked_too():
    # A constant that became a tracer would skip its check and give a plausible number.
    with pytest.raises(ArgumentError, match="rho_ft"):
        jax.jit(lambda omega: Task(0.1, 2.0, omega).group_weights)(0.5)
