"""Global minimisers of quadratics that are kept short, in coordinates where the quadratic is diagonal.

    min cᵀy + ½ yᵀΛy over ‖y‖ ≤ Δ          and          min cᵀy + ½ yᵀΛy + σ/3 ‖y‖³

Both are y = −(Λ + μ)⁻¹ c with μ ≥ 0 and Λ + μ ⪰ 0, where ‖y‖ = Δ (or μ = 0 inside the ball) and ‖y‖ = μ/σ. In the hard
case c does not reach the lowest eigenvalue λ, y is too short even at μ = −λ, and the lowest eigenvector fills the gap.
The unknown is ν = μ + λ, which is free of cancellation next to the pole.
References: Moré and Sorensen 1983, SIAM J. Sci. Stat. Comput. 4:553; Cartis, Gould and Toint 2011, Math. Program.
127:245.
"""

from collections.abc import Callable
from math import inf, isfinite, sqrt

import torch
from torch import Tensor

_MAX_ITER = 100
_RTOL = 1e-12  # of the length


def ball_minimiser(values: Tensor, coefficients: Tensor, radius: float) -> tuple[Tensor, float]:
    """The minimiser y (m,) in the ball of `radius`, and its multiplier μ.

    Args:
        values: Λ (m,), ascending.
        coefficients: c (m,).
        radius: Δ > 0; infinite only where an interior minimiser exists.

    Raises:
        ValueError: the radius is not positive, or infinite where the quadratic is unbounded below.

    >>> y, mu = ball_minimiser(torch.tensor([-1.0, 1.0]), torch.tensor([0.0, 2.0]), 2.0)
    >>> y.round(decimals=4), round(mu, 4)
    (tensor([ 1.7321, -1.0000]), 1.0)
    """
    if not radius > 0:
        raise ValueError(f"expected radius > 0, got {radius}")
    lowest = float(values[0])
    least = max(lowest, 0.0)
    y, length, _ = _shifted(values, coefficients, least)
    if lowest >= 0 and isfinite(length) and length <= radius:
        return y, 0.0
    if not isfinite(radius):
        raise ValueError("expected a finite radius where the quadratic is unbounded below, got infinity")
    if length <= radius:
        return _filled(y, length, radius), -lowest
    # each coordinate alone, less what rounding may add
    alone = coefficients.abs() / radius * (1 - 1e-10) - (values - lowest) * (1 + 1e-10)
    low = max(least, float(alone.max()))
    high = max(low, float(torch.linalg.vector_norm(coefficients)) / radius)
    y, nu = _root(values, coefficients, low, high, lambda nu: (radius, 0.0))
    return y * min(1.0, radius / float(torch.linalg.vector_norm(y))), nu - lowest


def cubic_minimiser(values: Tensor, coefficients: Tensor, sigma: float) -> tuple[Tensor, float]:
    """The minimiser y (m,) of the cubic with weight `sigma`, and μ = σ ‖y‖.

    Args:
        values: Λ (m,), ascending.
        coefficients: c (m,).
        sigma: σ ≥ 0; zero only where the quadratic itself has a minimiser.

    Raises:
        ValueError: sigma is negative, or zero where the quadratic is unbounded below.

    >>> y, mu = cubic_minimiser(torch.tensor([-1.0]), torch.tensor([0.0]), 0.5)
    >>> y, mu
    (tensor([2.]), 1.0)
    """
    if not (sigma >= 0 and isfinite(sigma)):
        raise ValueError(f"expected a finite sigma ≥ 0, got {sigma}")
    lowest = float(values[0])
    least = max(lowest, 0.0)
    y, length, _ = _shifted(values, coefficients, least)
    if sigma == 0:
        if lowest < 0 or not isfinite(length):
            raise ValueError("expected sigma > 0 where the quadratic is unbounded below, got 0")
        return y, 0.0
    if length <= (least - lowest) / sigma:
        return _filled(y, length, -lowest / sigma if lowest < 0 else 0.0), least - lowest
    # the first coordinate alone: σ |c| ≤ ν (ν − λ)
    product = sigma * abs(float(coefficients[0]))
    root = sqrt(lowest * lowest + 4 * product)
    alone = (lowest + root) / 2 if lowest > 0 else 2 * product / (root - lowest) if product else 0.0
    low = max(least, alone * (1 - 1e-10))
    high = max(low, least + sqrt(sigma * float(torch.linalg.vector_norm(coefficients))))
    y, nu = _root(values, coefficients, low, high, lambda nu: ((nu - lowest) / sigma, 1 / sigma))
    return y, nu - lowest


def decrease(values: Tensor, coefficients: Tensor, y: Tensor) -> float:
    """−(cᵀy + ½ yᵀΛy)."""
    return -float(coefficients @ y + 0.5 * y @ (values * y))


def _shifted(values: Tensor, coefficients: Tensor, nu: float) -> tuple[Tensor, float, float]:
    """y(ν), its length, and −d log‖y‖/dν."""
    shifted = (values - values[0]) + nu
    y = torch.where(coefficients == 0, 0, -coefficients / shifted)
    length = float(torch.linalg.vector_norm(y))
    if not 0 < length < inf:
        return y, length, 0.0
    unit = y / length
    return y, length, float(torch.where(y == 0, 0, unit * unit / shifted).sum())


def _filled(y: Tensor, length: float, target: float) -> Tensor:
    """y, lengthened to the target along the lowest eigenvector."""
    gap = max(target - length, 0.0) * (target + length)
    y = y.clone()
    y[0] += sqrt(gap)
    return y


def _root(
    values: Tensor, coefficients: Tensor, low: float, high: float, target: Callable[[float], tuple[float, float]]
) -> tuple[Tensor, float]:
    """ν between two bounds where ‖y(ν)‖ = target(ν), by Newton's method on target/‖y‖ = 1, kept within the bounds."""
    nu = low if low > 0 else high / 2
    y = coefficients
    for _ in range(_MAX_ITER):
        y, length, falloff = _shifted(values, coefficients, nu)
        wanted, slope = target(nu)
        if abs(length - wanted) <= _RTOL * wanted or not low < high:
            break
        if length > wanted:
            low = nu
        else:
            high = nu
        rate = slope + wanted * falloff
        proposed = nu + (length - wanted) / rate if rate > 0 and isfinite(length) else inf
        if not low <= proposed <= high:
            proposed = sqrt(low) * sqrt(high) if low > 0 else high / 4
        if proposed == nu:
            break
        nu = proposed
    return y, nu
