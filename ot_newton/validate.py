"""The public boundary: inputs of a transport problem are checked here, once, before any work."""

from typing import Any

import torch
from torch import Tensor

MASS_TOLERANCE = 1e-4


def check_points(points: Any, name: str) -> Tensor:
    """Points as a contiguous floating tensor (n, d); float16 and bfloat16 become float32.

    Raises TypeError for anything that is not a real floating tensor or array, ValueError for another shape, an empty
    set or an entry that is not finite.
    """
    if not isinstance(points, Tensor):
        try:
            points = torch.as_tensor(points)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{name}: expected a tensor or array of points (n, d), got {type(points).__name__}"
            ) from error
    if not points.dtype.is_floating_point:
        raise TypeError(f"{name}: expected floating-point numbers, got {points.dtype}; convert with .double()")
    if points.ndim != 2 or 0 in points.shape:
        raise ValueError(f"{name}: expected shape (n, d) with n, d ≥ 1, got {tuple(points.shape)}")
    if not bool(torch.isfinite(points.detach()).all()):
        bad = int((~torch.isfinite(points.detach())).any(1).sum())
        raise ValueError(f"{name}: expected finite coordinates, got {bad} rows with NaN or inf; drop or impute them")
    points = points.float() if points.dtype in (torch.float16, torch.bfloat16) else points
    return points.contiguous()


def check_weights(weights: Any, n: int, like: Tensor, name: str) -> Tensor:
    """Weights (n,) with sum 1, uniform where None; a sum within 1e-4 of 1 is brought to 1 exactly.

    Raises TypeError for integers, ValueError for another shape, a negative or non-finite entry, or another total mass.
    """
    if weights is None:
        return torch.full((n,), 1 / n, dtype=like.dtype, device=like.device)
    weights = torch.as_tensor(weights)
    if not weights.dtype.is_floating_point:
        raise TypeError(
            f"{name}: expected floating-point weights with sum 1, got {weights.dtype}; divide counts by their sum"
        )
    if tuple(weights.shape) != (n,):
        raise ValueError(f"{name}: expected shape ({n},), one weight a point, got {tuple(weights.shape)}")
    if weights.device != like.device:
        raise ValueError(f"{name}: expected device {like.device} like the points, got {weights.device}")
    weights = weights.to(like.dtype).contiguous()
    held = weights.detach()
    if not bool(torch.isfinite(held).all()) or bool((held < 0).any()):
        raise ValueError(f"{name}: expected finite weights ≥ 0, got a minimum of {float(held.min())}")
    return weights


def check_measures(x: Any, y: Any, a: Any, b: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both measures of a balanced problem, checked alone and against each other."""
    x, y = check_points(x, "x"), check_points(y, "y")
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"x and y: expected points of one dimension d, got {tuple(x.shape)} and {tuple(y.shape)}")
    if x.device != y.device:
        raise ValueError(f"x and y: expected one device, got {x.device} and {y.device}")
    if x.dtype != y.dtype:
        raise TypeError(f"x and y: expected one dtype, got {x.dtype} and {y.dtype}")
    a, b = check_weights(a, len(x), x, "a"), check_weights(b, len(y), y, "b")
    total_a, total_b = (w.detach().sum(dtype=torch.float64) for w in (a, b))
    if max(abs(float(total_a) - 1), abs(float(total_b) - 1)) > MASS_TOLERANCE:
        raise ValueError(
            f"a and b: expected total mass 1 each, got {float(total_a):g} and {float(total_b):g}; divide by the sum"
        )
    return x, y, a / total_a.to(a.dtype), b / total_b.to(b.dtype)


def check_positive(value: Any, name: str) -> float:
    """A finite number above 0 as a float. Raises TypeError or ValueError."""
    if isinstance(value, (bool, str)):
        raise TypeError(f"{name}: expected a number above 0, got {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected a number above 0, got {type(value).__name__}") from error
    if not 0 < number < float("inf"):
        raise ValueError(f"{name}: expected a finite number above 0, got {value!r}")
    return number
