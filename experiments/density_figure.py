"""The density of a large spectrum with its band: rows of a table, a sentence and a picture."""

import pandas as pd
import torch
from matplotlib.axes import Axes

from ot_newton.density import SpectralDensity
from ot_newton.experiments.figures import BLUE, VERMILION
from ot_newton.experiments.run import Row

NUMERIC = ("x", "density", "lower", "upper", "share", "share_lower", "share_upper")
_GRID = 512  # points of the density
_DECADES = 5.0  # shown below the peak


def density_rows(spectrum: SpectralDensity) -> list[Row]:
    """Density and distribution at points that cover the range, zero among them; nothing where there is no number."""
    if not spectrum.status.success:
        return []
    (low, high), reach = spectrum.range, 4 * spectrum.sigma
    grid = torch.linspace(low - reach, high + reach, _GRID, dtype=torch.float64)
    grid = torch.cat([grid, grid.new_zeros(1)]).unique()
    density, share = spectrum.density(grid), spectrum.cdf(grid)
    columns = (grid, density.value, density.lower, density.upper, share.value, share.lower, share.upper)
    return [dict(zip(NUMERIC, values, strict=True)) for values in torch.stack(columns, 1).tolist()]


def describe(full: Row) -> str:
    """The summary of the case in a sentence."""
    return (
        f"full Hessian, {full['rows']} × {full['rows']}: nodes from {full['smallest_node']:+.3g} to"
        f" {full['largest_node']:+.3g}; about {full['n_below']:.0f} eigenvalues below 0 ({full['n_below_lower']} to"
        f" {full['n_below_upper']} at {full['confidence']:.0%} confidence); {full['n_matvec']} products,"
        f" {full['n_passes']} passes, {full['seconds']:.1f} s, {full['status']}"
    )


def draw_density(ax: Axes, rows: pd.DataFrame, n: int) -> None:
    """The density over n times the eigenvalue, whose scale does not depend on n, and the share below zero."""
    x = n * rows["x"]
    bottom, top = rows["density"].max() / n * 10**-_DECADES, 3 * rows["upper"].max() / n
    ax.set_title("Density of the full Hessian's eigenvalues, with its 95 % band")
    ax.set_xlabel("n × eigenvalue (2 where a point has one partner)")
    ax.fill_between(x, (rows["lower"] / n).clip(lower=bottom), rows["upper"] / n, color=BLUE, alpha=0.2, linewidth=0)
    ax.plot(x, rows["density"] / n, color=BLUE)
    ax.axvline(0, color="black", linewidth=1)
    ax.set_yscale("log")
    ax.set_ylim(bottom, top)
    ax.set_xlim(x.min(), x.max())
    _mark_negative(ax, rows)


def _mark_negative(ax: Axes, rows: pd.DataFrame) -> None:
    at_zero = rows[rows["x"] == 0]
    if at_zero.empty:
        return
    share, lower, upper = (100 * at_zero[column].iloc[0] for column in ("share", "share_lower", "share_upper"))
    ax.annotate(
        f"{share:.3g} % below 0 ({lower:.3g} to {upper:.3g} %)",
        (0, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-6, -4),
        textcoords="offset points",
        ha="right",
        va="top",
        color=VERMILION,
    )
