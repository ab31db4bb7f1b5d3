"""Eigenvalues of the Hessian of a shuffled regression: along the way out of a saddle, or at a saved point."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ot_newton.adam import Adam
from ot_newton.experiments.errors import InputError, checking_input
from ot_newton.experiments.escape_figure import shade_phases
from ot_newton.experiments.figures import BLUE, GREEN, GREY, VERMILION, render, signed_axis
from ot_newton.experiments.files import load_array, load_table, write
from ot_newton.experiments.real_regression import RegressionConfig
from ot_newton.experiments.report import Column, format_table
from ot_newton.experiments.run import Case, Context, Outcome, Row, run_cases
from ot_newton.minimize import minimize
from ot_newton.problems.shuffled_regression import ShuffledRegression
from ot_newton.result import OptimizeResult
from ot_newton.saddle_switch import SaddleSwitch

HESSIAN_RTOL = 1e-4
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eps > 0:
            raise ValueError(f"expected eps > 0, got {self.eps}")
        if min(self.steps, self.every) < 1:
            raise ValueError(f"expected steps and every ≥ 1, got {self.steps} and {self.every}")


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
        case: Case = partial(_trajectory, config) if point is None else partial(_at_point, config, point)
        results = run_cases(config, {"trajectory" if point is None else "point": case})
        print(format_table(results.summary, _COLUMNS))
        last = results.table[results.table["step"] == results.table["step"].max()]
        print("eigenvalues:", "  ".join(f"{value:+.4f}" for value in last["eigenvalue"]))
        run = results.summary.iloc[0]
        if run["status"] not in ("converged", "given"):
            print(f"not converged: {run['message']}")
    table = load_table(folder / "table.csv", numeric=NUMERIC, text=TEXT)
    write(folder / "figure.png", render(partial(draw_spectrum, table=table), (10.0, 4.6)))
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
    return Outcome(_summary(problem, eigenvalues, float(loss), norm, "given", ""), rows)


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
    """Eigenvalues by step, and the first and last spectra side by side."""
    first, last = table["step"].min(), table["step"].max()
    title = f"Hessian of a shuffled regression of {table['n'].iloc[0]:.0f} real cells, eps {table['eps'].iloc[0]:g}"
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    if first == last:
        _draw_sorted(figure.subplots(), {"at the saved point": (table, BLUE)})
        return
    path, ends = figure.subplots(1, 2, width_ratios=(1.5, 1))
    path.set_title("Eigenvalues along the way", pad=16)
    path.set_xlabel("step")
    for _, line in table.groupby("index"):
        path.plot(line["step"], line["eigenvalue"], color=GREY, linewidth=0.8)
    lowest = table[table["index"] == 0]
    path.plot(lowest["step"], lowest["eigenvalue"], color=VERMILION, linewidth=2, label="λ_min")
    path.axhline(0, color="black", linewidth=1)
    signed_axis(path, table["eigenvalue"])
    path.legend(loc="lower right")
    shade_phases(path, lowest)
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
