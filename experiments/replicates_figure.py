"""Gains of a calibration beside those of the medians, and the distances that it leaves beside those of sampling."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from ot_newton.experiments.figures import BLUE, GREEN, GREY, VERMILION, legend_below

NUMERIC = ("gain_medians", "gain_se", "gain_map", "W_diagonal", "intercept", "before", "after", "sampling")
TEXT = ("run", "x", "y", "channel")
_SCALINGS = {"arcsinh": (BLUE, "o"), "linear": (GREEN, "s")}
_BAR = {"marker": "|", "linestyle": "", "markersize": 15, "markeredgewidth": 2.5}


def draw_replicates(figure: Figure, table: pd.DataFrame) -> None:
    """A line for each channel: the gains in the left panel, the distances in the right one."""
    figure.suptitle(
        f"Replicate {table['x'].iloc[0]} mapped to replicate {table['y'].iloc[0]}: no cell has a partner",
        x=0.01,
        ha="left",
        fontweight="bold",
    )
    gains, distances = figure.subplots(1, 2, sharey=True)
    channels = list(dict.fromkeys(table["channel"]))
    gains.set_yticks(range(len(channels)), channels)
    gains.set_ylim(len(channels) - 0.5, -0.5)
    first = table[table["run"] == table["run"].iloc[0]]
    lines = np.arange(len(channels))
    reach = 2 * first["gain_se"]
    medians = gains.errorbar(first["gain_medians"], lines, xerr=reach, fmt="k|", markersize=15, markeredgewidth=2.5)
    medians.set_label("medians ± 2 standard errors")
    before = distances.plot(first["before"], lines, color=VERMILION, label="before", **_BAR)
    sampling = distances.plot(first["sampling"], lines, color=GREY, label="sampling alone", **_BAR)
    maps = []
    for number, (scaling, rows) in enumerate(table.groupby("run", sort=False)):
        (color, marker), beside = _SCALINGS[str(scaling)], lines + 0.2 * number - 0.1
        for ax, column in ((gains, "gain_map"), (distances, "after")):
            dots = ax.plot(rows[column], beside, marker, color=color, label=f"map, {scaling} units", zorder=3)
        maps.append(dots[0])
    _finish(gains, "Gain, raw units", "median of the target / median of the source", (1, 1.2, 1.5, 2, 3, 4, 5, 7))
    _finish(distances, "Distance of the unseen halves", "Wasserstein distance, arcsinh units", (1, 2, 5))
    legend_below(figure, [medians, *maps, before[0], sampling[0]])


def _finish(ax: Axes, title: str, label: str, steps: Sequence[float]) -> None:
    """Titles, and a logarithmic axis with round numbers on it."""
    ax.set_title(title)
    ax.set_xlabel(label)
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ticks = [step * 10.0**power for power in range(-6, 7) for step in steps]
    shown = [tick for tick in ticks if low <= tick <= high]
    ax.set_xticks(shown, [f"{tick:g}" for tick in shown])
    ax.xaxis.set_minor_locator(NullLocator())
