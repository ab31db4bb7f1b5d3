"""Eigenvalues of the Hessian of a shuffled regression: along the way out of a saddle, or at a saved point.

The (p q, p q) Hessian in W is diagonalised. Behind it stands the (n d, n d) Hessian of the transport value in the
points X W, too large for that: stochastic Lanczos quadrature gives the density of its eigenvalues (`density`).
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import ClassVar, Literal

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ot_newton.adam import Adam
from ot_newton.density import spectral_density
from ot_newton.experiments.density_figure import NUMERIC as DENSITY
from ot_newton.experiments.density_figure import density_rows, describe, draw_density
from ot_newton.experiments.errors import InputError, checking_input
from ot_newton.experiments.escape_figure import shade_phases
from ot_newton.experiments.figures import BLUE, GREEN, GREY, VERMILION, render, signed_axis
from ot_newton.experiments.files import load_array, load_table, write
from ot_newton.experiments.real_regression import RegressionConfig
from ot_newton.experiments.report import Column, format_table
from ot_newton.experiments.run import Case, Context, Outcome, Row, run_cases
from ot_newton.minimize import minimize
from ot_newton.operators import FunctionOperator
from ot_newton.problems.shuffled_regression import ShuffledRegression
from ot_newton.result import OptimizeResult
from ot_newton.saddle_switch import SaddleSwitch
from ot_newton.status import Status

HESSIAN_RTOL = 1e-4
FULL = "full"
FULL_RTOL = 1e-3  # of the response; the density is smoothed by the range of the spectrum over lanczos_steps, far more
FULL_MARGINAL_TOL = 1e-5
NUMERIC = ("step", "index", "eigenvalue", "eps", "n")
TEXT = ("run", "phase")


@dataclass(frozen=True, kw_only=True)
class Config(RegressionConfig):
    """The whole spectrum of the regression Hessian along Adam→Newton, or at a saved point."""

    name: ClassVar[str] = "hessian-spectrum"

    preset: Literal["quick", "laptop", "paper"] = "laptop"
    """Which settings the options start from."""
    eps: float = 0.25
    """Temperature, in squared standard deviations of a channel."""
    point: Path | None = None
    """A .npy file with W (p, q), such as points/*.npy of a saddle-escape run with the same settings; a trajectory
    from a random start if none is given."""
    start: int = 0
    """Number of the random start."""
    steps: int = 200
    """Limit of steps."""
    lr: float = 0.1
    """Adam's learning rate."""
    every: int = 5
    """Adam steps between two spectra; every Newton step has one."""
    gtol: float = 1e-6
    """Gradient norm at which the trajectory ends."""
    full: bool = False
    """Also the density of the eigenvalues of the Hessian in all n·d coordinates of the points X W, at the last W."""
    probes: int = 8
    """Random vectors for that density; its statistical error falls like 1/√(probes·n·d)."""
    lanczos_steps: int = 64
    """Steps of Lanczos from each of them; they resolve the range of the spectrum over their number."""

    _not_settings: ClassVar[frozenset[str]] = RegressionConfig._not_settings | {"full"}  # it only adds a case

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eps > 0:
            raise ValueError(f"expected eps > 0, got {self.eps}")
        if min(self.steps, self.every) < 1:
            raise ValueError(f"expected steps and every ≥ 1, got {self.steps} and {self.every}")
        if min(self.probes, self.lanczos_steps) < 1:
            raise ValueError(f"expected probes and lanczos-steps ≥ 1, got {self.probes} and {self.lanczos_steps}")


PRESETS = {
    "quick": Config(preset="quick", n=200, every=10),
    "laptop": Config(),
    "paper": Config(preset="paper", n=40_000, eps=0.1, steps=2000, dtype="float32"),
}

_COLUMNS = (
    Column("run", "run"),
    Column("loss", "loss", ".6f"),
    Column("grad_norm", "‖g‖", ".1e"),
    Column("n_negative", "negative", "d"),
    Column("lambda_min", "λ_min", "+.4f"),
    Column("lambda_max", "λ_max", "+.4f"),
    Column("n_passes", "passes", "d"),
    Column("status", "status"),
)


def main(config: Config) -> int:
    """Compute the spectra, print the last one, draw them."""
    folder = config.folder()
    if not config.redraw:
        with checking_input():
            point = _read_point(config)
        first, case = (
            ("trajectory", partial(_trajectory, config))
            if point is None
            else ("point", partial(_at_point, config, point))
        )
        cases: dict[str, Case] = {first: case}
        if config.full:
            cases[FULL] = partial(_full, config, first)
        results = run_cases(config, cases)
        print(format_table(results.summary[results.summary["run"] == first], _COLUMNS))
        last = results.table[results.table["step"] == results.table["step"].max()]
        print("eigenvalues:", "  ".join(f"{value:+.4f}" for value in last["eigenvalue"]))
        if config.full:
            print(describe(results.outcomes[FULL].summary))
        for run in (outcome.summary for outcome in results.outcomes.values()):
            if run["status"] not in ("converged", "given"):
                print(f"not converged: {run['message']}")
    path = folder / "table.csv"
    table = load_table(path, numeric=NUMERIC, text=TEXT)
    height = 4.6
    if "x" in table:
        table, height = load_table(path, numeric=(*NUMERIC, *DENSITY), text=TEXT), 8.0
    write(folder / "figure.png", render(partial(draw_spectrum, table=table), (10.0, height)))
    print(f"tables and figure: {folder}")
    return 0


def _read_point(config: Config) -> torch.Tensor | None:
    problem = config.problem(config.eps)
    if config.point is None:
        return None
    W = load_array(config.point)
    if W.shape != problem.shape or not np.isfinite(W).all():
        raise InputError(f"expected finite W of shape {problem.shape} in {config.point}, got shape {W.shape}")
    return torch.as_tensor(W, dtype=problem.dtype, device=problem.device).reshape(-1)


def _at_point(config: Config, w: torch.Tensor, context: Context) -> Outcome:
    problem = config.problem(config.eps)
    loss, grad = problem.value_and_grad(w)
    eigenvalues = _spectrum(problem, w)
    rows = _rows(config, 0, "point", eigenvalues)
    norm = float(torch.linalg.vector_norm(grad))
    summary = _summary(problem, eigenvalues, float(loss), norm, "given", "")
    return Outcome(summary, rows, w.reshape(problem.shape).cpu().numpy())


def _trajectory(config: Config, context: Context) -> Outcome:
    problem = config.problem(config.eps)
    w = problem.start(torch.Generator().manual_seed(config.seed + config.start))
    rows = _rows(config, 0, "start", _spectrum(problem, w))

    def look(intermediate_result: OptimizeResult) -> None:
        step, phase = intermediate_result.nit, intermediate_result.rows[intermediate_result.nit]["phase"]
        context.progress(step / config.steps)
        if phase != "adam" or step % config.every == 0:
            rows.extend(_rows(config, step, phase, _spectrum(problem, intermediate_result.x)))

    method = SaddleSwitch(escape=Adam(lr=config.lr))
    options = {"maxiter": config.steps, "gtol": 0.0, "gtol_abs": config.gtol, "seed": config.seed}
    result = minimize(problem, w, method=method, callback=look, options=options)
    eigenvalues = _spectrum(problem, result.x)
    norm = float(torch.linalg.vector_norm(result.jac))
    summary = _summary(problem, eigenvalues, result.fun, norm, str(result.status), result.message)
    return Outcome(summary, rows, result.x.reshape(problem.shape).cpu().numpy())


def _full(config: Config, first: str, context: Context) -> Outcome:
    """The density of the eigenvalues of ∇²OT_eps in the points X W, where the first case ended."""
    began = perf_counter()
    problem = config.problem(config.eps)
    w = torch.as_tensor(context.outcomes[first].point, dtype=problem.dtype, device=problem.device).reshape(-1)
    plan = problem.solve_plan(w, FULL_MARGINAL_TOL)
    H, before = plan.hessian(rtol=FULL_RTOL), plan.pairs.passes
    responses: list[tuple[float, Status]] = []

    def product(V: torch.Tensor) -> torch.Tensor:
        out = H @ V
        assert H.last_response is not None
        responses.append((float(H.last_response.residual.max()), H.last_response.status))
        context.progress(len(responses) / min(config.lanczos_steps, H.shape[0]))
        return out

    operator = FunctionOperator(H.shape, matmat=product, dtype=H.dtype, device=H.device, symmetric=True)
    spectrum = spectral_density(operator, n_probes=config.probes, steps=config.lanczos_steps)
    below = spectrum.count_below(0.0)
    residual, answered = max(responses)
    status = next((each for each in (plan.status, spectrum.status, answered) if not each.success), Status.CONVERGED)
    smallest, largest = spectrum.range
    summary = {
        "rows": H.shape[0],
        "smallest_node": smallest,
        "largest_node": largest,
        "n_below": below.value,
        "n_below_lower": below.lower,
        "n_below_upper": below.upper,
        "confidence": below.confidence,
        "sigma": spectrum.sigma,
        "marginal_error": plan.error,
        "response_residual": residual,
        "n_matvec": spectrum.n_matvec,
        "n_passes": plan.n_passes + (plan.pairs.passes - before).total,
        "seconds": perf_counter() - began,
        "status": status,
        "message": status.advice,
    }
    return Outcome(summary, density_rows(spectrum))


def _spectrum(problem: ShuffledRegression, w: torch.Tensor) -> list[float]:
    H = problem.hessian(w, HESSIAN_RTOL).to_dense().double()
    return torch.linalg.eigvalsh((H + H.T) / 2).tolist()


def _rows(config: Config, step: int, phase: str, eigenvalues: list[float]) -> list[Row]:
    labels = {"eps": config.eps, "n": config.n, "step": step, "phase": phase}
    return [{**labels, "index": index, "eigenvalue": value} for index, value in enumerate(eigenvalues)]


def _summary(
    problem: ShuffledRegression, eigenvalues: list[float], loss: float, grad_norm: float, status: str, message: str
) -> Row:
    return {
        "loss": loss,
        "grad_norm": grad_norm,
        "n_negative": sum(value < 0 for value in eigenvalues),
        "lambda_min": eigenvalues[0],
        "lambda_max": eigenvalues[-1],
        "n_passes": problem.n_passes,
        "status": status,
        "message": message,
    }


def draw_spectrum(figure: Figure, table: pd.DataFrame) -> None:
    """Eigenvalues by step, the first and last spectra side by side, and below them the density of the full Hessian."""
    density = table[table["x"].notna()] if "x" in table else None
    table = table[table["eigenvalue"].notna()]
    first, last, n = table["step"].min(), table["step"].max(), int(table["n"].iloc[0])
    title = f"Hessian of a shuffled regression of {n} real cells, eps {table['eps'].iloc[0]:g}"
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    grid = figure.add_gridspec(1 if density is None else 2, 2, width_ratios=(1.5, 1))
    if density is not None:
        draw_density(figure.add_subplot(grid[1, :]), density, n)
    if first == last:
        _draw_sorted(figure.add_subplot(grid[0, :]), {"at the saved point": (table, BLUE)})
        return
    path, ends = (figure.add_subplot(grid[0, column]) for column in range(2))
    path.set_title("Eigenvalues along the way", pad=16)
    path.set_xlabel("step")
    for _, line in table.groupby("index"):
        path.plot(line["step"], line["eigenvalue"], color=GREY, linewidth=0.8)
    lowest = table[table["index"] == 0]
    path.plot(lowest["step"], lowest["eigenvalue"], color=VERMILION, linewidth=2, label="λ_min")
    path.axhline(0, color="black", linewidth=1)
    signed_axis(path, table["eigenvalue"])
    path.legend(loc="lower right")
    shade_phases(path, lowest, float(lowest["step"].max()))
    _draw_sorted(
        ends,
        {
            "at the start": (table[table["step"] == first], VERMILION),
            "at the end": (table[table["step"] == last], GREEN if lowest["eigenvalue"].iloc[-1] > 0 else BLUE),
        },
    )


def _draw_sorted(ax: Axes, spectra: dict[str, tuple[pd.DataFrame, str]]) -> None:
    ax.set_title("Spectrum", pad=16)
    ax.set_xlabel("index")
    for label, (rows, color) in spectra.items():
        ax.plot(rows["index"] + 1, rows["eigenvalue"], "o-", markersize=4, linewidth=0.8, color=color, label=label)
    ax.axhline(0, color="black", linewidth=1)
    signed_axis(ax, pd.concat([rows["eigenvalue"] for rows, _ in spectra.values()]))
    ax.legend(loc="lower right")
