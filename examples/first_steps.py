"""From a question to numbers: is it worth starting fine-tuning from sparse or from pretrained features?

Run: python examples/first_steps.py
"""

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402

import replica  # noqa: E402
from dlnsim import Init, Task, simulate  # noqa: E402

task = Task(rho_pt=0.1, rho_ft=0.1, omega=0.5)
init = Init(c_pt=1e-3, lambda_pt=jnp.array([-0.99, 0.0, 0.99]), gamma_ft=0.0)

theory = replica.solve(task, init, alpha_ft=0.3)
runs = simulate(task, init, alpha_ft=0.3, dim=1000, seeds=8, key=jax.random.key(0))
print("predicted", theory.mse)
print("simulated", runs.mse_ft.mean(-1), "+-", runs.mse_ft.std(-1, ddof=1) / jnp.sqrt(8))


def error(lambda_pt):
    return replica.solve(task, Init(1e-3, lambda_pt, 0.0), alpha_ft=0.3).mse


print("d mse / d lambda_pt at 0:", jax.grad(error)(0.0))
