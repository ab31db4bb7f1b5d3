"""Adam: w ← w − lr m̂ / (√v̂ + eps), with running means m of g and v of g², corrected for their start at zero.

Kingma and Ba 2015, arXiv:1412.6980. The gradient is measured in units of its first root mean square, so that `eps` is
relative and f and c·f give the same iterates.
"""

from dataclasses import dataclass, field, replace
from math import isfinite, sqrt

import torch

from ot_newton.method import State, evaluate
from ot_newton.problem import Problem
from ot_newton.status import Status


@dataclass(frozen=True)
class AdamState(State):
    """Running means `m`, `v` (size,) of the gradient and its square in units of `unit`, after `t` steps."""

    m: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    v: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    unit: float = 0.0
    t: int = 0


@dataclass(frozen=True)
class Adam:
    """Adam, a first-order method that tolerates rough gradients. It cannot leave an exact saddle.

    Args:
        lr: length of a step in each coordinate, about.
        betas: decay of the two running means.
        eps: softens the division, in units of the root mean square of the first gradient.
        rtol: relative accuracy of the gradients that it asks the problem for.

    Raises:
        ValueError: a hyperparameter outside its range.

    Example:

        >>> from ot_newton.minimize import minimize
        >>> minimize(lambda x: ((x - 3) ** 2).sum(), [0.0, 0.0], method=Adam(lr=0.1)).success
        True
    """

    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    rtol: float | None = 5e-2

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"expected lr > 0, got {self.lr}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"expected two betas in [0, 1), got {self.betas}")
        if not self.eps >= 0:
            raise ValueError(f"expected eps ≥ 0, got {self.eps}")
        if self.rtol is not None and not self.rtol > 0:
            raise ValueError(f"expected rtol > 0 or None, got {self.rtol}")

    def init(self, problem: Problem, w: torch.Tensor) -> AdamState:
        """Evaluate the starting point; both means are zero."""
        fun, grad, grad_norm = evaluate(problem, w, self.rtol)
        return AdamState(fun, grad, grad_norm, m=torch.zeros_like(w), v=torch.zeros_like(w))

    def step(self, problem: Problem, w: torch.Tensor, state: AdamState) -> tuple[torch.Tensor, AdamState]:
        """One step and one gradient. A point whose value or gradient is not finite is not accepted."""
        unit = state.unit or state.grad_norm / sqrt(len(w))
        g = state.grad / unit if unit else state.grad
        t, (beta_m, beta_v) = state.t + 1, self.betas
        m = torch.lerp(state.m, g, 1 - beta_m)
        v = torch.lerp(state.v, g * g, 1 - beta_v)
        denominator = (v / (1 - beta_v**t)).sqrt() + self.eps
        # 0/0, a coordinate that has never had a gradient, stays where it is
        step = torch.where(m == 0, 0, -self.lr / (1 - beta_m**t) * m / denominator)

        fun, grad, grad_norm = evaluate(problem, w + step, self.rtol)
        if not (isfinite(fun) and isfinite(grad_norm)):
            return w, replace(state, phase="adam", step_norm=0.0, accepted=False, status=Status.NONFINITE)
        step_norm = float(torch.linalg.vector_norm(step))
        return w + step, AdamState(fun, grad, grad_norm, "adam", step_norm=step_norm, m=m, v=v, unit=unit, t=t)
