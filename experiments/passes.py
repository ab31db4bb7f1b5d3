"""Passes, the cost that no machine changes: responses, exact Hessians, potentials, Adam steps and whole runs.

A pass is one sweep over all n×m pairs: a half-step of Sinkhorn, or a transport application of up to 64 columns. All is
counted at a random start W0 and at the solution W* of a shuffled regression, and judged by dense float64 answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import torch

from ot_newton.experiments.environment import pick_device
from ot_newton.experiments.errors import InputError, checking_input
from ot_newton.experiments.figures import render
from ot_newton.experiments.files import load_table, write
from ot_newton.experiments.passes_figure import FIGURE_SIZE, NUMERIC, TEXT, draw_passes
from ot_newton.experiments.passes_plain import PlainRegression
from ot_newton.experiments.passes_point import Point, until
from ot_newton.experiments.passes_runs import adam_path, potentials, whole_run
from ot_newton.experiments.passes_tables import count, print_tables
from ot_newton.experiments.real_regression import RegressionConfig
from ot_newton.experiments.run import Case, Context, Outcome, Results, Row, RunConfig, run_cases, tabulate
from ot_newton.minimize import minimize
from ot_newton.problems.cytometry import Preprocess, load_events, subsample
from ot_newton.problems.shuffled_regression import ShuffledRegression

POINTS = ("W0", "W*")
PRODUCT_GOALS = (1e-2, 1e-4, 1e-6)
HESSIAN_GOALS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-6)
POTENTIAL_GOALS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8)
PRODUCT_METHODS = ("CG", "block + random columns", "block + slow modes")
HESSIAN_METHODS = ("columns", "columns + random", "columns + slow modes")
POTENTIAL_METHODS = ("alternating", "two-level", "newton", "auto")
FIRST_ORDER = {"plain, 1e-2": 1e-2, "plain, 1e-3": 1e-3}
RUNS = ("this library", "plain Sinkhorn + CG")
MOST_BLOCK = 120  # passes of a block solve
SOLVED = 1e-7  # gradient norm at W*


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Passes of every solver on real cells, or on two tables of your own, beside plain Sinkhorn and CG."""

    name: ClassVar[str] = "passes"
    _not_settings: ClassVar[frozenset[str]] = RunConfig._not_settings | {"copy_to", "sizes", "eps", "starts"}

    preset: Literal["quick", "laptop", "full"] = "laptop"
    """Which settings the options start from."""
    sizes: tuple[int, ...] = (300,)
    """Cells on each side."""
    eps: tuple[float, ...] = (0.5, 0.25, 0.1)
    """Temperatures, in squared standard deviations of a channel."""
    x: Path | None = None
    """A .fcs, .csv or .tsv file of cells to map from, together with --y; simulated pairs of real cells if none."""
    y: Path | None = None
    """Cells to map to."""
    channels: tuple[str, ...] = ()
    """Channels of both files; all but scatter and time if none are named."""
    noise: float = 0.05
    """Standard deviation of the noise of simulated pairs, in standard deviations of a channel."""
    w_star: Literal["near-identity", "arbitrary"] = "near-identity"
    """The map behind simulated pairs."""
    cofactor: float = 3000.0
    """Of the arcsinh that the raw values go through."""
    clip: float = 5.0
    """Farthest distance of a cell from the mean, in standard deviations."""
    step: float = 0.02
    """Distance, in each entry of W, of the neighbour that leaves its slow modes; and Adam's learning rate."""
    steps: int = 30
    """Adam steps with the Hessian at each."""
    starts: int = 1
    """Random starts of whole runs."""
    run_lr: float = 0.1
    """Adam's learning rate in a whole run."""
    run_steps: int = 400
    """Limit of steps of a whole run."""
    gtol: float = 1e-5
    """Gradient norm at which a whole run is finished."""
    most: int = 3000
    """Passes after which CG, a solve for the potentials, or a whole run is given up."""
    seed: int = 2
    """Of the cells, W* and the starts."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto is cuda where there is one."""
    copy_to: Path | None = None
    """Also copy the counts, the environment and the figure to this folder."""

    def __post_init__(self) -> None:
        if (self.x is None) != (self.y is None):
            raise ValueError("expected both --x and --y, or neither")
        if not self.sizes or min(self.sizes) < 2:
            raise ValueError(f"expected sizes ≥ 2, got {self.sizes}")
        if not self.eps or min(self.eps) <= 0:
            raise ValueError(f"expected eps > 0, got {self.eps}")
        if not (self.step > 0 and self.run_lr > 0 and self.gtol > 0):
            raise ValueError("expected step, run_lr and gtol > 0")
        if min(self.steps, self.run_steps, self.most) < 1 or self.starts < 0:
            raise ValueError("expected steps, run_steps and most ≥ 1, and starts ≥ 0")

    def problem(self, n: int, eps: float) -> ShuffledRegression:
        """A fresh problem on n cells a side at temperature `eps`."""
        if self.x is not None and self.y is not None:
            X, Y = (self._points(path, n, self.seed + k) for k, path in enumerate((self.x, self.y)))
            return ShuffledRegression(X, Y, eps)
        return self._simulated(n).problem(eps)

    def _simulated(self, n: int) -> RegressionConfig:
        return RegressionConfig(
            n=n, noise=self.noise, w_star=self.w_star, cofactor=self.cofactor, clip=self.clip, seed=self.seed,
            device=self.device,
        )  # fmt: skip

    def _points(self, path: Path, n: int, seed: int) -> torch.Tensor:
        events = load_events(path, self.channels or None)
        if len(events) < n:
            raise InputError(f"expected at least {n} cells in {path}, got {len(events)}; give smaller --sizes")
        drawn = subsample(events, n, seed)
        scaler = Preprocess(self.cofactor or None, self.clip or None).fit(drawn)
        return torch.as_tensor(scaler.transform(drawn), dtype=torch.float64, device=pick_device(self.device))

    def near_solution(self, n: int, problem: ShuffledRegression) -> torch.Tensor:
        """Where the search for W* starts: the true map if it is known, else the Gaussian Monge map."""
        if self.x is None:
            return problem.join(self._simulated(n).data.W_star)
        return problem.start(torch.Generator(), law="monge")

    def random_start(self, problem: ShuffledRegression, number: int = 0) -> torch.Tensor:
        """The random start of this number; 0 is W0."""
        return problem.start(torch.Generator().manual_seed(self.seed + number))


