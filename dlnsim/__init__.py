"""dlnsim: exact simulation of gradient flow on diagonal linear networks, pretraining then fine-tuning."""

from dlnsim.bias import (
    init_elasticity,
    l_order,
    potential,
    pretraining_dependence,
    regime_weights,
    total_potential,
)
from dlnsim.data import Teacher, sample_data, sample_teacher
from dlnsim.descent import DescentSolution, descent
from dlnsim.dual import LimitSolution
from dlnsim.errors import ArgumentError, DataError, DlnsimError, PrecisionError, SolverError
from dlnsim.flow import FlowSolution, flow
from dlnsim.init import Init, Weights, conserved, initial_weights, reinitialise, weights_from_solution
from dlnsim.limit import limit
from dlnsim.pipeline import Simulation, simulate
from dlnsim.result import Result
from dlnsim.task import GROUPS, Task

__all__ = [
    "GROUPS",
    "ArgumentError",
    "DataError",
    "DescentSolution",
    "DlnsimError",
    "FlowSolution",
    "Init",
    "LimitSolution",
    "PrecisionError",
    "Result",
    "Simulation",
    "SolverError",
    "Task",
    "Teacher",
    "Weights",
    "conserved",
    "descent",
    "flow",
    "init_elasticity",
    "initial_weights",
    "l_order",
    "limit",
    "potential",
    "pretraining_dependence",
    "regime_weights",
    "reinitialise",
    "sample_data",
    "sample_teacher",
    "simulate",
    "total_potential",
    "weights_from_solution",
]
