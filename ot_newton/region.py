"""What a local model and the rule that keeps its steps short have to offer a method, and what the method remembers.

The rule has one number, its size: the radius Δ of a ball, or the weight σ of a cubic term.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf, nan

import torch

from ot_newton.escape import Escape
from ot_newton.krylov_model import EigenModel, MatrixModel, Rule
from ot_newton.method import State
from ot_newton.secular import decrease

POOR, GOOD, EXCELLENT = 0.25, 0.75, 0.9  # ρ below which a model is trusted less, above which more, and at once


@dataclass(frozen=True)
class DescentState(State):
    """Memory of a method that descends along local models.

    Attributes:
        eta: relative residual asked for in the last step.
        previous_norm: gradient norm before the last step, NaN where the two cannot be compared.
        radius: length up to which the models have earned trust.
        sigma: weight of the cubic term that the models need, which `Cubic` uses in place of a radius; 0 for none.
        last_escape: where the last escape from a saddle began and ended.
    """

    eta: float = nan
    previous_norm: float = nan
    radius: float = inf
    sigma: float = 0.0
    last_escape: Escape | None = None


@dataclass(frozen=True)
class Trial:
    """A step s (size,) that a model proposes.

    Attributes:
        step, length: s and ‖s‖.
        promised: decrease of the quadratic model.
        held: whether the rule kept it short.
        multiplier: μ of the rule where it is known.
    """

    step: torch.Tensor
    length: float
    promised: float
    held: bool
    multiplier: float = nan


class Region(ABC):
    """A local model and the rule that keeps its steps short; `size` is the rule's parameter, a radius or a weight.

    Attributes:
        size: to begin with.
        finite: whether gradient and Hessian were, as far as they are known.
        lambda_min, lambda_bound, scale: of the Hessian, as in `State`.
    """

    size: float
    finite: bool
    lambda_min: float = nan
    lambda_bound: float = nan
    scale: float = nan

    @abstractmethod
    def trial(self, size: float) -> Trial:
        """The step for this size."""

    @abstractmethod
    def shorter(self, size: float, trial: Trial, length: float) -> float:
        """A size for which the step is at most `length`, or at least clearly shorter than the trial."""

    @abstractmethod
    def longer(self, size: float, trial: Trial) -> float:
        """A size for which a step that was held back is longer."""

    @abstractmethod
    def remember(
        self, state: DescentState, size: float, trial: Trial, fall: float, ratio: float, tried: bool
    ) -> DescentState:
        """The state with the size for the next model; `tried` says that a longer step has just failed."""


class EigenRegion(Region):
    """A region around a model in eigencoordinates; a subclass gives the rule for each size."""

    def __init__(self, model: EigenModel, state: DescentState, hard_case: bool) -> None:
        self.model, self._tol, self._hard_case = model, state.eta * state.grad_norm, hard_case
        self._look()

    @abstractmethod
    def rule(self, size: float) -> Rule:
        """Θ and c to y and μ, for this size."""

    def trial(self, size: float) -> Trial:
        """The step by the rule, on a space that is large enough."""
        model = self.model
        y, mu = model.solve(self.rule(size), self._tol, hard_case=self._hard_case)
        self._look()
        promised = decrease(model.values, model.coefficients, y)
        return Trial(model.lift(y), float(torch.linalg.vector_norm(y)), promised, mu > 0, mu)

    def _look(self) -> None:
        model = self.model
        self.finite, self.lambda_bound, self.scale = model.finite, model.lowest, model.scale
        if isinstance(model, MatrixModel):
            self.lambda_min = model.lowest
