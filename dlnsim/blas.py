"""One LAPACK thread while JAX factorises on a CPU.

JAX calls SciPy's OpenBLAS, whose threads wait for each other by spinning. On a machine with other work they wait for
a core that another process holds: a Cholesky factor of 160 rows has taken 0.27 s instead of 0.15 ms. The matrix
products, where the time goes, are JAX's own and keep all cores.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from threadpoolctl import ThreadpoolController


@cache
def _controller() -> ThreadpoolController:
    # Looking the libraries up takes a millisecond. jax loads SciPy's when it first factorises, which may be later.
    importlib.import_module("scipy.linalg.cython_lapack")
    return ThreadpoolController()


@contextmanager
def single_threaded_lapack() -> Iterator[None]:
    """Limit BLAS and LAPACK to one thread inside the block; results must be ready before it ends."""
    with _controller().limit(limits=1, user_api="blas"):
        yield
