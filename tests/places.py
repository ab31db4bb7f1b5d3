"""The backends, dtypes and devices that a case is tried on."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ot_newton import Plan, solve

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Place:
    """A backend with the dtype and device it is tried on."""

    backend: str
    dtype: torch.dtype
    device: str = "cpu"

    @property
    def tol(self) -> float:
        """Tolerance of value, gradient and Hessian relative to the largest entry."""
        return 1e-8 if self.dtype == torch.float64 else 3e-5

    def put(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype)

    def solve(self, x: Tensor, y: Tensor, eps: float, **options) -> Plan:
        weights = {key: self.put(options.pop(key)) for key in ("a", "b") if key in options}
        options.setdefault("tol", 1e-11 if self.dtype == torch.float64 else None)
        plan = solve(self.put(x), self.put(y), eps, **weights, backend=self.backend, **options)
        assert plan.backend == self.backend
        assert plan.value().dtype == plan.grad().dtype == self.dtype
        return plan


def _places() -> Iterator:
    for backend in ("dense", "blocked"):
        for dtype in (torch.float64, torch.float32):
            marks = () if not INTERPRETED else pytest.mark.skip("in the process of its own only triton runs")
            yield pytest.param(Place(backend, dtype), id=f"{backend}-{str(dtype)[6:]}", marks=marks)
            yield pytest.param(
                Place(backend, dtype, "cuda"), id=f"{backend}-{str(dtype)[6:]}-cuda", marks=pytest.mark.gpu
            )
    marks = () if INTERPRETED else pytest.mark.gpu
    yield pytest.param(Place("triton", torch.float32, "cpu" if INTERPRETED else "cuda"), id="triton", marks=marks)


PLACES = list(_places())
everywhere = pytest.mark.parametrize("place", PLACES)
everywhere_in_float32 = pytest.mark.parametrize("place", [p for p in PLACES if p.values[0].dtype == torch.float32])
