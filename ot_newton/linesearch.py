"""Search along a ray of negative curvature, where no model says how far to go.

Backtracking until f falls by a fixed part of what the quadratic model promises, then forward tracking: doubling while f
keeps falling (Curtis and Robinson 2019, Math. Program. 176:69). Falls within the noise of f do not count.
"""

from collections.abc import Callable
from math import isfinite, sqrt

import torch

from ot_newton.problem import Problem

FLATTER, LESS_STEEP = 0.75, 0.5  # of the gradient norm and of the slope along a step, to call them clearly smaller
PART = 0.01  # of the model's decrease that must come true
CERTAIN = 10.0  # a fall must exceed the noise this many times


def value_noise(problem: Problem, *values: float) -> float:
    """Differences between these values of f below this size say nothing: rounding, and the problem's own error."""
    return problem.value_error + 16 * torch.finfo(problem.dtype).eps * max(abs(f) for f in values)


def flatter(before: torch.Tensor, after: torch.Tensor, step: torch.Tensor) -> bool:
    """Whether the gradient, or the slope along the step, is clearly smaller: the judge where values decide nothing."""
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in (before, after)]
    slopes = [(grad @ step).to(torch.float64) for grad in (before, after)]
    norm, norm_after, slope, slope_after = torch.stack([*norms, *slopes]).tolist()
    return norm_after <= FLATTER * norm or abs(slope_after) <= LESS_STEEP * abs(slope)


def first_length(w: torch.Tensor) -> float:
    """A length to start forward tracking from where nothing is known: a small part of the size of w."""
    return torch.finfo(w.dtype).eps ** 0.25 * max(1.0, float(torch.linalg.vector_norm(w)))


def ray_search(
    value: Callable[[float], float],
    fun: float,
    slope: float,
    curvature: float,
    *,
    length: float,
    noise: float,
    least_fall: float = 0.0,
    longest: float = float("inf"),
    max_trials: int = 40,
) -> tuple[float, float] | None:
    """A length t with f(t) well below f(0) = `fun` along a ray, and f(t); None if f does not fall.

    Args:
        value: t ↦ f(t) along the ray, which has unit speed.
        slope, curvature: f′(0) ≤ 0 and f″(0) ≤ 0.
        length: first trial.
        noise: error of a value.
        least_fall: a decrease below this does not count either.
        longest: forward tracking stops here.
        max_trials: evaluations in each of the two phases.
    """

    least = max(CERTAIN * noise, least_fall)

    def promised(t: float) -> float:
        return -slope * t - 0.5 * curvature * t * t

    def falls(t: float, f: float) -> bool:
        return isfinite(f) and fun - f >= max(PART * promised(t), least) and f < fun

    if promised(length) <= 2 * least:
        length = _length_for(2 * least, -slope, -curvature)
        if not isfinite(length):
            return None
    t, f = length, value(length)
    trials = 1
    while not falls(t, f):
        t /= 2
        if trials == max_trials or promised(t) <= least:
            return None
        f = value(t)
        trials += 1
    if trials == 1:
        while trials < max_trials and 2 * t <= longest:
            further = value(2 * t)
            trials += 1
            if not (isfinite(further) and further < f):
                break
            t, f = 2 * t, further
    return t, f


def _length_for(decrease: float, slope: float, curvature: float) -> float:
    """The t ≥ 0 with slope·t + ½ curvature·t² = decrease, for nonnegative arguments; infinite if there is none."""
    if slope == 0 and curvature == 0:
        return float("inf")
    return 2 * decrease / (slope + sqrt(slope * slope + 2 * curvature * decrease))
