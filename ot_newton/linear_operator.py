"""The base of all operators: a linear map on torch tensors with the names of `scipy.sparse.linalg.LinearOperator`.

An operator A of shape (m, n) is known by its products A V, V (n, k), and Aᵀ U, U (m, k). Columns come last, as in
scipy; one call with k columns may cost far less than k calls.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse.linalg
import torch
from torch import Tensor

Scalar = float | Tensor
Product = Callable[[Tensor], Tensor]


class LinearOperator:
    """A linear map A of shape (m, n) in one dtype on one device, known by its products.

    A subclass implements `_matmat`, V (n, k) ↦ A V (m, k), and, unless it is symmetric, may implement `_rmatmat`,
    U (m, k) ↦ Aᵀ U (n, k). It says that it is symmetric by a class attribute or by the argument `symmetric`: True (the
    adjoint is the operator itself), False (known not to be), None (unknown).

    Operators support `A @ v`, `A @ V`, `A @ B`, `v @ A`, `A + B`, `A - B`, `c * A`, `A / c`, `-A`, `A.T` and `A.H`.

    Raises `ValueError` for a negative shape and `TypeError` for a dtype that is not real floating point.

    >>> class Difference(LinearOperator):
    ...     def _matmat(self, V):
    ...         return V[1:] - V[:-1]
    >>> D = Difference((2, 3), torch.float64)
    >>> D @ torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64)
    tensor([3., 5.], dtype=torch.float64)
    """

    symmetric: bool | None = None

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        symmetric: bool | None = None,
    ) -> None:
        if len(shape) != 2 or any(s < 0 for s in shape):
            raise ValueError(f"expected a shape (m, n), got {tuple(shape)}")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"expected a real floating-point torch dtype, got {dtype}")
        self.shape = (int(shape[0]), int(shape[1]))
        self.dtype = dtype
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        if symmetric is not None:
            self.symmetric = symmetric
        if self.symmetric and self.shape[0] != self.shape[1]:
            raise ValueError(f"expected a square shape for a symmetric operator, got {self.shape}")
        self._n_matvec = 0

    def _matmat(self, V: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not define _matmat")

    def _rmatmat(self, U: Tensor) -> Tensor:
        if self.symmetric:
            return self._matmat(U)
        raise NotImplementedError(f"{type(self).__name__} does not define _rmatmat, so its adjoint is unknown")

    @property
    def n_matvec(self) -> int:
        """Columns applied so far, forward and adjoint together."""
        return self._n_matvec

    def matmat(self, V: Tensor) -> Tensor:
        """A V for V (n, k), a tensor (m, k). Raises `ValueError` for another shape, dtype or device."""
        return self._checked_product(self._matmat, V, *self.shape)

    def rmatmat(self, U: Tensor) -> Tensor:
        """Aᵀ U for U (m, k), a tensor (n, k). Raises `NotImplementedError` where the adjoint is unknown."""
        return self._checked_product(self._rmatmat, U, *self.shape[::-1])

    def matvec(self, v: Tensor) -> Tensor:
        """A v for v (n,), a tensor (m,)."""
        return self.matmat(_column(v, self.shape[1]))[:, 0]

    def rmatvec(self, u: Tensor) -> Tensor:
        """Aᵀ u for u (m,), a tensor (n,)."""
        return self.rmatmat(_column(u, self.shape[0]))[:, 0]

    def _checked_product(self, product: Product, V: Tensor, n_out: int, n_in: int) -> Tensor:
        require_like(V, self, "the argument of a product")
        if V.ndim != 2 or V.shape[0] != n_in:
            raise ValueError(f"expected a tensor of shape ({n_in}, k), got {tuple(V.shape)}")
        W = product(V)
        if W.shape != (n_out, V.shape[1]) or W.dtype != self.dtype:
            got = f"{tuple(W.shape)} in {W.dtype}"
            raise ValueError(
                f"expected {type(self).__name__} to return {(n_out, V.shape[1])} in {self.dtype}, got {got}"
            )
        self._n_matvec += V.shape[1]
        return W

    def to_dense(self, *, chunk: int = 256) -> Tensor:
        """The matrix (m, n), by products with the identity, `chunk` columns at a time."""
        m, n = self.shape
        dense = torch.empty(m, n, dtype=self.dtype, device=self.device)
        for start in range(0, n, chunk):
            stop = min(start + chunk, n)
            columns = torch.zeros(n, stop - start, dtype=self.dtype, device=self.device)
            columns[start:stop].fill_diagonal_(1.0)
            dense[:, start:stop] = self.matmat(columns).detach()
        return dense

    def to_scipy(self) -> scipy.sparse.linalg.LinearOperator:
        """This operator for scipy: numpy arrays in and out, in this operator's dtype.

        Raises `TypeError` for a dtype that numpy lacks (bfloat16).
        """
        from ot_newton.scipy_bridge import ScipyOperator

        return ScipyOperator(self)

    def adjoint(self) -> "LinearOperator":
        """Aᵀ; a symmetric operator returns itself."""
        return self if self.symmetric else _algebra().AdjointOperator(self)

    @property
    def T(self) -> "LinearOperator":
        """The transpose, which is the adjoint: operators are real."""
        return self.adjoint()

    H = T

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, LinearOperator):
            return _algebra().ProductOperator(self, other)
        if isinstance(other, Tensor):
            return self.matvec(other) if other.ndim == 1 else self.matmat(other)
        return NotImplemented

    def __rmatmul__(self, other: Any) -> Any:
        if isinstance(other, Tensor):
            return self.rmatvec(other) if other.ndim == 1 else self.rmatmat(other.mT).mT
        return NotImplemented

    def __add__(self, other: Any) -> "LinearOperator":
        return _algebra().SumOperator(self, other) if isinstance(other, LinearOperator) else NotImplemented

    def __sub__(self, other: Any) -> "LinearOperator":
        return self + (-other) if isinstance(other, LinearOperator) else NotImplemented

    def __mul__(self, scalar: Any) -> "LinearOperator":
        return _algebra().ScaledOperator(self, scalar) if is_scalar(scalar) else NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, scalar: Any) -> "LinearOperator":
        return self * (1 / scalar) if is_scalar(scalar) else NotImplemented

    def __neg__(self) -> "LinearOperator":
        return self * -1.0

    __array_ufunc__ = None  # numpy scalars on the left then defer to __rmul__

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.shape[0]}×{self.shape[1]}, {self.dtype} on {self.device}>"


def require_like(x: Any, A: LinearOperator, what: str) -> None:
    """Raise `TypeError` unless x is a tensor (or operator), `ValueError` unless it shares A's dtype and device."""
    if not isinstance(x, Tensor | LinearOperator):
        raise TypeError(f"expected {what} to be a torch tensor, got {described(x)}")
    if x.dtype != A.dtype or x.device != A.device:
        raise ValueError(f"expected {what} in {A.dtype} on {A.device}, got {x.dtype} on {x.device}")


def require_symmetric(A: LinearOperator) -> None:
    """Raise `ValueError` unless A is square and not known to be unsymmetric."""
    if A.shape[0] != A.shape[1]:
        raise ValueError(f"expected a square operator, got shape {A.shape}")
    if A.symmetric is False:
        raise ValueError(
            f"expected a symmetric operator, got {A!r}, which is not; use (A + A.T) / 2, or symmetric=True where the "
            "asymmetry is noise (`check_operator` measures it)"
        )


def is_scalar(x: Any) -> bool:
    """A real number or a tensor without dimensions."""
    return isinstance(x, int | float | np.floating | np.integer) or (isinstance(x, Tensor) and x.ndim == 0)


def _algebra() -> Any:
    """The module of composed operators, imported late because it builds on this one."""
    from ot_newton import operator_algebra

    return operator_algebra


def _column(v: Tensor, n: int) -> Tensor:
    if isinstance(v, Tensor) and v.shape != (n,):
        raise ValueError(f"expected a vector of shape ({n},), got {tuple(v.shape)}")
    return v[:, None] if isinstance(v, Tensor) else v


def described(x: Any) -> str:
    """What an error message says of an argument that is not what was expected."""
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
