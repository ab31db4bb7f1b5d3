"""Adam caught in a saddle of a shuffled regression of real cells, and Newton finishing in a few steps.

    L(W) = OT_eps(X W, Y),   X (n, p),   Y (n, q) ~ the rows of X W* + noise in unknown order

At every random start the Hessian has negative eigenvalues. Adam alone creeps out and stops short; the switch watches
λ_min, hands over to Newton where it turns positive, and ends at a certified minimum. Whether that is the right minimum
λ_min cannot tell, the loss can: the tables report both. A run from the Gaussian Monge map shows what a good start does.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import ClassVar, Literal

import torch

from ot_newton.adam import Adam
from ot_newton.certificate import smallest_eigenvalue
from ot_newton.experiments.errors import checking_input
from ot_newton.experiments.escape_figure import NEWTON_PHASES, NUMERIC, TEXT, draw_escape
from ot_newton.experiments.figures import render
from ot_newton.experiments.files import load_table, write
from ot_newton.experiments.real_regression import RegressionConfig
from ot_newton.experiments.report import Column, format_table
from ot_newton.experiments.run import Case, Context, Outcome, Results, Row, run_cases, tabulate
from ot_newton.minimize import minimize
from ot_newton.pairs import Passes
from ot_newton.problems.shuffled_regression import ShuffledRegression
from ot_newton.result import OptimizeResult
from ot_newton.saddle_switch import SaddleSwitch
from ot_newton.status import Status

BEST_BASIN = 1e-3  # a run is in the best basin if its loss is above the best known by less than this part of it
LOOK_RTOL = 1e-2  # relative accuracy of a Hessian that is only looked at
PASSES = ("n_passes", "half_steps", "applications", "columns")  # all of them, and by kind
FIGURE_SIZE = (10.0, 7.4)


@dataclass(frozen=True, kw_only=True)
class Config(RegressionConfig):
    """Adam only against Adam→Newton on a shuffled regression of real flow-cytometry cells."""

    name: ClassVar[str] = "saddle-escape"

    preset: Literal["quick", "laptop", "paper"] = "laptop"
    """Which settings the options start from."""
    eps: tuple[float, ...] = (0.25,)
    """Temperatures, in squared standard deviations of a channel."""
    starts: int = 2
    """Random starts at each temperature."""
    methods: tuple[Literal["adam", "adam-newton"], ...] = ("adam", "adam-newton")
    """What runs from every start."""
    monge: bool = True
    """Also run Newton from the Gaussian Monge map."""
    steps: int = 200
    """Limit of steps of a run that switches to Newton."""
    adam_steps: int = 80
    """Steps of a run of Adam only."""
    lr: float = 0.1
    """Adam's learning rate."""
    grad_rtol: float = 0.05
    """Relative accuracy of Adam's gradients."""
    gtol: float = 1e-6
    """Gradient norm at which a run is finished."""
    look_every: int = 10
    """Adam steps between two looks at λ_min."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eps or min(self.eps) <= 0:
            raise ValueError(f"expected eps > 0, got {self.eps}")
        if min(self.starts, self.steps, self.adam_steps, self.look_every) < 1:
            raise ValueError("expected starts, steps, adam_steps and look_every ≥ 1")
        if not self.methods and not self.monge:
            raise ValueError("expected at least one method, or monge")


PRESETS = {
    "quick": Config(preset="quick", n=300, starts=1),
    "laptop": Config(),
    "paper": Config(
        preset="paper", n=40_000, eps=(0.1, 0.25, 0.5), starts=24, steps=2000, adam_steps=2000, dtype="float32"
    ),
}

_COLUMNS = (
    Column("eps", "eps", "g"),
    Column("start", "start"),
    Column("method", "method"),
    Column("start_lambda_min", "first λ_min", "+.3f"),
    Column("steps", "steps", "d"),
    Column("newton_steps", "Newton", "d"),
    Column("loss", "loss", ".6f"),
    Column("loss_above_best", "above best", ".1e"),
    Column("grad_norm", "‖g‖", ".1e"),
    Column("lambda_min", "λ_min", "+.4f"),
    Column("rel_W", "rel_W", ".3f"),
    Column("r2_held_out", "R² test", ".3f"),
    Column("best_basin", "best basin"),
    Column("n_passes", "passes", "d"),
    Column("half_steps", "half-steps", "d"),
    Column("applications", "applications", "d"),
    Column("columns", "columns", "d"),
    Column("seconds", "seconds", ".1f"),
    Column("status", "status"),
)


def main(config: Config) -> int:
    """Run what is missing, print the table, draw the figure."""
    folder = config.folder()
    if not config.redraw:
        with checking_input():
            config.problem(config.eps[0])
        results = run_cases(config, _cases(config), tables=compare)
        print(format_table(results.summary, _COLUMNS))
        for status, runs in results.summary.groupby("status"):
            if not Status(status).success:
                print(f"not converged: {', '.join(runs['run'])}: {Status(status).advice}")
    table = load_table(folder / "table.csv", numeric=NUMERIC, text=TEXT)
    write(folder / "figure.png", render(partial(draw_escape, table=table), FIGURE_SIZE))
    print(f"tables and figure: {folder}")
    return 0


def compare(outcomes: Mapping[str, Outcome]) -> Results:
    """The tables, with each loss measured against the best one known at its temperature."""
    results = tabulate(outcomes)
    if results.summary.empty:
        return results
    finished = results.summary["status"] == "converged"
    best = results.summary[finished].groupby("eps")["loss"].min()
    best = best.combine_first(results.summary.groupby("eps")["loss"].min())
    for frame in (results.table, results.summary):
        frame["loss_above_best"] = frame["loss"] - frame["eps"].map(best)
    summary = results.summary
    summary["best_basin"] = (summary["loss_above_best"] <= BEST_BASIN * summary["eps"].map(best).abs()).map(
        {True: "yes", False: "no"}
    )
    return results


def _cases(config: Config) -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for eps in config.eps:
        if config.monge:
            cases[f"eps{eps:g}-monge"] = partial(_run, config, eps, None, "monge-newton")
        for start in range(config.starts):
            for method in config.methods:
                cases[f"eps{eps:g}-start{start}-{method}"] = partial(_run, config, eps, start, method)
    return cases


def _run(config: Config, eps: float, start: int | None, method: str, context: Context) -> Outcome:
    """The method from one start; from the Monge map where `start` is None."""
    problem = config.problem(eps)
    law, number = ("monge", 0) if start is None else ("random", start)
    w = problem.start(torch.Generator().manual_seed(config.seed + number), law=law)
    start_lambda_min = smallest_eigenvalue(config.problem(eps).hessian(w, LOOK_RTOL)).lambda_min
    limit = config.adam_steps if method == "adam" else config.steps
    watch = _Watch(problem, context, limit, config.look_every if method == "adam" else None)
    adam = Adam(lr=config.lr, rtol=config.grad_rtol)
    result = minimize(
        problem,
        w,
        method=adam if method == "adam" else SaddleSwitch(escape=adam),
        callback=watch,
        options={"maxiter": limit, "gtol": 0.0, "gtol_abs": config.gtol, "seed": config.seed},
    )
    labels: Row = {"eps": eps, "n": config.n, "start": law if start is None else start, "method": method}
    steps = watch.rows(result)
    steps[0]["lambda_min"] = start_lambda_min
    curvature = smallest_eigenvalue(problem.hessian(result.x, 1e-4), error=problem.hessian_error)
    steps[-1]["lambda_min"] = curvature.lambda_min
    summary = {
        **labels,
        "start_lambda_min": start_lambda_min,
        "steps": result.nit,
        "newton_steps": int(result.history["phase"].isin(NEWTON_PHASES).sum()),
        "loss": result.fun,
        "grad_norm": float(torch.linalg.vector_norm(result.jac)),
        "lambda_min": curvature.lambda_min,
        "verdict": curvature.verdict.value,
        **problem.metrics(result.x, config.data),
        **{name: steps[-1][name] for name in PASSES},
        "seconds": steps[-1]["seconds"],
        "status": str(result.status),
        "message": result.message,
    }
    point = result.x.reshape(problem.shape).cpu().numpy()
    return Outcome(summary, [{**labels, **row} for row in steps], point)


class _Watch:
    """Follows a run: tells the progress, and looks at λ_min where the method does not.

    What the looks cost in time and passes is not the method's and is taken off its account.
    """

    def __init__(self, problem: ShuffledRegression, context: Context, steps: int, look_every: int | None):
        self.problem, self.context, self.steps, self.look_every = problem, context, steps, look_every
        self.lambda_min: dict[int, float] = {}
        self.spent: dict[int, tuple[float, Passes]] = {}

    def __call__(self, intermediate_result: OptimizeResult) -> None:
        step = intermediate_result.nit
        self.context.progress(step / self.steps)
        if self.look_every is None or step % self.look_every:
            return
        began, passes = perf_counter(), self.problem.passes
        H = self.problem.hessian(intermediate_result.x, LOOK_RTOL)
        self.lambda_min[step] = smallest_eigenvalue(H).lambda_min
        self.spent[step] = (perf_counter() - began, self.problem.passes - passes)

    def rows(self, result: OptimizeResult) -> list[Row]:
        """The history of the run, a row per step."""
        seconds, passes, rows = 0.0, Passes(), []
        for row in result.history.rename(columns={"fun": "loss"}).to_dict("records"):
            step, kinds = row["step"], {"n_passes": passes.total, **asdict(passes)}
            rows.append(
                row
                | {"seconds": row["seconds"] - seconds, **{name: row[name] - kinds[name] for name in PASSES}}
                | ({"lambda_min": self.lambda_min[step]} if step in self.lambda_min else {})
            )
            more = self.spent.get(step, (0.0, Passes()))
            seconds, passes = seconds + more[0], passes + more[1]
        return rows
