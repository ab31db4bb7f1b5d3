"""Methods side by side: who left the saddles, who found the best minimum, and what it cost."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from ot_newton.experiments.escape_figure import BEST_BASIN
from ot_newton.experiments.figures import BLUE, GREEN, GREY, VERMILION

LABELS = {
    "adam": "Adam only",
    "recipe": "published recipe",
    "adam-newton": "Adam→Newton",
    "trust-ncg": "trust region",
    "saddle-free": "saddle-free Newton",
    "monge-newton": "Newton from the Monge map",
    "polish": "starts on a subsample,\nNewton on all cells",
}


def ends(table: pd.DataFrame) -> pd.DataFrame:
    """A row per run: eps, method, whether it escaped and into the best basin, passes and seconds."""
    last = table.groupby("run", sort=False).last(skipna=False)
    escaped = last["lambda_lower"] > -1e-3 * (last["lambda_upper"] - last["lambda_lower"]).clip(lower=1)
    best = last["loss_above_best"] <= BEST_BASIN * (last["loss"] - last["loss_above_best"]).abs()
    return last.assign(escaped=escaped, best=best & escaped)


def draw_methods(figure: Figure, table: pd.DataFrame) -> None:
    """Counts of runs by method and eps, and their passes and seconds, each run a dot."""
    runs = ends(table)
    methods = [name for name in LABELS if (runs["method"] == name).any()]
    temperatures = sorted(runs["eps"].unique())
    success, passes, seconds = figure.subplots(1, 3, width_ratios=(1.5, 1, 1))
    figure.suptitle(f"Methods side by side, {table['n'].iloc[0]:.0f} real cells", x=0.01, ha="left", fontweight="bold")
    _draw_success(success, runs, methods, temperatures)
    for ax, column, title in ((passes, "n_passes", "Passes over all pairs"), (seconds, "seconds", "Seconds")):
        ax.set_title(title, pad=16)
        for row, method in enumerate(methods):
            own = runs[runs["method"] == method]
            for best, color in ((False, VERMILION), (True, GREEN)):
                values = own.loc[own["best"] == best, column]
                ax.plot(values, np.full(len(values), row), "o", color=color, alpha=0.6, markersize=4)
            ax.plot(own[column].median(), row, "|", color="black", markersize=13)
        ax.set_xscale("log")
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_yticks(range(len(methods)), [""] * len(methods))
        ax.set_ylim(len(methods) - 0.5, -0.5)


def _draw_success(ax: Axes, runs: pd.DataFrame, methods: list[str], temperatures: list[float]) -> None:
    """Pale bar: runs; blue: escaped, at a minimum for certain; green: in the best basin known."""
    ax.set_title("Runs, escaped, in the best basin", pad=16)
    height = 0.8 / len(temperatures)
    for row, method in enumerate(methods):
        for k, eps in enumerate(temperatures):
            own = runs[(runs["method"] == method) & (runs["eps"] == eps)]
            if own.empty:
                continue
            y, counts = row - 0.4 + (k + 0.5) * height, (len(own), own["escaped"].sum(), own["best"].sum())
            for count, color in zip(counts, ("#DDDDDD", BLUE, GREEN), strict=True):
                ax.barh(y, count / len(own), height=0.85 * height, color=color, zorder=2)
            text = f"{counts[1]} and {counts[2]} of {counts[0]}"
            ax.annotate(
                text + (f", eps {eps:g}" if len(temperatures) > 1 else ""),
                (1.02, y),
                va="center",
                fontsize=8,
                color=GREY,
            )
    ax.set_yticks(range(len(methods)), [LABELS[name] for name in methods])
    ax.set_ylim(len(methods) - 0.5, -0.5)
    ax.set_xlim(0, 1.75)
    ax.set_xticks([0, 0.5, 1], ["0", "½", "1"])
    ax.grid(visible=False, axis="y")
