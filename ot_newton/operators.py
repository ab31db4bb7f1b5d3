"""Linear operators on torch tensors: of matrices, functions, diagonals, and of scipy's operators.

Sums, scalings, products, shifts and congruences live in `operator_algebra`, the base class in `linear_operator`.
"""

from typing import Any

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
import torch
from torch import Tensor

from ot_newton.linear_operator import LinearOperator, Product, described, require_like, require_symmetric

__all__ = [
    "DiagonalOperator",
    "FunctionOperator",
    "IdentityOperator",
    "LinearOperator",
    "MatrixOperator",
    "aslinearoperator",
    "require_like",
    "require_symmetric",
]


class MatrixOperator(LinearOperator):
    """The operator of a dense matrix (m, n). Whether it is symmetric (to rounding) is read off unless it is told.

    >>> MatrixOperator(torch.eye(2)).symmetric
    True
    """

    def __init__(self, matrix: Tensor, *, symmetric: bool | None = None) -> None:
        if not isinstance(matrix, Tensor) or matrix.ndim != 2:
            raise ValueError(f"expected a tensor with two dimensions, got {described(matrix)}")
        super().__init__((matrix.shape[0], matrix.shape[1]), matrix.dtype, matrix.device)
        self.matrix = matrix
        self.symmetric = _is_symmetric(matrix) if symmetric is None else symmetric

    def _matmat(self, V: Tensor) -> Tensor:
        return self.matrix @ V

    def _rmatmat(self, U: Tensor) -> Tensor:
        return self.matrix.mT @ U


class FunctionOperator(LinearOperator):
    """An operator given by functions: `matvec` (n,) ↦ (m,) or `matmat` (n, k) ↦ (m, k), and their adjoints.

    Where only the product with one vector is given, a block is applied column by column.
    Raises `ValueError` if neither `matvec` nor `matmat` is given.

    >>> A = FunctionOperator((3, 3), matvec=lambda v: v.flip(0), dtype=torch.float64, symmetric=True)
    >>> A @ torch.arange(3, dtype=torch.float64)
    tensor([2., 1., 0.], dtype=torch.float64)
    """

    def __init__(
        self,
        shape: tuple[int, int],
        *,
        matvec: Product | None = None,
        matmat: Product | None = None,
        rmatvec: Product | None = None,
        rmatmat: Product | None = None,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        symmetric: bool | None = None,
    ) -> None:
        super().__init__(shape, dtype, device, symmetric=symmetric)
        forward, backward = matmat or _by_columns(matvec), rmatmat or _by_columns(rmatvec)
        if forward is None:
            raise ValueError("expected matvec or matmat, got neither")
        self._forward, self._backward = forward, backward

    def _matmat(self, V: Tensor) -> Tensor:
        return self._forward(V)

    def _rmatmat(self, U: Tensor) -> Tensor:
        return super()._rmatmat(U) if self._backward is None else self._backward(U)


class DiagonalOperator(LinearOperator):
    """diag(d) for a vector d (n,)."""

    symmetric = True

    def __init__(self, diagonal: Tensor) -> None:
        if not isinstance(diagonal, Tensor) or diagonal.ndim != 1:
            raise ValueError(f"expected a tensor with one dimension, got {described(diagonal)}")
        super().__init__((len(diagonal), len(diagonal)), diagonal.dtype, diagonal.device)
        self.diagonal = diagonal

    def _matmat(self, V: Tensor) -> Tensor:
        return self.diagonal[:, None] * V


class IdentityOperator(LinearOperator):
    """The identity on n coordinates."""

    symmetric = True

    def __init__(self, n: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__((n, n), dtype, device)

    def _matmat(self, V: Tensor) -> Tensor:
        return V.clone()


def aslinearoperator(A: Any, *, device: torch.device | str = "cpu") -> LinearOperator:
    """A as a `LinearOperator`: an operator, a tensor (m, n), a numpy array, or a scipy sparse matrix or operator.

    `device` is where the vectors of a scipy operator or numpy array live; torch objects stay where they are. The
    dtype is kept. Raises `TypeError` for anything else.
    """
    if isinstance(A, LinearOperator):
        return A
    if isinstance(A, Tensor):
        return MatrixOperator(A)
    if isinstance(A, np.ndarray):
        return MatrixOperator(torch.tensor(A, device=device))
    if scipy.sparse.issparse(A) or isinstance(A, scipy.sparse.linalg.LinearOperator):
        from ot_newton.scipy_bridge import from_scipy

        return from_scipy(scipy.sparse.linalg.aslinearoperator(A), device)
    raise TypeError(f"expected a LinearOperator, a matrix or a scipy operator, got {described(A)}")


def _by_columns(product: Product | None) -> Product | None:
    if product is None:
        return None
    return lambda V: torch.stack([product(v) for v in V.unbind(1)], 1) if V.shape[1] else V.new_zeros(len(V), 0)


def _is_symmetric(matrix: Tensor) -> bool | None:
    """Whether the matrix equals its transpose to rounding; None, unknown, where an entry is not finite."""
    if matrix.shape[0] != matrix.shape[1] or matrix.numel() == 0:
        return matrix.shape[0] == matrix.shape[1]
    largest = matrix.abs().amax()
    if not bool(largest.isfinite()):
        return None
    return bool((matrix - matrix.mT).abs().amax() <= 1e3 * torch.finfo(matrix.dtype).eps * largest)
