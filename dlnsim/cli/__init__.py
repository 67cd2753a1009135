"""The command line: the roof of the house. It imports the other packages lazily; nothing imports it."""

import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence

from dlnsim.cli.arguments import UsageError, parse
from dlnsim.errors import DlnsimError, SolverError

BAD_INPUT, FAILED_POINTS, INTERRUPTED, BROKEN_PIPE = 2, 3, 130, 141
"""Exit codes other than 0; the last two are what a shell reports for SIGINT and SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program name; the default is `sys.argv[1:]`.

    Returns:
        Exit code: 0, `BAD_INPUT` (one line on stderr says what to do), `FAILED_POINTS` (the output gives the
        code of each point), `INTERRUPTED` or `BROKEN_PIPE`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    program = "dlnsim"
    try:
        if arguments and arguments[0] in ("--version", "-V"):
            return _print(f"dlnsim {importlib.metadata.version('dlnsim')}")
        try:
            name, options = parse(arguments)
        except SystemExit as done:  # --help
            sys.stdout.flush()
            return done.code if isinstance(done.code, int) else 0
        program = f"dlnsim {name}"
        # What `run` needs, jax above all, takes longer to import than to parse and to print help.
        from dlnsim.cli.commands import run

        report = run(name, options)
        _print(report.json() if options.json else report.text())
        for line in report.failures:
            print(f"{program}: {_one_line(line)}", file=sys.stderr)
        return FAILED_POINTS if report.failures else 0
    except DlnsimError as error:
        program = error.program if isinstance(error, UsageError) else program
        print(f"{program}: {_one_line(str(error))}", file=sys.stderr)
        return FAILED_POINTS if isinstance(error, SolverError) else BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _abandon_stdout()
        return BROKEN_PIPE
    except OSError as error:  # a full disk behind stdout, for one; the readers of files raise DataError
        where = f": {error.filename}" if error.filename else ""
        print(f"{program}: {error.strerror or _one_line(str(error))}{where}", file=sys.stderr)
        _abandon_stdout()
        return BAD_INPUT


def _abandon_stdout() -> None:
    """Keep the interpreter from flushing stdout once more on exit, which would fail and complain."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print(text: str) -> int:
    print(text, flush=True)
    return 0


def _one_line(text: str) -> str:
    return " ".join(text.split())
