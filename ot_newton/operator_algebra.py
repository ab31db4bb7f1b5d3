"""Operators made of operators: A + B, c A, A B, Aᵀ, A + σ I, Jᵀ A J.

Each product calls its parts once per block, so every part counts its own columns. Parts must share dtype and device.
"""

from typing import Any

from torch import Tensor

from ot_newton.linear_operator import LinearOperator, Scalar, is_scalar, require_like
from ot_newton.operators import aslinearoperator


class SumOperator(LinearOperator):
    """A + B."""

    def __init__(self, A: LinearOperator, B: LinearOperator) -> None:
        require_like(B, A, "both terms of a sum")
        if A.shape != B.shape:
            raise ValueError(f"expected two operators of the same shape, got {A.shape} and {B.shape}")
        super().__init__(A.shape, A.dtype, A.device, symmetric=True if A.symmetric and B.symmetric else None)
        self.terms = (A, B)

    def _matmat(self, V: Tensor) -> Tensor:
        A, B = self.terms
        return A.matmat(V) + B.matmat(V)

    def _rmatmat(self, U: Tensor) -> Tensor:
        A, B = self.terms
        return A.rmatmat(U) + B.rmatmat(U)


class ScaledOperator(LinearOperator):
    """c A for a scalar c, a number or a tensor without dimensions."""

    def __init__(self, A: LinearOperator, scalar: Scalar) -> None:
        super().__init__(A.shape, A.dtype, A.device, symmetric=A.symmetric)
        self.operator, self.scalar = A, _scalar_for(A, scalar)

    def _matmat(self, V: Tensor) -> Tensor:
        return self.operator.matmat(V) * self.scalar

    def _rmatmat(self, U: Tensor) -> Tensor:
        return self.operator.rmatmat(U) * self.scalar


class ProductOperator(LinearOperator):
    """A B, B applied first."""

    def __init__(self, A: LinearOperator, B: LinearOperator) -> None:
        require_like(B, A, "both factors of a product")
        if A.shape[1] != B.shape[0]:
            raise ValueError(f"expected {A.shape[1]} rows in the second factor, got {B.shape[0]}")
        super().__init__((A.shape[0], B.shape[1]), A.dtype, A.device)
        self.factors = (A, B)

    def _matmat(self, V: Tensor) -> Tensor:
        A, B = self.factors
        return A.matmat(B.matmat(V))

    def _rmatmat(self, U: Tensor) -> Tensor:
        A, B = self.factors
        return B.rmatmat(A.rmatmat(U))


class AdjointOperator(LinearOperator):
    """Aᵀ; its own adjoint is A again."""

    def __init__(self, A: LinearOperator) -> None:
        super().__init__((A.shape[1], A.shape[0]), A.dtype, A.device, symmetric=A.symmetric)
        self.operator = A

    def adjoint(self) -> LinearOperator:
        return self.operator

    def _matmat(self, V: Tensor) -> Tensor:
        return self.operator.rmatmat(V)

    def _rmatmat(self, U: Tensor) -> Tensor:
        return self.operator.matmat(U)


class ShiftedOperator(LinearOperator):
    """A + σ I for a square operator A."""

    def __init__(self, A: LinearOperator, sigma: Scalar) -> None:
        if A.shape[0] != A.shape[1]:
            raise ValueError(f"expected a square operator, got shape {A.shape}")
        super().__init__(A.shape, A.dtype, A.device, symmetric=A.symmetric)
        self.operator, self.sigma = A, _scalar_for(A, sigma)

    def _matmat(self, V: Tensor) -> Tensor:
        return self.operator.matmat(V) + self.sigma * V

    def _rmatmat(self, U: Tensor) -> Tensor:
        return self.operator.rmatmat(U) + self.sigma * U


class CongruenceOperator(LinearOperator):
    """Jᵀ A J, symmetric where A is: the curvature of A seen through the linear map J."""

    def __init__(self, A: LinearOperator, J: LinearOperator) -> None:
        require_like(J, A, "both factors of a congruence")
        if A.shape != (J.shape[0], J.shape[0]):
            raise ValueError(f"expected A of shape {(J.shape[0], J.shape[0])} for J of shape {J.shape}, got {A.shape}")
        super().__init__((J.shape[1], J.shape[1]), A.dtype, A.device, symmetric=A.symmetric or None)
        self.inner, self.map = A, J

    def _matmat(self, V: Tensor) -> Tensor:
        return self.map.rmatmat(self.inner.matmat(self.map.matmat(V)))

    def _rmatmat(self, U: Tensor) -> Tensor:
        return self.map.rmatmat(self.inner.rmatmat(self.map.matmat(U)))


def shift(A: Any, sigma: Scalar) -> LinearOperator:
    """A + σ I, on A's device and in A's dtype. A: square operator or matrix (n, n).

    Raises `ValueError` if A is not square.

    >>> import torch
    >>> shift(torch.zeros(2, 2), 3.0).to_dense()
    tensor([[3., 0.],
            [0., 3.]])
    """
    return ShiftedOperator(aslinearoperator(A), sigma)


def congruence(A: Any, J: Any) -> LinearOperator:
    """Jᵀ A J, (p, p), for A (n, n) and J (n, p), operators or matrices; one product with each of A, J, Jᵀ per block.

    Raises `ValueError` if shapes, dtypes or devices do not fit.

    >>> import torch
    >>> congruence(torch.diag(torch.tensor([1.0, 2.0])), torch.ones(2, 1)).to_dense()
    tensor([[3.]])
    """
    return CongruenceOperator(aslinearoperator(A), aslinearoperator(J))


def _scalar_for(A: LinearOperator, c: Scalar) -> Scalar:
    if not is_scalar(c):
        raise TypeError(f"expected a real number, got {type(c).__name__}")
    if isinstance(c, Tensor):
        if c.device != A.device:
            raise ValueError(f"expected a scalar on {A.device}, got {c.device}")
        return c.to(A.dtype)
    return float(c)
