"""Theory lines with exactly simulated points and their error bars, published values overlaid."""

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.agreement import student_quantile
from figures.style import CYCLE, SYMBOLS

_LINES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "v")


def draw_grid(theory: xr.Dataset, simulation: xr.Dataset, published: xr.Dataset) -> Figure:
    """One panel for each (omega, gamma_FT): colours are c_PT, lines and markers lambda_PT.

    Args:
        theory: from `experiments.published_grid.theory`.
        simulation: from `experiments.published_grid.simulation`; bars are 95 % intervals of the mean over seeds.
        published: from `experiments.published_grid.published`; drawn where its parameters are on the grid.

    Returns:
        The figure.
    """
    omegas, gammas = theory.omega.values, theory.gamma_ft.values
    figure = Figure(figsize=(6.9, 1.9 * len(omegas) + 0.7))
    panels = figure.subplots(len(omegas), len(gammas), sharex=True, sharey="col", squeeze=False)
    seeds = simulation.sizes["seed"]
    mean = simulation.mse.mean("seed")
    half_width = student_quantile(seeds - 1) * simulation.mse.std("seed", ddof=1) / np.sqrt(seeds)
    # On a logarithmic axis the interval of log mse, by the delta method: the other would reach below zero.
    relative = (half_width / mean).clip(max=5)
    bars = xr.concat([mean * (1 - np.exp(-relative)), mean * (np.exp(relative) - 1)], dim="side")
    for i, omega in enumerate(omegas):
        for j, gamma in enumerate(gammas):
            axes = panels[i, j]
            for k, c_pt in enumerate(theory.c_pt.values):
                for m, lambda_pt in enumerate(theory.lambda_pt.values):
                    at = {"omega": omega, "gamma_ft": gamma, "c_pt": c_pt, "lambda_pt": lambda_pt}
                    axes.plot(
                        theory.alpha_ft,
                        theory.mse.sel(at),
                        color=CYCLE[k % len(CYCLE)],
                        linestyle=_LINES[m % len(_LINES)],
                        linewidth=1,
                    )
                    axes.errorbar(
                        simulation.alpha_ft,
                        mean.sel(at),
                        bars.sel(at).values,
                        fmt=_MARKERS[m % len(_MARKERS)],
                        color=CYCLE[k % len(CYCLE)],
                        markersize=2.6,
                        elinewidth=0.8,
                    )
            _overlay(axes, published, omega, gamma, theory)
            axes.set_title(f"{SYMBOLS['omega']} = {omega:g},  {SYMBOLS['gamma_ft']} = {gamma:g}")
            axes.set_yscale("log")
            # Exact recovery goes on falling; what matters is above.
            column = theory.mse.sel(gamma_ft=gamma)
            axes.set_ylim(max(1e-5, float(column.min()) / 2), 2 * float(column.max()))
    for axes in panels[-1]:
        axes.set_xlabel(SYMBOLS["alpha_ft"])
    for axes in panels[:, 0]:
        axes.set_ylabel(SYMBOLS["mse"])
    handles = [
        Line2D([], [], color=CYCLE[k % len(CYCLE)], label=f"{SYMBOLS['c_pt']} = {c:g}")
        for k, c in enumerate(theory.c_pt.values)
    ]
    handles += [
        Line2D(
            [],
            [],
            color="black",
            linestyle=_LINES[m % len(_LINES)],
            marker=_MARKERS[m % len(_MARKERS)],
            label=f"{SYMBOLS['lambda_pt']} = {x:g}",
        )
        for m, x in enumerate(theory.lambda_pt.values)
    ]
    figure.suptitle(
        f"Lines: theory. Points: exact simulation, D = {simulation.attrs['dim']}, {seeds} seeds, 95 %.  "
        rf"$\rho_{{\rm PT}}$ = {theory.attrs['rho_pt']:g}, $\rho_{{\rm FT}}$ = {theory.attrs['rho_ft']:g}",
        fontsize=8.5,
    )
    handles.append(Line2D([], [], color="black", linestyle="", marker="x", label="published Monte Carlo"))
    handles.append(Line2D([], [], color="black", linestyle="", marker="+", markersize=6, label="published descent"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def _overlay(axes, published: xr.Dataset, omega: float, gamma: float, theory: xr.Dataset) -> None:
    tasks = {name: theory.attrs[name] for name in ("rho_pt", "rho_ft")}
    wanted = {**tasks, "omega": omega, "gamma_ft": gamma}
    here = np.all([np.isclose(published[name], value) for name, value in wanted.items()], axis=0)
    for source, marker, size in (("replica_mc", "x", 4.0), ("gradient_descent", "+", 6.5)):
        rows = published.isel(row=np.flatnonzero(here & (published.source.values == source)))
        on_grid = np.isin(rows.c_pt, theory.c_pt) & np.isin(rows.lambda_pt, theory.lambda_pt)
        rows = rows.isel(row=np.flatnonzero(on_grid))
        axes.plot(rows.alpha_ft, rows.value, marker, color="black", markersize=size, markeredgewidth=0.9, zorder=5)


def draw_published(published: xr.Dataset) -> Figure:
    """Published against predicted error at the published parameters, nominal and as sampled.

    Args:
        published: from `experiments.published_grid.published`.

    Returns:
        The figure: relative deviation of every published value from the theory.
    """
    figure = Figure(figsize=(5.2, 3.0))
    axes = figure.subplots()
    axes.axhline(0, color="black", linewidth=0.7)
    kinds = (
        ("replica_mc", "theory_mse", "x", CYCLE[1], "Monte Carlo, nominal sparsities"),
        ("replica_mc", "theory_mse_emp", "o", CYCLE[0], "Monte Carlo, sparsities as sampled"),
        ("gradient_descent", "theory_mse", "s", CYCLE[2], "gradient descent, D = 5000"),
    )
    for source, predicted, marker, colour, label in kinds:
        rows = published.where(published.source == source, drop=True)
        deviation = rows.value / rows[predicted] - 1
        bars = rows.se / rows[predicted]
        axes.errorbar(rows[predicted], deviation, bars, fmt=marker, color=colour, label=label, elinewidth=0.8)
    axes.set(xscale="log", xlabel="predicted " + SYMBOLS["mse"], ylabel="published / predicted - 1")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.legend(loc="upper right")
    return figure
