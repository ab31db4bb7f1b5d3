"""The base of functions in closed form: value, gradient and Hessian written out, not differentiated by a program."""

from abc import abstractmethod
from typing import Any, ClassVar

import torch

from ot_newton.operators import FunctionOperator, LinearOperator, MatrixOperator
from ot_newton.problem import Problem


class Toy(Problem):
    """A function in closed form. A subclass defines `_value`, `_grad` and `_hessian` on a flat tensor.

    Args:
        x0: the point that `start` returns; the class's own if None.
        matrix: hand the Hessian out as a `MatrixOperator`; if False, as an operator that is only known by products.
        scale: the function is multiplied by it.
        dtype, device: of the parameters.

    Raises:
        ValueError: `x0` has the wrong number of entries, or `scale` is not positive.
    """

    default_start: ClassVar[tuple[float, ...]] = ()

    def __init__(
        self,
        x0: Any = None,
        *,
        matrix: bool = False,
        scale: float = 1.0,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        start = torch.as_tensor(self.default_start if x0 is None else x0, dtype=dtype, device=device).reshape(-1)
        if self.default_start and len(start) != len(self.default_start):
            raise ValueError(f"expected x0 with {len(self.default_start)} entries, got {len(start)}")
        if not scale > 0:
            raise ValueError(f"expected scale > 0, got {scale}")
        self.size, self.dtype, self.device = len(start), dtype, start.device
        self.matrix, self.scale = matrix, scale
        self._start = start

    minimum: float | None = None

    @property
    def minimisers(self) -> torch.Tensor | None:
        """All global minimisers (k, size); None where they form a continuum or do not exist."""
        return None

    @abstractmethod
    def _value(self, w: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def _grad(self, w: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def _hessian(self, w: torch.Tensor) -> torch.Tensor: ...

    def start(self, rng: torch.Generator) -> torch.Tensor:
        """`x0`; nothing is drawn."""
        return self._start.clone()

    def value(self, w: torch.Tensor) -> torch.Tensor:
        """f(w)."""
        return self.scale * self._value(self.check(w))

    def value_and_grad(self, w: torch.Tensor, rtol: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """f(w) and ∇f(w)."""
        return self.value(w), self.scale * self._grad(w)

    def hessian(self, w: torch.Tensor, rtol: float | None = None) -> LinearOperator:
        """∇²f(w), as a matrix or by products."""
        matrix = self.scale * self._hessian(self.check(w))
        if self.matrix:
            return MatrixOperator(matrix, symmetric=True)
        return FunctionOperator(
            (self.size, self.size),
            matmat=lambda V: matrix @ V,
            dtype=self.dtype,
            device=self.device,
            symmetric=True,
        )

    def tensor(self, values: Any) -> torch.Tensor:
        """`values` in the dtype and on the device of the parameters."""
        return torch.tensor(values, dtype=self.dtype, device=self.device)
