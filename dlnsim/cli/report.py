"""What a command found: as an aligned table or as JSON that every parser accepts."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dlnsim.cli.grid import Grid
from dlnsim.result import Result


@dataclass(frozen=True)
class Report:
    """The findings of a command.

    Attributes:
        command: its name.
        values: everything found, by name; scalars, arrays, or nested mappings.
        lines: the text for a person.
        failures: one line for each code with which a problem failed.
    """

    command: str
    values: Mapping[str, Any]
    lines: Sequence[str]
    failures: Sequence[str] = ()

    def text(self) -> str:
        """The text for a person."""
        return "\n".join(self.lines)

    def json(self) -> str:
        """One JSON object."""
        return json.dumps(plain({"command": self.command, **self.values}), allow_nan=False)


@dataclass(frozen=True)
class Column:
    """One quantity over the grid.

    Attributes:
        name: heading in the table and key in JSON.
        values: array of the grid's shape, numbers or strings.
        style: how to print a number.
    """

    name: str
    values: np.ndarray = field(repr=False)
    style: str = ".6g"


def grid_report(
    command: str,
    grid: Grid,
    columns: Sequence[Column],
    *,
    settings: Mapping[str, Any] | None = None,
    codes: np.ndarray | None = None,
    notes: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
) -> Report:
    """A table with one row a point.

    Args:
        command: name of the command.
        grid: the points.
        columns: what to show for each.
        settings: single numbers that belong to the parameters, such as `dim`.
        codes: all result codes, any shape; explained below the table unless converged.
        notes: lines below the table.
        extra: further values for JSON.

    Returns:
        `Report`.
    """
    settings = settings or {}
    single = {name: values[0] for name, values in grid.parameters.items() if name not in grid.axes}
    fixed = ", ".join(f"{name} = {value:g}" for name, value in {**single, **settings}.items())
    axes = [Column(name, np.broadcast_to(grid[name], grid.shape)) for name in grid.axes]
    shown = [Column(c.name, np.broadcast_to(c.values, grid.shape), c.style) for c in columns]
    present = [] if codes is None else [Result(int(code)) for code in np.unique(codes)]
    explained = [f"{code}: {code.remedy}" for code in present if code != Result.CONVERGED]
    lines = [f"# {fixed}"] if fixed else []
    lines += table([*axes, *shown])
    lines += [f"# {line}" for line in (*notes, *explained)]
    values = {
        "parameters": {**{n: v if n in grid.axes else v[0] for n, v in grid.parameters.items()}, **settings},
        "axes": list(grid.axes),
        "shape": list(grid.shape),
        **{column.name: column.values for column in shown},
        **(extra or {}),
    }
    return Report(command, values, lines, [] if codes is None else failures(codes))


def failures(codes: np.ndarray) -> list[str]:
    """One line for each code that is a failure: how many, and the remedy."""
    codes = np.asarray(codes)
    bad = [code for code in map(Result, np.unique(codes).tolist()) if code.is_failure]
    return [f"{int((codes == code).sum())} of {codes.size} problems failed: {code}: {code.remedy}" for code in bad]


def names(codes: np.ndarray) -> np.ndarray:
    """Result codes as their names, same shape."""
    codes = np.asarray(codes)
    return np.array([str(Result(int(code))) for code in codes.ravel()], dtype=object).reshape(codes.shape)


def table(columns: Sequence[Column]) -> list[str]:
    """Aligned lines, a heading first; numbers to the right, words to the left."""
    cells, left = [], []
    # Adding 0 turns the number -0.0 into 0.0.
    for column in columns:
        flat = np.asarray(column.values).ravel().tolist()
        words = [value if isinstance(value, str) else format(value + 0, column.style) for value in flat]
        cells.append([column.name, *words])
        left.append(any(isinstance(value, str) for value in flat))
    widths = [max(map(len, column)) for column in cells]
    return [
        "  ".join(
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in zip(*cells, strict=True)
    ]


def plain(value: Any) -> Any:
    """The value in JSON's own types: NaN is None, infinity "inf" or "-inf"."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, str | bool | int | None):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return value + 0.0 if math.isfinite(value) else str(value)
    # Arrays and numbers of numpy and jax; anything else as its text.
    return plain(np.asarray(value).tolist()) if hasattr(value, "__array__") else str(value)
