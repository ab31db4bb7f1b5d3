"""Linear operators on torch tensors, with the names of `scipy.sparse.linalg.LinearOperator`.

An operator A of shape (m, n) is known by its products A V, V (n, k), and Aᵀ U, U (m, k). Columns come last, as in
scipy; one call with k columns may cost far less than k calls. Sums, scalings, products, shifts and congruences live in
`operator_algebra`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse
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


class MatrixOperator(LinearOperator):
    """The operator of a dense matrix (m, n). Whether it is symmetric (to rounding) is read off unless it is told.

    >>> MatrixOperator(torch.eye(2)).symmetric
    True
    """

    def __init__(self, matrix: Tensor, *, symmetric: bool | None = None) -> None:
        if not isinstance(matrix, Tensor) or matrix.ndim != 2:
            raise ValueError(f"expected a tensor with two dimensions, got {_described(matrix)}")
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
            raise ValueError(f"expected a tensor with one dimension, got {_described(diagonal)}")
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
    raise TypeError(f"expected a LinearOperator, a matrix or a scipy operator, got {_described(A)}")


def require_like(x: Any, A: LinearOperator, what: str) -> None:
    """Raise `TypeError` unless x is a tensor (or operator), `ValueError` unless it shares A's dtype and device."""
    if not isinstance(x, Tensor | LinearOperator):
        raise TypeError(f"expected {what} to be a torch tensor, got {_described(x)}")
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


def _by_columns(product: Product | None) -> Product | None:
    if product is None:
        return None
    return lambda V: torch.stack([product(v) for v in V.unbind(1)], 1) if V.shape[1] else V.new_zeros(len(V), 0)


def _is_symmetric(matrix: Tensor) -> bool:
    if matrix.shape[0] != matrix.shape[1] or matrix.numel() == 0:
        return matrix.shape[0] == matrix.shape[1]
    rounding = 1e3 * torch.finfo(matrix.dtype).eps * matrix.abs().amax()
    return bool((matrix - matrix.mT).abs().amax() <= rounding)


def _described(x: Any) -> str:
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
