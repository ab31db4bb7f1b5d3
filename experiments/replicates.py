"""A calibration between two technical replicates: the same blood, measured twice, at gains that differ.

    T(x) = x W + b,   (W, b) = argmin OT_eps(x W + b, y),   no cell of x being a cell of y

A map is fitted to a random half of the cells of each replicate and judged in raw units: by the gain of each channel,
which the medians tell without any transport, and on the other halves by the Wasserstein distance of each channel before
and after the map, beside that between two halves of one replicate, which is what sampling alone leaves.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from time import perf_counter
from typing import ClassVar, Literal

import numpy as np
import pandas as pd
import torch
from scipy.stats import wasserstein_distance

from ot_newton.experiments.environment import pick_device
from ot_newton.experiments.errors import checking_input
from ot_newton.experiments.figures import render
from ot_newton.experiments.files import load_table, write
from ot_newton.experiments.real_regression import DTYPES, curvature_at
from ot_newton.experiments.replicates_figure import NUMERIC, TEXT, draw_replicates
from ot_newton.experiments.report import Column, format_table
from ot_newton.experiments.run import Case, Context, Outcome, Row, RunConfig, run_cases
from ot_newton.minimize import minimize
from ot_newton.problems.cytometry import Events, Preprocess, load_healthy_donors, unscale_regression
from ot_newton.problems.shuffled_regression import ShuffledRegression
from ot_newton.result import OptimizeResult
from ot_newton.status import Status

SCALINGS = ("arcsinh", "linear")
RESAMPLES = 200  # for the standard error of a gain
LEAST_CELLS = 10


@dataclass(frozen=True)
class Replicate:
    """The cells of one replicate: all, the half that a map may be fitted to, and the unseen half."""

    cells: Events
    seen: Events
    unseen: Events


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """A real calibration between two technical replicates of one donor, whose gains the medians tell."""

    name: ClassVar[str] = "replicates"

    preset: Literal["quick", "laptop", "full"] = "laptop"
    """Which settings the options start from."""
    x: str = "A_1_1"
    """Replicate to map from, one of the bundled samples, donor_day_replicate."""
    y: str = "A_1_2"
    """Replicate to map to."""
    n: int = 2500
    """Cells of each replicate that the map is fitted to, at most half of them: the other half stays unseen."""
    eps: float = 0.1
    """Temperature, in squared standard deviations of a channel."""
    cofactor: float = 3000.0
    """Of the arcsinh, for the scaling of that name and for the distances."""
    clip: float = 5.0
    """Farthest distance of a cell from the mean, in standard deviations, for the scaling arcsinh."""
    steps: int = 50
    """Limit of Newton steps."""
    gtol: float = 2e-5
    """Gradient norm at which W is finished."""
    seed: int = 0
    """Of the halves."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto is cuda where there is one."""

    def __post_init__(self) -> None:
        if self.x == self.y:
            raise ValueError(f"expected two different replicates, got {self.x} twice")
        for name, least in (("n", LEAST_CELLS), ("steps", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"expected {name} ≥ {least}, got {getattr(self, name)}")
        for name in ("eps", "cofactor", "clip", "gtol"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected {name} > 0, got {getattr(self, name)}")

    @cached_property
    def replicates(self) -> tuple[Replicate, Replicate]:
        """Both replicates, each split at random."""
        rng = np.random.default_rng(self.seed)
        first, second = (_halved(load_healthy_donors(name), rng) for name in (self.x, self.y))
        return first, second

    def preprocess(self, scaling: str) -> Preprocess:
        """How the values become points."""
        return Preprocess(self.cofactor, self.clip) if scaling == "arcsinh" else Preprocess(None, None)


PRESETS = {
    "quick": Config(preset="quick", n=400, dtype="float64"),
    "laptop": Config(),
    "full": Config(preset="full", n=10_000),
}

_RUN_COLUMNS = (
    Column("run", "scaling"),
    Column("cells", "cells"),
    Column("steps", "steps", "d"),
    Column("loss", "loss", ".6f"),
    Column("grad_norm", "‖g‖", ".1e"),
    Column("lambda_lower", "λ_min ≥", "+.4f"),
    Column("lambda_upper", "λ_min ≤", "+.4f"),
    Column("verdict", "verdict"),
    Column("n_passes", "passes", "d"),
    Column("seconds", "seconds", ".1f"),
    Column("status", "status"),
)
_CHANNEL_COLUMNS = (
    Column("run", "scaling"),
    Column("channel", "channel"),
    Column("gain_medians", "gain by medians", ".3f"),
    Column("gain_se", "± se", ".3f"),
    Column("gain_map", "by the map", ".3f"),
    Column("W_diagonal", "W_jj", "+.3f"),
    Column("intercept", "b_j", "+.4g"),
    Column("before", "distance before", ".3f"),
    Column("after", "after", ".3f"),
    Column("sampling", "sampling alone", ".3f"),
)


def main(config: Config) -> int:
    """Fit what is missing, print gains and distances and what they say, draw them."""
    folder = config.folder()
    if not config.redraw:
        with checking_input():
            for replicate in config.replicates:
                for scaling in SCALINGS:
                    config.preprocess(scaling).fit(replicate.seen.values[: config.n])
            pick_device(config.device)
        cases: dict[str, Case] = {scaling: partial(_calibrate, config, scaling) for scaling in SCALINGS}
        results = run_cases(config, cases)
        print(format_table(results.summary, _RUN_COLUMNS))
        print(f"\n{config.x} → {config.y}: gains in raw units, W and b in the scaling's, distances in arcsinh units")
        print(format_table(results.table, _CHANNEL_COLUMNS))
        for scaling, rows in results.table.groupby("run", sort=False):
            print(f"{scaling}: {conclude(rows)}")
        for scaling, outcome in results.outcomes.items():
            if outcome.summary["status"] != "converged":
                print(f"{scaling} not converged: {outcome.summary['message']}")
    table = load_table(folder / "table.csv", numeric=NUMERIC, text=TEXT)
    write(folder / "figure.png", render(partial(draw_replicates, table=table), (10.0, 4.6)))
    print(f"tables and figure: {folder}")
    return 0


def conclude(rows: pd.DataFrame) -> str:
    """What the rows of one scaling say about the gains, in a sentence; W itself is a gain in raw units only."""
    known = rows[rows["gain_medians"].notna()]
    measured, reach = known["gain_medians"].to_numpy(), 2 * known["gain_se"].to_numpy()
    through_map, slope = known["gain_map"].to_numpy(), known["W_diagonal"].to_numpy()
    close = np.abs(through_map - measured) <= reach
    off = zip(known["channel"][~close], (through_map / measured - 1)[~close], strict=True)
    missed = ", ".join(f"{channel} {value:+.0%}" for channel, value in off)
    before, after, sampling = (rows[column].mean() for column in ("before", "after", "sampling"))
    nearer = np.count_nonzero(rows["after"] < rows["before"])
    return (
        f"the map's gain is within two standard errors of the medians' in {close.sum()} of {len(known)} channels"
        + (f" (not in {missed})" if missed else "")
        + (f", W_jj alone in {(np.abs(slope - measured) <= reach).sum()}" if rows["run"].iloc[0] == "linear" else "")
        + f"; unseen cells come nearer in {nearer} of {len(rows)}, on average from {before:.3f} to {after:.3f},"
        f" where sampling alone leaves {sampling:.3f}"
    )


def _halved(events: Events, rng: np.random.Generator) -> Replicate:
    order, half = rng.permutation(len(events)), len(events) // 2
    return Replicate(events, events.take(order[:half]), events.take(order[half:]))


def _calibrate(config: Config, scaling: str, context: Context) -> Outcome:
    began = perf_counter()
    preprocess, device = config.preprocess(scaling), pick_device(config.device)
    seen = [replicate.seen.values[: config.n] for replicate in config.replicates]
    x_scaler, y_scaler = (preprocess.fit(values) for values in seen)
    X, Y = (
        torch.as_tensor(scaler.transform(values), dtype=DTYPES[config.dtype], device=device)
        for scaler, values in zip((x_scaler, y_scaler), seen, strict=True)
    )
    problem = ShuffledRegression(X, Y, config.eps, intercept=True)

    def progress(intermediate_result: OptimizeResult) -> None:
        context.progress(intermediate_result.nit / config.steps)

    result = minimize(
        problem,
        problem.start(torch.Generator(), law="monge"),
        method="newton-cg",
        callback=progress,
        options={"maxiter": config.steps, "gtol": 0.0, "gtol_abs": config.gtol},
    )
    curvature = result.certificate
    if curvature is None:
        curvature = curvature_at(problem, result.x)
    W, b = unscale_regression(*problem.split(result.x), x_scaler, y_scaler)
    summary = {
        "cells": f"{len(X)} → {len(Y)}",
        "steps": result.nit,
        "loss": result.fun,
        "grad_norm": float(torch.linalg.vector_norm(result.jac)),
        "lambda_lower": curvature.lower,
        "lambda_upper": curvature.upper,
        "verdict": curvature.verdict.value,
        "n_passes": problem.n_passes,
        "seconds": perf_counter() - began,
        "status": str(result.status),
        "message": "" if result.status is None else Status(result.status).advice,
    }
    return Outcome(summary, _by_channel(config, preprocess, W, b), result.x.reshape(problem.shape).cpu().numpy())


def _by_channel(config: Config, preprocess: Preprocess, W: np.ndarray, b: np.ndarray) -> list[Row]:
    x, y = config.replicates
    medians = _gain(x.cells.values, y.cells.values)
    error = _gain_error(config, x.cells.values, y.cells.values)
    through_map = _gain(x.cells.values, _mapped(x.cells.values, preprocess, W, b))
    moved = _mapped(x.unseen.values, preprocess, W, b)
    pairs = ((x.unseen.values, y.unseen.values), (moved, y.unseen.values), (y.seen.values, y.unseen.values))
    before, after, sampling = (_distances(*pair, config.cofactor) for pair in pairs)
    columns = {
        "gain_medians": medians,
        "gain_se": np.where(np.isnan(medians), np.nan, error),
        "gain_map": through_map,
        "W_diagonal": W.diagonal(),
        "intercept": b,
        "before": before,
        "after": after,
        "sampling": sampling,
    }
    labels = {"x": config.x, "y": config.y}
    return [
        {**labels, "channel": channel, **{name: float(values[j]) for name, values in columns.items()}}
        for j, channel in enumerate(x.cells.channels)
    ]


def _mapped(values: np.ndarray, preprocess: Preprocess, W: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Raw values (n, p) through the map, which is linear in arcsinh units if there is a cofactor."""
    c = preprocess.cofactor
    return values @ W + b if c is None else c * np.sinh(np.arcsinh(values / c) @ W + b)


def _gain(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Ratio of the medians by channel; NaN where one is not positive, for that is an offset and no gain."""
    first, second = np.median(x, axis=0), np.median(y, axis=0)
    return np.where((first > 0) & (second > 0), second / first, np.nan)


def _gain_error(config: Config, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Standard error of the ratio of the medians for as many cells as the map is fitted to, by resampling."""
    rng = np.random.default_rng((config.seed, 1))
    sizes = [min(config.n, len(values) // 2) for values in (x, y)]
    draws = [
        [np.median(values[rng.integers(len(values), size=size)], axis=0) for _ in range(RESAMPLES)]
        for values, size in zip((x, y), sizes, strict=True)
    ]
    return np.std(np.array(draws[1]) / np.array(draws[0]), axis=0)


def _distances(x: np.ndarray, y: np.ndarray, cofactor: float) -> list[float]:
    """The Wasserstein distance of each channel, in arcsinh units."""
    first, second = (np.arcsinh(values / cofactor) for values in (x, y))
    return [float(wasserstein_distance(u, v)) for u, v in zip(first.T, second.T, strict=True)]
