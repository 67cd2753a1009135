"""The options of every command: names, defaults and the help text with ranges and units."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from tyro.conf import Positional, arg

Numbers = Annotated[tuple[float, ...], arg(metavar="X [X ...]")]
Number = Annotated[float, arg(metavar="X")]
File = Annotated[Path, arg(metavar="FILE")]

_GRID = """\
An option marked X [X ...] takes one or several values. The grid is the outer product over the options with
several values, in the order of the list below; one row a point."""


def _default(value: object) -> object:
    """Show a default that depends on other options, and is therefore filled in after parsing."""
    return arg(help_behavior_hint=f"(default: {value})")


@dataclass(frozen=True, kw_only=True)
class Command:
    """What every command takes."""

    about: ClassVar[str]
    positional: ClassVar[tuple[str, ...]] = ()
    json: bool = False
    """Print one JSON object instead of a table; NaN is null and infinity the string "inf"."""


@dataclass(frozen=True, kw_only=True)
class Initialisation:
    """The three knobs of the protocol."""

    c_pt: Numbers = (1e-3,)
    """Absolute scale at pretraining, c = w^2 + v^2 per coordinate: finite, > 0."""
    lambda_pt: Numbers = (0.0,)
    """Relative scale at pretraining, (w^2 - v^2) / c_pt with first layer w: in [-1, 1]."""
    gamma_ft: Numbers = (0.0,)
    """Scale of the readout at fine-tuning: finite, >= 0."""


@dataclass(frozen=True, kw_only=True)
class Teachers:
    """The two tasks."""

    rho_pt: Numbers = (0.1,)
    """Sparsity of the pretraining teacher: a probability in [0, 1]."""
    rho_ft: Annotated[Numbers, _default(0.1)] = ()
    """Sparsity of the fine-tuning teacher: a probability in (0, 1]."""
    omega: Annotated[Numbers, _default(0.5)] = ()
    """Share of the fine-tuning support inside the pretraining support: in [0, 1]."""
    rho_ft_shared: Annotated[Numbers, _default("not used")] = ()
    """The paper's own parameter, P(in FT support | in PT support): in [0, 1]. With --rho-ft-new, instead of
    --rho-ft and --omega."""
    rho_ft_new: Annotated[Numbers, _default("not used")] = ()
    """The paper's own parameter, P(in FT support | not in PT support): in [0, 1]. With --rho-ft-shared."""
    beta_pt: Numbers = (1.0,)
    """Amplitude of the pretraining teacher on its support: finite, >= 0."""
    noise_var_ft: Numbers = (0.0,)
    """Variance of the label noise per fine-tuning sample: finite, >= 0."""


@dataclass(frozen=True, kw_only=True)
class _Samples:
    alpha_ft: Numbers = (0.3,)
    """Fine-tuning samples per coordinate, n / D: finite, > 0."""


@dataclass(frozen=True, kw_only=True)
class Solve(Command, _Samples, Initialisation, Teachers):
    """Theory: the exact error of fine-tuning in the limit of many coordinates."""

    about: ClassVar[str] = f"""\
Predict fine-tuning after perfect pretraining, exactly, for D -> infinity.

Columns: mse = E[(beta_FT - beta*_FT)^2] per coordinate, forgetting = E[(beta_FT - beta*_PT)^2], the effective
noise tau and regularisation theta, the relative residual of the equations, and the result code.

{_GRID}

Exit code: 0; 3 if a point failed (its code is printed); 2 for bad input.

Example: dlnsim solve --c-pt 1e-3 1e-1 --lambda-pt -0.99 0 0.99 --alpha-ft 0.1 0.3 0.5"""


@dataclass(frozen=True, kw_only=True)
class _FiniteSize:
    alpha_pt: Numbers = (float("inf"),)
    """Pretraining samples per coordinate: > 0; inf is perfect pretraining, without training."""
    noise_var_pt: Numbers = (0.0,)
    """Variance of the label noise per pretraining sample: finite, >= 0."""
    dim: int = 1000
    """Number of coordinates D: >= 1. Time grows as n^2 D."""
    seeds: int = 8
    """Draws of tasks and data per grid point: >= 1 (standard errors need 2)."""
    seed: int = 0
    """Seed of the random numbers: in [0, 2^63)."""


