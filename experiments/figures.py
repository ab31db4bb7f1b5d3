"""How the figures look: palette, style, and the parts that several of them share.

Figures are drawn without pyplot, so they need no display and leave matplotlib's settings as they are. The colours are
Okabe and Ito's (https://jfly.uni-koeln.de/color/), distinct for the colour-blind and in grey.
"""

import io
from collections.abc import Callable, Iterable
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

BLUE, VERMILION, GREEN, ORANGE, SKY, PURPLE, GREY = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#E69F00",
    "#56B4E9",
    "#CC79A7",
    "#6E6E6E",
)

_STYLE: dict[str, Any] = {
    "font.size": 9.5,
    "font.family": "DejaVu Sans",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#444444",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "savefig.dpi": 150,
    "figure.facecolor": "white",
}


def render(draw: Callable[[Figure], None], size: tuple[float, float]) -> bytes:
    """Draw on a new figure of `size` inches and return it as PNG."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def shade(ax: Axes, start: float, stop: float, color: str, label: str = "") -> None:
    """Shade start ≤ x ≤ stop, with a word at the top of the band."""
    ax.axvspan(start, stop, color=color, alpha=0.13, linewidth=0, zorder=0)
    if label:
        ax.annotate(
            label,
            ((start + stop) / 2, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            va="bottom",
            color=color,
            fontsize=8.5,
            fontweight="bold",
        )


def legend_below(figure: Figure, handles: Iterable[Any]) -> None:
    """One legend for the whole figure, in a row under the panels."""
    handles = list(handles)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def signed_axis(ax: Axes, values: Any) -> None:
    """A vertical axis that shows small and large values of both signs, with round numbers on it."""
    low, high = float(np.min(values)), float(np.max(values))
    ax.set_yscale("symlog", linthresh=0.2, linscale=0.7)
    round_numbers = [step * 10.0**power for power in range(-1, 7) for step in (1, 2, 5)]
    ticks = [sign * number for sign in (-1, 1) for number in round_numbers]
    ax.set_yticks([0.0, *(tick for tick in ticks if low <= tick <= high and abs(tick) >= 0.2)])
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(NullLocator())


def positive(values: Any) -> np.ndarray:
    """Values for a logarithmic axis: what is not positive is left out."""
    array = np.asarray(values, dtype=float)
    return np.where(array > 0, array, np.nan)
