"""Pass counts of potentials from nothing, of Adam with the Hessian at every step, and of a whole Adam→Newton run."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from ot_newton.adam import Adam
from ot_newton.experiments.passes_point import ledger
from ot_newton.experiments.run import Row
from ot_newton.minimize import minimize
from ot_newton.pairs import Passes
from ot_newton.plan import Plan
from ot_newton.problem import Problem
from ot_newton.problems.shuffled_regression import ShuffledRegression
from ot_newton.result import OptimizeResult
from ot_newton.saddle_switch import SaddleSwitch
from ot_newton.sinkhorn import ConvergenceWarning, solve

LOOK_EVERY = 10  # steps between two comparisons with the converged gradient and Hessian


def potentials(problem: ShuffledRegression, w: Tensor, method: str, goals: tuple[float, ...], most: int) -> list[Row]:
    """A solve from zero for each goal, until one needs more than `most` passes.

    Alternating sweeps, which do the same whatever the goal, go on from the last one; the sweep that this repeats is not
    counted.
    """
    rows: list[Row] = []
    init, spent = None, Passes()
    for goal in sorted(goals, reverse=True):
        plan = _solved(problem, w, goal, most - spent.total, method, init)
        passes = spent + plan.passes
        rows.append({"goal": goal, "error": plan.error, "status": plan.status.value} | ledger(passes))
        if not plan.converged or passes.total >= most:
            break
        if method == "alternating":
            init, spent = plan, passes - Passes(half_steps=2)
    return rows


def _solved(problem: ShuffledRegression, w: Tensor, tol: float, most: int, method: str, init: Plan | None) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the row has the status
        return solve(
            problem.X @ w.reshape(problem.shape), problem.Y, problem.eps, tol=tol, method=method,
            max_iter=max(1, most // 2), anneal=1.0 if method == "alternating" else None, init=init,
            backend=problem.backend,
        )  # fmt: skip


def adam_path(
    fresh: Callable[[], ShuffledRegression],
    w: Tensor,
    *,
    lr: float,
    rtol: float,
    steps: int,
    first_order: dict[str, float],
    most: int,
    progress: Callable[[float], None],
) -> list[Row]:
    """Adam with gradient, exact Hessian and bracket at every step, and at the same points plain Sinkhorn's gradients.

    `first_order` are names and marginal tolerances; each sweep starts from the potentials of the step before.
    """
    problem, judge = fresh(), fresh()
    before = problem.passes
    rows: list[Row] = []
    plans: dict[str, Plan | None] = dict.fromkeys(first_order)

    def look(intermediate_result: OptimizeResult) -> None:
        nonlocal before
        now = intermediate_result
        step, record = now.nit, now.rows[now.nit]
        row = {
            "method": "one-shot", "step": step, "lambda_min": record["lambda_min"],
            "lower": record["lambda_lower"], "upper": record["lambda_upper"],
        } | ledger(problem.passes, before)  # fmt: skip
        before = problem.passes
        if step % LOOK_EVERY == 0:
            grad = judge.value_and_grad(now.x)[1]
            row["error"] = float((now.jac - grad).norm() / grad.norm())
            row["exact"] = float(torch.linalg.eigvalsh(judge.hessian(now.x, 1e-6).to_dense())[0])
        rows.append(row)
        for name, tol in first_order.items():
            plan = plans[name] = _solved(problem, now.x, tol, most, "alternating", plans[name])
            plan.grad()
            rows.append({"method": name, "step": step, "status": plan.status.value} | ledger(plan.pairs.passes))
        progress(step / steps)

    minimize(problem, w, method=Adam(lr=lr, rtol=rtol), callback=look, options={"maxiter": steps, "gtol": 0.0})
    return rows


def whole_run(
    problem: Problem,
    w: Tensor,
    *,
    lr: float,
    rtol: float,
    steps: int,
    gtol: float,
    most: int,
    progress: Callable[[float], None],
) -> tuple[Row, list[Row]]:
    """Adam→Newton from w to a gradient norm `gtol`: how it ended, and a row for each step with the passes so far."""

    def look(intermediate_result: OptimizeResult) -> None:
        progress(max(intermediate_result.nit / steps, intermediate_result.n_passes / most))

    result = minimize(
        problem,
        w,
        method=SaddleSwitch(escape=Adam(lr=lr, rtol=rtol)),
        callback=look,
        options={"maxiter": steps, "gtol": 0.0, "gtol_abs": gtol, "max_passes": most},
    )
    end: Row = {"steps": result.nit, "loss": result.fun, "lambda_min": result.lambda_min, "status": str(result.status)}
    history = result.history.rename(columns={"grad_norm": "error", "n_passes": "passes"})
    kept = ("step", "phase", "error", "passes", "half_steps", "applications", "columns")
    return end, [{name: row[name] for name in kept} for row in history.to_dict("records")]
