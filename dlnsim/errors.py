"""The exceptions that dlnsim raises: one class per kind of failure, each message one line."""


class DlnsimError(Exception):
    """Base class: `except DlnsimError` catches everything that this distribution raises on purpose."""


class ArgumentError(DlnsimError, ValueError):
    """An argument is outside the range that the theory allows; the message names it and its range."""


class PrecisionError(DlnsimError, RuntimeError):
    """A theory or exact-solver entry point was called with float32 numbers."""


class SolverError(DlnsimError, RuntimeError):
    """At least one problem of a batch has a failing result code and `throw=True` was given."""


class DataError(DlnsimError, ValueError):
    """A file that the user named is missing, unreadable or lacks what was expected in it."""
