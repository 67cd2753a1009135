"""Speed of the exact end point of gradient flow at the size of the published runs, D = 5000.

python -m pytest benchmarks/bench_limit.py --benchmark-only -o python_files='bench_*.py' -s
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dlnsim import Init, Result, Task
from dlnsim.data import sample_data, sample_teacher
from dlnsim.limit import limit

jax.config.update("jax_enable_x64", True)

DIM, GROSS = 5000, 5


# Corners of the published grid (the easiest and the hardest) and its middle.
@pytest.mark.parametrize(("c_pt", "lambda_pt", "gamma"), [(1e-3, 0.0, 0.0), (1e-6, -0.99, 0.0), (1.0, 0.99, 10.0)])
@pytest.mark.parametrize(("alpha", "target"), [(0.157, 3.0), (0.451, 40.0)])
def test_end_point(benchmark, capsys, alpha, target, c_pt, lambda_pt, gamma):
    teacher_key, data_key = jax.random.split(jax.random.key(0))
    teacher = sample_teacher(teacher_key, Task(0.1, 0.1, 0.5), DIM)
    X, y = sample_data(data_key, teacher.beta_ft, round(alpha * DIM), jnp.asarray(0.0))
    c = Init(c_pt, lambda_pt, gamma).c_ft(teacher.beta_pt)
    limit(X, y, c, max_steps=1, throw=False)  # compile
    solution = benchmark.pedantic(lambda: jax.block_until_ready(limit(X, y, c)), rounds=1)
    assert solution.result == Result.CONVERGED
    assert np.isfinite(solution.misfit)
    if not benchmark.enabled:
        return
    seconds = benchmark.stats.stats.median
    with capsys.disabled():
        print(
            f"\nD = {DIM}, alpha = {alpha}, c = {c_pt:g}, lambda = {lambda_pt:g}, gamma = {gamma:g}: "
            f"{seconds:.2f} s (target {target:g}), {int(solution.steps)} factorisations, "
            f"residual {float(solution.residual):.1e}"
        )
    assert seconds < GROSS * target
