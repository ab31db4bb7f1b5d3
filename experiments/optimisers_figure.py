"""How the methods of a comparison end, and how many problems they solve within a budget of Hessian products."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ot_newton.experiments.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION

NUMERIC = ("number", "size", "fun", "excess", "grad_ratio", "lambda_ratio", "nit", "nfev", "njev", "nhev", "seconds")
TEXT = ("run", "problem", "source", "outcome", "known", "status", "message", "common")
_OUTCOMES = {
    "success": (GREEN, "success"),
    "unclaimed": (SKY, "minimiser, not claimed"),
    "failure": (GREY, "failure, admitted"),
    "false success": (VERMILION, "false success"),
}
_COLORS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, GREY)


def draw_optimisers(figure: Figure, table: pd.DataFrame) -> None:
    """The outcomes as bars, and data profiles: problems solved over the number of products spent on each."""
    bars, profile = figure.subplots(1, 2, width_ratios=(1.0, 1.2))
    figure.suptitle(
        f"{table['problem'].nunique()} functions: where the methods end, and what it costs",
        x=0.01,
        ha="left",
        fontweight="bold",
    )
    _draw_outcomes(bars, table)
    _draw_profile(profile, table)


def _draw_outcomes(ax: Axes, table: pd.DataFrame) -> None:
    methods = list(dict.fromkeys(table["run"]))
    counts = pd.crosstab(table["run"], table["outcome"]).reindex(index=methods, columns=list(_OUTCOMES), fill_value=0)
    left = np.zeros(len(methods))
    for outcome, (color, label) in _OUTCOMES.items():
        widths = counts[outcome].to_numpy()
        ax.barh(methods, widths, left=left, color=color, height=0.7, label=label)
        for row, (start, width) in enumerate(zip(left, widths, strict=True)):
            if width:
                ax.text(start + width / 2, row, f"{width}", ha="center", va="center", color="white", fontsize=8)
        left += widths
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    ax.set_title("Ends", pad=38)
    ax.set_xlabel("problems")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, borderaxespad=0.2, fontsize=8, columnspacing=1.0)


def _draw_profile(ax: Axes, table: pd.DataFrame) -> None:
    total = table["problem"].nunique()
    shown = table[table["run"] != "adam"]  # its cost is in gradients
    seen = {True: 0, False: 0}  # scipy's methods and ours take the colours in the same order
    for method, run in shown.groupby("run", sort=False):
        spent = np.sort(run.loc[run["outcome"] == "success", "nhev"].to_numpy())
        theirs = str(method).startswith("scipy-")
        color = _COLORS[seen[theirs] % len(_COLORS)]
        seen[theirs] += 1
        ax.step(
            np.concatenate([spent, [max(table["nhev"].max(), 1)]]),
            np.concatenate([np.arange(1, len(spent) + 1), [len(spent)]]) / total,
            where="post",
            color=color,
            linestyle="--" if theirs else "-",
            linewidth=1.4 if theirs else 1.9,
            label=str(method),
        )
    ax.set_xscale("log")
    ax.set_ylim(0, 1.02)
    ax.set_title("Part of the problems solved", pad=38)
    ax.set_xlabel("Hessian products for each, certificate included")
    ax.legend(loc="lower right", fontsize=8)
