"""The best lambda_PT over (omega, alpha_FT), and what it gains over the default."""

import numpy as np
import xarray as xr
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from figures.style import SYMBOLS


def draw(data: xr.Dataset) -> Figure:
    """Draw the optimum and its gain.

    Args:
        data: from `experiments.published_grid.best_lambda`.

    Returns:
        A figure of two maps.
    """
    figure = Figure(figsize=(6.9, 2.8))
    left, right = figure.subplots(1, 2, sharey=True)
    omega, alpha = data.omega.values, data.alpha_ft.values
    optimum = (1 + data.lambda_pt).values
    # Grey: the lower end of the search, that is, the sparser the better.
    searched = np.ma.masked_where(data.at_edge.values & (optimum < 1e-3), optimum)
    left.set_facecolor("0.85")
    image = left.pcolormesh(omega, alpha, searched.T, norm=LogNorm(1e-6, 2), cmap="cividis", rasterized=True)
    figure.colorbar(image, ax=left)
    left.set_title(f"best {SYMBOLS['one_plus_lambda']}; grey: its lower end, $10^{{-6}}$")
    # The scale ends where exact recovery makes the ratio of two vanishing errors meaningless.
    gain = data.gain.values.clip(1, 100)
    image = right.pcolormesh(omega, alpha, gain.T, norm=LogNorm(1, 100), cmap="magma", rasterized=True)
    figure.colorbar(image, ax=right, extend="max")
    right.set_title(f"gain: error at {SYMBOLS['lambda_pt']} = 0 / error at the best")
    levels = [level for level in (1.1, 2, 10) if gain.min() < level < gain.max()]
    if levels and min(gain.shape) > 1:
        lines = right.contour(omega, alpha, gain.T, levels=levels, colors="white", linewidths=0.7)
        right.clabel(lines, fmt="%gx", fontsize=6)
    for axes in (left, right):
        axes.set_xlabel("overlap " + SYMBOLS["omega"])
    left.set_ylabel(SYMBOLS["alpha_ft"])
    return figure
