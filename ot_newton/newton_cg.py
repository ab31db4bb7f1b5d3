"""Newton's method that finds minimisers, not saddles: H d = −g inexactly by capped CG, or exactly where H is a matrix.

Each solve is as accurate as the gradient's recent fall makes worthwhile, η = γ (‖g‖/‖g₋‖)^α with γ = 0.9, α = (1+√5)/2
(Eisenstat and Walker 1996, SIAM J. Sci. Comput. 17:16, choice 2). A step must deliver a tenth of the decrease that its
model promises, else it is shortened; directions of negative curvature are searched forward (Royer, O'Neill and Wright
2020, Math. Program. 180:451).
"""

from dataclasses import dataclass, replace
from math import inf, isfinite, nan, sqrt

import torch

from ot_newton.certificate import Certificate
from ot_newton.escape import Escape, leave_saddle
from ot_newton.linesearch import flatter, ray_search, value_noise
from ot_newton.method import SHARP, State, evaluate, gradient_floor, sharpened
from ot_newton.newton_model import Model, Ray, exact_model, inexact_model
from ot_newton.operators import MatrixOperator
from ot_newton.problem import Problem
from ot_newton.status import Status

GAMMA, ALPHA = 0.9, (1 + sqrt(5)) / 2
PART = 0.1  # of the promised decrease that a step must deliver
MAX_TRIALS = 60


@dataclass(frozen=True)
class NewtonState(State):
    """Memory of Newton's method.

    Attributes:
        eta: relative residual asked for in the last step.
        previous_norm: gradient norm before the last step, NaN where the two cannot be compared.
        radius: longest step that the models have earned.
        last_escape: where the last escape from a saddle began and ended.
    """

    eta: float = nan
    previous_norm: float = nan
    radius: float = inf
    last_escape: Escape | None = None


