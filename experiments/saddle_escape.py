"""Adam caught in a saddle of a shuffled regression of real cells, and Newton finishing in a few steps.

    L(W) = OT_eps(X W, Y),   X (n, p),   Y (n, q) ~ the rows of X W* + noise in unknown order

At every random start the Hessian has negative eigenvalues. Adam alone creeps out and stops short; the switch watches
λ_min, hands over to Newton where it turns positive, and ends at a certified minimum. Whether that is the right minimum
λ_min cannot tell, the loss can: the tables report both. Beside it, from the same starts, a trust region, saddle-free
Newton and the published recipe; and two ways to begin well, the Gaussian Monge map and many starts on a subsample.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import sqrt
from typing import ClassVar, Literal

from ot_newton.experiments.errors import checking_input
from ot_newton.experiments.escape_figure import BEST_BASIN, NUMERIC, TEXT, draw_escape
from ot_newton.experiments.escape_runs import run_polish, run_start
from ot_newton.experiments.figures import render
from ot_newton.experiments.files import load_table, write
from ot_newton.experiments.methods_figure import draw_methods
from ot_newton.experiments.real_regression import RegressionConfig
from ot_newton.experiments.report import Column, format_table
from ot_newton.experiments.run import Case, Outcome, Results, run_cases, tabulate
from ot_newton.problems.shuffled_regression import ShuffledRegression
from ot_newton.problems.simulation import RegressionData
from ot_newton.status import Status

FIGURE_SIZE, METHODS_SIZE = (10.0, 7.4), (10.0, 4.2)
MethodName = Literal["adam", "adam-newton", "trust-ncg", "saddle-free", "recipe"]


@dataclass(frozen=True, kw_only=True)
class Config(RegressionConfig):
    """Ways out of the saddles of a shuffled regression of real flow-cytometry cells, side by side."""

    name: ClassVar[str] = "saddle-escape"

    preset: Literal["quick", "laptop", "paper"] = "laptop"
    """Which settings the options start from."""
    eps: tuple[float, ...] = (0.25,)
    """Temperatures, in squared standard deviations of a channel."""
    starts: int = 2
    """Random starts at each temperature."""
    methods: tuple[MethodName, ...] = ("adam-newton",)
    """What runs from every start. "recipe" is the published one: 100 Sinkhorn iterations an evaluation, Lanczos on
    damped products, bare Newton steps."""
    beside: tuple[MethodName, ...] = ("adam", "trust-ncg", "saddle-free")
    """What runs beside them from the first few starts, for comparison."""
    beside_starts: int = 1
    """How many starts that is."""
    recipe_starts: int = 0
    """How many starts the published recipe runs from, at the smallest eps."""
    monge: bool = True
    """Also run Newton from the Gaussian Monge map."""
    polish: bool = True
    """Also run many starts on a subsample, and Newton on all cells from the lowest loss."""
    polish_starts: int = 4
    """Random starts on the subsample, besides the Monge map."""
    polish_cells: int = 300
    """Cells of each side in the subsample."""
    matched_noise: bool = False
    """Noise of variance eps/2, for which the loss is the likelihood, instead of --noise."""
    steps: int = 200
    """Limit of steps of a run that switches to Newton."""
    adam_steps: int = 80
    """Steps of a run of Adam only, and of Adam in the recipe."""
    recipe_newton: int = 30
    """Limit of Newton steps in the recipe."""
    lr: float = 0.1
    """Adam's learning rate."""
    grad_rtol: float = 0.05
    """Relative accuracy of Adam's gradients."""
    gtol: float = 1e-6
    """Gradient norm at which a run is finished."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eps or min(self.eps) <= 0:
            raise ValueError(f"expected eps > 0, got {self.eps}")
        if min(self.steps, self.adam_steps, self.recipe_newton) < 1:
            raise ValueError("expected steps, adam_steps and recipe_newton ≥ 1")
        if min(self.starts, self.beside_starts, self.recipe_starts, self.polish_starts) < 0:
            raise ValueError("expected starts, beside_starts, recipe_starts and polish_starts ≥ 0")
        if self.polish_cells < 2:
            raise ValueError(f"expected polish_cells ≥ 2, got {self.polish_cells}")
        if not (self.monge or self.polish or (self.starts and self.methods)):
            raise ValueError("nothing to run: expected starts and methods, or monge, or polish")

    @cached_property
    def _data(self) -> dict[float, RegressionData]:
        return {}

    def data_at(self, eps: float) -> RegressionData:
        """Both clouds for a run at temperature `eps`: the same at all, unless the noise is matched to it."""
        if not self.matched_noise:
            return self.data
        if eps not in self._data:
            self._data[eps] = replace(self, matched_noise=False, noise=sqrt(eps / 2)).data
        return self._data[eps]

    def problem(self, eps: float, cells: int | None = None) -> ShuffledRegression:
        """A fresh problem at temperature `eps`, on all cells or on the first `cells` of each side."""
        data = self.data_at(eps)
        return ShuffledRegression(data.X[:cells], data.Y[:cells], eps)


PRESETS = {
    "quick": Config(preset="quick", n=300, starts=1, polish_cells=100, polish_starts=2),
    "laptop": Config(),
    "paper": Config(
        preset="paper",
        n=40_000,
        eps=(0.1, 0.25, 0.5),
        starts=24,
        recipe_starts=1,
        polish_starts=8,
        polish_cells=1000,
        steps=400,
        adam_steps=300,
        dtype="float32",
    ),
}

_COLUMNS = (
    Column("eps", "eps", "g"),
    Column("start", "start"),
    Column("method", "method"),
    Column("start_lambda_min", "first λ_min", "+.3f"),
    Column("steps", "steps", "d"),
    Column("newton_steps", "Newton", "d"),
    Column("returns", "returns", "d"),
    Column("loss", "loss", ".6f"),
    Column("loss_above_best", "above best", ".1e"),
    Column("grad_norm", "‖g‖", ".1e"),
    Column("lambda_lower", "λ_min ≥", "+.4f"),
    Column("lambda_upper", "λ_min ≤", "+.4f"),
    Column("verdict", "verdict"),
    Column("rel_W", "rel_W", ".3f"),
    Column("r2_held_out", "R² test", ".3f"),
    Column("best_basin", "best basin"),
    Column("n_passes", "passes", "d"),
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
    write(folder / "methods.png", render(partial(draw_methods, table=table), METHODS_SIZE))
    print(f"tables and figures: {folder}")
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
            cases[f"eps{eps:g}-monge"] = partial(run_start, config, eps, "monge", "monge-newton")
        if config.polish:
            cases[f"eps{eps:g}-polish"] = partial(run_polish, config, eps)
    plan = [
        (config.methods, config.starts, config.eps),
        (config.beside, min(config.beside_starts, config.starts), config.eps),
        (("recipe",), min(config.recipe_starts, config.starts), (min(config.eps),)),
    ]
    for methods, starts, temperatures in plan:
        for eps in temperatures:
            for start in range(starts):
                for method in methods:
                    cases[f"eps{eps:g}-start{start}-{method}"] = partial(run_start, config, eps, start, method)
    return cases
