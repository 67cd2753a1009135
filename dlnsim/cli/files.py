"""Reading the user's files. Whatever is wrong with one ends as a `DataError` of one line."""

import csv
import zipfile
import zlib
from pathlib import Path

import numpy as np

from dlnsim.errors import DataError

_SINGLE = ""


def read_data(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Read inputs and targets.

    Args:
        path: .npz with X, y and optionally beta_pt, or .csv with the target in the last column.

    Returns:
        (X, y, beta_pt) of shapes (n, D), (n,) and (D,), finite; beta_pt is None if there is none.

    Raises:
        DataError: the file is missing, unreadable or not as described.
    """
    suffix = path.suffix.lower()
    if suffix == ".csv":
        rows = _read_csv(path)
        if rows.shape[1] < 2:
            raise DataError(
                f"{path} must have at least two columns, inputs and then the target, separated by commas, "
                f"got {rows.shape[1]}"
            )
        return rows[:, :-1], rows[:, -1], None
    if suffix != ".npz":
        raise DataError(f"the data must be a .npz or .csv file, got {path}")
    arrays = _read_npz(path)
    for name, shape in (("X", "(samples, coordinates)"), ("y", "(samples,)")):
        if name not in arrays:
            found = ", ".join(arrays) or "nothing"
            raise DataError(f"{path} must hold an array {name} of shape {shape}, got {found}")
    X, y = (_numbers(arrays[name], f"{name} in {path}") for name in ("X", "y"))
    if X.ndim != 2 or 0 in X.shape:
        raise DataError(f"X in {path} must have shape (samples, coordinates), not empty, got {X.shape}")
    if y.shape != X.shape[:1]:
        raise DataError(f"y in {path} must have shape ({len(X)},), one target a row of X, got {y.shape}")
    if "beta_pt" not in arrays:
        return X, y, None
    return X, y, _coordinates(arrays["beta_pt"], f"beta_pt in {path}", X.shape[1])


def read_coordinates(path: Path, dim: int) -> np.ndarray:
    """Read one finite value a coordinate.

    Args:
        path: .csv, .npy or .npz (array beta_pt, else beta, else the only one).
        dim: number of values expected.

    Returns:
        Array of shape (dim,).

    Raises:
        DataError: the file is missing, unreadable or not as described.
    """
    suffix = path.suffix.lower()
    if suffix == ".csv":
        return _coordinates(_read_csv(path), str(path), dim)
    if suffix == ".npy":
        arrays = _load(path)
        if _SINGLE not in arrays:
            raise DataError(f"{path} must be a single array, got a .npz archive: rename it")
        return _coordinates(arrays[_SINGLE], str(path), dim)
    if suffix != ".npz":
        raise DataError(f"`beta_pt` must be a .csv, .npy or .npz file, got {path}")
    arrays = _read_npz(path)
    names = [name for name in ("beta_pt", "beta", *arrays) if name in arrays]
    if not names or (names[0] not in ("beta_pt", "beta") and len(arrays) > 1):
        raise DataError(f"{path} must hold an array beta_pt or beta, got {', '.join(arrays) or 'nothing'}")
    return _coordinates(arrays[names[0]], f"{names[0]} in {path}", dim)


def _coordinates(array: np.ndarray, what: str, dim: int) -> np.ndarray:
    array = _numbers(array, what)
    if array.shape not in ((dim,), (dim, 1), (1, dim)):
        raise DataError(f"{what} must hold {dim} values, one a coordinate of X, got shape {array.shape}")
    return array.ravel()


def _numbers(array: np.ndarray, what: str) -> np.ndarray:
    if array.dtype.kind not in "biuf":
        raise DataError(f"{what} must hold real numbers, got the type {array.dtype}")
    array = array.astype(float)
    bad = np.argwhere(~np.isfinite(array))
    if len(bad):
        at = tuple(bad[0].tolist())
        raise DataError(
            f"{what} must be finite, got {array[at]:g} at index ({', '.join(map(str, at))}), "
            f"{len(bad)} such values in all: remove or impute them"
        )
    return array


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    arrays = _load(path)
    if _SINGLE in arrays:
        raise DataError(f"{path} must be a .npz archive, got a single array: save it with numpy.savez")
    return arrays


def _load(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an archive, or the only array of a .npy under the name `_SINGLE`."""
    _check_file(path)
    try:
        # numpy leaves a file that it opened itself open if the archive is torn.
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            arrays = {_SINGLE: loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
        # A member that is not an array comes as bytes.
        if not all(isinstance(array, np.ndarray) for array in arrays.values()):
            raise TypeError
        return arrays
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is not a file of numeric arrays that numpy.savez or numpy.save wrote") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _check_file(path: Path) -> None:
    if not path.exists():
        raise DataError(f"{path} does not exist: check the name and the folder")
    if not path.is_file():
        raise DataError(f"{path} must be a file, got a folder")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty")


def _read_csv(path: Path) -> np.ndarray:
    """The numbers of a CSV file, shape (rows, columns); a first line without any number is a header."""
    _check_file(path)
    try:
        # Spreadsheets put a byte-order mark first.
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [(i, row) for i, row in enumerate(csv.reader(file), start=1) if any(map(str.strip, row))]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a text file of comma-separated numbers: {error}") from error
    if rows and all(_number(cell) is None for cell in rows[0][1]):
        del rows[0]
    if not rows:
        raise DataError(f"{path} must hold rows of comma-separated numbers, got none")
    width = len(rows[0][1])
    values = np.empty((len(rows), width))
    for k, (line, row) in enumerate(rows):
        if len(row) != width:
            raise DataError(f"{path}, line {line} must have {width} columns like the others, got {len(row)}")
        for j, cell in enumerate(row):
            number = _number(cell)
            if number is None or not np.isfinite(number):
                raise DataError(f"{path}, line {line}, column {j + 1} must be a finite number, got {cell.strip()!r}")
            values[k, j] = number
    return values


def _number(cell: str) -> float | None:
    try:
        # Python reads 1_0 as 10; a file of numbers does not mean that.
        return None if "_" in cell else float(cell)
    except ValueError:
        return None
