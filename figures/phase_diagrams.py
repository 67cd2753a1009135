"""l-order, pretraining dependence and regimes over (beta_PT, lambda), (c_PT, lambda), (gamma_FT, lambda)."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.style import SYMBOLS, mix

FIXED = {
    "beta_ft": r"$\beta_{\rm FT}$",
    **{name: SYMBOLS[name] for name in ("beta_pt", "c_pt", "gamma_ft")},
}
"""What the data set's attributes hold fixed, and how it is written."""


def draw(data: xr.Dataset) -> Figure:
    """Draw the three phase diagrams.

    Args:
        data: from `experiments.published_grid.phase_diagrams`.

    Returns:
        A figure of three rows (l, PD, regimes) and one column a diagram.
    """
    figure = Figure(figsize=(6.9, 5.6))
    grid = figure.subplots(3, 4, width_ratios=[1, 1, 1, 0.62])
    y = data.one_plus_lambda.values
    maps = [
        ("l_order", "l-order: 1 sparse, 2 ridge", "cividis", 1, 2),
        ("pretraining_dependence", "PD: -1 follows pretraining", "cividis_r", -1, 0),
    ]
    for column, name in enumerate(data.diagram.values):
        at = data.sel(diagram=name)
        x = at.x_value.values
        for row, (variable, label, colours, low, high) in enumerate(maps):
            axes = grid[row, column]
            values = at[variable].values.T
            image = axes.pcolormesh(x, y, values, cmap=colours, vmin=low, vmax=high, rasterized=True)
            levels = np.arange(low + 0.25, high, 0.25)
            axes.contour(x, y, values, levels=levels, colors="white", linewidths=0.5, linestyles="solid")
            if column == 0:
                bar = grid[row, 3].inset_axes((0.0, 0.0, 0.14, 1.0))
                figure.colorbar(image, cax=bar, label=label)
                grid[row, 3].set_axis_off()
        _regimes(grid[2, column], x, y, at.weights.values)
        for axes in grid[:, column]:
            axes.set(xscale="log", yscale="log", xlim=(x[0], x[-1]), ylim=(y[0], y[-1]))
            if column:
                axes.set_yticklabels([])
        grid[2, column].set_xlabel(SYMBOLS[str(name)])
    for axes in grid[:, 0]:
        axes.set_ylabel(SYMBOLS["one_plus_lambda"])
    _triangle(grid[2, 3])
    fixed = ", ".join(f"{symbol} = {data.attrs[name]:g}" for name, symbol in FIXED.items())
    figure.suptitle(f"Where not varied: {fixed}. White lines: every 0.25.", fontsize=8.5)
    return figure


def _regimes(axes: Axes, x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> None:
    colours = mix(weights).transpose(1, 0, 2)
    axes.pcolormesh(x, y, colours, shading="nearest", rasterized=True)


def _triangle(axes: Axes) -> None:
    """Draw the legend of the ternary colours: the (l, PD) triangle itself."""
    order, dependence = np.meshgrid(np.linspace(1, 2, 150), np.linspace(-1, 0, 150))
    weights = np.stack([2 - order, -dependence, order + dependence - 1], axis=-1)
    colours = np.where((weights[..., 2] >= -1e-9)[..., None], mix(weights.clip(0)), 1.0)
    axes.imshow(colours, origin="lower", extent=(1, 2, -1, 0), aspect="auto", interpolation="bilinear")
    for text, at, align in (
        ("I", (1.1, -0.01), "left"),
        ("II", (1.97, -0.85), "right"),
        ("III", (1.97, -0.01), "right"),
    ):
        axes.annotate(text, at, ha=align, va="top", fontsize=7, color="black")
    axes.annotate("IV", (1.42, -0.52), ha="right", va="top", fontsize=7)
    axes.set(xlabel="l-order", ylabel="PD", xticks=(1, 2), yticks=(-1, 0))
    axes.yaxis.set_label_coords(-0.12, 0.5)
    axes.xaxis.set_label_coords(0.5, -0.1)