PRESETS = {
    "quick": Config(preset="quick", sizes=(100,), eps=(0.5,), steps=10, most=1000),
    "laptop": Config(),
    "full": Config(preset="full", sizes=(1000, 2500), steps=100, most=8000),
}


def main(config: Config) -> int:
    """Count what is missing, print the tables, draw the figure."""
    folder = config.folder()
    if not config.redraw:
        with checking_input():
            for n in config.sizes:
                config.near_solution(n, config.problem(n, config.eps[0]))
        run_cases(config, _cases(config), tables=compare)
    counts = load_table(folder / "summary.csv", numeric=("n", "eps", "passes"), text=("table", "point", "method"))
    print_tables(counts)
    table = load_table(folder / "table.csv", numeric=NUMERIC, text=TEXT)
    write(folder / "figure.png", render(partial(draw_passes, table=table), FIGURE_SIZE))
    if config.copy_to is not None:
        for name in ("summary.csv", "environment.json", "figure.png"):
            with checking_input():
                write(config.copy_to / f"{folder.name}-{name}", (folder / name).read_bytes())
    print(f"tables and figure: {folder}")
    return 0


def compare(outcomes: Mapping[str, Outcome]) -> Results:
    """The tables; the summary has a row for each number of passes that the printed tables show."""
    results = tabulate(outcomes)
    return Results(outcomes, results.table, count(results.table))


def _cases(config: Config) -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for n in config.sizes:
        for eps in config.eps:
            here = f"n{n}-eps{eps:g}"
            cases[f"{here}-solution"] = partial(_solution, config, n, eps)
            for point in POINTS:
                at = f"{here}-{'start' if point == 'W0' else 'end'}"
                cases[f"{at}-product"] = partial(_product, config, n, eps, point)
                cases[f"{at}-hessian"] = partial(_hessian, config, n, eps, point)
                cases[f"{at}-potentials"] = partial(_potentials, config, n, eps, point)
            cases[f"{here}-adam"] = partial(_adam, config, n, eps)
            for start in range(config.starts):
                for method in RUNS:
                    name = f"{here}-run{start}-{method.split()[0]}"
                    cases[name] = partial(_run, config, n, eps, start, method)
    return cases


