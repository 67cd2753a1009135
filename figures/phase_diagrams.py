"""l-order, pretraining dependence and regimes over (beta_PT, lambda), (c_PT, lambda), (gamma_FT, lambda)."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.style import REGIMES, SYMBOLS, mix


def draw(data: xr.Dataset) -> Figure:
    """Draw the three phase diagrams.

    Args:
        data: from `experiments.published_grid.phase_diagrams`.

    Returns:
        A figure of three rows (l, PD, regimes) and one column a diagram.
    """
    figure = Figure(figsize=(6.9, 6.1))
    grid = figure.subplots(3, 3, sharey=True)
    y = data.one_plus_lambda.values
    maps = [("l_order", "l-order", "cividis", 1, 2), ("pretraining_dependence", "PD", "cividis_r", -1, 0)]
    for column, name in enumerate(data.diagram.values):
        at = data.sel(diagram=name)
        x = at.x_value.values
        for row, (variable, label, colours, low, high) in enumerate(maps):
            axes = grid[row, column]
            image = axes.pcolormesh(
                x, y, at[variable].values.T, cmap=colours, vmin=low, vmax=high, shading="gouraud", rasterized=True
            )
            levels = np.arange(low + 0.25, high, 0.25)
            axes.contour(x, y, at[variable].values.T, levels=levels, colors="white", linewidths=0.5)
            if column == 2:
                figure.colorbar(image, ax=axes, label=label)
        _regimes(grid[2, column], x, y, at.weights.values)
        for axes in grid[:, column]:
            axes.set(xscale="log", yscale="log", xlim=(x[0], x[-1]), ylim=(y[0], y[-1]))
        grid[2, column].set_xlabel(SYMBOLS[str(name)])
    for axes, title in zip(grid[:, 0], ("", "", ""), strict=True):
        axes.set_ylabel(SYMBOLS["one_plus_lambda"] + title)
    _triangle(grid[2, 2])
    return figure


def _regimes(axes: Axes, x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> None:
    colours = mix(weights).transpose(1, 0, 2)
    axes.pcolormesh(x, y, colours, shading="nearest", rasterized=True)


def _triangle(beside: Axes) -> None:
    """The legend of the ternary colours: the (l, PD) triangle itself, where the colour bars stand above."""
    axes = beside.inset_axes((1.12, 0.12, 0.62, 0.8))
    order, dependence = np.meshgrid(np.linspace(1, 2, 150), np.linspace(-1, 0, 150))
    weights = np.stack([2 - order, -dependence, order + dependence - 1], axis=-1)
    colours = np.where((weights[..., 2] >= -1e-9)[..., None], mix(weights.clip(0)), 1.0)
    axes.imshow(colours, origin="lower", extent=(1, 2, -1, 0), aspect="auto", interpolation="bilinear")
    corners = {"I": (1.0, 0.0), "II": (2.0, -1.0), "III": (2.0, 0.0)}
    for regime, (l_order, pd) in corners.items():
        offset = {"I": (-2, 4), "II": (3, -2), "III": (3, 2)}[regime]
        axes.annotate(regime, (l_order, pd), offset, textcoords="offset points", color=REGIMES[regime], fontsize=7)
    axes.annotate("IV", (1.42, -0.6), fontsize=7)
    axes.set(xlabel="l", ylabel="PD", xticks=(1, 2), yticks=(-1, 0))
    axes.yaxis.set_label_coords(-0.08, 0.5)
    axes.xaxis.set_label_coords(0.5, -0.06)
