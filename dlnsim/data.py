"""Sampling at finite dimension: supports, the two teachers, and Gaussian data."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from dlnsim.task import Task


class Teacher(eqx.Module):
    """One draw of the two tasks at dimension D.

    Attributes:
        group: index of each coordinate's group in `dlnsim.GROUPS`.
        beta_pt: PT teacher, `Task.beta_pt` on the PT support and 0 off it.
        beta_ft: FT teacher, N(0, 1 / rho_ft) on the FT support and 0 off it.
    """

    group: Int[Array, " D"]
    beta_pt: Float[Array, " D"]
    beta_ft: Float[Array, " D"]


def sample_teacher(key: PRNGKeyArray, task: Task, dim: int) -> Teacher:
    """Draw supports and teachers; each coordinate is independent (theory.md section 2).

    Args:
        key: from `jax.random.key`.
        task: scalar fields.
        dim: number of coordinates D.

    Returns:
        `Teacher`.
    """
    support_key, value_key = jax.random.split(key)
    # Inversion never draws an empty group: its interval is empty too.
    ends = jnp.cumsum(task.group_weights)
    group = jnp.searchsorted(ends / ends[-1], jax.random.uniform(support_key, (dim,)), side="right")
    values = jax.random.normal(value_key, (dim,)) * jnp.sqrt(task.group_var_ft)[group]
    return Teacher(group, task.group_beta_pt[group], values)


def sample_data(
    key: PRNGKeyArray, beta: Float[Array, " D"], samples: int, noise_var: Float[Array, ""]
) -> tuple[Float[Array, "n D"], Float[Array, " n"]]:
    """Draw X with N(0, 1 / D) entries and y = X beta + noise.

    Args:
        key: from `jax.random.key`.
        beta: teacher.
        samples: number of samples n.
        noise_var: label-noise variance per sample.

    Returns:
        (X, y), of shapes (samples, D) and (samples,).
    """
    design_key, noise_key = jax.random.split(key)
    dim = beta.shape[0]
    X = jax.random.normal(design_key, (samples, dim)) / jnp.sqrt(dim)
    return X, X @ beta + jnp.sqrt(noise_var) * jax.random.normal(noise_key, (samples,))


def group_means(values: Float[Array, " D"], group: Int[Array, " D"], groups: int) -> Float[Array, " group"]:
    """Mean of `values` within each group; NaN for an empty group."""
    members = group == jnp.arange(groups)[:, None]
    return (members * values).sum(-1) / members.sum(-1)
