"""Newton's method in a trust region: min gᵀs + ½ sᵀHs, ‖s‖ ≤ Δ, with Δ from the data and from how well the models did.

"trust-krylov" goes to the global minimiser of the subproblem, by Lanczos (GLTR) or, where the Hessian is a matrix, by
its eigenvalues; "trust-ncg" stops where conjugate gradients leave the ball. Both use negative curvature.
References: Conn, Gould and Toint, Trust-Region Methods (2000), chapters 6 and 7; Moré and Sorensen 1983, SIAM J. Sci.
Stat. Comput. 4:553.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite

import torch

from ot_newton.eigen_step import eigen_step
from ot_newton.krylov_model import EigenModel, Rule, local_model
from ot_newton.linesearch import first_length
from ot_newton.model_descent import ModelDescent
from ot_newton.operators import LinearOperator, MatrixOperator
from ot_newton.region import GOOD, POOR, DescentState, EigenRegion, Region, Trial
from ot_newton.secular import ball_minimiser
from ot_newton.status import Status
from ot_newton.steihaug import SteihaugPath

SOLVERS = ("krylov", "cg")
Within = Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, float]]


class Ball(Region):
    """The rule ‖s‖ ≤ Δ; a subclass says how the model is minimised there."""

    def shorter(self, size: float, trial: Trial, length: float) -> float:
        """The length itself."""
        return length

    def longer(self, size: float, trial: Trial) -> float:
        """Three times the length."""
        return 3 * trial.length

    def remember(
        self, state: DescentState, size: float, trial: Trial, fall: float, ratio: float, tried: bool
    ) -> DescentState:
        """Halve after a poor model, triple after a good one that was held back."""
        if ratio < POOR:
            return replace(state, radius=trial.length / 2)
        if not trial.held:
            return replace(state, radius=size)
        return replace(state, radius=3 * trial.length if ratio > GOOD and not tried else trial.length)


class EigenBall(EigenRegion, Ball):
    """The ball around a model in eigencoordinates.

    `within` maps Θ, c and Δ to y and μ. An infinite Δ is replaced by the natural length where the model is unbounded.
    """

    def __init__(
        self, model: EigenModel, w: torch.Tensor, state: DescentState, within: Within, hard_case: bool
    ) -> None:
        super().__init__(model, state, hard_case)
        self._w, self._within, self.size = w, within, state.radius

    def rule(self, size: float) -> Rule:
        """The minimiser in the ball of this radius."""

        def solve(values: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, float]:
            unbounded = not isfinite(size) and not values[0] > 0
            return self._within(values, c, natural_length(self.model, self._w) if unbounded else size)

        return solve


class PathBall(Ball):
    """The ball around a model that is known along the path of conjugate gradients."""

    def __init__(self, path: SteihaugPath, w: torch.Tensor, state: DescentState) -> None:
        self._path, self._w, self.size = path, w, state.radius
        self.finite = isfinite(path.norm)

    def trial(self, size: float) -> Trial:
        """Steihaug's step; an infinite radius becomes a finite one where the path meets nonpositive curvature."""
        found = self._path.within(size)
        if found.status is Status.NEGATIVE_CURVATURE and not isfinite(size):
            reached = float(torch.linalg.vector_norm(found.step, dtype=torch.float64))
            cauchy = self._path.norm / found.scale if found.scale else 0.0
            found = self._path.within(at_least(max(reached, cauchy), self._w))
        self.finite = found.status is not Status.NONFINITE
        self.lambda_bound, self.scale = found.lambda_bound, found.scale
        length = float(torch.linalg.vector_norm(found.step, dtype=torch.float64))
        held = found.status in (Status.BOUNDARY, Status.NEGATIVE_CURVATURE)
        return Trial(found.step, length, found.decrease, held)


def natural_length(model: EigenModel, w: torch.Tensor) -> float:
    """The length of the step −|H|⁻¹ g: how far an indefinite model may be trusted before anything is known."""
    if not model.floor:
        return first_length(w)
    step, _ = eigen_step(model.values, model.coefficients, floor=model.floor)
    return at_least(float(torch.linalg.vector_norm(step)), w)


def at_least(length: float, w: torch.Tensor) -> float:
    """A length that is not lost in w; the customary one if there is none."""
    if not length:
        return first_length(w)
    return max(length, torch.finfo(w.dtype).eps ** 0.25 * float(torch.linalg.vector_norm(w)))


@dataclass(frozen=True)
class TrustRegion(ModelDescent):
    """Newton's method in a trust region.

    Args:
        radius, eta_min, eta_max, hessian_rtol, max_krylov: as in `ModelDescent`.
        solver: of the subproblem. "krylov", the global minimiser in the ball on a Krylov space that is kept; "cg",
            Steihaug's step, which needs less work beside the products. A Hessian that is a matrix is diagonalised
            and the subproblem solved exactly, whatever the solver.
        hard_case: "krylov" computes the smallest eigenvalue at every step, so that it misses none. That takes many
            products; without it, `minimize` finds what was missed when the gradient vanishes.

    Raises:
        ValueError: a hyperparameter outside its range.

    Example:

        >>> from ot_newton.minimize import minimize
        >>> result = minimize(lambda x: x[0] ** 2 - x[1] ** 2 + x[1] ** 4, [1.0, 0.0], method=TrustRegion())
        >>> result.success, round(abs(float(result.x[1])), 4)
        (True, 0.7071)
    """

    solver: str = "krylov"
    hard_case: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.solver not in SOLVERS:
            raise ValueError(f"expected solver as one of {', '.join(SOLVERS)}, got {self.solver!r}")

    def _region(self, H: LinearOperator, w: torch.Tensor, state: DescentState, *, error: float) -> Region:
        if self.solver == "cg" and not isinstance(H, MatrixOperator):
            return PathBall(SteihaugPath(H, state.grad, rtol=state.eta, maxiter=self.max_krylov), w, state)
        model = local_model(H, state.grad, error=error, capacity=self.max_krylov)
        return EigenBall(model, w, state, ball_minimiser, self.hard_case)


@dataclass(frozen=True)
class TrustNCG(TrustRegion):
    """`TrustRegion` with Steihaug's conjugate gradients as its solver.

    Example:

        >>> from ot_newton.minimize import minimize
        >>> minimize(lambda x: ((x - 1) ** 4).sum() + x[0] ** 2, [3.0, 2.0], method=TrustNCG()).success
        True
    """

    solver: str = "cg"
