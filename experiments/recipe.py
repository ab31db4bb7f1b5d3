"""The published recipe for escaping a saddle, as a baseline to measure against.

FlashSinkhorn (arXiv:2602.03067, section 5) runs Adam on potentials from a fixed number of Sinkhorn iterations, looks at
λ_min by Lanczos every few steps, on Hessian-vector products by damped conjugate gradients, and takes bare Newton steps
from the first look above a threshold on. What the paper leaves open (learning rate, Lanczos steps, tolerance of the
inner solves, warm starts) is filled in as its code would most simply do it: see `Recipe`.
"""

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import isfinite
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ot_newton.krylov import cg
from ot_newton.lanczos import lanczos
from ot_newton.linear_model import linear_model_grad
from ot_newton.operators import FunctionOperator
from ot_newton.pairs import Passes
from ot_newton.plan import Plan
from ot_newton.problems.shuffled_regression import ShuffledRegression
from ot_newton.sinkhorn import ConvergenceWarning, solve

ADAM_BETA = (0.9, 0.999)
ADAM_EPS = 1e-8


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the recipe is made of.

    Attributes:
        sweeps: Sinkhorn iterations of every evaluation, each from zero potentials.
        look_every: Adam steps between two looks at λ_min.
        lanczos_steps: Hessian-vector products of a look, and at most those of a Newton step.
        cg_steps, cg_rtol: limits of the conjugate gradients inside a product.
        damping: added to the Schur complement as it is, so that relative to its diagonal it grows with the cloud.
        threshold: Newton takes over where λ_min > -threshold.
        newton_rtol: relative residual to which a Newton step is solved.
    """

    sweeps: int = 100
    look_every: int = 5
    lanczos_steps: int = 20
    cg_steps: int = 50
    cg_rtol: float = 1e-6
    damping: float = 1e-5
    threshold: float = 1e-3
    newton_rtol: float = 1e-3


def run_recipe(
    problem: ShuffledRegression,
    w: Tensor,
    recipe: Recipe,
    *,
    lr: float,
    gtol: float,
    adam_steps: int,
    newton_steps: int,
    progress: Callable[[float], None],
) -> tuple[Tensor, list[dict[str, Any]]]:
    """Follow the recipe from w until the gradient norm is at most `gtol`, or the steps are used up.

    Returns the last point and a row for each step: step, phase, loss, gradient norm, λ_min, passes by kind, seconds.
    """
    run = _Run(problem, recipe)
    mean, square, newton = torch.zeros_like(w), torch.zeros_like(w), 0
    plan, loss, grad, norm = run.evaluate(w)
    run.note(0, "start", loss, norm)
    for step in range(1, adam_steps + newton_steps + 1):
        if norm <= gtol or not isfinite(loss) or newton == newton_steps:
            break
        if not newton and (step - 1) % recipe.look_every == 0:
            run.rows[-1]["lambda_min"] = lowest = run.lambda_min(plan)
            newton = int(lowest > -recipe.threshold)
        elif newton:
            newton += 1
        if newton:
            w = w - cg(run.hessian(plan), grad, rtol=recipe.newton_rtol, maxiter=recipe.lanczos_steps).x
        elif step > adam_steps:
            break
        else:
            mean = ADAM_BETA[0] * mean + (1 - ADAM_BETA[0]) * grad
            square = ADAM_BETA[1] * square + (1 - ADAM_BETA[1]) * grad**2
            first, second = mean / (1 - ADAM_BETA[0] ** step), square / (1 - ADAM_BETA[1] ** step)
            w = w - lr * first / (second.sqrt() + ADAM_EPS)
        plan, loss, grad, norm = run.evaluate(w)
        run.note(step, "newton" if newton else "adam", loss, norm)
        progress(step / adam_steps)
    return w, run.rows


class _Run:
    """Evaluations of the recipe, with what they have cost."""

    def __init__(self, problem: ShuffledRegression, recipe: Recipe) -> None:
        self.problem, self.recipe, self.began = problem, recipe, perf_counter()
        self.passes, self.rows = Passes(), list[dict[str, Any]]()

    def evaluate(self, w: Tensor) -> tuple[Plan, float, Tensor, float]:
        """Plan, loss, gradient (pq,) and its norm after the fixed number of iterations."""
        problem = self.problem
        z = problem.design @ w.reshape(problem.shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            plan = solve(
                z, problem.Y, problem.eps, a=problem.a, b=problem.b, scale=problem.cost.scale, method="alternating",
                tol=0.0, max_iter=self.recipe.sweeps, backend=problem.backend,
            )  # fmt: skip
        grad = linear_model_grad(plan, problem.design).reshape(-1)
        loss, norm = float(plan.dual_value()), float(torch.linalg.vector_norm(grad))
        self.passes += plan.pairs.passes
        return plan, loss, grad, norm

    def hessian(self, plan: Plan) -> FunctionOperator:
        """Products with the damped Hessian in the parameters, one vector at a time."""
        recipe, X, shape = self.recipe, self.problem.design, self.problem.shape
        points = plan.hessian(
            method="cg", damping=recipe.damping * len(plan.b), rtol=recipe.cg_rtol, max_iter=recipe.cg_steps
        )

        def product(v: Tensor) -> Tensor:
            before = plan.pairs.passes
            moved = (X @ v.reshape(shape)).reshape(-1)
            answer = X.T @ (points @ moved).reshape(len(X), -1)
            self.passes += plan.pairs.passes - before
            return answer.reshape(-1)

        size = self.problem.size
        return FunctionOperator((size, size), matvec=product, dtype=X.dtype, device=X.device, symmetric=True)

    def lambda_min(self, plan: Plan) -> float:
        """The lowest Ritz value after a fixed number of Lanczos steps, from above and without an error."""
        return float(torch.linalg.eigvalsh(lanczos(self.hessian(plan), steps=self.recipe.lanczos_steps).T)[0])

    def note(self, step: int, phase: str, loss: float, grad_norm: float) -> None:
        kinds = {"n_passes": self.passes.total, **asdict(self.passes)}
        seconds = perf_counter() - self.began
        row = {"step": step, "phase": phase, "loss": loss, "grad_norm": grad_norm, "lambda_min": float("nan")}
        self.rows.append(row | kinds | {"seconds": seconds})
