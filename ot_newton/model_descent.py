"""What trust-region, cubic and saddle-free Newton methods share: a local model, asked until one of its steps delivers.

A trial step is judged by ρ = (f(w) − f(w + s) + ν) / (m(0) − m(s) + ν), where ν is the noise of such a difference
(Conn, Gould and Toint, Trust-Region Methods, 2000, section 17.4.2). A rejection costs a value of f and no product with
the Hessian: the model is kept, and asked again. The accuracy of the model is that of Eisenstat and Walker 1996, which
does not depend on the scale of f.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from math import inf, isfinite, nan, sqrt

import torch

from ot_newton.certificate import Certificate
from ot_newton.escape import leave_saddle
from ot_newton.linesearch import flatter, value_noise
from ot_newton.method import SHARP, evaluate, gradient_floor, sharpened
from ot_newton.operators import LinearOperator
from ot_newton.problem import Problem
from ot_newton.region import EXCELLENT, DescentState, Region, Trial
from ot_newton.status import Status

GAMMA, ALPHA = 0.9, (1 + sqrt(5)) / 2
PART = 0.1  # of the promised decrease that a step must deliver
CLEARLY = 1.25  # times the length makes a longer step worth a value of f
MAX_TRIALS, MAX_LONGER = 60, 6


@dataclass(frozen=True)
class ModelDescent(ABC):
    """A method that descends along local models; a subclass says which by `_region`.

    Args:
        radius: longest first step; unlimited if None and the model has a minimiser, else as long as the model suggests.
        eta_min, eta_max: range of the relative residual of the subproblems.
        hessian_rtol: relative accuracy of gradient and Hessian that it asks the problem for, tightened with the
            residual.
        max_krylov: products with the Hessian in one step; chosen by size and memory if None.

    Raises:
        ValueError: a hyperparameter outside its range.
    """

    radius: float | None = None
    eta_min: float = 1e-6
    eta_max: float = 0.5
    hessian_rtol: float = 5e-2
    max_krylov: int | None = None

    def __post_init__(self) -> None:
        if self.radius is not None and not self.radius > 0:
            raise ValueError(f"expected radius > 0 or None, got {self.radius}")
        if not 0 < self.eta_min <= self.eta_max < 1:
            raise ValueError(f"expected 0 < eta_min ≤ eta_max < 1, got {self.eta_min} and {self.eta_max}")
        if not 0 < self.hessian_rtol < 1:
            raise ValueError(f"expected 0 < hessian_rtol < 1, got {self.hessian_rtol}")
        if self.max_krylov is not None and not self.max_krylov > 0:
            raise ValueError(f"expected max_krylov > 0 or None, got {self.max_krylov}")

    def init(self, problem: Problem, w: torch.Tensor) -> DescentState:
        """Evaluate the starting point."""
        fun, grad, grad_norm = evaluate(problem, w, self._rtol(self.eta_max))
        return DescentState(fun, grad, grad_norm, radius=inf if self.radius is None else self.radius)

    def step(self, problem: Problem, w: torch.Tensor, state: DescentState) -> tuple[torch.Tensor, DescentState]:
        """One Hessian, one model, and as many values as it takes to find a lower point; twice if rough answers fail."""
        moved, after = self._attempt(problem, w, state, self._forcing(state))
        sharp = sharpened(problem, w, after, self._rtol(after.eta))
        return (moved, after) if sharp is None else self._attempt(problem, w, sharp, 10 * SHARP, sharp=True)

    def _attempt(
        self, problem: Problem, w: torch.Tensor, state: DescentState, eta: float, *, sharp: bool = False
    ) -> tuple[torch.Tensor, DescentState]:
        state = replace(state, eta=eta)
        H = problem.hessian(w, self._rtol(eta))
        region = self._region(H, w, state, error=problem.hessian_error)
        moved, after = self._descend(problem, w, state, region, sharp=sharp)
        seen = {"lambda_min": region.lambda_min, "lambda_bound": region.lambda_bound, "scale": region.scale}
        return moved, replace(after, grad_floor=gradient_floor(H, w), **seen)

    def escape_saddle(
        self, problem: Problem, w: torch.Tensor, state: DescentState, curvature: Certificate, least_fall: float = 0.0
    ) -> tuple[torch.Tensor, DescentState]:
        """Leave a stationary point along the eigenvector; LINE_SEARCH_FAILED if f falls in neither sense."""
        found = leave_saddle(problem, w, state.fun, state.grad, curvature, state.last_escape, least_fall)
        if found is None:
            return w, replace(_stay(state, Status.LINE_SEARCH_FAILED), phase="escape")
        fun, grad, grad_norm = evaluate(problem, found.point, self._rtol(self.eta_max))
        if not (isfinite(fun) and isfinite(grad_norm)):
            return w, replace(_stay(state, Status.NONFINITE), phase="escape")
        state = replace(state, last_escape=found, lambda_min=curvature.lambda_min, scale=curvature.scale)
        radius = max(state.radius, 2 * found.length)
        moved = _moved(state, fun, grad, grad_norm, found.length, 0)
        return found.point, replace(moved, phase="escape", previous_norm=nan, radius=radius)

    @abstractmethod
    def _region(self, H: LinearOperator, w: torch.Tensor, state: DescentState, *, error: float) -> Region:
        """The model of H and `state.grad` around w, solved to `state.eta`."""

    def _forcing(self, state: DescentState) -> float:
        """Eisenstat-Walker's relative residual."""
        if not (isfinite(state.eta) and state.previous_norm > 0):
            return self.eta_max
        eta = GAMMA * (state.grad_norm / state.previous_norm) ** ALPHA
        kept = GAMMA * state.eta**ALPHA
        return min(max(eta, kept if kept > 0.1 else 0.0, self.eta_min), self.eta_max)

    def _rtol(self, eta: float) -> float:
        """Accuracy of gradient and Hessian that does not spoil a solve to `eta`."""
        return min(0.1 * eta, self.hessian_rtol)

    def _descend(
        self, problem: Problem, w: torch.Tensor, state: DescentState, region: Region, *, sharp: bool
    ) -> tuple[torch.Tensor, DescentState]:
        """Ask the model for shorter and shorter steps until one delivers.

        Where the promise is below the noise of f the gradient decides: a point is taken where it, or the slope along
        the step, is clearly smaller, or where the value that comes with it is, if the state's is as `sharp`. If there
        is none, rounding stops the run.
        """
        size, ceiling = region.size, inf
        for rejected in range(MAX_TRIALS):
            trial = region.trial(size)
            if not region.finite:
                return w, _stay(state, Status.NONFINITE, rejected)
            if not trial.promised > 0 or torch.equal(w + trial.step, w):
                return w, _stay(state, Status.STALLED, rejected)
            fun = float(problem.value(w + trial.step))
            ratio, noise = _ratio(problem, state.fun, fun, trial)
            blind, tried = trial.promised <= noise, False
            if ratio >= (0.0 if blind else PART):
                if not blind:
                    size, trial, fun, tried = self._lengthen(problem, w, state, region, size, trial, fun, ceiling)
                moved = w + trial.step
                fun, grad, grad_norm = evaluate(problem, moved, self._rtol(state.eta))
                ratio, noise = _ratio(problem, state.fun, fun, trial)  # with a gradient
                fallen = sharp and trial.promised > noise and ratio >= PART
                better = not blind or fallen or flatter(state.grad, grad, trial.step)
                if isfinite(fun) and isfinite(grad_norm) and better:
                    after = _moved(state, fun, grad, grad_norm, trial.length, rejected)
                    if blind:
                        return moved, after
                    return moved, region.remember(after, size, trial, state.fun - fun, ratio, tried)
            if blind:
                return w, _stay(state, Status.STALLED, rejected + 1)
            ceiling = trial.length / 2
            size = region.shorter(size, trial, _shrunk(state, trial, fun))
        return w, _stay(state, Status.LINE_SEARCH_FAILED, MAX_TRIALS)

    def _lengthen(
        self,
        problem: Problem,
        w: torch.Tensor,
        state: DescentState,
        region: Region,
        size: float,
        trial: Trial,
        fun: float,
        ceiling: float,
    ) -> tuple[float, Trial, float, bool]:
        """Try clearly longer steps of a model that was held back and is excellent, while f falls; a value of f each."""
        for _ in range(MAX_LONGER):
            if not trial.held or _ratio(problem, state.fun, fun, trial)[0] < EXCELLENT:
                break
            longer = region.longer(size, trial)
            further = region.trial(longer)
            if not (region.finite and CLEARLY * trial.length <= further.length < ceiling):
                break
            value = float(problem.value(w + further.step))
            if not (isfinite(value) and value < fun):
                return size, trial, fun, True
            size, trial, fun = longer, further, value
        return size, trial, fun, False


