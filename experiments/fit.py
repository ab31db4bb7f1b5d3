"""Estimate W in y ≈ x W (+ b) from two tables of cells whose rows do not correspond.

    W = argmin OT_eps(X W + b, Y),   X and Y: arcsinh, standardised channel by channel

Starts (the Gaussian Monge map, then random ones) run on a subsample; the lowest loss is polished on all cells. Entropic
transport is maximum-likelihood deconvolution of Gaussian noise with variance eps/2 (Rigollet & Weed 2018, C. R. Math.
356:1228): where the noise is known, `--noise σ` sets eps = 2σ².
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from ot_newton.adam import Adam
from ot_newton.experiments.environment import pick_device
from ot_newton.experiments.errors import InputError, checking_input
from ot_newton.experiments.fit_report import SUMMARY_COLUMNS, Pair, redraw, write_report
from ot_newton.experiments.real_regression import curvature_at
from ot_newton.experiments.report import format_table
from ot_newton.experiments.run import Case, Context, Outcome, Results, Row, RunConfig, run_cases, tabulate
from ot_newton.minimize import minimize
from ot_newton.problems.cytometry import Events, Preprocess, load_events, subsample
from ot_newton.problems.shuffled_regression import ShuffledRegression, eps_from_noise
from ot_newton.result import OptimizeResult
from ot_newton.saddle_switch import SaddleSwitch
from ot_newton.status import Status

DEFAULT_EPS = 0.1
POLISH = "polish"
MARGINAL_TOL = 1e-8  # of the plan that the report speaks of


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Estimate W in y ≈ x W from two files of cells, FCS or CSV, without knowing which cell belongs to which."""

    name: ClassVar[str] = "fit"

    x: Path
    """Cells to map from: a .fcs, .csv or .tsv file."""
    y: Path
    """Cells to map to."""
    channels: tuple[str, ...] = ()
    """Channels of X, by detector or marker name; all but scatter and time if none are named."""
    y_channels: tuple[str, ...] = ()
    """Channels of Y; those of X if none are named."""
    eps: float | None = None
    """Temperature, in squared standard deviations of a channel; 0.1 if neither this nor --noise is given."""
    noise: float | None = None
    """Standard deviation of the noise, in standard deviations of a channel; sets eps = 2 noise²."""
    starts: int = 4
    """Random starts beside the Monge map."""
    start_law: Literal["auto", "monge", "random", "identity"] = "auto"
    """Where to start: auto is the Monge map, if X and Y have as many channels, and random starts."""
    intercept: bool = False
    """Estimate an offset too; both clouds are centred already, so it is rarely needed."""
    max_cells: int = 5000
    """Cells of each file that are used, drawn at random. Where both files hold the same cells, use them all: a cell
    whose partner is not drawn counts as noise."""
    start_cells: int = 300
    """Cells of each side that the starts run on."""
    cofactor: float = 3000.0
    """Of the arcsinh that the values go through: about 150 for 18-bit cytometers, 3000 for 20-bit, 5 for mass
    cytometry; 0 keeps the values as they are."""
    clip: float = 5.0
    """Farthest distance of a cell from the mean, in standard deviations; 0 for no limit."""
    compensate: Literal["auto", "always", "never"] = "auto"
    """Whether to undo the spillover by the matrix in the FCS file: if there is one, insist, or never."""
    steps: int = 300
    """Limit of steps from a start."""
    gtol: float = 1e-6
    """Gradient norm at which W is finished."""
    seed: int = 0
    """Of the cells drawn and of the random starts."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto is cuda where there is one."""

    def __post_init__(self) -> None:
        if self.eps is not None and self.noise is not None:
            raise ValueError("expected --eps or --noise, got both; --noise sets eps = 2 noise²")
        for name in ("eps", "noise"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"expected {name} > 0, got {value}")
        for name, least in (("starts", 0), ("max_cells", 2), ("start_cells", 2), ("steps", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"expected {name} ≥ {least}, got {getattr(self, name)}")
        if self.start_law == "random" and self.starts < 1:
            raise ValueError("expected --starts ≥ 1 with --start-law random, got 0")

    def folder(self) -> Path:
        """The folder that this configuration writes to; it is named after the two files."""
        return self.out if self.out is not None else Path("runs") / f"fit-{self.x.stem}-{self.y.stem}"

    def settings(self) -> Row:
        """The settings, and what the two files hold, so that a changed file is not mistaken for a finished run."""
        digests = {f"{side}_sha256": _digest(path) for side, path in (("x", self.x), ("y", self.y))}
        return super().settings() | digests

    @property
    def temperature(self) -> float:
        """eps, from whichever option sets it."""
        if self.noise is not None:
            return eps_from_noise(self.noise)
        return DEFAULT_EPS if self.eps is None else self.eps

    @cached_property
    def pair(self) -> Pair:
        """Both sides, read, drawn and scaled."""
        first = load_events(self.x, self.channels or None, compensate=self.compensate)
        second = load_events(self.y, self.y_channels or first.channels, compensate=self.compensate)
        preprocess = Preprocess(self.cofactor or None, self.clip or None)
        sides = [_draw(events, self.max_cells, self.seed + k) for k, events in enumerate((first, second))]
        return Pair(*sides, *(preprocess.fit(events) for events in sides))

    def problem(self, cells: int | None = None) -> ShuffledRegression:
        """The regression on all cells that are used, or on the first `cells` of each side."""
        device = pick_device(self.device)
        X, Y = (torch.as_tensor(points[:cells], device=device) for points in self.pair.points)
        return ShuffledRegression(X, Y, self.temperature, intercept=self.intercept)


PRESETS: dict[str, Config] = {}


def main(config: Config) -> int:
    """Run what is missing, write W and its report, print what it found."""
    folder = config.folder()
    if config.redraw:
        redraw(folder)
        return 0
    with checking_input():
        problem = config.problem()
        cases = _cases(config, problem)
    results = run_cases(config, cases, tables=compare)
    print(format_table(results.summary, SUMMARY_COLUMNS))
    write_report(folder, config.pair, problem, results.outcomes[POLISH], results.summary, config.temperature)
    return 0


def compare(outcomes: Mapping[str, Outcome]) -> Results:
    """The tables; losses of the starts are measured against the lowest of them."""
    results = tabulate(outcomes)
    if not results.summary.empty:
        starts = results.summary["run"] != POLISH
        results.summary["loss_above_best"] = (results.summary["loss"] - results.summary["loss"][starts].min())[starts]
    return results


def _cases(config: Config, problem: ShuffledRegression) -> dict[str, Case]:
    laws: dict[str, tuple[str, int]] = {}
    p, q = problem.X.shape[1], problem.Y.shape[1]
    if config.start_law == "monge" or (config.start_law == "auto" and p == q):
        laws["monge"] = ("monge", 0)
    if config.start_law == "identity":
        laws["identity"] = ("identity", 0)
    if config.start_law in ("auto", "random"):
        laws |= {f"random{number}": ("random", number) for number in range(config.starts)}
    if not laws:
        raise InputError(f"expected --starts ≥ 1: there is no Monge map from {p} to {q} channels")
    for law, _ in laws.values():
        problem.start(torch.Generator().manual_seed(0), law=law)
    cases: dict[str, Case] = {name: partial(_start, config, law, number) for name, (law, number) in laws.items()}
    return cases | {POLISH: partial(_polish, config)}


def _start(config: Config, law: str, number: int, context: Context) -> Outcome:
    problem = config.problem(config.start_cells)
    w = problem.start(torch.Generator().manual_seed(config.seed + number), law=law)
    return _descend(config, problem, w, 0.1, context)


def _polish(config: Config, context: Context) -> Outcome:
    """From the lowest loss on the subsample to the minimum on all cells."""
    best = min(context.outcomes.values(), key=lambda outcome: outcome.summary["loss"])
    problem = config.problem()
    w = torch.as_tensor(best.point, dtype=problem.dtype, device=problem.device).reshape(-1)
    return _descend(config, problem, w, 0.02, context)


def _descend(config: Config, problem: ShuffledRegression, w: torch.Tensor, lr: float, context: Context) -> Outcome:
    def progress(intermediate_result: OptimizeResult) -> None:
        context.progress(intermediate_result.nit / config.steps)

    result = minimize(
        problem,
        w,
        method=SaddleSwitch(escape=Adam(lr=lr)),
        callback=progress,
        options={"maxiter": config.steps, "gtol": 0.0, "gtol_abs": config.gtol, "seed": config.seed},
    )
    curvature = curvature_at(problem, result.x)
    plan = problem.solve_plan(result.x, MARGINAL_TOL)
    history = result.history
    summary: dict[str, Any] = {
        "cells": f"{len(problem.X)} → {len(problem.Y)}",
        "steps": result.nit,
        "loss": result.fun,
        "grad_norm": float(torch.linalg.vector_norm(result.jac)),
        "lambda_min": curvature.lambda_min,
        "verdict": curvature.verdict.value,
        "marginal_error": plan.error,
        "n_passes": result.n_passes,
        "seconds": float(history["seconds"].iloc[-1]),
        "status": str(result.status),
        "advice": "" if result.status is None else Status(result.status).advice,
    }
    rows = history.rename(columns={"fun": "loss"}).to_dict("records")
    return Outcome(summary, rows, result.x.reshape(problem.shape).cpu().numpy())


def _draw(events: Events, most: int, seed: int) -> Events:
    return subsample(events, min(most, len(events)), seed)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
