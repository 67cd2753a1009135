"""The command line: every mistake is exit code 2 and one line on stderr, and no file is lost."""

import sys

import numpy as np
import pytest

from dlnsim.cli import BAD_INPUT, FAILED_POINTS, INTERRUPTED, arguments, commands, main
from dlnsim.cli.files import read_data
from dlnsim.errors import DataError, SolverError


@pytest.fixture
def complain(capsys):
    """Run a command that must fail as bad input; its one line on stderr."""

    def call(*arguments):
        assert main([str(a) for a in arguments]) == BAD_INPUT
        out, err = capsys.readouterr()
        assert out == ""
        assert err.endswith("\n")
        assert err.count("\n") == 1
        assert "Traceback" not in err
        return err[:-1]

    return call


@pytest.fixture
def npz(tmp_path):
    path = tmp_path / "task.npz"
    X = np.random.default_rng(3).standard_normal((6, 15))
    np.savez(path, X=X, y=X @ np.ones(15))
    return path


BAD_LINES = {
    "slove": "dlnsim: unknown command `slove`, did you mean `solve`?",
    "--jsno": "dlnsim: unknown option `--jsno`",
    "solve --c-tp 1": "dlnsim solve: unknown option `--c-tp`, did you mean `--c-pt`?",
    "solve --qqq": "dlnsim solve: unknown option `--qqq`; the options are --rho-pt,",
    "solve -c 1": "dlnsim solve: unknown option `-c`",
    "solve --c-pt abc": "dlnsim solve: `--c-pt` must be a number, got `abc`",
    "solve --c-pt 1 1,2": "dlnsim solve: `--c-pt` must be a number, got `1,2`",
    "solve --c-pt": "dlnsim solve: `--c-pt` must be followed by one or several numbers, got nothing",
    "solve --c-pt --json": "dlnsim solve: `--c-pt` must be followed by one or several numbers",
    "solve --c-pt=": "dlnsim solve: `--c-pt` must be a number, got ``",
    "solve --c-pt 1 --c-pt 2": "dlnsim solve: `--c-pt` is given twice; give all its values after one",
    "solve 3": "dlnsim solve: unexpected argument `3`",
    "solve --json 3": "dlnsim solve: unexpected argument `3`",
    "solve --json=yes": "dlnsim solve: unexpected argument `yes`",
    "solve --c-pt 0": "dlnsim solve: `c_pt` must be finite and > 0, got 0",
    "solve --c-pt 1 nan": "dlnsim solve: `c_pt` must be finite and > 0, got nan",
    "solve --c-pt -1e-3": "dlnsim solve: `c_pt` must be finite and > 0, got -0.001",
    "solve --lambda-pt -1.5": "dlnsim solve: `lambda_pt` must be relative, in [-1, 1], got -1.5",
    "solve --alpha-ft inf": "dlnsim solve: `alpha_ft` must be finite and > 0, got inf",
    "solve --omega 1 --rho-ft 0.5": "dlnsim solve: infeasible overlap",
    "solve --omega 1 --rho-ft-new 0.1": "dlnsim solve: give either --rho-ft and --omega or",
    "solve --rho-ft-new 0.1": "dlnsim solve: --rho-ft-shared and --rho-ft-new go together",
    "solve --dim 10": "dlnsim solve: unknown option `--dim`",
    "simulate --dim 1.5": "dlnsim simulate: `--dim` must be an integer, got `1.5`",
    "simulate --dim 0": "dlnsim simulate: `dim` must be an integer >= 1, got 0",
    "simulate --dim 99999999999999999999": "dlnsim simulate: `dim` must be",
    "simulate --seeds -2": "dlnsim simulate: `seeds` must be an integer >= 1, got -2",
    "simulate --seeds 2 3": "dlnsim simulate: unexpected argument `3`",
    "simulate --seed -1": "dlnsim simulate: `seed` must be an integer in [0, 2^63), got -1",
    "simulate --alpha-pt 0": "dlnsim simulate: `alpha_pt` must be > 0",
    "bias --beta-ft nan": "dlnsim bias: `beta_ft` must be finite, got nan",
    "bias --gamma-ft -1": "dlnsim bias: `gamma_ft` must be finite and >= 0, got -1",
    "limit": "dlnsim limit: DATA is missing",
    "limit a.npz b.npz": "dlnsim limit: unexpected argument `b.npz`",
    "limit a.npz --c": "dlnsim limit: `--c` must be followed by a number, got nothing",
    "limit a.npz --c None": "dlnsim limit: `--c` must be a number, got `None`",
    "limit a.npz --c 0": "dlnsim limit: `c` must be finite and > 0, got 0",
    "limit a.npz --c 1 --lambda-pt 0": "dlnsim limit: --c replaces",
    "limit a.npz --out": "dlnsim limit: `--out` must be followed by a path, got nothing",
    "limit a.npz --out b.txt": "dlnsim limit: `out` must end in .npz, got b.txt",
    "limit a.npz --out nowhere/b.npz": "dlnsim limit: `out` must be a file in an existing folder",
    "limit no_such_file.npz": "dlnsim limit: no_such_file.npz does not exist",
    "limit data.txt": "dlnsim limit: the data must be a .npz or .csv file, got data.txt",
    "limit .": "dlnsim limit: the data must be a .npz or .csv file",
    "demo --quikc": "dlnsim demo: unknown option `--quikc`, did you mean `--quick`?",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_bad_input_is_one_line(complain, line):
    assert complain(*line.split(" ")).startswith(BAD_LINES[line])


def test_a_huge_grid_is_refused_before_it_is_made(complain):
    values = [str(0.1 + i / 1e5) for i in range(1001)]
    assert "1,002,001 points" in complain("solve", "--alpha-ft", *values, "--c-pt", *values)


def test_what_only_tyro_notices_is_one_line_too(complain, monkeypatch):
    monkeypatch.setattr(arguments, "_check", lambda *a: None)
    message = complain("simulate", "--dim", "1.5")
    assert message.startswith("dlnsim simulate: Value error Error parsing --dim: invalid literal for int()")
    assert message.endswith("(see dlnsim simulate --help)")
    assert "Unrecognized options: --c-tp" in complain("solve", "--c-tp", "1")


X2, Y2 = np.ones((2, 3)), np.ones(2)
BAD_FILES = {
    "no_y.npz": ({"X": X2}, "must hold an array y of shape (samples,), got X"),
    "no_x.npz": ({}, "must hold an array X of shape (samples, coordinates), got nothing"),
    "nan.npz": ({"X": X2 * [1, np.nan, 1], "y": Y2}, "must be finite, got nan at index (0, 1), 2 such values"),
    "inf.npz": ({"X": X2, "y": [1, np.inf]}, "y in {} must be finite, got inf at index (1)"),
    "flat.npz": ({"X": Y2, "y": Y2}, "must have shape (samples, coordinates)"),
    "none.npz": ({"X": np.ones((0, 3)), "y": np.ones(0)}, "not empty, got (0, 3)"),
    "shape.npz": ({"X": X2, "y": np.ones(3)}, "y in {} must have shape (2,), one target a row of X, got (3,)"),
    "words.npz": ({"X": X2, "y": ["a", "b"]}, "y in {} must hold real numbers, got the type <U1"),
    "complex.npz": ({"X": X2, "y": Y2 * 1j}, "must hold real numbers, got the type complex128"),
    "objects.npz": ({"X": X2, "y": np.array([1, "a"], dtype=object)}, "is not a file of numeric arrays"),
    "beta.npz": ({"X": X2, "y": Y2, "beta_pt": Y2}, "beta_pt in {} must hold 3 values, one a coordinate of X"),
    "torn.npz": (b"PK\x03\x04 and no more", "is not a file of numeric arrays that numpy.savez or numpy.save wrote"),
    "text.npz": (b"1,2,3", "is not a file of numeric arrays that numpy.savez or numpy.save wrote"),
    "empty.npz": (b"", "is empty"),
    "empty.csv": (b"", "is empty"),
    "header.csv": (b"a,b,c\n", "must hold rows of comma-separated numbers, got none"),
    "word.csv": (b"a,b\n1,2\n3,four\n", "line 3, column 2 must be a finite number, got 'four'"),
    "gap.csv": (b"1,2\n3,\n", "line 2, column 2 must be a finite number, got ''"),
    "nan.csv": (b"1,2\nnan,1\n", "line 2, column 1 must be a finite number, got 'nan'"),
    "ragged.csv": (b"1,2\n3,4,5\n", "line 2 must have 2 columns like the others, got 3"),
    "one.csv": (b"1\n2\n", "must have at least two columns"),
    "semicolons.csv": (b"1;2\n3;4\n", "must be a finite number, got '3;4'"),
    "binary.csv": (b"\xff\xfe\x00\x01", "is not a text file of comma-separated numbers"),
}


def write(path, content):
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.savez(path, **content)
    return path


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_data_is_one_line(complain, tmp_path, name):
    content, expected = BAD_FILES[name]
    path = write(tmp_path / name, content)
    message = complain("limit", path)
    assert message.startswith("dlnsim limit: ")
    assert str(path) in message
    assert expected.replace("{}", str(path)) in message
    with pytest.raises(DataError):
        read_data(path)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("b.csv", b"1\n2\n", "must hold 15 values, one a coordinate of X, got shape (2, 1)"),
        ("b.npz", {"p": Y2, "q": Y2}, "must hold an array beta_pt or beta, got p, q"),
        ("b.txt", b"1", "`beta_pt` must be a .csv, .npy or .npz file"),
        ("b.npy", b"", "is empty"),
        ("c.npy", None, "does not exist"),
    ],
)
def test_bad_pretrained_solution_is_one_line(complain, npz, tmp_path, name, content, expected):
    if content is not None:
        write(tmp_path / name, content)
    assert expected in complain("limit", npz, "--beta-pt", tmp_path / name)


