"""The four panels of a saddle escape: loss, gradient norm and smallest eigenvalue by step, and the time by phase."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ot_newton.experiments.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    VERMILION,
    legend_below,
    positive,
    shade,
    signed_axis,
)

NUMERIC = (
    "step", "eps", "n", "loss", "loss_above_best", "grad_norm", "lambda_min", "lambda_lower", "lambda_upper",
    "seconds", "n_passes",
)  # fmt: skip
TEXT = ("run", "start", "method", "phase")
NEWTON_PHASES = ("newton", "curvature")
MANY = 12  # runs, from which on not each of them has its bar
WIDEST = 2.0  # a bracket of λ_min that is wider says nothing that could be drawn
BEST_BASIN = 1e-3  # a run is in the best basin if its loss is above the best known by less than this part of it
WRONG_ABOVE = 1e-3  # a minimum whose loss is this far above the best known is another one


@dataclass(frozen=True)
class _Style:
    label: str
    color: str
    order: float


_METHODS = {
    "adam": _Style("Adam only", VERMILION, 3),
    "adam-newton": _Style("Adam→Newton", BLUE, 4),
    "monge-newton": _Style("Newton from the Monge map", GREEN, 2),
    "recipe": _Style("published recipe", GREY, 2.5),
}


def draw_escape(figure: Figure, table: pd.DataFrame) -> None:
    """Draw the smallest eps of `table`: one start in full, the other starts pale behind it."""
    table = table[(table["eps"] == table["eps"].min()) & table["method"].isin(_METHODS)]
    shown = _telling_start(table)
    (loss, grad), (curvature, clock) = figure.subplots(2, 2)
    figure.suptitle(
        f"Shuffled regression of {table['n'].iloc[0]:.0f} real cells, eps {table['eps'].iloc[0]:g}:"
        f" start {shown} in full, the other starts pale",
        x=0.01,
        ha="left",
        fontweight="bold",
    )
    for ax, column, title in (
        (loss, "loss_above_best", "Loss above the best known"),
        (grad, "grad_norm", "Gradient norm"),
        (curvature, "lambda_min", "Smallest eigenvalue of the Hessian"),
    ):
        ax.set_title(title, pad=16)
        ax.set_xlabel("step")
        for (start, method), run in table.groupby(["start", "method"], sort=False):
            _trace(ax, run, column, _METHODS[str(method)], front=start in (shown, "monge"))
        shade_phases(
            ax, table[(table["start"] == shown) & (table["method"] == "adam-newton")], float(table["step"].max())
        )
    for ax in (loss, grad):
        ax.set_yscale("log")
    loss.set_ylim(bottom=max(loss.get_ylim()[0], 1e-12))
    _mark_wrong_minima(loss, table)
    signed_axis(curvature, table["lambda_min"].dropna())
    curvature.axhline(0, color="black", linewidth=1, zorder=1)
    curvature.text(0.99, 0.03, "below 0: saddle region", transform=curvature.transAxes, ha="right", color=GREY)
    _draw_clock(clock, table)
    used = [style for name, style in _METHODS.items() if (table["method"] == name).any()]
    lines = [Line2D([], [], color=style.color, linewidth=2, label=style.label) for style in used]
    legend_below(figure, [*lines, Line2D([], [], color=BLUE, marker="o", linestyle="", label="Newton step")])


def _telling_start(table: pd.DataFrame) -> str:
    """Of the starts that led to the best minimum, if any, the one where Newton took over last."""
    switched = table[table["method"] == "adam-newton"]
    if switched.empty:
        return str(table["start"].iloc[-1])
    ends = switched.groupby("start")["loss_above_best"].last()
    best = ends[ends <= WRONG_ABOVE].index
    waiting = switched[~switched["phase"].isin(NEWTON_PHASES)].groupby("start").size()
    return str((waiting[best] if len(best) else waiting).idxmax())


def _mark_wrong_minima(ax: Axes, table: pd.DataFrame) -> None:
    """A word where Newton has converged to a minimum that is not the best."""
    ends = table[table["method"] == "adam-newton"].groupby("start").last()
    wrong = ends[ends["loss_above_best"] > WRONG_ABOVE]
    ax.plot(wrong["step"], wrong["loss_above_best"], "x", color=BLUE, markersize=6, zorder=5)
    if len(wrong):
        lowest = wrong.loc[wrong["loss_above_best"].idxmin()]
        ax.annotate(
            "a wrong minimum" if len(wrong) == 1 else "wrong minima",
            (lowest["step"], lowest["loss_above_best"]),
            xytext=(0, -6),
            textcoords="offset points",
            ha="center",
            va="top",
            color=BLUE,
            fontsize=8.5,
        )


def _trace(ax: Axes, run: pd.DataFrame, column: str, style: _Style, *, front: bool) -> None:
    known = run[run[column].notna()]
    if column == "lambda_min" and front:
        tight = known[known["lambda_upper"] - known["lambda_lower"] <= WIDEST]
        ax.vlines(
            tight["step"], tight["lambda_lower"], tight["lambda_upper"], color=style.color, alpha=0.3, linewidth=2
        )
    values = known[column].to_numpy() if column == "lambda_min" else positive(known[column])
    look = {"linewidth": 1.9, "zorder": style.order} if front else {"linewidth": 1.1, "alpha": 0.4, "zorder": 1.5}
    ax.plot(known["step"], values, color=style.color, **look)
    if front:
        newton = known["phase"].isin(NEWTON_PHASES).to_numpy()
        ax.plot(known["step"][newton], values[newton], "o", color=style.color, markersize=4, zorder=style.order)


def shade_phases(ax: Axes, run: pd.DataFrame, steps: float) -> None:
    """Where Adam and where Newton moved the run that is shown, named where that is a good part of all `steps`."""
    if run.empty:
        return
    newton = run["phase"].isin(NEWTON_PHASES).to_numpy()
    for part in np.split(np.arange(len(run)), np.flatnonzero(np.diff(newton)) + 1):
        first, last = max(run["step"].iloc[part[0]] - 1, 0), run["step"].iloc[part[-1]]
        color, name = (BLUE, "Newton") if newton[part[0]] else (ORANGE, "Adam")
        wide = last - first > 0.12 * steps
        shade(ax, first, last, color, name if wide else "")


def _order(start: str) -> tuple[bool, int, str]:
    """Numbered starts by their number, then the others by their name."""
    return (False, int(start), "") if start.isdigit() else (True, 0, start)


def _draw_clock(ax: Axes, table: pd.DataFrame) -> None:
    """Seconds of each run, split into phases; of Adam→Newton and the Monge map alone where there are many."""
    many = table["run"].nunique() > MANY
    if many:
        table = table[table["method"].isin(["adam-newton", "monge-newton"])]
    ax.set_title("Time by phase", pad=16)
    ax.set_xlabel("seconds")
    labels = []
    runs = sorted(table.groupby(["start", "method"]), key=lambda item: (_order(str(item[0][0])), item[0][1]))
    for (start, method), run in runs:
        spent = run["seconds"].diff().fillna(run["seconds"])
        newton = run["phase"].mask(run["phase"] == "start").bfill().isin(NEWTON_PHASES)
        row, adam = len(labels), spent[~newton].sum()
        ax.barh(row, adam, color=ORANGE, height=0.7)
        ax.barh(row, spent[newton].sum(), left=adam, color=BLUE, height=0.7)
        label = _METHODS[str(method)].label
        labels.append(label if start == "monge" else f"start {start}" if many else f"start {start}: {label}")
    ax.set_yticks(range(len(labels)), labels, fontsize=min(9.5, 150 / len(labels)))
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    ax.margins(x=0.02)
    ax.legend(handles=[Patch(color=ORANGE, label="Adam"), Patch(color=BLUE, label="Newton")], loc="best")
