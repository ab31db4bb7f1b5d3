"""Matrix products in the precision of their operands, whatever the program around has allowed.

On CUDA torch may round float32 products to 11 bits (TF32) or 8 (bfloat16) where `torch.set_float32_matmul_precision`
or `allow_tf32` say so. A transport plan does not survive that: exponents of size 100 would be off by 0.05.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """The function with exact float32 products on CUDA; what was allowed before is allowed again afterwards."""

    @wraps(function)
    def exact(*args: P.args, **kwargs: P.kwargs) -> R:
        matmul = torch.backends.cuda.matmul
        if not hasattr(matmul, "fp32_precision"):  # torch before 2.9
            return _legacy(function, *args, **kwargs)
        before = matmul.fp32_precision
        if before in ("ieee", "none"):
            return function(*args, **kwargs)
        matmul.fp32_precision = "ieee"
        try:
            return function(*args, **kwargs)
        finally:
            matmul.fp32_precision = before

    return exact


def _legacy(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        return function(*args, **kwargs)
    torch.set_float32_matmul_precision("highest")
    try:
        return function(*args, **kwargs)
    finally:
        torch.set_float32_matmul_precision(before)
