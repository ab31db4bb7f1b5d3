"""The runs of the saddle-escape experiment, one function for each kind of case."""

from collections.abc import Callable
from itertools import pairwise
from math import nan
from time import perf_counter
from typing import Any, Protocol

import torch

from ot_newton.adam import Adam
from ot_newton.certificate import Certificate, smallest_eigenvalue
from ot_newton.experiments.escape_figure import NEWTON_PHASES
from ot_newton.experiments.real_regression import curvature_at
from ot_newton.experiments.recipe import Recipe, run_recipe
from ot_newton.experiments.run import Context, Outcome, Row
from ot_newton.method import Method
from ot_newton.minimize import minimize
from ot_newton.problems.shuffled_regression import ShuffledRegression
from ot_newton.problems.simulation import RegressionData, least_squares_on_pairs
from ot_newton.result import OptimizeResult
from ot_newton.saddle_free import SaddleFree
from ot_newton.saddle_switch import SaddleSwitch
from ot_newton.status import Status
from ot_newton.trust_region import TrustNCG

LOOK_RTOL = 1e-2  # relative accuracy of a Hessian that is only looked at
PASSES = ("n_passes", "half_steps", "applications", "columns")  # all of them, and by kind
POLISH_LR = 0.02  # of Adam, should the polish start at negative curvature


class Settings(Protocol):
    """What the runs read of the configuration."""

    n: int
    steps: int
    adam_steps: int
    recipe_newton: int
    lr: float
    grad_rtol: float
    gtol: float
    seed: int
    polish_starts: int
    polish_cells: int

    def data_at(self, eps: float) -> RegressionData:
        """Both clouds."""
        ...

    def problem(self, eps: float, cells: int | None = None) -> ShuffledRegression:
        """A fresh problem, on all cells or on the first few of each side."""
        ...


def start_of(config: Settings, problem: ShuffledRegression, start: int | str) -> torch.Tensor:
    """The point that a numbered random start, or the Monge map, begins at."""
    law, number = (start, 0) if isinstance(start, str) else ("random", start)
    return problem.start(torch.Generator().manual_seed(config.seed + number), law=law)


def run_start(config: Settings, eps: float, start: int | str, method: str, context: Context) -> Outcome:
    """One method from one start."""
    problem = config.problem(eps)
    w = start_of(config, problem, start)
    labels: Row = {"eps": eps, "n": config.n, "start": start, "method": method}
    if method == "recipe":
        return _run_recipe(config, labels, problem, w, context)
    limit = config.adam_steps if method == "adam" else config.steps
    result = _minimize(config, problem, w, _methods(config)[method], limit, context.progress)
    return _outcome(config, labels, problem, result)


def run_polish(config: Settings, eps: float, context: Context) -> Outcome:
    """The Monge map and random starts on a subsample, then Newton on all cells from the lowest loss."""
    small, began = config.problem(eps, config.polish_cells), perf_counter()
    starts: list[int | str] = ["monge", *range(config.polish_starts)]
    part = 1 / (len(starts) + 1)
    found = [
        _minimize(
            config,
            small,
            start_of(config, small, start),
            _methods(config)["adam-newton"],
            config.steps,
            lambda fraction, done=done: context.progress(part * (done + min(fraction, 1))),
        )
        for done, start in enumerate(starts)
    ]
    best, seconds = min(found, key=lambda result: result.fun), perf_counter() - began
    problem = config.problem(eps)
    switch = SaddleSwitch(escape=Adam(lr=POLISH_LR, rtol=config.grad_rtol))
    result = _minimize(config, problem, best.x, switch, config.steps, lambda fraction: context.progress(1 - part))
    labels: Row = {"eps": eps, "n": config.n, "start": "subsample", "method": "polish"}
    share = (len(small.X) / len(problem.X)) ** 2  # of a pass over all pairs
    return _outcome(config, labels, problem, result, seconds, subsample_passes=small.passes.total * share)


def _methods(config: Settings) -> dict[str, Method[Any]]:
    adam = Adam(lr=config.lr, rtol=config.grad_rtol)
    switch = SaddleSwitch(escape=adam)
    return {
        "adam": adam,
        "adam-newton": switch,
        "monge-newton": switch,
        "trust-ncg": TrustNCG(),
        "saddle-free": SaddleFree(),
    }