@dataclass(frozen=True, kw_only=True)
class Simulate(Command, _FiniteSize, _Samples, Initialisation, Teachers):
    """Exact simulation at finite size, held against the theory where it applies."""

    about: ClassVar[str] = f"""\
Draw tasks and data; solve both stages exactly to the end of gradient flow.

Columns: mean and standard error (_se) over the converged seeds of mse_ft, forgetting and mse_pt, the largest
relative residual, the theory's mse at the sample number used, z = (mse_ft - theory) / se, and how many seeds
ended with which code. The theory is compared for perfect pretraining: alpha_pt inf, or >= 1 without noise.

Sample numbers that differ by a quarter octave take seconds to compile, once: compiled programs are kept in the
folder that JAX_COMPILATION_CACHE_DIR names, or in ~/.cache/dlnsim.

{_GRID}

Exit code: 0; 3 if a seed failed (its code is printed); 2 for bad input.

Example: dlnsim simulate --dim 500 --alpha-ft 0.2 0.4 --lambda-pt -0.9"""


@dataclass(frozen=True, kw_only=True)
class Bias(Command, Initialisation):
    """Inductive bias: l-order, pretraining dependence and regime of a coordinate."""

    about: ClassVar[str] = f"""\
Inductive bias on a coordinate that went to beta_pt, then to beta_ft.

Columns: c_ft (scale at the start of fine-tuning), l_order in [1, 2] (1 sparse, 2 ridge), the pretraining
dependence in [-1, 0] (0 ignores beta_pt), and the regime weights a_I (sparse), a_II (pretraining-dependent
ridge), a_III (plain ridge), which sum to 1.

{_GRID}

Example: dlnsim bias --beta-pt 0 1 --c-pt 1e-3 1 --lambda-pt -0.99 0"""

    beta_ft: Numbers = (1.0,)
    """Fine-tuned value of the coordinate: finite."""
    beta_pt: Numbers = (1.0,)
    """Pretrained value of the coordinate: finite."""


@dataclass(frozen=True, kw_only=True)
class Limit(Command):
    """Your own data: where gradient flow of the fine-tuned network ends."""

    about: ClassVar[str] = """\
The end point of gradient flow on your own data, and the bias that led there.

DATA is a .npz with arrays X (n x D), y (n) and, if you like, beta_pt (D); or a .csv with the target in the
last column and the inputs in the others, with or without a header line.

The scale of each coordinate follows from --c-pt, --lambda-pt, --gamma-ft and the pretrained beta_pt (0 if
none is given); or give it directly with --c. The mean l-order and pretraining dependence weigh each
coordinate by its share of the minimised penalty Q.

Exit code: 0; 3 if the solver failed (its code is printed); 2 for bad input.

Example: dlnsim limit task.npz --beta-pt pretrained.npz --lambda-pt -0.9 --out solution.npz"""

    positional: ClassVar[tuple[str, ...]] = ("data",)
    data: Annotated[Positional[Path], arg(metavar="DATA")]
    """.npz with X, y and optionally beta_pt, or .csv with y in the last column."""
    beta_pt: Annotated[File | None, arg(metavar="FILE"), _default("that of DATA, else 0")] = None
    """Pretrained solution, one finite value a coordinate: .csv, .npy or .npz (array beta_pt, or the beta that
    --out wrote)."""
    c_pt: Annotated[Number | None, arg(metavar="X"), _default(0.001)] = None
    """Absolute scale at pretraining, c = w^2 + v^2 per coordinate: finite, > 0."""
    lambda_pt: Annotated[Number | None, arg(metavar="X"), _default(0)] = None
    """Relative scale at pretraining, (w^2 - v^2) / c_pt with first layer w: in [-1, 1]."""
    gamma_ft: Annotated[Number | None, arg(metavar="X"), _default(0)] = None
    """Scale of the readout at fine-tuning: finite, >= 0."""
    c: Annotated[Number | None, arg(metavar="X"), _default("not used")] = None
    """Scale of every coordinate at the start of fine-tuning: finite, > 0. Instead of the four above."""
    out: Annotated[File | None, arg(metavar="FILE.npz"), _default("not written")] = None
    """Write beta, c, l_order and pretraining_dependence, one value a coordinate."""
    force: bool = False
    """Let --out replace a file."""


@dataclass(frozen=True, kw_only=True)
class Demo(Command):
    """Reproduce published results: theory, simulation and figures from one config."""

    about: ClassVar[str] = """\
Run the packaged demonstration, or your own config, and write data and figures.

Example: dlnsim demo --quick --out demo_output"""

    config: Annotated[File | None, arg(metavar="FILE.toml"), _default("examples/published_grid.toml")] = None
    """The grid to run."""
    out: Annotated[Path, arg(metavar="FOLDER")] = Path("demo_output")
    """Folder for data and figures."""
    quick: bool = False
    """A smaller grid with fewer seeds, for a first look."""


COMMANDS: dict[str, type[Command]] = {
    "solve": Solve,
    "simulate": Simulate,
    "bias": Bias,
    "limit": Limit,
    "demo": Demo,
}
