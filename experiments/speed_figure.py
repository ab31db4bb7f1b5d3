"""The figure of the speed experiment: a row per problem, a dot on a logarithmic axis for every library."""

from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

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
    _Panel("Hessian product", "hvp", ((OWN, "hvp to 1e-4", f"{OWN}, to 1e-4"),)),
)


def figure_size(table: pd.DataFrame) -> tuple[float, float]:
    """Inches: wide enough for three panels, high enough for a bar for every library of every problem."""
    problems = _problems(table)
    return 11.5, 1.2 + sum(0.8 + 0.27 * _count(group) for group in problems.values())


def draw_speed(figure: Figure, table: pd.DataFrame) -> None:
    """Times in milliseconds; what disagrees with the referee is pale, what did not run is named."""
    problems = _problems(table)
    if not problems:
        figure.text(0.5, 0.5, "no solve was timed", ha="center")
        return
    counts = [_count(group) for group in problems.values()]
    axes = figure.subplots(len(problems), len(_PANELS), squeeze=False, height_ratios=[1.5 + c for c in counts])
    for row, ((n, d), group), count in zip(axes, problems.items(), counts, strict=True):
        for ax, panel in zip(row, _PANELS, strict=True):
            _draw_times(ax, _bars(group, panel), count)
            ax.set_title(panel.title)
        row[0].set_title(f"{n:,.0f} × {d:.0f}: {_PANELS[0].title.lower()}".replace(",", "\u2009"))
    for ax in axes[-1]:
        ax.set_xlabel("milliseconds")
    figure.suptitle("Time on the same problem, shorter is faster", x=0.01, ha="left", fontweight="bold")


def _problems(table: pd.DataFrame) -> dict[tuple[float, float], pd.DataFrame]:
    """The problems on which there is a solve to compare, in the order of the table."""
    plain = table[(table["variant"] == "plain") & ~table["run"].str.startswith("accuracy") & table["n"].notna()]
    solved = plain[plain["task"].isin(["forward"])]
    wanted = dict.fromkeys(zip(solved["n"], solved["d"], strict=True))
    return {(n, d): plain[(plain["n"] == n) & (plain["d"] == d)] for n, d in wanted}


def _count(group: pd.DataFrame) -> int:
    return max(len(_bars(group, panel)) for panel in _PANELS)


def _bars(group: pd.DataFrame, panel: _Panel) -> list[tuple[str, str, float, str]]:
    """Label, library, milliseconds (NaN where there are none) and status, ours first, then from fast to slow."""
    bars = []
    for library, rows in group.groupby("library", sort=False):
        done = rows[rows["task"] == panel.task]
        if len(done):
            label = f"{library}, CG" if panel.task == "hvp" else str(library)
            bars.append((label, str(library), float(done["ms"].iloc[0]), str(done["status"].iloc[0])))
        elif panel.task == "forward":
            bars.append((str(library), str(library), float("nan"), str(rows["status"].iloc[-1])))
    for library, task, label in panel.more:
        done = group[(group["library"] == library) & (group["task"] == task)]
        if len(done):
            bars.append((label, library, float(done["ms"].iloc[0]), str(done["status"].iloc[0])))
    return sorted(bars, key=lambda bar: (bar[1] != OWN, bar[2] if bar[2] == bar[2] else float("inf")))


def _draw_times(ax: Axes, bars: list[tuple[str, str, float, str]], count: int) -> None:
    known = [ms for _, _, ms, _ in bars if ms == ms]
    ax.set_xscale("log")
    low, high = (min(known) / 2, max(known) * 2) if known else (1.0, 10.0)
    low, high = low / max(1.0, 10 / (high / low)) ** 0.5, high * max(1.0, 10 / (high / low)) ** 0.5
    ax.set_xlim(low, high * (high / low) ** 0.35)  # room for the numbers
    for place, (_, library, ms, status) in enumerate(bars):
        if ms != ms:
            ax.text(low * 1.1, place, status, va="center", color=GREY, fontsize=8.5, style="italic")
            continue
        color = BLUE if library == OWN else ORANGE if library.startswith(RIVAL) else SKY
        alpha = 1.0 if status == "ok" else 0.4
        ax.plot([low, ms], [place, place], color=color, linewidth=2.2, alpha=0.5 * alpha)
        ax.plot(ms, place, "o", color=color, markersize=8, alpha=alpha)
        note = f"{ms:,.3g}" if ms < 1000 else f"{ms:,.0f}"
        ax.annotate(
            note + ("" if status == "ok" else f" ({status})"), (ms, place), (8, 0), textcoords="offset points",
            va="center", fontsize=8.5,
        )  # fmt: skip
    ax.set_yticks(range(len(bars)), [label for label, *_ in bars])
    ax.set_ylim(max(count, 1) - 0.4, -0.6)
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.grid(visible=False, axis="y")
