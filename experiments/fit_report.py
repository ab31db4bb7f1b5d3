"""What `fit` leaves: W in scaled and raw units, the evidence for it, and a picture of how well the clouds agree."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ot_newton.experiments.figures import BLUE, GREY, render
from ot_newton.experiments.files import load_table, write, write_csv
from ot_newton.experiments.report import Column, format_markdown, format_table
from ot_newton.experiments.run import Outcome
from ot_newton.problems.cytometry import Events, Scaler, unscale_regression
from ot_newton.problems.shuffled_regression import ShuffledRegression

MAPPED, MEASURED = "x W", "y"
OFFSET = "intercept"
DRAWN_CELLS = 2000
MAX_MARGINALS = 12
SAME_LOSS = 1e-3  # starts that end within this part of the lowest loss have found the same minimum

SUMMARY_COLUMNS = (
    Column("run", "run"),
    Column("cells", "cells"),
    Column("steps", "steps", "d"),
    Column("loss", "loss", ".6f"),
    Column("loss_above_best", "above best", ".1e"),
    Column("grad_norm", "‖g‖", ".1e"),
    Column("lambda_min", "λ_min", "+.4f"),
    Column("n_passes", "passes", "d"),
    Column("seconds", "seconds", ".1f"),
    Column("status", "status"),
)


@dataclass(frozen=True)
class Pair:
    """The cells of both sides and how they were scaled."""

    x: Events
    y: Events
    x_scaler: Scaler
    y_scaler: Scaler

    @property
    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """Scaled points (n, p) and (m, q)."""
        return self.x_scaler.transform(self.x), self.y_scaler.transform(self.y)


def write_report(
    folder: Path, pair: Pair, problem: ShuffledRegression, polished: Outcome, runs: pd.DataFrame, eps: float
) -> None:
    """Write W, the report and the figure, and print the essence."""
    assert polished.point is not None
    W, b = problem.split(torch.as_tensor(polished.point, dtype=problem.dtype, device=problem.device))
    raw, offset = unscale_regression(W, b, pair.x_scaler, pair.y_scaler)
    scaled_table = _weights(W.cpu().numpy(), b.cpu().numpy(), pair)
    raw_table = _weights(raw, offset, pair)
    write_csv(folder / "W_scaled.csv", scaled_table)
    write_csv(folder / "W_raw.csv", raw_table)
    write_csv(folder / "cells.csv", _cells(pair, (problem.X @ W + b).cpu().numpy()))
    evidence = _evidence(polished, runs, eps)
    content = {
        "x": {"source": pair.x.source, "channels": pair.x.channels, "units": pair.x_scaler.units},
        "y": {"source": pair.y.source, "channels": pair.y.channels, "units": pair.y_scaler.units},
        "eps": eps,
        **polished.summary,
        "starts_at_the_lowest_loss": _agreement(runs),
        "W_scaled": W.tolist(),
        "W_raw": raw.tolist(),
        "intercept_raw": offset.tolist(),
    }
    write(folder / "report.json", json.dumps(content, indent=2) + "\n")
    write(folder / "report.md", _markdown(pair, evidence, scaled_table, raw_table, runs))
    print(f"\nW in {_units(pair)}:")
    print(format_table(raw_table, _weight_columns(raw_table)))
    print()
    print(format_table(evidence, (Column("evidence", "evidence"), Column("value", "value"), Column("meaning", ""))))
    redraw(folder)


def redraw(folder: Path) -> None:
    """Draw the figure from W_scaled.csv and cells.csv alone."""
    weights = load_table(folder / "W_scaled.csv", text=["channel"])
    cells = load_table(folder / "cells.csv", text=["cloud"])
    channels = [column for column in cells.columns if column != "cloud"]
    weights = load_table(folder / "W_scaled.csv", text=["channel"], numeric=channels)
    cells = load_table(folder / "cells.csv", text=["cloud"], numeric=channels)
    panels = 1 + min(len(channels), MAX_MARGINALS) + len(_pairs(channels))
    rows = -(-panels // 3)
    write(folder / "figure.png", render(partial(draw_fit, weights=weights, cells=cells), (10.0, 2.6 * rows + 0.6)))
    print(f"report, tables and figure: {folder}")


def draw_fit(figure: Figure, weights: pd.DataFrame, cells: pd.DataFrame) -> None:
    """W as a heat map, the marginals of x W and y, and a few pairs of channels."""
    channels = [column for column in cells.columns if column != "cloud"]
    clouds = {name: cells[cells["cloud"] == name] for name in (MEASURED, MAPPED)}
    shown, pairs = channels[:MAX_MARGINALS], _pairs(channels)
    grid = figure.subplots(-(-(1 + len(shown) + len(pairs)) // 3), 3).flat
    figure.suptitle(
        "y (grey), and x W (blue), which lacks the noise; scaled units", x=0.01, ha="left", fontweight="bold"
    )
    _draw_weights(next(grid), weights[weights["channel"] != OFFSET], channels)
    for channel in shown:
        _draw_marginal(next(grid), clouds, channel)
    for first, second in pairs:
        ax = next(grid)
        ax.plot(clouds[MEASURED][first], clouds[MEASURED][second], ".", color=GREY, markersize=2, alpha=0.6)
        ax.plot(clouds[MAPPED][first], clouds[MAPPED][second], ".", color=BLUE, markersize=2, alpha=0.6)
        ax.set_xlabel(first)
        ax.set_ylabel(second)
    for ax in grid:
        ax.set_axis_off()


def _draw_weights(ax: Axes, weights: pd.DataFrame, channels: list[str]) -> None:
    values = weights[channels].to_numpy()
    limit = np.abs(values).max()
    ax.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    ax.grid(visible=False)
    ax.set_title("W (rows: x, columns: y)")
    ax.set_xticks(range(len(channels)), channels)
    ax.set_yticks(range(len(weights)), weights["channel"])
    if values.size <= 64:
        for (i, j), value in np.ndenumerate(values):
            color = "white" if abs(value) > 0.6 * limit else "black"
            ax.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7.5, color=color)


def _draw_marginal(ax: Axes, clouds: dict[str, pd.DataFrame], channel: str) -> None:
    low, high = (function([function(cloud[channel]) for cloud in clouds.values()]) for function in (np.min, np.max))
    bins = np.linspace(low, high, 50)
    ax.hist(clouds[MEASURED][channel], bins=bins, color=GREY, alpha=0.5, density=True)
    ax.hist(clouds[MAPPED][channel], bins=bins, color=BLUE, histtype="step", linewidth=1.5, density=True)
    ax.set_title(channel)
    ax.set_yticks([])


def _pairs(channels: list[str]) -> list[tuple[str, str]]:
    """Up to three pairs of channels."""
    return list(zip(channels[::2], [*channels[1::2], *channels[:1]], strict=False))[:3] if len(channels) > 1 else []


def _weights(W: np.ndarray, b: np.ndarray, pair: Pair) -> pd.DataFrame:
    frame = pd.DataFrame(np.vstack([W, b]), columns=pd.Index(pair.y.channels))
    frame.insert(0, "channel", [*pair.x.channels, OFFSET])
    return frame


def _weight_columns(frame: pd.DataFrame) -> list[Column]:
    return [Column("channel", "x \\ y"), *(Column(name, name, "+.4f") for name in frame.columns[1:])]


def _cells(pair: Pair, mapped: np.ndarray) -> pd.DataFrame:
    """A part of both clouds, in scaled units, for the figure."""
    clouds = {MEASURED: pair.points[1], MAPPED: mapped}
    frames = [
        pd.DataFrame(points[:DRAWN_CELLS], columns=pd.Index(pair.y.channels)).assign(cloud=name)
        for name, points in clouds.items()
    ]
    return pd.concat(frames, ignore_index=True)[["cloud", *pair.y.channels]]


def _agreement(runs: pd.DataFrame) -> str:
    """How many starts ended at the lowest loss."""
    losses = runs["loss"][runs["loss_above_best"].notna()]
    same = losses - losses.min() <= SAME_LOSS * abs(losses.min())
    return f"{int(same.sum())} of {len(losses)}"


def _evidence(polished: Outcome, runs: pd.DataFrame, eps: float) -> pd.DataFrame:
    found = polished.summary
    verdicts = {
        "nonnegative": "a minimum: no direction of negative curvature",
        "negative": "NOT a minimum: a saddle; give more --steps or --starts",
        "undecided": "the sign of the smallest eigenvalue is within its error",
    }
    converged = found["status"] == "converged"
    rows = [
        ("status", found["status"], found["advice"] if converged else f"NOT CONVERGED. {found['advice']}"),
        ("gradient norm", f"{found['grad_norm']:.1e}", "zero at a stationary point"),
        ("λ_min", f"{found['lambda_min']:+.4f}", verdicts[found["verdict"]]),
        ("marginal error", f"{found['marginal_error']:.1e}", "L1 distance of the plan's marginals from the two clouds"),
        (
            "loss",
            f"{found['loss']:.6f}",
            f"OT_eps(x W, y), eps = {eps:g}: right for noise of sd {(eps / 2) ** 0.5:.3g}",
        ),
        ("lowest loss from", f"{_agreement(runs)} starts", "the more agree, the less likely is a lower one missed"),
        ("passes", f"{runs['n_passes'].sum()}", "sweeps over all pairs of cells, starts included"),
        ("seconds", f"{runs['seconds'].sum():.1f}", "starts included"),
    ]
    return pd.DataFrame(rows, columns=pd.Index(["evidence", "value", "meaning"]))


def _units(pair: Pair) -> str:
    x, y = pair.x_scaler.units, pair.y_scaler.units
    return f"units of {x}" if x == y else f"units of {x} (x) and {y} (y)"


def _markdown(pair: Pair, evidence: pd.DataFrame, scaled: pd.DataFrame, raw: pd.DataFrame, runs: pd.DataFrame) -> str:
    evidence_columns = (Column("evidence", "evidence"), Column("value", "value"), Column("meaning", "meaning"))
    return f"""# y ≈ x W + b without correspondence

- x: {len(pair.x)} cells of {pair.x.source}
- y: {len(pair.y)} cells of {pair.y.source}

## Evidence

{format_markdown(evidence, evidence_columns)}

## W in {_units(pair)}

Rows are channels of x, columns channels of y; the last row is b.

{format_markdown(raw, _weight_columns(raw))}

## W in scaled units (each channel with mean 0 and standard deviation 1)

{format_markdown(scaled, _weight_columns(scaled))}

## Starts

{format_markdown(runs, SUMMARY_COLUMNS)}
"""