def _solution(config: Config, n: int, eps: float, context: Context) -> Outcome:
    """W*, the minimiser that is reached from the true map or from the Monge map."""
    problem = config.problem(n, eps)
    w = config.near_solution(n, problem)
    result = minimize(problem, w, options={"gtol": 0.0, "gtol_abs": SOLVED, "maxiter": config.run_steps})
    row = {"table": "solution", "n": n, "eps": eps, "point": "W*", "method": "this library", "status": result.status}
    row |= {"error": float(result.jac.norm()), "lambda_min": result.lambda_min}
    return Outcome({"n": n, "eps": eps, "status": str(result.status)}, [row], result.x.cpu().numpy())


def _at(config: Config, n: int, eps: float, point: str, context: Context) -> Point:
    problem = config.problem(n, eps)
    if point == "W0":
        w = config.random_start(problem)
    else:
        w = torch.as_tensor(context.outcomes[f"n{n}-eps{eps:g}-solution"].point).to(problem.X)
    return Point(problem, w, config.step, config.seed)


def _product(config: Config, n: int, eps: float, point: str, context: Context) -> Outcome:
    at, steps = _at(config, n, eps, point, context), []
    for method in PRODUCT_METHODS:
        most = config.most if method == "CG" else MOST_BLOCK
        steps += _labelled("product", n, eps, point, method, until(at.product(method, most), PRODUCT_GOALS))
    return _outcome(steps)


def _hessian(config: Config, n: int, eps: float, point: str, context: Context) -> Outcome:
    at, steps = _at(config, n, eps, point, context), []
    for method in HESSIAN_METHODS:
        steps += _labelled("hessian", n, eps, point, method, until(at.hessian(method, MOST_BLOCK), HESSIAN_GOALS))
    return _outcome(steps)


def _potentials(config: Config, n: int, eps: float, point: str, context: Context) -> Outcome:
    at, steps = _at(config, n, eps, point, context), []
    for done, method in enumerate(POTENTIAL_METHODS):
        rows = potentials(at.problem, at.w, method, POTENTIAL_GOALS, config.most)
        steps += _labelled("potentials", n, eps, point, method, rows)
        context.progress((done + 1) / len(POTENTIAL_METHODS))
    return _outcome(steps)


def _adam(config: Config, n: int, eps: float, context: Context) -> Outcome:
    fresh = partial(config.problem, n, eps)
    rows = adam_path(
        fresh, config.random_start(fresh()), lr=config.step, rtol=0.05, steps=config.steps, first_order=FIRST_ORDER,
        most=config.most, progress=context.progress,
    )  # fmt: skip
    return _outcome([{"table": "adam", "n": n, "eps": eps, "point": "path", **row} for row in rows])


def _run(config: Config, n: int, eps: float, start: int, method: str, context: Context) -> Outcome:
    problem = config.problem(n, eps)
    if method != RUNS[0]:
        problem = PlainRegression(problem.X, problem.Y, eps, most=config.most, backend=problem.backend)
    w = config.random_start(problem, start)
    end, rows = whole_run(
        problem, w, lr=config.run_lr, rtol=0.05, steps=config.run_steps, gtol=config.gtol, most=config.most,
        progress=context.progress,
    )  # fmt: skip
    rows[-1] |= end
    return _outcome(_labelled("run", n, eps, f"start {start}", method, rows))


def _labelled(table: str, n: int, eps: float, point: str, method: str, rows: list[Row]) -> list[Row]:
    return [{"table": table, "n": n, "eps": eps, "point": point, "method": method, **row} for row in rows]


def _outcome(steps: list[Row]) -> Outcome:
    first = steps[0]
    return Outcome({name: first[name] for name in ("table", "n", "eps", "point")}, steps)
