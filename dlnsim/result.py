"""Result codes: what a solver says about each problem of a batch."""

from enum import IntEnum

import numpy as np
from jaxtyping import ArrayLike

from dlnsim.errors import SolverError


class Result(IntEnum):
    """Code carried by every solution, one a problem. `str(code)` is the name, `code.remedy` what to do."""

    CONVERGED = 0
    STUCK = 1
    DIVERGES = 2
    MAX_STEPS = 3
    NONFINITE = 4
    QUADRATURE = 5
    STOPPED = 6
    INVALID = 7

    def __str__(self) -> str:
        """Lower-case name, as printed by the command line."""
        return self.name.lower()

    @property
    def remedy(self) -> str:
        """One line: what the code means and what the user can do."""
        return _REMEDIES[self]

    @property
    def is_failure(self) -> bool:
        """True where the numbers of the problem are not to be used (they are NaN)."""
        return self in FAILURES


_REMEDIES = {
    Result.CONVERGED: "the residual is below the tolerance",
    Result.STUCK: "c_FT = 0 (lambda_pt = -1 and gamma_ft = 0): the flow never leaves the origin; "
    "for the l1 solution take lambda_pt slightly above -1",
    Result.DIVERGES: "the error is infinite (alpha = 1 with label noise); move alpha away from 1",
    Result.MAX_STEPS: "the step limit was reached above the tolerance; raise `max_steps`",
    Result.NONFINITE: "a number overflowed or the input holds inf or NaN; rescale the data",
    Result.QUADRATURE: "the finest quadrature rule misses the tolerance: c_FT is too small for the signal; raise it",
    Result.STOPPED: "the last requested time came before the residual reached the tolerance; add later times",
    Result.INVALID: "an argument is outside its range; under jit nothing is raised, so check `result`",
}

FAILURES = (Result.MAX_STEPS, Result.NONFINITE, Result.QUADRATURE, Result.INVALID)


def raise_on_failure(result: ArrayLike, what: str) -> None:
    """Raise `SolverError` if any code is a failure.

    Args:
        result: integer codes, any shape, concrete.
        what: the name of the caller, for the message.

    Raises:
        SolverError: names the first failing index, its code and remedy, and how many failed.
    """
    codes = np.asarray(result)
    failed = np.isin(codes, [int(code) for code in FAILURES])
    if failed.any():
        first = tuple(int(i) for i in np.argwhere(failed)[0])
        code = Result(int(codes[first]))
        where = f" (first at index {first})" if first else ""
        raise SolverError(
            f"{what}: {int(failed.sum())} of {codes.size} problems failed{where}: {code}: {code.remedy}. "
            "Pass throw=False to get NaN and the codes instead."
        )
