"""The figure of the speed experiment: a row per problem, bars on a logarithmic axis for every library."""

from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ot_newton.experiments.figures import BLUE, GREY, ORANGE, SKY

NUMERIC = ("n", "d", "ms", "passes", "error")
TEXT = ("library", "task", "status", "variant", "run")
OWN, RIVAL = "ot-newton", "flash-sinkhorn"


@dataclass(frozen=True)
class _Panel:
    """A column of the figure: its title, and the bars as (library, task, label)."""

    title: str
    task: str
    more: tuple[tuple[str, str, str], ...] = ()


_PANELS = (
    _Panel("Solve", "forward"),
    _Panel("Solve and gradient", "gradient"),
    _Panel("Hessian-vector product", "hvp", ((OWN, "hvp to 1e-4", f"{OWN}, block, to 1e-4"),)),
)


def figure_size(table: pd.DataFrame) -> tuple[float, float]:
    """Inches: wide enough for three panels, high enough for a bar for every library of every problem."""
    problems = _problems(table)
    bars = sum(max(len(_bars(group, panel)) for panel in _PANELS) for group in problems.values())
    return 11.5, 1.2 + 0.75 * len(problems) + 0.27 * bars


def draw_speed(figure: Figure, table: pd.DataFrame) -> None:
    """Times in milliseconds; what disagrees with the referee is pale, what did not run is named."""
    problems = _problems(table)
    if not problems:
        figure.text(0.5, 0.5, "no solve was timed", ha="center")
        return
    heights = [1.2 + max(len(_bars(group, panel)) for panel in _PANELS) for group in problems.values()]
    axes = figure.subplots(len(problems), len(_PANELS), squeeze=False, height_ratios=heights)
    for row, ((n, d), group) in zip(axes, problems.items(), strict=True):
        for ax, panel in zip(row, _PANELS, strict=True):
            _draw_bars(ax, _bars(group, panel))
            ax.set_title(f"{panel.title}, n = {n:,.0f}, d = {d:.0f}".replace(",000", " 000"))
    for ax in axes[-1]:
        ax.set_xlabel("milliseconds")
    figure.suptitle("Time on the same problem, shorter is faster", x=0.01, ha="left", fontweight="bold")


def _problems(table: pd.DataFrame) -> dict[tuple[float, float], pd.DataFrame]:
    """The problems on which there is a solve to compare, in the order of the table."""
    plain = table[(table["variant"] == "plain") & (table["run"] != "accuracy") & table["n"].notna()]
    solved = plain[plain["task"].isin(["forward"])]
    wanted = dict.fromkeys(zip(solved["n"], solved["d"], strict=True))
    return {(n, d): plain[(plain["n"] == n) & (plain["d"] == d)] for n, d in wanted}


def _bars(group: pd.DataFrame, panel: _Panel) -> list[tuple[str, str, float, str]]:
    """Label, library, milliseconds (NaN where there are none) and status, ours first, then from fast to slow."""
    bars = []
    for library, rows in group.groupby("library", sort=False):
        done = rows[rows["task"] == panel.task]
        if len(done):
            bars.append((str(library), str(library), float(done["ms"].iloc[0]), str(done["status"].iloc[0])))
        elif panel.task == "forward":
            bars.append((str(library), str(library), float("nan"), str(rows["status"].iloc[-1])))
    for library, task, label in panel.more:
        done = group[(group["library"] == library) & (group["task"] == task)]
        if len(done):
            bars.append((label, library, float(done["ms"].iloc[0]), str(done["status"].iloc[0])))
    return sorted(bars, key=lambda bar: (bar[1] != OWN, bar[2] if bar[2] == bar[2] else float("inf")))


def _draw_bars(ax: Axes, bars: list[tuple[str, str, float, str]]) -> None:
    known = [ms for _, _, ms, _ in bars if ms == ms]
    ax.set_xscale("log")
    low, high = (min(known) / 3, max(known) * 6) if known else (1.0, 10.0)
    ax.set_xlim(low, high)
    for place, (_, library, ms, status) in enumerate(bars):
        if ms != ms:
            ax.text(low * 1.1, place, status, va="center", color=GREY, fontsize=8.5, style="italic")
            continue
        color = BLUE if library == OWN else ORANGE if library.startswith(RIVAL) else SKY
        ax.barh(place, ms, left=0, color=color, height=0.72, alpha=1.0 if status == "ok" else 0.35)
        note = f" {ms:,.3g}" if ms < 1000 else f" {ms:,.0f}"
        ax.text(ms, place, note + ("" if status == "ok" else f" ({status})"), va="center", fontsize=8.5)
    ax.set_yticks(range(len(bars)), [label for label, *_ in bars])
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
