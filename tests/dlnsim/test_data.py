"""Samples against the laws that they are drawn from: supports, teachers, design and noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binom, chi2, kstest, norm

from dlnsim import Task
from dlnsim.data import group_means, sample_data, sample_teacher

DIM = 40_000
# Every test below is one draw with a fixed key, compared with a two-sided quantile of probability TAIL: a right
# law would fail it once in 10,000 keys, and never with this one.
TAIL = 1e-4


def within(law, value):
    return law.ppf(TAIL / 2) <= value <= law.ppf(1 - TAIL / 2)


@pytest.mark.parametrize("omega", [0.0, 0.3, 1.0])
def test_groups_and_teachers(omega):
    rho_pt, rho_ft, amplitude = 0.2, 0.1, 3.0
    teacher = sample_teacher(jax.random.key(3), Task(rho_pt, rho_ft, omega, amplitude), DIM)
    group, beta_pt, beta_ft = (np.asarray(leaf) for leaf in vars(teacher).values())
    overlap = omega * rho_ft
    shares = [overlap, rho_ft - overlap, rho_pt - overlap, 1 - rho_pt - rho_ft + overlap]
    for k, share in enumerate(shares):
        count = (group == k).sum()
        if share == 0:
            assert count == 0
        else:
            assert within(binom(DIM, share), count)
    # The PT teacher is a constant on its support; the FT teacher is Gaussian on its own and 0 off it.
    np.testing.assert_array_equal(beta_pt, np.where((group == 0) | (group == 2), amplitude, 0))
    np.testing.assert_array_equal(beta_ft != 0, group <= 1)
    values = beta_ft[group <= 1]
    assert kstest(values, norm(scale=rho_ft**-0.5).cdf).pvalue > TAIL
    assert within(chi2(values.size), rho_ft * (values**2).sum())
    for k in (0, 1):
        members = beta_ft[group == k]
        if members.size:
            assert within(chi2(members.size), rho_ft * (members**2).sum())


@pytest.mark.parametrize("fields", [(0.0, 0.5, 0.0), (1.0, 0.5, 1.0), (0.3, 0.7, 0.0), (0.3, 0.3, 1.0)])
def test_empty_groups_are_never_drawn(fields):
    task = Task(*fields)
    groups = np.concatenate([sample_teacher(jax.random.key(k), task, DIM).group for k in range(5)])
    assert not np.isin(groups, np.flatnonzero(np.asarray(task.group_weights) == 0)).any()
    assert groups.max() <= 3


def test_coordinates_are_independent():
    group = np.asarray(sample_teacher(jax.random.key(0), Task(0.5, 0.5, 0.5), DIM).group)
    # Counts of ordered neighbours of 4 equal groups: chi-square with 15 degrees of freedom.
    pairs = np.bincount(4 * group[0::2] + group[1::2], minlength=16)
    expected = DIM / 2 / 16
    assert chi2(15).sf(((pairs - expected) ** 2 / expected).sum()) > TAIL


def test_design_and_noise():
    dim, samples, noise = 500, 400, 0.3
    beta = jnp.arange(dim) / dim
    X, y = sample_data(jax.random.key(1), beta, samples, jnp.asarray(noise))
    assert X.shape == (samples, dim)
    assert y.shape == (samples,)
    entries = np.asarray(X).ravel() * np.sqrt(dim)
    assert kstest(entries, norm.cdf).pvalue > TAIL
    assert within(chi2(entries.size), (entries**2).sum())
    residual = np.asarray(y - X @ beta)
    assert within(chi2(samples), (residual**2).sum() / noise)
    assert kstest(residual / np.sqrt(noise), norm.cdf).pvalue > TAIL
    # Noise is drawn apart from the design: no correlation with any function of X, here row sums.
    rows = np.asarray(X).sum(1)
    assert abs(np.corrcoef(rows, residual)[0, 1]) < norm.isf(TAIL / 2) / np.sqrt(samples)


def test_no_noise_is_exact():
    beta = jnp.arange(50.0)
    X, y = sample_data(jax.random.key(1), beta, 20, jnp.asarray(0.0))
    np.testing.assert_array_equal(y, X @ beta)


def test_keys_decide_everything():
    task = Task(0.2, 0.1, 0.5)
    one, same, other = (sample_teacher(jax.random.key(k), task, 100) for k in (1, 1, 2))
    np.testing.assert_array_equal(one.beta_ft, same.beta_ft)
    assert not np.array_equal(one.group, other.group)
    X, _ = sample_data(jax.random.key(1), one.beta_ft, 30, jnp.asarray(0.0))
    Z, _ = sample_data(jax.random.key(2), one.beta_ft, 30, jnp.asarray(0.0))
    assert not np.array_equal(X, Z)


def test_group_means_by_hand():
    means = group_means(jnp.array([1.0, 2.0, 3.0, 10.0]), jnp.array([0, 0, 2, 3]), 4)
    np.testing.assert_array_equal(means, [1.5, np.nan, 3, 10])
