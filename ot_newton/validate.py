"""The public boundary: inputs of a transport problem are checked here, once, before any work.

Dtypes have one rule. Points in float64 or float32 are computed with, and answered, in their own dtype; float16 and
bfloat16 are storage, computed with and answered in float32; integers and everything else are refused. x and y agree,
and weights follow the points. Strides and memory order never matter.
"""

from collections.abc import Callable, Collection
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ot_newton.pairs import Pairs

MASS_TOLERANCE = 1e-4
POINTS = ("a tensor or array of points (n, d)", "convert with .double() or .float()")
WEIGHTS = ("a tensor or array of weights with sum 1", "divide counts by their sum")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def as_real(value: Any, name: str, what: str, otherwise: str) -> Tensor:
    """A tensor of one of the four dtypes from a tensor, an array or nested lists, which are never written to.

    Raises TypeError: "expected {what}, got …; {otherwise}".
    """
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        try:
            if hasattr(value, "__array__") and not hasattr(value, "__cuda_array_interface__"):
                array = np.asarray(value)
                kind = f"{kind} of {array.dtype}"
                native = array.astype(array.dtype.newbyteorder("="), copy=False)
                # torch takes neither other byte orders nor negative strides, and not quietly what is read-only
                plain = native.flags.writeable and all(stride >= 0 for stride in native.strides)
                value = native if plain else native.copy()
            value = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{name}: expected {what}, got {kind}; {otherwise}") from error
    if value.dtype not in FLOATS:
        raise TypeError(f"{name}: expected floating-point numbers, got {value.dtype}; {otherwise}")
    if value.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got {value.layout}; convert with .to_dense()")
    if value.device.type == "meta":
        raise ValueError(f"{name}: expected a tensor with data, got one on the device 'meta'; put it on a real device")
    return value.resolve_neg()


def check_points(points: Any, name: str) -> Tensor:
    """Points as a contiguous floating tensor (n, d); float16 and bfloat16 become float32.

    Raises TypeError for anything that is not a real floating tensor or array, ValueError for another shape, an empty
    set or an entry that is not finite.
    """
    points = as_real(points, name, *POINTS)
    if points.ndim != 2 or 0 in points.shape:
        hint = {1: "; points on a line are x[:, None]", 3: "; solve_batch and the losses take batches"}.get(
            points.ndim, ""
        )
        raise ValueError(f"{name}: expected shape (n, d) with n, d ≥ 1, got {tuple(points.shape)}{hint}")
    if not bool(torch.isfinite(points.detach()).all()):
        bad = int((~torch.isfinite(points.detach())).any(1).sum())
        raise ValueError(f"{name}: expected finite coordinates, got {bad} rows with NaN or inf; drop or impute them")
    points = points.float() if points.dtype in (torch.float16, torch.bfloat16) else points
    return points.contiguous()


def check_weights(weights: Any, n: int, like: Tensor, name: str) -> Tensor:
    """Weights (n,) in the dtype of the points `like`, uniform where None; zeros are allowed.

    Raises TypeError for integers, ValueError for another shape or device and for a negative or non-finite entry.
    """
    if weights is None:
        return torch.full((n,), 1 / n, dtype=like.dtype, device=like.device)
    weights = as_real(weights, name, *WEIGHTS)
    if tuple(weights.shape) != (n,):
        hint = "; use .squeeze()" if weights.numel() == n else ""
        raise ValueError(f"{name}: expected shape ({n},), one weight a point, got {tuple(weights.shape)}{hint}")
    if weights.device != like.device:
        raise ValueError(
            f"{name}: expected device {like.device} like the points, got {weights.device}; move it with .to()"
        )
    held = weights.detach().to(torch.float64)
    if not bool(torch.isfinite(held).all()) or bool((held < 0).any()):
        raise ValueError(
            f"{name}: expected finite weights ≥ 0, got a minimum of {float(held.min()):g} and a maximum of "
            f"{float(held.max()):g}; a measure with negative parts has no transport plan"
        )
    return weights.to(like.dtype).contiguous()


