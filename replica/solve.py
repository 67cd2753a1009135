"""Generalisation error of fine-tuning in the limit D -> infinity: the public solver over grids."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int

from dlnsim.errors import ArgumentError
from dlnsim.init import Init
from dlnsim.result import FAILURES, Result, raise_on_failure
from dlnsim.task import Task
from dlnsim.validation import as_float, broadcast_shape, check_range, is_traced, require_float64
from replica.channel import Channel, moments, perfect_pretraining, posterior_variance, quadrature
from replica.fixed_point import Outcome, root
from replica.iteration import FINEST

CHUNK = 128
"""Points whose predictions are evaluated at once; beyond inputs and outputs, memory is that of one chunk."""


class Solution(eqx.Module):
    """The theory's prediction, one entry a grid point; NaN where `result` is a failure.

    Attributes:
        mse: E[(beta_FT - beta*_FT)^2] per coordinate = prediction error on a new sample, noise excluded.
        tau: variance of the effective noise of the scalar channel (NaN where stuck).
        theta: strength of the effective regularisation (0 for alpha_ft >= 1, NaN where stuck).
        residual: largest relative residual of the two equations, on a finer quadrature than solved with.
        error: estimated relative error of `tau` (and of `mse` without noise) that this residual implies.
        steps: evaluations of the equations.
        result: codes of `dlnsim.Result`: CONVERGED, STUCK, DIVERGES, or a failure.
        mse_by_group: error within each of `dlnsim.GROUPS`; their mean under `Task.group_weights` is `mse`.
        forgetting: E[(beta_FT - beta*_PT)^2] per coordinate, the error on the PT task after fine-tuning.
        forgetting_by_group: the same within each group.
    """

    mse: Float[Array, "..."]
    tau: Float[Array, "..."]
    theta: Float[Array, "..."]
    residual: Float[Array, "..."]
    error: Float[Array, "..."]
    steps: Int[Array, "..."]
    result: Int[Array, "..."]
    mse_by_group: Float[Array, "... 4"]
    forgetting: Float[Array, "..."]
    forgetting_by_group: Float[Array, "... 4"]


def solve(
    task: Task, init: Init, *, alpha_ft: ArrayLike, alpha_pt: ArrayLike = jnp.inf, throw: bool = True
) -> Solution:
    """Predict fine-tuning after pretraining, exactly, at every point of a broadcast grid.

    Solves tau = (noise + E[(x^ - x)^2]) / alpha and E[dx^/dz] = alpha (theory.md section 4). Works under
    `jax.jit`, `vmap`, `grad` and `jvp`; derivatives are those of the implicit function theorem.

    Args:
        task: sparsities, overlap, amplitude and noise; fields broadcast with everything else.
        init: c_PT, lambda_PT and gamma_FT; fields broadcast with everything else.
        alpha_ft: fine-tuning samples per coordinate, > 0 and finite.
        alpha_pt: pretraining samples per coordinate; inf, or >= 1 without PT noise (perfect pretraining).
        throw: raise if a point fails; with False it is NaN with its result code.

    Returns:
        `Solution` with leaves of the broadcast shape (`..., 4` for the groups).

    Raises:
        ArgumentError: an argument is out of range, or shapes do not broadcast.
        PrecisionError: float64 is not enabled.
        SolverError: a point failed and `throw` is True (concrete arguments only).
    """
    alpha_ft = as_float(alpha_ft)
    if is_traced(alpha_pt):
        raise ArgumentError("`alpha_pt` must be concrete, got a traced value: close over it")
    # Under jit even a constant would come out traced.
    with jax.ensure_compile_time_eval():
        alpha_pt = as_float(alpha_pt)
    require_float64("replica.solve", task, init, alpha_ft, alpha_pt)
    check_range("alpha_ft", alpha_ft, "finite and > 0", lambda x: (x > 0) & np.isfinite(x))
    check_range("alpha_pt", alpha_pt, "> 0 (inf for perfect pretraining)", lambda x: x > 0)
    shape = broadcast_shape(task=task.shape, init=init.shape, alpha_ft=alpha_ft.shape, alpha_pt=alpha_pt.shape)
    imperfect = np.isfinite(alpha_pt)
    if imperfect.any():
        if is_traced(task.noise_var_pt):
            raise ArgumentError(
                "`noise_var_pt` must be concrete for a finite `alpha_pt`, got a traced value: close over it"
            )
        imperfect = imperfect & ((np.asarray(alpha_pt) < 1) | (np.asarray(task.noise_var_pt) > 0))
    if imperfect.any():
        raise ArgumentError(
            "`alpha_pt` must be inf, or >= 1 with noise_var_pt = 0 (perfect pretraining), in this version "
            "of the theory; dlnsim.simulate trains an imperfect PT stage exactly"
        )
    if is_traced(task, init, alpha_ft):
        points = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, shape).reshape(-1), (task, init, alpha_ft))
        solution = jax.tree.map(
            lambda leaf: leaf.reshape(shape + leaf.shape[1:]), _solve_flat(*points, math.prod(shape))
        )
    else:
        solution = _solve_concrete(task, init, alpha_ft, shape)
    if throw and not is_traced(solution.result):
        raise_on_failure(solution.result, "replica.solve")
    return solution


def _solve_concrete(task: Task, init: Init, alpha_ft: Array, shape: tuple[int, ...]) -> Solution:
    # Padded to four sizes an octave, grids of all shapes share a few compiled programs; numpy, since eager JAX
    # would compile every reshape.
    size = math.prod(shape)
    step = max(4, 1 << (size - 1).bit_length() >> 3) if size else 4
    padded = max(-(-size // step) * step, step)

    def pad(leaf: Array) -> np.ndarray:
        return np.resize(np.broadcast_to(np.asarray(leaf), shape), padded) if size else np.full(padded, 0.5)

    solution = _solve_flat(*jax.tree.map(pad, (task, init, alpha_ft)), size)
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[:size].reshape(shape + leaf.shape[1:])), solution)


@jax.jit
def _solve_flat(task: Task, init: Init, alpha: Array, count: Array) -> Solution:
    """Solve the first `count` of a list of points; the rest is padding."""
    size = alpha.shape[0]
    channels = jax.vmap(perfect_pretraining)(task, init, jnp.where(alpha < 1, alpha, 0.5))
    # The excluded branches still pass through the solver: give them a harmless problem.
    solvable = eqx.tree_at(lambda ch: ch.c, channels, jnp.where(channels.c == 0, 1.0, channels.c))
    # Traced values reach here unchecked.
    valid = task.in_range & init.in_range & (alpha > 0) & jnp.isfinite(alpha)
    problems = (task, valid, alpha, channels, solvable, *root(solvable, count))

    chunk = min(CHUNK, size)
    chunks = -(-size // chunk)

    def pad(leaf: Array) -> Array:
        widths = [(0, chunks * chunk - size)] + [(0, 0)] * (leaf.ndim - 1)
        return jnp.pad(leaf, widths, mode="edge").reshape(chunks, chunk, *leaf.shape[1:])

    solved = lax.map(jax.vmap(lambda problem: _predict(*problem)), jax.tree.map(pad, problems))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:size], solved)


def _predict(
    task: Task, valid: Array, alpha: Array, channel: Channel, solvable: Channel, p: Array, outcome: Outcome
) -> Solution:
    tau, theta = jnp.exp(p[0]), jnp.exp(p[1])
    m = moments(tau, theta, solvable, quadrature(tau, theta, solvable, FINEST))
    solution = _assemble(channel, m.bias + posterior_variance(tau, solvable), m.power, tau, theta)
    dead = channel.c == 0
    certificate = (outcome.residual, outcome.error, outcome.steps.astype(int))
    # c_FT^2 must not overflow in the quadrature: its expectations would silently be 0.
    lost = dead.any() | (channel.c > 1e150).any()
    code = jnp.where(lost, Result.NONFINITE, outcome.result.astype(int))
    solution = eqx.tree_at(lambda s: (s.residual, s.error, s.steps, s.result), solution, (*certificate, code))

    # alpha >= 1: least squares, x^ = z (theory.md section 4). A zero excess would poison derivatives.
    noise = task.noise_var_ft
    excess = jnp.where(alpha > 1, alpha - 1, 1.0)
    tau_ls = jnp.where((alpha == 1) & (noise > 0), jnp.inf, noise / excess)
    least_squares = _assemble(channel, 0 * channel.var, channel.var, tau_ls, jnp.asarray(0.0))
    code = jnp.where(jnp.isinf(tau_ls), Result.DIVERGES, Result.CONVERGED)
    # The error is the same in every group; added last, since an empty group would make 0 * inf of it.
    least_squares = eqx.tree_at(
        lambda s: (s.mse, s.mse_by_group, s.forgetting, s.forgetting_by_group),
        least_squares,
        replace_fn=lambda leaf: leaf + tau_ls,
    )
    least_squares = eqx.tree_at(lambda s: s.result, least_squares, code)
    # c_FT = 0: the flow never leaves the origin.
    nan = jnp.asarray(jnp.nan)
    at_origin = _assemble(channel, channel.var, 0 * channel.var, nan, nan)
    at_origin = eqx.tree_at(lambda s: s.result, at_origin, jnp.asarray(int(Result.STUCK)))

    solution = _select(alpha < 1, solution, least_squares)
    solution = _select(dead.all(), at_origin, solution)
    solution = eqx.tree_at(lambda s: s.result, solution, jnp.where(valid, solution.result, Result.INVALID))
    failed = jnp.isin(solution.result, jnp.array([int(code) for code in FAILURES]))
    kept = (solution.residual, solution.error, solution.steps, solution.result)
    blank = jax.tree.map(lambda leaf: jnp.where(failed, jnp.nan, leaf), eqx.filter(solution, eqx.is_inexact_array))
    blank = eqx.combine(blank, solution)
    return eqx.tree_at(lambda s: (s.residual, s.error, s.steps, s.result), blank, kept)


def _assemble(channel: Channel, mse: Array, power: Array, tau: Array, theta: Array) -> Solution:
    # beta*_FT and the estimate are symmetric and independent of beta*_PT, so the cross term vanishes.
    forgetting = power + channel.beta_pt**2
    return Solution(
        mse=jnp.sum(channel.weight * mse, -1),
        tau=tau,
        theta=theta,
        residual=jnp.asarray(0.0),
        error=jnp.asarray(0.0),
        steps=jnp.asarray(0),
        result=jnp.asarray(int(Result.CONVERGED)),
        mse_by_group=mse,
        forgetting=jnp.sum(channel.weight * forgetting, -1),
        forgetting_by_group=forgetting,
    )


def _select(condition: Array, yes: Solution, no: Solution) -> Solution:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
