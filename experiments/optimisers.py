"""Every method of `minimize` and scipy's second-order methods on one collection of functions, with one referee.

    f(x) → min,   35 functions of Moré, Garbow and Hillstrom and 11 strict saddles, started on their stable manifolds

All methods see the same exact gradients and Hessian products and are asked for the same gradient norm. Where one ends
is judged apart from what it says: a certified minimiser has a small gradient and, by dense eigenvalues in float64, no
negative curvature. A success is both claimed and certified; a false success is claimed only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import ClassVar, Literal

import numpy as np
import pandas as pd
import torch

from ot_newton.experiments.figures import render
from ot_newton.experiments.files import load_table, write
from ot_newton.experiments.optimisers_figure import NUMERIC, TEXT, draw_optimisers
from ot_newton.experiments.optimisers_scipy import SCIPY_METHODS, minimize_by_scipy
from ot_newton.experiments.report import Column, format_table
from ot_newton.experiments.run import Case, Context, Outcome, Results, Row, RunConfig, run_cases, tabulate
from ot_newton.minimize import METHODS, minimize
from ot_newton.problems.benchmark import Benchmark
from ot_newton.problems.more_garbow_hillstrom import MORE_GARBOW_HILLSTROM
from ot_newton.problems.strict_saddles import STRICT_SADDLES

COLLECTION = {benchmark.name: benchmark for benchmark in (*MORE_GARBOW_HILLSTROM, *STRICT_SADDLES)}
EVERY_METHOD = (*METHODS, *SCIPY_METHODS)
FIRST_ORDER = ("adam", "adam-newton")  # they begin with many cheap steps
OUTCOMES = ("success", "unclaimed", "failure", "false success")
KNOWN = 1e-6  # of the fall from f(x0) to a known minimum may be missing (Moré and Wild 2009, SIAM J. Optim. 20:172)


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Every method of minimize, and scipy's, on 46 functions: successes, false successes and what they cost."""

    name: ClassVar[str] = "optimisers"

    preset: Literal["quick", "full"] = "full"
    """Which settings the options start from."""
    methods: tuple[str, ...] = EVERY_METHOD
    """What is compared; scipy's methods begin with "scipy-"."""
    problems: tuple[str, ...] = tuple(COLLECTION)
    """Names of the functions."""
    gtol: float = 1e-8
    """Gradient norm that is asked for, relative to that at the start where it exceeds 1."""
    xtol: float = 1e-8
    """What scipy's newton-cg is asked for instead: the mean change of a coordinate in one step."""
    maxiter: int = 1000
    """Limit of steps of a second-order method."""
    first_order_steps: int = 5000
    """Limit of steps of a method that begins with Adam."""
    max_products: int = 20_000
    """Hessian products after which one of scipy's methods is stopped; it may not return otherwise."""
    certified_gtol: float = 1e-6
    """A certified minimiser has a gradient norm below this, in the units of gtol."""
    certified_rtol: float = 1e-6
    """A certified minimiser has λ_min above minus this part of the Hessian's norm."""

    def __post_init__(self) -> None:
        for kind, given, known in (("methods", self.methods, EVERY_METHOD), ("problems", self.problems, COLLECTION)):
            unknown = [name for name in given if name not in known]
            if unknown or not given:
                raise ValueError(f"expected {kind} among {', '.join(known)}, got {', '.join(unknown) or 'none'}")
        if min(self.gtol, self.xtol, self.certified_gtol, self.certified_rtol) <= 0:
            raise ValueError("expected gtol, xtol, certified_gtol and certified_rtol > 0")
        if min(self.maxiter, self.first_order_steps, self.max_products) < 1:
            raise ValueError("expected maxiter, first_order_steps and max_products ≥ 1")


PRESETS = {
    "quick": Config(preset="quick", problems=("rosenbrock", "beale", "wood", *(b.name for b in STRICT_SADDLES))),
    "full": Config(),
}

_COLUMNS = (
    Column("run", "method"),
    Column("n_problems", "problems", "d"),
    *(Column(outcome, outcome, "d") for outcome in OUTCOMES),
    Column("known", "known minimum", "d"),
    Column("nit", "steps", "d"),
    Column("nfev", "values", "d"),
    Column("njev", "gradients", "d"),
    Column("nhev", "products", "d"),
    Column("n_certificate", "of them to certify", "d"),
    Column("nhev_common", "on common", "d"),
    Column("seconds", "seconds", ".1f"),
)


def main(config: Config) -> int:
    """Run what is missing, print the totals and the false successes, draw the figure."""
    folder = config.folder()
    if not config.redraw:
        cases: dict[str, Case] = {method: partial(_run_method, config, method) for method in config.methods}
        results = run_cases(config, cases, tables=compare)
        print(format_table(results.summary, _COLUMNS))
        print(
            f"on common: the products on the {_n_common(results.table)} problems that every second-order method solved"
        )
        for method, run in results.table[results.table["outcome"] == "false success"].groupby("run", sort=False):
            saddles = run["lambda_ratio"] < -config.certified_rtol
            for kind, rows in (("at a saddle", run[saddles]), ("with a large gradient", run[~saddles])):
                if len(rows):
                    print(f"{method} claims success {kind} of: {', '.join(rows['problem'])}")
    table = load_table(folder / "table.csv", numeric=NUMERIC, text=TEXT)
    write(folder / "figure.png", render(partial(draw_optimisers, table=table), (10.0, 4.8)))
    print(f"tables and figure: {folder}")
    return 0


