import os

# The core solvers, called directly, leave LAPACK's threads as they are: see dlnsim/blas.py.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax

jax.config.update("jax_enable_x64", True)