def _minimize(
    config: Settings,
    problem: ShuffledRegression,
    w: torch.Tensor,
    method: Method[Any],
    limit: int,
    progress: Callable[[float], None],
) -> OptimizeResult:
    def tell(intermediate_result: OptimizeResult) -> None:
        progress(intermediate_result.nit / limit)

    options = {"maxiter": limit, "gtol": 0.0, "gtol_abs": config.gtol, "seed": config.seed}
    return minimize(problem, w, method=method, callback=tell, options=options)


def _run_recipe(
    config: Settings, labels: Row, problem: ShuffledRegression, w: torch.Tensor, context: Context
) -> Outcome:
    x, rows = run_recipe(
        problem, w, Recipe(), lr=config.lr, gtol=config.gtol, adam_steps=config.adam_steps,
        newton_steps=config.recipe_newton, progress=context.progress,
    )  # fmt: skip
    last = rows[-1]
    status = Status.CONVERGED if last["grad_norm"] <= config.gtol else Status.MAX_ITER
    curvature = curvature_at(problem, x) if bool(torch.isfinite(x).all()) else None
    return _summed(config, labels, problem, x, rows, curvature, str(status), status.advice)


def _outcome(
    config: Settings,
    labels: Row,
    problem: ShuffledRegression,
    result: OptimizeResult,
    seconds: float = 0.0,
    **more: Any,
) -> Outcome:
    """The outcome of a run that was preceded by other work of so many seconds."""
    history = result.history.rename(columns={"fun": "loss"})
    rows = history.assign(seconds=history["seconds"] + seconds).to_dict("records")
    curvature = curvature_at(problem, result.x)
    return _summed(config, labels, problem, result.x, rows, curvature, str(result.status), result.message, **more)


def _summed(
    config: Settings, labels: Row, problem: ShuffledRegression, x: torch.Tensor, rows: list[Row],
    curvature: Certificate | None, status: str, message: str, **more: Any,
) -> Outcome:  # fmt: skip
    """The outcome of a run, judged at the point where it ended."""
    last, data = rows[-1], config.data_at(labels["eps"])
    if labels["start"] != "subsample" and not _is_tight(rows[0]):
        begin = start_of(config, problem, labels["start"])
        rows[0] |= _bracket(smallest_eigenvalue(config.problem(labels["eps"]).hessian(begin, LOOK_RTOL)))
    newton = [row["phase"] in NEWTON_PHASES for row in rows[1:]]
    turns = [after - before for before, after in pairwise(newton)]
    began = [0.0, *(row["seconds"] for row in rows[:-1])]
    spent = [row["seconds"] - before for row, before in zip(rows, began, strict=True)]
    in_newton = sum(part for part, is_newton in zip(spent[1:], newton, strict=True) if is_newton)
    if curvature is not None:
        rows[-1] |= _bracket(curvature)
    summary: Row = {
        **labels,
        "start_lambda_min": rows[0]["lambda_min"],
        "steps": len(rows) - 1,
        "newton_steps": sum(newton),
        "switches": turns.count(1) + int(newton[:1] == [True]),
        "returns": turns.count(-1),
        "loss": last["loss"],
        "grad_norm": last["grad_norm"],
        **({} if curvature is None else _bracket(curvature)),
        "verdict": "none" if curvature is None else curvature.verdict.value,
        **problem.metrics(x, data),
        "rel_W_pairs": _on_pairs(data),
        **{name: last[name] for name in PASSES},
        "seconds": last["seconds"],
        "newton_seconds": in_newton,
        "status": status,
        "message": message,
        **more,
    }
    return Outcome(summary, [{**labels, **row} for row in rows], x.reshape(problem.shape).cpu().numpy())


def _bracket(found: Certificate) -> Row:
    return {"lambda_min": found.lambda_min, "lambda_lower": found.lower, "lambda_upper": found.upper}


def _is_tight(row: Row) -> bool:
    """Whether a bracket of λ_min is known and narrow enough to name λ_min."""
    return row.get("lambda_upper", nan) - row.get("lambda_lower", nan) <= LOOK_RTOL * abs(row["lambda_min"])


def _on_pairs(data: RegressionData) -> float:
    """The relative error of W by least squares if the pairs were known; NaN where there are none."""
    W = least_squares_on_pairs(data)
    return nan if W is None else float((W - data.W_star).norm() / data.W_star.norm())
