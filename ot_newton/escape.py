"""Leaving a stationary point along an eigenvector v with vᵀHv < 0: w ± t v, both senses, forward tracking in t.

A second attempt from the same point goes the other way where the slope leaves the choice, and starts three times as far
as the first one got, which no halving or doubling brings back to the same place.
"""

from dataclasses import dataclass

import torch

from ot_newton.certificate import Certificate
from ot_newton.linesearch import first_length, ray_search, value_noise
from ot_newton.problem import Problem


@dataclass(frozen=True)
class Escape:
    """Where an escape began (size,), where it ended (size,) and how far that is."""

    origin: torch.Tensor
    point: torch.Tensor
    length: float


def leave_saddle(
    problem: Problem,
    w: torch.Tensor,
    fun: float,
    grad: torch.Tensor,
    curvature: Certificate,
    last: Escape | None = None,
    least_fall: float = 0.0,
) -> Escape | None:
    """A point well below `fun` on the line through w along `curvature.vector`; None if f falls in neither sense.

    Args:
        problem: what is minimised.
        w, fun, grad: a point that is stationary or nearly so, (size,), its value and gradient.
        curvature: evidence of a negative eigenvalue at w.
        last: the previous escape.
        least_fall: a smaller decrease of f, like one within its noise, is none.
    """
    if last is not None and float(torch.dist(w, last.origin)) > 1e-3 * last.length:
        last = None
    length = first_length(w) if last is None else 3 * last.length
    v, slope = curvature.vector, float(grad @ curvature.vector)

    def value(t: float) -> float:
        return float(problem.value(w + t * v))

    sense = -1.0 if slope > 0 else 1.0
    if abs(slope) < -0.5 * curvature.lambda_min * length:  # too flat to say which way is down
        if last is None:
            sense = -1.0 if value(-length) < value(length) else 1.0
        else:
            sense = -1.0 if float((last.point - last.origin) @ v) > 0 else 1.0
    for s in (sense, -sense):
        found = ray_search(
            lambda t, s=s: value(s * t),
            fun,
            min(s * slope, 0.0),
            min(curvature.lambda_min, 0.0),
            length=length,
            noise=value_noise(problem, fun),
            least_fall=least_fall,
        )
        if found is not None:
            return Escape(w, w + s * found[0] * v, found[0])
    return None
