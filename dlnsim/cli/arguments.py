"""From arguments to options. Every complaint is one line that names the option and the near match."""

import contextlib
import difflib
import io
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin

import tyro

from dlnsim.cli.options import COMMANDS, Command
from dlnsim.errors import ArgumentError

_ABOUT = (
    "How pretraining shapes fine-tuning: exact theory and exact simulation.\n\n"
    "Options and an example of each command: dlnsim COMMAND --help"
)
_CONFIG = (tyro.conf.FlagCreatePairsOff,)
_KINDS = {float: "a number", int: "an integer", Path: "a path"}


class UsageError(ArgumentError):
    """The command line cannot be understood; `program` is the (sub)command at fault."""

    def __init__(self, program: str, message: str) -> None:
        super().__init__(message)
        self.program = program


def parse(arguments: Sequence[str]) -> tuple[str, Command]:
    """Understand a command line.

    tyro parses and prints the help; what it would complain about in a box of several lines is checked first.

    Args:
        arguments: without the program name.

    Returns:
        The command's name and its options.

    Raises:
        UsageError: unknown command or option, or a value that is missing, superfluous or of the wrong type.
        SystemExit: help was printed.
    """
    if not arguments or arguments[0] in ("-h", "--help") or arguments[0].startswith("--tyro-"):
        _top_level(list(arguments) or ["--help"])
    name, *rest = arguments
    if name not in COMMANDS:
        what = "option" if name.startswith("-") else "command"
        raise UsageError(
            "dlnsim",
            f"unknown {what} `{name}`{_near(name, COMMANDS)}; the commands are {', '.join(COMMANDS)} (dlnsim --help)",
        )
    program, command = f"dlnsim {name}", COMMANDS[name]
    if not {"-h", "--help"} & set(rest):
        _check(program, command, rest)
    return name, _tyro(command, program, command.about, rest)


def _top_level(arguments: list[str]) -> NoReturn:
    commands = [Annotated[cls, tyro.conf.subcommand(name)] for name, cls in COMMANDS.items()]
    _tyro(Union[tuple(commands)], "dlnsim", _ABOUT, arguments)  # noqa: UP007
    raise SystemExit(0)


def _tyro(target: Any, program: str, about: str, arguments: list[str]) -> Any:
    complaint = io.StringIO()
    # tyro joins the lines of a paragraph, which a terminal then breaks in mid-word, unless they are indented.
    description = "\n\n".join(
        textwrap.fill(paragraph, 80, subsequent_indent="  ", break_on_hyphens=False)
        for paragraph in about.split("\n\n")
    )
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(target, prog=program, description=description, args=arguments, config=_CONFIG)
    except SystemExit as done:
        if done.code in (0, None):
            raise
        # Not foreseen by `_check`: the text of tyro's box without colour, frame and what follows the message.
        text = re.split("(?:Argument|For full) helptext", re.sub(r"\x1b\[[0-9;]*m", "", complaint.getvalue()))
        words = re.sub(r"[│╭╮╰╯─]+|-{3,}", " ", text[0]).split()
        raise UsageError(program, f"{' '.join(words)} (see {program} --help)") from None


def _check(program: str, command: type[Command], arguments: list[str]) -> None:
    """Raise `UsageError` for everything that a user is likely to get wrong."""
    options = {"--" + field.name.replace("_", "-"): field.type for field in fields(command)}
    for name in command.positional:
        del options["--" + name]
    loose: list[str] = []
    seen: set[str] = set()
    for flag, values in _groups(arguments):
        if flag is None:
            loose += values
            continue
        if flag not in options:
            near = _near(flag, options) or f"; the options are {', '.join(options)}"
            raise UsageError(program, f"unknown option `{flag}`{near}")
        if flag in seen:
            raise UsageError(program, f"`{flag}` is given twice; {_several(options[flag])}")
        seen.add(flag)
        kind, count = _kind(options[flag])
        if count != 0 and not values:
            expected = _KINDS[kind] if count == 1 else "one or several numbers"
            raise UsageError(program, f"`{flag}` must be followed by {expected}, got nothing")
        taken = values if count is None else values[:count]
        loose += values[len(taken) :]
        for value in taken:
            _check_value(program, flag, kind, value)
    if len(loose) < len(command.positional):
        missing = command.positional[len(loose)].upper()
        raise UsageError(program, f"{missing} is missing (see {program} --help)")
    if len(loose) > len(command.positional):
        extra = loose[len(command.positional)]
        raise UsageError(program, f"unexpected argument `{extra}` (see {program} --help)")


def _check_value(program: str, flag: str, kind: type, value: str) -> None:
    try:
        kind(value)
    except ValueError:
        raise UsageError(program, f"`{flag}` must be {_KINDS[kind]}, got `{value}`") from None


def _groups(arguments: list[str]) -> Iterator[tuple[str | None, list[str]]]:
    """Each option with the values after it; None for the values before the first option."""
    flag: str | None = None
    values: list[str] = []
    for argument in arguments:
        if argument.startswith("-") and argument != "-" and not _is_number(argument):
            yield flag, values
            name, equals, value = argument.partition("=")
            flag, values = name.replace("_", "-"), [value] if equals else []
        else:
            values.append(argument)
    yield flag, values


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _strip(kind: Any) -> Any:
    """The type without `Annotated` and `| None`."""
    while get_origin(kind) in (Annotated, UnionType, Union):
        kind = get_args(kind)[0]
    return kind


def _kind(kind: Any) -> tuple[type, int | None]:
    """The type of one value, and how many an option takes (None: any number)."""
    kind = _strip(kind)
    if get_origin(kind) is tuple:
        return get_args(kind)[0], None
    return kind, 0 if kind is bool else 1


def _several(kind: Any) -> str:
    return "give all its values after one" if _kind(kind)[1] is None else "give it once"


def _near(text: str, known: Sequence[str] | dict[str, Any]) -> str:
    match = difflib.get_close_matches(text, list(known), n=1, cutoff=0.6)
    return f", did you mean `{match[0]}`?" if match else ""