def test_out_is_atomic_and_never_replaced_unasked(complain, npz, tmp_path, monkeypatch):
    out = tmp_path / "solution.npz"
    out.write_bytes(b"precious")
    assert "--force" in complain("limit", npz, "--out", out)
    assert out.read_bytes() == b"precious"

    def full(file, **arrays):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    before = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        assert "No space left" in complain("limit", npz, "--out", out, "--force")
    assert out.read_bytes() == b"precious"
    assert sorted(tmp_path.iterdir()) == before

    assert main(["limit", str(npz), "--out", str(out), "--force"]) == 0
    assert sorted(tmp_path.iterdir()) == before
    with np.load(out) as stored:
        assert set(stored) == {"beta", "c", "l_order", "pretraining_dependence"}


def test_demo_complains_in_one_line(complain, monkeypatch, tmp_path):
    assert "does not exist" in complain("demo", "--config", tmp_path / "none.toml")
    (tmp_path / "file").touch()
    assert "must be a folder" in complain("demo", "--out", tmp_path / "file")
    monkeypatch.setitem(sys.modules, "figures.demo", None)
    assert "not installed" in complain("demo")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), INTERRUPTED),
        (SolverError("a\nproblem"), FAILED_POINTS),
        (MemoryError(), BAD_INPUT),
        (RuntimeError("RESOURCE_EXHAUSTED: on a GPU"), BAD_INPUT),
        (RuntimeError("INTERNAL: Out of memory allocating 9 bytes"), BAD_INPUT),
    ],
)
def test_interruptions_leave_no_traceback(capsys, monkeypatch, error, code):
    def fail(options):
        raise error

    monkeypatch.setitem(commands._RUN, "bias", fail)
    assert main(["bias"]) == code
    assert capsys.readouterr().err.count("\n") == (code != INTERRUPTED)


def test_a_full_disk_is_one_line(capsys, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(commands, "run", full)
    monkeypatch.setattr("dlnsim.cli._abandon_stdout", lambda: None)
    assert main(["bias"]) == BAD_INPUT
    assert capsys.readouterr().err == "dlnsim bias: No space left on device\n"
