"""One look for every figure: fonts, sizes, colour-blind-safe colours, the paper's symbols."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from jaxtyping import Float
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

SYMBOLS = {
    "alpha_ft": r"$\alpha_{\rm FT}$",
    "beta_pt": r"$\beta_{\rm PT}$",
    "c_pt": r"$c_{\rm PT}$",
    "gamma_ft": r"$\gamma_{\rm FT}$",
    "lambda_pt": r"$\lambda_{\rm PT}$",
    "one_plus_lambda": r"$1 + \lambda_{\rm PT}$",
    "omega": r"$\omega$",
    "mse": r"fine-tuning error",
}
"""Axis labels."""

# Okabe and Ito's palette.
ORANGE, SKY, GREEN, BLUE, RED, PURPLE = "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"
CYCLE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
REGIMES = {"I": ORANGE, "II": BLUE, "III": "#BBBBBB"}
"""Colours of the regimes: sparse, pretraining-dependent, plain ridge; IV is the mixture of I and II."""

# Any: matplotlib's stubs list the allowed keys one by one, and dict keys are invariant.
_RC: dict[Any, object] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8.5,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.5,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
}


@contextmanager
def style() -> Iterator[None]:
    """Apply the house style within a `with` block; drawing needs no display."""
    with mpl.rc_context(_RC):
        yield


def mix(weights: Float[np.ndarray, "... 3"]) -> Float[np.ndarray, "... 3"]:
    """RGB mixture of the three regime colours with barycentric weights.

    Args:
        weights: from `dlnsim.regime_weights`.

    Returns:
        Colours in [0, 1].
    """
    corners = np.array([to_rgb(colour) for colour in REGIMES.values()])
    return np.clip(np.asarray(weights) @ corners, 0, 1)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write PNG and PDF.

    Args:
        figure: what to write.
        folder: an existing folder.
        name: file name without ending.

    Returns:
        The two paths.
    """
    paths = [folder / f"{name}.{ending}" for ending in ("png", "pdf")]
    for path in paths:
        # Without a date equal data give equal files.
        figure.savefig(path, metadata={"CreationDate": None} if path.suffix == ".pdf" else None)
    return paths