def check_measures(x: Any, y: Any, a: Any, b: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both measures of a balanced problem, checked alone and against each other, with weights of sum 1 exactly.

    Raises ValueError where a total mass is off by more than 1e-4, or by more than a 16-bit dtype rounds.
    """
    x, y = check_points(x, "x"), check_points(y, "y")
    if x.shape[1] != y.shape[1]:
        raise ValueError(
            f"x and y: expected points of one dimension d, got {tuple(x.shape)} and {tuple(y.shape)}; rows are points"
        )
    if x.device != y.device:
        raise ValueError(f"x and y: expected one device, got {x.device} and {y.device}; move one with .to()")
    if x.dtype != y.dtype:
        raise TypeError(f"x and y: expected one dtype, got {x.dtype} and {y.dtype}; convert one with .to()")
    a, b = (None if w is None else as_real(w, name, *WEIGHTS) for w, name in ((a, "a"), (b, "b")))
    slack = max([MASS_TOLERANCE, *(torch.finfo(w.dtype).eps for w in (a, b) if w is not None)])
    a, b = check_weights(a, len(x), x, "a"), check_weights(b, len(y), y, "b")
    total_a, total_b = (float(w.detach().sum(dtype=torch.float64)) for w in (a, b))
    if max(abs(total_a - 1), abs(total_b - 1)) > slack:
        raise ValueError(f"a and b: expected total mass 1 each, got {total_a:g} and {total_b:g}; divide by the sum")
    return x, y, _normalised(a, total_a), _normalised(b, total_b)


def _normalised(weights: Tensor, total: float) -> Tensor:
    """Weights of sum 1; those that have it up to rounding keep their bits, so that checking twice changes nothing."""
    return weights if abs(total - 1) <= 2 * torch.finfo(weights.dtype).eps else weights / total


def check_batch(
    x: Any, y: Any, a: Any, b: Any, eps: Any, *, check: Callable[..., tuple[Tensor, ...]] = check_measures
) -> list[tuple[Tensor, Tensor, Tensor, Tensor, float]]:
    """The problems of a batch, one tuple (x, y, a, b, eps) an item, the measures of each checked by `check`.

    x is (B, n, d) and y (B, m, d); weights (n,) and a single eps are shared by all items. A message names its item.
    """
    x, y = as_real(x, "x", *POINTS), as_real(y, "y", *POINTS)
    if x.ndim != 3 or y.ndim != 3 or len(x) != len(y) or len(x) == 0:
        raise ValueError(
            f"x and y: expected shapes (B, n, d) and (B, m, d) with B ≥ 1, got {tuple(x.shape)} and {tuple(y.shape)}; "
            "share points by y.expand(B, -1, -1)"
        )
    size = len(x)
    columns = [x.unbind(), y.unbind(), *(_shared(w, size, name) for w, name in ((a, "a"), (b, "b")))]
    temperatures = _temperatures(eps, size)
    items = []
    for k, measures in enumerate(zip(*columns, strict=True)):
        try:
            items.append((*check(*measures), temperatures[k]))
        except (TypeError, ValueError) as error:
            raise type(error)(f"item {k}: {error}") from error
    return items


def _shared(weights: Any, size: int, name: str) -> tuple[Tensor | None, ...]:
    if weights is None:
        return (None,) * size
    weights = as_real(weights, name, *WEIGHTS)
    if weights.ndim == 1:
        return (weights,) * size
    if weights.ndim != 2 or len(weights) != size:
        raise ValueError(f"{name}: expected shape (n,) or ({size}, n), got {tuple(weights.shape)}")
    return weights.unbind()


def _temperatures(eps: Any, size: int) -> list[float]:
    if isinstance(eps, (str, bytes)) or not hasattr(eps, "__len__") or getattr(eps, "ndim", 1) == 0:
        return [check_positive(eps, "eps")] * size
    if len(eps) != size:
        raise ValueError(f"eps: expected one number or {size}, one an item, got {len(eps)}")
    return [check_positive(value, f"eps[{k}]") for k, value in enumerate(eps)]


def check_pairs(pairs: Pairs) -> Pairs:
    """The pairs themselves, where every cost over eps is within the range of the dtype. Raises ValueError."""
    for name, side in (("x", pairs.source), ("y", pairs.target)):
        # |x - y|² ≤ 4 max |x|², and the query holds what no norm shows: 1/eps, and the cost of labels
        if not bool(torch.isfinite((4 * side.norm).to(side.points.dtype)).all() & torch.isfinite(side.query).all()):
            raise ValueError(
                f"{name}: expected points whose cost over eps is finite, got an overflow; rescale or raise eps"
            )
    return pairs


def check_positive(value: Any, name: str) -> float:
    """A finite number above 0 as a float. Raises TypeError or ValueError."""
    number = _number(value, name, "a number above 0")
    if not 0 < number < float("inf"):
        raise ValueError(f"{name}: expected a finite number above 0, got {value!r}")
    return number


def check_nonnegative(value: Any, name: str) -> float:
    """A finite number ≥ 0 as a float. Raises TypeError or ValueError."""
    number = _number(value, name, "a number ≥ 0")
    if not 0 <= number < float("inf"):
        raise ValueError(f"{name}: expected a finite number ≥ 0, got {value!r}")
    return number


def check_ratio(value: Any, name: str) -> float:
    """A number in (0, 1] as a float. Raises TypeError or ValueError."""
    number = _number(value, name, "a ratio in (0, 1]")
    if not 0 < number <= 1:
        raise ValueError(f"{name}: expected a ratio in (0, 1], got {value!r}")
    return number


def check_integer(value: Any, name: str, least: int = 1) -> int:
    """An integer ≥ `least`, of Python, numpy or torch, as an int. Raises ValueError."""
    if not is_integer(value) or index(value) < least:
        raise ValueError(f"{name}: expected an integer ≥ {least}, got {value!r}")
    return index(value)


def is_integer(value: Any) -> bool:
    """Whether it is an integer of Python, numpy or torch; True and False are none."""
    try:
        index(value)
    except TypeError:
        return False
    return not _is_bool(value)


def check_choice(value: Any, name: str, choices: Collection[str]) -> str:
    """One of some names. Raises ValueError, whatever else it is."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
    return value


def _number(value: Any, name: str, what: str) -> float:
    """A number of any kind as a float; what only looks like one is refused."""
    if isinstance(value, (str, bytes)) or _is_bool(value):
        raise TypeError(f"{name}: expected {what}, got {value!r}")
    if isinstance(value, Tensor) and value.requires_grad:
        raise TypeError(f"{name}: expected a number, got a tensor that requires gradients; pass {name}.detach()")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(
            f"{name}: expected {what} that float64 can hold, got a larger {type(value).__name__}"
        ) from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected {what}, got {type(value).__name__}") from error


def _is_bool(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_)) or getattr(value, "dtype", None) in (torch.bool, np.dtype(bool))
