"""The specification of the published-grid experiment: a TOML file, validated whole before anything runs."""

import dataclasses
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args, get_origin

import numpy as np

from dlnsim.errors import ArgumentError, DataError
from dlnsim.init import Init
from dlnsim.task import Task
from dlnsim.validation import check_range

Axis = tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class TaskAxes:
    """Axes of `dlnsim.Task`; see there for ranges."""

    rho_pt: float
    rho_ft: float
    omega: Axis
    beta_pt: float = 1.0
    noise_var_ft: float = 0.0


@dataclasses.dataclass(frozen=True)
class InitAxes:
    """Axes of `dlnsim.Init`; see there for ranges."""

    c_pt: Axis
    lambda_pt: Axis
    gamma_ft: Axis


@dataclasses.dataclass(frozen=True)
class Theory:
    """Where the theory curves are solved."""

    alpha_ft: Axis


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Where and how finely exact simulations check the curves."""

    alpha_ft: Axis
    dim: int
    seeds: int
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class PhaseDiagram:
    """Resolution of the phase diagrams, and what is held fixed while two axes vary."""

    num: int
    beta_ft: float
    beta_pt: float
    c_pt: float
    lambda_pt: float
    gamma_ft: float


@dataclasses.dataclass(frozen=True)
class BestLambda:
    """The map of the best lambda_PT over (omega, alpha_ft)."""

    c_pt: float
    gamma_ft: float
    omega: Axis
    alpha_ft: Axis
    num_lambda: int


@dataclasses.dataclass(frozen=True)
class Published:
    """Tables of published values to compare with, relative to the specification."""

    replica_mc: Path
    gradient_descent: Path


@dataclasses.dataclass(frozen=True)
class Spec:
    """One experiment; `load` reads it from TOML."""

    task: TaskAxes
    init: InitAxes
    theory: Theory
    simulation: Simulation
    phase_diagram: PhaseDiagram
    best_lambda: BestLambda
    published: Published

    def quick(self) -> "Spec":
        """The same experiment, coarser: for a first look."""
        return dataclasses.replace(
            self,
            simulation=dataclasses.replace(
                self.simulation,
                alpha_ft=self.simulation.alpha_ft[:2],
                dim=min(self.simulation.dim, 400),
                seeds=min(self.simulation.seeds, 4),
            ),
            phase_diagram=dataclasses.replace(self.phase_diagram, num=min(self.phase_diagram.num, 101)),
            best_lambda=dataclasses.replace(
                self.best_lambda,
                omega=self.best_lambda.omega[::2],
                alpha_ft=self.best_lambda.alpha_ft[::2],
                num_lambda=min(self.best_lambda.num_lambda, 25),
            ),
        )


def load(path: Path) -> Spec:
    """Read and validate a specification.

    Args:
        path: TOML file with the tables and keys of `Spec`; an axis is a list of numbers or
            {start, stop, num}.

    Returns:
        `Spec`, with the paths of `published` resolved.

    Raises:
        DataError: the file is missing or is not TOML.
        ArgumentError: a key is unknown or missing, a value has the wrong type, or a count is too small.
    """
    try:
        text = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read the specification {path}: {error.strerror}") from error
    except ValueError as error:  # TOML, UTF-8, an integer of more than 4300 digits
        raise DataError(f"{path} is not a TOML file: {error}") from error
    spec = _build(Spec, text, path.parent, "")
    for key, least in _LEAST.items():
        table, name = key.split(".")
        if (value := getattr(getattr(spec, table), name)) < least:
            raise ArgumentError(f"`{key}` must be at least {least}, got {value}")
    _check_ranges(spec)
    return spec


def _check_ranges(spec: Spec) -> None:
    """Raise now what `Task`, `Init` and the readers of tables would raise after minutes of compute."""
    task, plan, fixed = spec.task, spec.best_lambda, spec.phase_diagram
    for omega in (task.omega, plan.omega):
        Task(task.rho_pt, task.rho_ft, np.array(omega), task.beta_pt, 0.0, task.noise_var_ft)
    Init(*np.meshgrid(spec.init.c_pt, spec.init.lambda_pt, spec.init.gamma_ft, sparse=True))
    Init(plan.c_pt, 0.0, plan.gamma_ft)
    Init(fixed.c_pt, fixed.lambda_pt, fixed.gamma_ft)
    axes = {
        f"{table}.{field.name}": getattr(getattr(spec, table), field.name)
        for table in ("task", "init", "theory", "simulation", "best_lambda")
        for field in dataclasses.fields(getattr(spec, table))
        if field.type == Axis
    }
    for name, values in axes.items():
        if name.endswith("alpha_ft"):
            check_range(name, np.array(values), "> 0", lambda x: x > 0)
        if len(set(values)) < len(values):
            raise ArgumentError(f"`{name}` must hold every value once, got {sorted(values)}")
    for name in ("replica_mc", "gradient_descent"):
        table = getattr(spec.published, name)
        if not table.is_file():
            raise DataError(f"cannot read the published table `published.{name}`: no file {table}")


# z-scores of fewer than 4 seeds have no finite variance.
_LEAST = {"simulation.dim": 1, "simulation.seeds": 4, "phase_diagram.num": 2, "best_lambda.num_lambda": 3}


def _build(cls: Any, table: Any, folder: Path, prefix: str) -> Any:
    if not isinstance(table, dict):
        raise ArgumentError(f"`{prefix.rstrip('.')}` must be a table, got {table!r}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in sorted(table.keys() - fields.keys()):
        raise ArgumentError(f"unknown key `{prefix}{key}`: expected one of {', '.join(fields)}")
    required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    for key in sorted(required - table.keys()):
        raise ArgumentError(f"missing key `{prefix}{key}`")
    return cls(**{key: _convert(fields[key].type, value, folder, prefix + key) for key, value in table.items()})


def _convert(kind: Any, value: Any, folder: Path, key: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, folder, f"{key}.")
    if get_origin(kind) is tuple:
        if isinstance(value, dict):
            line = _build(_Line, value, folder, f"{key}.")
            if line.num < 1:
                raise ArgumentError(f"`{key}.num` must be at least 1, got {line.num}")
            return tuple(float(x) for x in np.linspace(line.start, line.stop, line.num))
        values = value if isinstance(value, list) else [value]
        if not values:
            raise ArgumentError(f"`{key}` must have at least one value, got an empty list")
        return tuple(_convert(get_args(kind)[0], item, folder, key) for item in values)
    if kind is Path:
        if not isinstance(value, str):
            raise ArgumentError(f"`{key}` must be a path, got {value!r}")
        return folder / value
    # Not isfinite: an integer may be too large for a float. NaN fails too.
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if kind is int and not (number and value == int(value) and value >= 0):
        raise ArgumentError(f"`{key}` must be a non-negative integer, got {value!r}")
    if not number:
        raise ArgumentError(f"`{key}` must be a finite number, got {value!r}")
    return kind(value)


@dataclasses.dataclass(frozen=True)
class _Line:
    start: float
    stop: float
    num: int