def compare(outcomes: Mapping[str, Outcome]) -> Results:
    """The tables; what is common to the methods is marked in the one and counted in the other."""
    results = tabulate(outcomes)
    table, summary = results.table, results.summary
    if table.empty:
        return results
    second = table[~table["run"].isin(["adam"])]
    solved = (second["outcome"] == "success").groupby(second["problem"]).all()
    table["common"] = table["problem"].map(solved).eq(True).map({True: "yes", False: "no"})
    common = table[table["common"] == "yes"].groupby("run")["nhev"].sum()
    summary["nhev_common"] = summary["run"].map(common).fillna(0).astype(int)
    return results


def _n_common(table: pd.DataFrame) -> int:
    return table[table["common"] == "yes"]["problem"].nunique()


def _run_method(config: Config, method: str, context: Context) -> Outcome:
    """One method on every problem: a row for each, and the totals."""
    rows = []
    for done, name in enumerate(config.problems):
        rows.append(_run(config, method, COLLECTION[name]))
        context.progress((done + 1) / len(config.problems))
    frame = pd.DataFrame(rows)
    totals = frame[["nit", "nfev", "njev", "nhev", "n_certificate", "seconds"]].sum().to_dict()
    integers = {key: int(value) for key, value in totals.items() if key != "seconds"}
    counts = {outcome: int((frame["outcome"] == outcome).sum()) for outcome in OUTCOMES}
    known = int((frame["known"] == "yes").sum())
    return Outcome(
        {"n_problems": len(rows), **counts, "known": known, **integers, "seconds": totals["seconds"]},
        rows,
    )


def _run(config: Config, method: str, benchmark: Benchmark) -> Row:
    problem = benchmark.problem()
    w = problem.start(torch.Generator())
    fun, grad = problem.value_and_grad(w)
    unit = max(1.0, float(grad.norm()))
    began = perf_counter()
    if method in METHODS:
        limit = config.first_order_steps if method in FIRST_ORDER else config.maxiter
        options = {"gtol": 0.0, "gtol_abs": config.gtol * unit, "maxiter": limit}
        result = minimize(problem, method=method, options=options)
        n_certificate = 0 if result.certificate is None else result.certificate.n_matvec
        ended = result.x
        report = {
            "claimed": result.success,
            "status": str(result.status),
            "message": result.message,
            **{name: getattr(result, name) for name in ("nit", "nfev", "njev", "nhev")},
            "n_certificate": n_certificate,
        }
    else:
        ended, report = minimize_by_scipy(
            problem,
            method,
            gtol=config.gtol * unit,
            xtol=config.xtol,
            maxiter=config.maxiter,
            max_products=config.max_products,
        )
    seconds = perf_counter() - began
    return {
        "problem": benchmark.name,
        "source": benchmark.source,
        "number": benchmark.number,
        "size": benchmark.size,
        **judge(config, benchmark, ended, unit, claimed=report.pop("claimed"), start=float(fun)),
        **report,
        "seconds": seconds,
    }


def judge(config: Config, benchmark: Benchmark, w: torch.Tensor, unit: float, *, claimed: bool, start: float) -> Row:
    """What kind of point w is, by dense float64 eigenvalues, and what the claim of success is worth.

    Args:
        w: where a method ended (n,).
        unit: of gradient norms.
        claimed: whether the method calls it a success.
        start: the value where it began.
    """
    problem = benchmark.problem()
    fun, grad = problem.value_and_grad(w)
    H = problem.hessian(w).to_dense()
    finite = bool(torch.isfinite(H).all())
    eigenvalues = torch.linalg.eigvalsh((H + H.T) / 2) if finite else torch.full((benchmark.size,), float("nan"))
    grad_ratio = float(grad.norm()) / unit
    lowest, scale = float(eigenvalues[0]), float(eigenvalues.abs().max())
    lambda_ratio = lowest / scale if scale else lowest
    certified = grad_ratio <= config.certified_gtol and lambda_ratio >= -config.certified_rtol
    known = any(abs(float(fun) - minimum) <= KNOWN * (start - minimum) for minimum in benchmark.minima)
    if certified:
        outcome = "success" if claimed else "unclaimed"
    else:
        outcome = "false success" if claimed else "failure"
    return {
        "outcome": outcome,
        "known": "yes" if known else "no",
        "fun": float(fun),
        "excess": min(np.abs(float(fun) - np.array(benchmark.minima))),
        "grad_ratio": grad_ratio,
        "lambda_ratio": lambda_ratio,
    }
