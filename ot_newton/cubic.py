"""Newton's method with cubic regularisation (ARC): min gᵀs + ½ sᵀHs + σ/3 ‖s‖³, with σ from how well the models did.

σ is the rate at which the Hessian is thought to change. It begins at zero where the quadratic has a minimiser, follows
the error of the last model, σ ≈ 3 |f(w + s) − q(s)| / ‖s‖³, and after a rejection is large enough for a step no longer
than the trust region would allow. The subproblem is solved on the Krylov space of g, or by the eigenvalues where the
Hessian is a matrix.
References: Cartis, Gould and Toint 2011, Math. Program. 127:245; Gould, Porcelli and Toint 2012, Comput. Optim. Appl.
53:1, for the update of σ.
"""

from dataclasses import dataclass, replace
from math import inf, isfinite

import torch

from ot_newton.krylov_model import EigenModel, Rule, local_model
from ot_newton.model_descent import ModelDescent
from ot_newton.operators import LinearOperator
from ot_newton.region import GOOD, POOR, DescentState, EigenRegion, Region, Trial
from ot_newton.secular import ball_minimiser, cubic_minimiser
from ot_newton.trust_region import natural_length


class CubicRegion(EigenRegion):
    """A cubic term of weight `size`; zero means none where the quadratic has a minimiser within the first radius."""

    def __init__(self, model: EigenModel, w: torch.Tensor, state: DescentState, hard_case: bool) -> None:
        super().__init__(model, state, hard_case)
        self._w, self.size, self._radius = w, state.sigma, state.radius

    def rule(self, size: float) -> Rule:
        """The global minimiser of the cubic. In a ball that of σ = μ/‖y‖, which serves where no σ is known."""

        def solve(values: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, float]:
            if size:
                return cubic_minimiser(values, c, size)
            unbounded = not isfinite(self._radius) and not values[0] > 0
            return ball_minimiser(values, c, natural_length(self.model, self._w) if unbounded else self._radius)

        return solve

    def shorter(self, size: float, trial: Trial, length: float) -> float:
        """The σ whose minimiser has this length, twice the last one at least."""
        _, mu = ball_minimiser(self.model.values, self.model.coefficients, length)
        return max(2 * size, mu / length)

    def longer(self, size: float, trial: Trial) -> float:
        """A tenth of the σ in force."""
        return 0.1 * trial.multiplier / trial.length

    def remember(
        self, state: DescentState, size: float, trial: Trial, fall: float, ratio: float, tried: bool
    ) -> DescentState:
        """The σ that the error of the model asks for, kept on the side of the last one that the ratio asks for."""
        sigma = trial.multiplier / trial.length
        told = 3 * abs(trial.promised - fall) / trial.length**3
        if ratio < POOR:
            sigma = min(max(told, 2 * sigma), 10 * sigma) if sigma else told
        elif ratio > GOOD and not tried:
            sigma = min(max(told, 0.1 * sigma), sigma)
        return replace(state, sigma=sigma, radius=inf)


@dataclass(frozen=True)
class Cubic(ModelDescent):
    """Newton's method with a cubic term in place of a trust region.

    Args:
        radius, eta_min, eta_max, hessian_rtol, max_krylov: as in `ModelDescent`. Subproblems are solved to η ‖g‖, which
            does not depend on the scales of f and x, and not to min(½, ‖s‖) ‖g‖, which does.
        hard_case: compute the smallest eigenvalue at every step, so that none is missed. That takes many products;
            without it, `minimize` finds what was missed when the gradient vanishes.

    Raises:
        ValueError: a hyperparameter outside its range.

    Example:

        >>> from ot_newton.minimize import minimize
        >>> result = minimize(lambda x: x[0] ** 2 - x[1] ** 2 + x[1] ** 4, [1.0, 0.0], method=Cubic())
        >>> result.success, round(abs(float(result.x[1])), 4)
        (True, 0.7071)
    """

    hard_case: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.hard_case, bool):
            raise ValueError(f"expected hard_case as True or False, got {self.hard_case!r}")

    def _region(self, H: LinearOperator, w: torch.Tensor, state: DescentState, *, error: float) -> Region:
        model = local_model(H, state.grad, error=error, capacity=self.max_krylov)
        return CubicRegion(model, w, state, self.hard_case)
