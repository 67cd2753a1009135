"""`dlnsim limit`: the end point of gradient flow, and its inductive bias, on the user's own data."""

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from dlnsim.bias import l_order, potential, pretraining_dependence
from dlnsim.cli.files import read_coordinates, read_data
from dlnsim.cli.options import Limit
from dlnsim.cli.report import Report, failures
from dlnsim.errors import ArgumentError, DataError
from dlnsim.init import Init
from dlnsim.limit import limit
from dlnsim.result import Result
from dlnsim.validation import check_range

_ACTIVE = 1e-3


def limit_command(options: Limit) -> Report:
    """Solve, describe and store.

    Args:
        options: of the command line.

    Returns:
        `Report`.

    Raises:
        ArgumentError: an option is out of range, or --c is mixed with what it replaces.
        DataError: a file is missing, unreadable or not what was expected, or `out` exists.
    """
    _check_out(options)
    fixed = {name: getattr(options, name) for name in ("c_pt", "lambda_pt", "gamma_ft", "beta_pt")}
    given = ["--" + name.replace("_", "-") for name, value in fixed.items() if value is not None]
    if options.c is not None and given:
        raise ArgumentError(f"--c replaces --c-pt, --lambda-pt, --gamma-ft and --beta-pt, got also {given[0]}")
    check_range("c", 1.0 if options.c is None else options.c, "finite and > 0", _positive)
    init = Init(1e-3 if options.c_pt is None else options.c_pt, options.lambda_pt or 0.0, options.gamma_ft or 0.0)

    X, y, beta_pt = read_data(options.data)
    notes = []
    if options.c is not None and beta_pt is not None:
        notes.append(f"beta_pt in {options.data} is not used: --c fixes the scale")
    if options.beta_pt is not None:
        beta_pt = read_coordinates(options.beta_pt, X.shape[1])
    if beta_pt is None or options.c is not None:
        beta_pt = np.zeros(X.shape[1])
    c = np.asarray(init.c_ft(beta_pt)) if options.c is None else np.full(X.shape[1], options.c)
    solution = limit(X, y, c, throw=False)

    beta = np.asarray(solution.beta)
    # A coordinate with c = 0 stays at 0 and adds nothing to Q, where the formula is 0 / 0.
    moving = c > 0
    share = np.where(moving, potential(beta, np.where(moving, c, 1.0)), 0.0)
    order = np.asarray(l_order(beta, c))
    dependence = np.asarray(pretraining_dependence(beta, beta_pt, init))
    if options.c is not None:
        dependence = np.full(beta.shape, np.nan)
        notes.append("pretraining dependence: not defined with --c, which does not depend on pretraining")
    failed = failures(np.asarray(solution.result))
    parameters = (
        {"c": options.c}
        if options.c is not None
        else {k: float(getattr(init, k)) for k in ("c_pt", "lambda_pt", "gamma_ft")}
    )
    values = {
        "data": options.data,
        "parameters": parameters,
        "samples": X.shape[0],
        "coordinates": X.shape[1],
        **_norms(beta),
        "Q": share.sum(),
        "residual": solution.residual,
        "misfit": solution.misfit,
        "steps": int(solution.steps),
        "result": str(Result(int(solution.result))),
        "l_order": _weighted(order, share),
        "pretraining_dependence": _weighted(dependence, share),
    }
    if options.out is not None and not failed:
        _write(
            options.out,
            {"beta": beta, "c": c, "l_order": order, "pretraining_dependence": dependence},
        )
        values["out"] = options.out
    elif options.out is not None:
        notes.append(f"{options.out} is not written: the solver failed")
    code = Result(int(solution.result))
    if code != Result.CONVERGED:
        notes.append(f"{code}: {code.remedy}")
    return Report("limit", values, _lines(values, notes), failed)


def _positive(x: np.ndarray) -> np.ndarray:
    return (x > 0) & np.isfinite(x)


def _norms(beta: np.ndarray) -> dict[str, Any]:
    size = np.abs(beta)
    if np.isnan(size).any():
        return dict.fromkeys(("l1", "l2", "linf", "active"), np.nan)
    largest = size.max()
    active = int((size > _ACTIVE * largest).sum())
    return {"l1": size.sum(), "l2": np.linalg.norm(size), "linf": largest, "active": active}


def _weighted(values: np.ndarray, share: np.ndarray) -> float:
    total = share.sum()
    return float((values * share).sum() / total) if total > 0 else float("nan")


_MEANING = {
    "active": f"coordinates above {_ACTIVE:g} of the largest",
    "Q": "the minimised penalty",
    "residual": "relative, of the equations solved",
    "misfit": "||X beta - y|| / ||y||",
    "steps": "Hessian factorisations",
    "l_order": "mean weighted by each coordinate's share of Q; 1 sparse, 2 ridge",
    "pretraining_dependence": "mean weighted by each coordinate's share of Q; 0 none, -1 full",
}


def _lines(values: dict[str, Any], notes: list[str]) -> list[str]:
    rows = {name: value for name, value in values.items() if name != "parameters"}
    rows = {"data": rows.pop("data"), **values["parameters"], **rows}
    lines = []
    for name, value in rows.items():
        shown = str(value) if isinstance(value, str | int | Path) else f"{float(value):.6g}"
        meaning = f"  # {_MEANING[name]}" if name in _MEANING else ""
        lines.append(f"{name:<22}  {shown:<12}{meaning}".rstrip())
    return [*lines, *(f"# {note}" for note in notes)]


def _check_out(options: Limit) -> None:
    """Complain about `out` before minutes of computing."""
    out = options.out
    if out is None:
        return
    if out.suffix != ".npz":
        raise DataError(f"`out` must end in .npz, got {out}")
    if out.is_dir() or not out.parent.is_dir():
        raise DataError(f"`out` must be a file in an existing folder, got {out}")
    if out.exists() and not options.force:
        raise DataError(f"{out} exists: choose another name, or pass --force to replace it")
    if not os.access(out.parent, os.W_OK):
        raise DataError(f"cannot write to the folder {out.parent}: choose another one")


def _write(out: Path, arrays: dict[str, np.ndarray]) -> None:
    """All or nothing: whoever reads `out` never sees half of it."""
    handle, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        # mkstemp makes files private; this one is as readable as any other.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, out)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise DataError(f"cannot write {out}: {error.strerror}") from error
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
