"""Error against passes, one panel for each table."""

from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from ot_newton.experiments.figures import BLUE, GREEN, GREY, ORANGE, SKY, VERMILION
from ot_newton.experiments.passes_tables import groups, only

FIGURE_SIZE = (11.0, 7.2)
NUMERIC = ("n", "eps", "error", "passes", "step", "lower", "upper", "exact")
TEXT = ("table", "point", "method")
COLORS = {
    "CG": VERMILION, "block + random columns": SKY, "block + slow modes": BLUE,
    "columns": VERMILION, "columns + random": SKY, "columns + slow modes": BLUE,
    "alternating": VERMILION, "two-level": SKY, "newton": GREEN, "auto": BLUE,
    "one-shot": BLUE, "plain, 1e-2": ORANGE, "plain, 1e-3": VERMILION,
    "this library": BLUE, "plain Sinkhorn + CG": VERMILION,
}  # fmt: skip
NAMES = {
    "columns": "its columns alone", "columns + random": "with random columns",
    "columns + slow modes": "with slow modes", "one-shot": "gradient, Hessian, λ_min",
    "plain, 1e-2": "plain, gradient to 1e-2", "plain, 1e-3": "plain, gradient to 1e-3",
}  # fmt: skip
FLOOR = 1e-9  # errors below it are not drawn
DASHES = {"W0": (0, (4, 2)), "W*": "-"}


def draw_passes(figure: Figure, table: pd.DataFrame) -> None:
    """The largest n at the smallest eps."""
    n, eps = table["n"].max(), table["eps"].min()
    here = only(table, n=n, eps=eps)
    title = f"Passes over all pairs: a shuffled regression of {n:.0f} cells, eps {eps:g}"
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    top = figure.subplots(2, 3).flatten()
    _curves(top[0], only(here, table="product"), "One Hessian-vector product", "relative error")
    _curves(top[1], only(here, table="hessian"), "The exact Hessian", "relative error")
    _curves(top[2], only(here, table="potentials"), "Potentials", "L1 marginal error")
    _bracket(top[3], only(here, table="hessian", method="columns + random"))
    _steps(top[4], only(here, table="adam"))
    _runs(top[5], only(here, table="run"))


def _curves(ax: Axes, rows: pd.DataFrame, title: str, ylabel: str) -> None:
    """Error against passes: a colour for a method, dashes for a point."""
    ax.set_title(title)
    ax.set_xlabel("passes")
    ax.set_ylabel(ylabel)
    ax.set_yscale("log")
    for (method, point), line in groups(rows, "method", "point"):
        marked = "o" if len(line) < 20 else None
        ax.plot(
            line["passes"], line["error"].cummin().clip(lower=FLOOR), color=COLORS[method], linestyle=DASHES[point],
            marker=marked, markersize=3,
        )  # fmt: skip
    ax.set_xscale("log")
    _count_axis(ax.xaxis)
    _legend(ax, list(rows["method"].unique()), points=True, loc="upper right")


def _count_axis(axis: Axis) -> None:
    """Whole numbers on a logarithmic axis."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 100 else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def _legend(ax: Axes, methods: list[str], points: bool = False, loc: Literal["best", "upper right"] = "best") -> None:
    handles = [Line2D([], [], color=COLORS[name], label=NAMES.get(name, name)) for name in methods]
    if points:
        handles += [
            Line2D([], [], color=GREY, linestyle=dashes, label=label)
            for dashes, label in ((DASHES["W0"], "random start"), (DASHES["W*"], "solution"))
        ]
    ax.legend(handles=handles, loc=loc, fontsize=7.5, handlelength=1.6, borderaxespad=0.2)


def _bracket(ax: Axes, rows: pd.DataFrame) -> None:
    """How far the two ends of the bracket of λ_min are from it."""
    ax.set_title("The bracket of λ_min")
    ax.set_xlabel("passes")
    ax.set_ylabel("distance from λ_min")
    ax.set_yscale("log")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    for (point,), line in groups(rows, "point"):
        for end, color in (("lower", BLUE), ("upper", GREEN)):
            gap = (line[end] - line["exact"]).abs().clip(lower=FLOOR)
            ax.plot(line["passes"], gap, color=color, linestyle=DASHES[point], marker="o", markersize=3)
    ends = [Line2D([], [], color=color, label=label) for color, label in ((BLUE, "lower end"), (GREEN, "upper end"))]
    ax.legend(handles=ends, fontsize=7.5)


def _steps(ax: Axes, rows: pd.DataFrame) -> None:
    """Passes of each Adam step."""
    ax.set_title("Adam, each step")
    ax.set_xlabel("step")
    ax.set_ylabel("passes")
    for (method,), line in groups(rows, "method"):
        ax.plot(line["step"], line["passes"], color=COLORS[method], linewidth=1.3)
    ax.set_yscale("log")
    _count_axis(ax.yaxis)
    _legend(ax, list(rows["method"].unique()))


def _runs(ax: Axes, rows: pd.DataFrame) -> None:
    """Gradient norm against the passes so far."""
    ax.set_title("Adam→Newton, whole runs")
    ax.set_xlabel("passes")
    ax.set_ylabel("gradient norm")
    ax.set_yscale("log")
    for (method, _), line in groups(rows, "method", "point"):
        ax.plot(np.maximum(line["passes"], 1), line["error"], color=COLORS[method], linewidth=1.3)
    ax.set_xscale("log")
    _count_axis(ax.xaxis)
    _legend(ax, list(rows["method"].unique()))