def _ratio(problem: Problem, before: float, after: float, trial: Trial) -> tuple[float, float]:
    """Decrease of f over the promised one, both raised by their noise, and that noise; −inf if f is not finite."""
    if not isfinite(after):
        return -inf, 0.0
    noise = 2 * value_noise(problem, before, after)
    return (before - after + noise) / (trial.promised + noise), noise


def _shrunk(state: DescentState, trial: Trial, fun: float) -> float:
    """The length for the trial after a failed one: where the parabola through f(w), its slope and f(w + s) is least."""
    if not isfinite(fun):
        return trial.length / 4
    slope = float(state.grad @ trial.step)
    rise = fun - state.fun - slope
    best = -0.5 * slope / rise if rise > 0 else 0.5
    return trial.length * min(max(best, 0.1), 0.5)


def _moved(
    state: DescentState, fun: float, grad: torch.Tensor, grad_norm: float, length: float, rejected: int
) -> DescentState:
    return replace(
        state,
        fun=fun,
        grad=grad,
        grad_norm=grad_norm,
        phase="newton",
        step_norm=length,
        accepted=True,
        n_rejected=rejected,
        status=None,
        previous_norm=state.grad_norm,
    )


def _stay(state: DescentState, status: Status, n_rejected: int = 0) -> DescentState:
    return replace(state, phase="newton", step_norm=0.0, accepted=False, status=status, n_rejected=n_rejected)
