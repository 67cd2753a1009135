import os

# The core solvers, called directly, leave LAPACK's threads as they are: see dlnsim/blas.py.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Tests of the command line must not fill the user's cache of compiled programs.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")

import jax

jax.config.update("jax_enable_x64", True)
