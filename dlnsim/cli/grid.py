"""Options with several values become broadcast axes, and those the model's dataclasses."""

import math
from dataclasses import dataclass

import numpy as np

from dlnsim.cli.options import Initialisation, Teachers
from dlnsim.errors import ArgumentError
from dlnsim.init import Init
from dlnsim.task import Task

_LARGEST = 10**6

_INIT = ("c_pt", "lambda_pt", "gamma_ft")


@dataclass(frozen=True)
class Grid:
    """An outer product.

    Attributes:
        parameters: values of every parameter, in the order of the axes.
    """

    parameters: dict[str, tuple[float, ...]]

    def __post_init__(self) -> None:
        points = math.prod(self.shape)
        if points > _LARGEST:
            raise ArgumentError(
                f"the grid has {points:,} points, at most {_LARGEST:,} fit one command: split it, "
                "or call replica.solve from Python"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """The parameters with several values."""
        return tuple(name for name, values in self.parameters.items() if len(values) > 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of values along each of `axes`."""
        return tuple(len(self.parameters[name]) for name in self.axes)

    def __getitem__(self, name: str) -> np.ndarray:
        """The values of a parameter, broadcasting along its axis (a scalar without one)."""
        values = np.asarray(self.parameters[name], dtype=float)
        if name not in self.axes:
            return values[0]
        return values.reshape([-1 if axis == name else 1 for axis in self.axes])

    def init(self) -> Init:
        """The initialisation of every point."""
        return Init(*(self[name] for name in _INIT))

    def task(self) -> Task:
        """The teachers of every point."""
        extra = {name: self[name] for name in ("beta_pt", "noise_var_pt", "noise_var_ft") if name in self.parameters}
        if "rho_ft_shared" in self.parameters:
            return Task.from_conditional(self["rho_pt"], self["rho_ft_shared"], self["rho_ft_new"], **extra)
        return Task(self["rho_pt"], self["rho_ft"], self["omega"], **extra)


def init_parameters(options: Initialisation) -> dict[str, tuple[float, ...]]:
    """The initialisation's parameters, by name."""
    return {name: getattr(options, name) for name in _INIT}


def task_parameters(options: Teachers) -> dict[str, tuple[float, ...]]:
    """The teachers' parameters, by name, in whichever parametrisation was given.

    Raises:
        ArgumentError: a mixture of both parametrisations, or half of the paper's.
    """
    given = [name for name in ("rho_ft", "omega", "rho_ft_shared", "rho_ft_new") if getattr(options, name)]
    paper = [name for name in given if name in ("rho_ft_shared", "rho_ft_new")]
    if paper and len(given) > len(paper):
        raise ArgumentError(
            "give either --rho-ft and --omega or --rho-ft-shared and --rho-ft-new, got "
            + " and ".join("--" + name.replace("_", "-") for name in given)
        )
    if len(paper) == 1:
        raise ArgumentError(f"--rho-ft-shared and --rho-ft-new go together, got only `{paper[0]}`")
    overlap = (
        {name: getattr(options, name) for name in paper}
        if paper
        else {"rho_ft": options.rho_ft or (0.1,), "omega": options.omega or (0.5,)}
    )
    return {
        "rho_pt": options.rho_pt,
        **overlap,
        "beta_pt": options.beta_pt,
        "noise_var_ft": options.noise_var_ft,
    }
