"""A step from a full eigendecomposition, kept inside a ball: s = −(|H| + μ I)⁻¹ g with the least μ ≥ 0 for ‖s‖ ≤ Δ.

|H| has the eigenvalues of H made positive and raised to a floor: Newton's step where H is positive definite, away from
saddles where it is not (Gill and Murray 1974; Dauphin et al. 2014, arXiv:1406.2572). μ solves the secular equation
1/‖s(μ)‖ = 1/Δ by Newton's method, which is monotone there (Conn, Gould and Toint 2000, ch. 7).
"""

from math import inf, isfinite

import torch


def eigen_step(
    values: torch.Tensor, coefficients: torch.Tensor, *, floor: float, radius: float = inf
) -> tuple[torch.Tensor, float]:
    """The step in eigencoordinates (n,) and the decrease −(gᵀs + ½ sᵀ|H|s) that the positive model promises.

    Args:
        values: eigenvalues of H (n,).
        coefficients: Vᵀg (n,), the gradient in the basis of the eigenvectors.
        floor: least eigenvalue of |H|; zero is allowed with a finite radius.
        radius: Δ, the longest step.

    Raises:
        ValueError: no finite step exists, because |H| is singular where g is not zero and the radius is infinite.
    """
    positive = values.abs().clamp_min(floor)
    if not bool(coefficients.any()):
        return torch.zeros_like(coefficients), 0.0
    if not isfinite(radius):
        if bool(((positive == 0) & (coefficients != 0)).any()):
            raise ValueError("expected a positive floor or a finite radius where the Hessian is singular")
        mu = 0.0
    else:
        mu = _multiplier(positive, coefficients, radius)
    shifted = positive + mu
    step = torch.where(coefficients == 0, 0, -coefficients / shifted)
    return step, float(-(coefficients @ step) - 0.5 * step @ (positive * step))


def _multiplier(positive: torch.Tensor, coefficients: torch.Tensor, radius: float) -> float:
    """The least μ ≥ 0 with ‖(|H| + μ)⁻¹ c‖ ≤ radius, to 1e-10 of the radius."""
    # two lower bounds: from each coordinate alone, and from the largest eigenvalue in place of all
    alone = float((coefficients.abs() / radius - positive).max())
    together = float(torch.linalg.vector_norm(coefficients)) / radius - float(positive.max())
    mu = max(0.0, alone, together)
    for _ in range(100):
        step = torch.where(coefficients == 0, 0, coefficients / (positive + mu))
        length = float(torch.linalg.vector_norm(step))
        if length <= radius * (1 + 1e-10):
            break
        growth = float(torch.where(step == 0, 0, step * step / (positive + mu)).sum())  # −½ d‖s‖²/dμ
        mu += length * length / growth * (length - radius) / radius
    return mu
