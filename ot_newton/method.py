"""What the driver `minimize` and a method of descent say to each other.

A method is a frozen dataclass of hyperparameters. All that changes during a run is in its `State`, which is replaced
and never modified, so that a run can be stopped, stored and continued at any step.
"""

from dataclasses import dataclass, replace
from math import nan
from typing import Protocol, TypeVar, runtime_checkable

import torch

from ot_newton.certificate import Certificate
from ot_newton.operators import LinearOperator, MatrixOperator
from ot_newton.problem import Problem
from ot_newton.status import Status


@dataclass(frozen=True)
class State:
    """What every method carries from step to step; a method subclasses it with its own memory.

    Attributes:
        fun, grad, grad_norm: value, gradient (size,) and its Euclidean norm at the current point.
        phase: what the last step was; a word for the history.
        lambda_min, scale: smallest eigenvalue and spectral norm of the Hessian where the last step began, NaN where
            they were not computed.
        lambda_bound: an upper bound of that eigenvalue, the Rayleigh quotient of a direction met on the way.
        grad_floor: what rounding the point to its dtype makes of the gradient; 0 where the Hessian is no matrix.
        step_norm: Euclidean length of the last step.
        accepted: whether the last step moved the point.
        n_rejected: trial points rejected on the way.
        status: set when the method cannot go on; `STALLED` means that rounding hides any further descent.
    """

    fun: float
    grad: torch.Tensor
    grad_norm: float
    phase: str = "start"
    lambda_min: float = nan
    scale: float = nan
    lambda_bound: float = nan
    grad_floor: float = 0.0
    step_norm: float = 0.0
    accepted: bool = True
    n_rejected: int = 0
    status: Status | None = None


S = TypeVar("S", bound=State)
SHARP = 1e-3  # relative accuracy of a gradient that cannot be why a step fails


class Method(Protocol[S]):
    """A frozen dataclass that starts with `init` and repeats `step`."""

    def init(self, problem: Problem, w: torch.Tensor) -> S:
        """The state at the starting point `w` (size,)."""
        ...

    def step(self, problem: Problem, w: torch.Tensor, state: S) -> tuple[torch.Tensor, S]:
        """The next point and its state."""
        ...


@runtime_checkable
class Escaping(Protocol[S]):
    """A method that can also leave a stationary point along a direction of negative curvature."""

    def escape_saddle(
        self, problem: Problem, w: torch.Tensor, state: S, curvature: Certificate, least_fall: float = 0.0
    ) -> tuple[torch.Tensor, S]:
        """The next point and its state; the same point and LINE_SEARCH_FAILED if f does not fall along the direction.

        A fall of f by less than `least_fall` is none.
        """
        ...


def evaluate(problem: Problem, w: torch.Tensor, rtol: float | None = None) -> tuple[float, torch.Tensor, float]:
    """f(w), ∇f(w) and ‖∇f(w)‖; the two numbers reach the host together."""
    f, g = problem.value_and_grad(w, rtol)
    norm = torch.linalg.vector_norm(g, dtype=torch.float64)
    fun, grad_norm = torch.stack([f.detach().to(norm), norm]).tolist()
    return fun, g, grad_norm


def gradient_floor(H: LinearOperator, w: torch.Tensor) -> float:
    """`‖ |H| |w| ‖ eps`, by how much the gradient may change where w (size,) is rounded; 0 where H is no matrix."""
    if not isinstance(H, MatrixOperator):
        return 0.0
    return torch.finfo(w.dtype).eps * float(torch.linalg.vector_norm(H.matrix.abs() @ w.abs().to(H.matrix)))


def sharpened(problem: Problem, w: torch.Tensor, state: S, rtol: float) -> S | None:
    """`state` from sharper answers at w, where answers as rough as `rtol` may be why a step failed; else None."""
    failed = state.status in (Status.STALLED, Status.LINE_SEARCH_FAILED)
    if not (failed and problem.value_error > 0 and rtol > SHARP):
        return None
    fun, grad, grad_norm = evaluate(problem, w, SHARP)
    return replace(state, fun=fun, grad=grad, grad_norm=grad_norm, status=None)
