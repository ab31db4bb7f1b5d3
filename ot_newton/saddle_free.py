"""Saddle-free Newton: s = −(|H| + μ)⁻¹ g, which is Newton's step along positive curvature and leaves along negative.

|H| has the eigenvalues of H made positive: of the whole Hessian where it is a matrix, of its projection on the Krylov
space of g otherwise. Along negative eigenvalues the quadratic falls without end, so there the step goes on to the
radius that earlier models have earned.
Reference: Dauphin et al., Identifying and attacking the saddle point problem in high-dimensional non-convex
optimization, 2014, arXiv:1406.2572.
"""

from dataclasses import dataclass
from math import isfinite, sqrt

import torch
from torch import Tensor

from ot_newton.eigen_step import eigen_step
from ot_newton.krylov_model import local_model
from ot_newton.model_descent import ModelDescent
from ot_newton.operators import LinearOperator
from ot_newton.region import DescentState, Region
from ot_newton.trust_region import EigenBall


def absolute_minimiser(values: Tensor, coefficients: Tensor, radius: float) -> tuple[Tensor, float]:
    """−(|Λ| + μ)⁻¹ c (m,) in the ball, lengthened to its edge where Λ < 0; and whether the ball held it, 1.0 or 0.0.

    An infinite radius holds nothing back: the step is −|Λ|⁻¹ c.

    >>> absolute_minimiser(torch.tensor([-1.0, 2.0]), torch.tensor([0.5, 2.0]), 2.0)[0].round(decimals=4)
    tensor([-1.7321, -1.0000])
    """
    y, _ = eigen_step(values, coefficients, floor=0.0, radius=radius)
    if not isfinite(radius):
        return y, 0.0
    length, bent = float(torch.linalg.vector_norm(y)), values < 0
    part = float(torch.linalg.vector_norm(y[bent]))
    if part and length < radius:
        y = torch.where(bent, y * sqrt(1 + (radius - length) * (radius + length) / part**2), y)
    return y, float(part > 0 or length >= radius * (1 - 1e-9))


@dataclass(frozen=True)
class SaddleFree(ModelDescent):
    """Newton's method with |H| in place of H.

    Args:
        radius, eta_min, eta_max, hessian_rtol, max_krylov: as in `ModelDescent`.

    Raises:
        ValueError: a hyperparameter outside its range.

    Example:

        >>> from ot_newton.minimize import minimize
        >>> result = minimize(lambda x: x[0] ** 2 - x[1] ** 2 + x[1] ** 4, [1.0, 0.1], method=SaddleFree())
        >>> result.success, round(float(result.x[1]), 4)
        (True, 0.7071)
    """

    def _region(self, H: LinearOperator, w: Tensor, state: DescentState, *, error: float) -> Region:
        model = local_model(H, state.grad, error=error, capacity=self.max_krylov)
        return EigenBall(model, w, state, absolute_minimiser, hard_case=False)