@dataclass(frozen=True)
class NewtonCG:
    """Newton's method with capped CG, steps along negative curvature, and an exact step where the Hessian is a matrix.

    Args:
        radius: longest first step; unlimited if None. Later steps are limited by how well the model did.
        eta_min, eta_max: range of the relative residual of the linear systems.
        hessian_rtol: relative accuracy of gradient and Hessian that it asks the problem for, tightened with the
            residual.
        max_cg: products with the Hessian in one step; 2·size + 10 if None.

    Raises:
        ValueError: a hyperparameter outside its range.

    Example:

        >>> from ot_newton.minimize import minimize
        >>> result = minimize(lambda x: x[0] ** 2 - x[1] ** 2 + x[1] ** 4, [1.0, 0.0], method=NewtonCG())
        >>> result.success, round(abs(float(result.x[1])), 4)
        (True, 0.7071)
    """

    radius: float | None = None
    eta_min: float = 1e-6
    eta_max: float = 0.5
    hessian_rtol: float = 5e-2
    max_cg: int | None = None

    def __post_init__(self) -> None:
        if self.radius is not None and not self.radius > 0:
            raise ValueError(f"expected radius > 0 or None, got {self.radius}")
        if not 0 < self.eta_min <= self.eta_max < 1:
            raise ValueError(f"expected 0 < eta_min ≤ eta_max < 1, got {self.eta_min} and {self.eta_max}")
        if not 0 < self.hessian_rtol < 1:
            raise ValueError(f"expected 0 < hessian_rtol < 1, got {self.hessian_rtol}")
        if self.max_cg is not None and not self.max_cg > 0:
            raise ValueError(f"expected max_cg > 0 or None, got {self.max_cg}")

    def init(self, problem: Problem, w: torch.Tensor) -> NewtonState:
        """Evaluate the starting point."""
        fun, grad, grad_norm = evaluate(problem, w, self._rtol(self.eta_max))
        return NewtonState(fun, grad, grad_norm, radius=inf if self.radius is None else self.radius)

    def step(self, problem: Problem, w: torch.Tensor, state: NewtonState) -> tuple[torch.Tensor, NewtonState]:
        """One Hessian, one direction, and values until one is lower; once more if rough answers may be why none is."""
        moved, after = self._attempt(problem, w, state, self._forcing(state))
        sharp = sharpened(problem, w, after, self._rtol(after.eta))
        return (moved, after) if sharp is None else self._attempt(problem, w, sharp, 10 * SHARP, sharp=True)

    def _attempt(
        self, problem: Problem, w: torch.Tensor, state: NewtonState, eta: float, *, sharp: bool = False
    ) -> tuple[torch.Tensor, NewtonState]:
        H = problem.hessian(w, self._rtol(eta))
        error, radius = problem.hessian_error, state.radius
        if isinstance(H, MatrixOperator):
            model = exact_model(H, w, state.grad, error=error, radius=radius)
        else:
            model = inexact_model(H, w, state.grad, rtol=eta, error=error, radius=radius, maxiter=self.max_cg)
        seen = {"lambda_min": model.lambda_min, "lambda_bound": model.lambda_bound, "scale": model.scale}
        state = replace(state, eta=eta, grad_floor=gradient_floor(H, w), **seen)
        if model.ray is not None:
            return self._along(problem, w, state, model.ray)
        if model.within is not None:
            return self._shorten(problem, w, state, model, sharp=sharp)
        return w, _stay(state, Status.STALLED if model.scale == 0 else Status.NONFINITE)

    def escape_saddle(
        self, problem: Problem, w: torch.Tensor, state: NewtonState, curvature: Certificate, least_fall: float = 0.0
    ) -> tuple[torch.Tensor, NewtonState]:
        """Leave a stationary point along the eigenvector; LINE_SEARCH_FAILED if f falls in neither sense."""
        found = leave_saddle(problem, w, state.fun, state.grad, curvature, state.last_escape, least_fall)
        if found is None:
            return w, replace(_stay(state, Status.LINE_SEARCH_FAILED), phase="escape")
        state = replace(state, last_escape=found, lambda_min=curvature.lambda_min, scale=curvature.scale)
        return self._arrive(problem, w, state, found.point, found.length, "escape")

    def _forcing(self, state: NewtonState) -> float:
        """Eisenstat-Walker's relative residual, which does not depend on the scale of f."""
        if not (isfinite(state.eta) and state.previous_norm > 0):
            return self.eta_max
        eta = GAMMA * (state.grad_norm / state.previous_norm) ** ALPHA
        kept = GAMMA * state.eta**ALPHA
        return min(max(eta, kept if kept > 0.1 else 0.0, self.eta_min), self.eta_max)

    def _rtol(self, eta: float) -> float:
        """Accuracy of gradient and Hessian that does not spoil a solve to `eta`."""
        return min(0.1 * eta, self.hessian_rtol)

    def _along(
        self, problem: Problem, w: torch.Tensor, state: NewtonState, ray: Ray
    ) -> tuple[torch.Tensor, NewtonState]:
        """Search the ray forward and go to the lowest point seen."""
        found = ray_search(
            lambda t: float(problem.value(w + t * ray.direction)),
            state.fun,
            ray.slope,
            ray.curvature,
            length=ray.length,
            noise=value_noise(problem, state.fun),
        )
        if found is None:
            return w, replace(_stay(state, Status.LINE_SEARCH_FAILED), phase="curvature")
        return self._arrive(problem, w, state, w + found[0] * ray.direction, found[0], "curvature")

    def _arrive(
        self, problem: Problem, w: torch.Tensor, state: NewtonState, moved: torch.Tensor, length: float, phase: str
    ) -> tuple[torch.Tensor, NewtonState]:
        """Accept a point off the Newton path, where the gradient before and after cannot be compared."""
        fun, grad, grad_norm = evaluate(problem, moved, self._rtol(self.eta_max))
        if not (isfinite(fun) and isfinite(grad_norm)):
            return w, replace(_stay(state, Status.NONFINITE), phase=phase)
        return moved, replace(
            state,
            fun=fun,
            grad=grad,
            grad_norm=grad_norm,
            phase=phase,
            step_norm=length,
            accepted=True,
            n_rejected=0,
            status=None,
            previous_norm=nan,
            radius=max(state.radius, 2 * length),
        )

    def _shorten(
        self, problem: Problem, w: torch.Tensor, state: NewtonState, model: Model, *, sharp: bool
    ) -> tuple[torch.Tensor, NewtonState]:
        """Ask the model for shorter and shorter steps until one delivers.

        Where the promise is below the noise of f the gradient decides: a point is taken where it, or the slope along
        the step, is clearly smaller, or where the value that comes with it is, if the state's is as `sharp`. If there
        is none, rounding stops the run.
        """
        assert model.within is not None
        radius = state.radius
        for trial in range(MAX_TRIALS):
            step, promised = model.within(radius)
            length = float(torch.linalg.vector_norm(step))
            moved = w + step
            if promised <= 0 or torch.equal(moved, w):
                return w, _stay(state, Status.STALLED, trial)
            fun = float(problem.value(moved))
            noise = value_noise(problem, state.fun, fun) if isfinite(fun) else 0.0
            blind = promised <= noise
            ratio = (state.fun - fun + noise) / promised if isfinite(fun) else -inf
            if ratio >= PART:
                fun, grad, grad_norm = evaluate(problem, moved, self._rtol(state.eta))
                noise = value_noise(problem, state.fun, fun)  # with a gradient
                fallen = sharp and promised > noise and state.fun - fun + noise >= PART * promised
                better = not blind or fallen or flatter(state.grad, grad, step)
                if isfinite(fun) and isfinite(grad_norm) and better:
                    return moved, replace(
                        state,
                        fun=fun,
                        grad=grad,
                        grad_norm=grad_norm,
                        phase="newton",
                        step_norm=length,
                        accepted=True,
                        n_rejected=trial,
                        status=None,
                        previous_norm=state.grad_norm,
                        radius=radius if blind else _next_radius(radius, length, ratio),
                    )
            if blind:
                return w, _stay(state, Status.STALLED, trial + 1)
            radius = length / 2 if isfinite(fun) else length / 4
        return w, _stay(state, Status.LINE_SEARCH_FAILED, MAX_TRIALS)


def _stay(state: NewtonState, status: Status, n_rejected: int = 0) -> NewtonState:
    return replace(state, phase="newton", step_norm=0.0, accepted=False, status=status, n_rejected=n_rejected)


def _next_radius(radius: float, length: float, ratio: float) -> float:
    """Halve after a poor model, triple after a good one that was held back."""
    if ratio < 0.25:
        return length / 2
    if ratio > 0.75 and length >= 0.99 * radius:
        return 3 * length
    return radius
