"""What is minimised: a value, its gradient and its Hessian as functions of one flat vector of parameters.

`Problem` is the protocol; `FunctionProblem` fulfils it for any torch function, with Hv = ∇⟨∇f, v⟩ by a second backward
pass (Pearlmutter 1994, Neural Computation 6:147).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ot_newton.operators import FunctionOperator, LinearOperator
from ot_newton.pairs import Counted, Passes


class Problem(Counted, ABC):
    """A smooth function of `size` parameters, held in one flat tensor.

    A subclass sets `size`, `dtype` and `device` and defines `start`, `value`, `value_and_grad` and `hessian`. It may
    keep the work of its last point (a transport plan, say) so that value, gradient and Hessian share it; that cache is
    the only state it has, and the answers do not depend on it beyond the accuracy asked for.

    `rtol` is the relative accuracy of the gradient, or of the operator, that the caller needs. A problem solved by
    iteration saves work by it; `None` asks for the best it can do; an exact problem ignores it.

    Attributes:
        size: number of parameters.
        dtype, device: of the parameters, the gradient and the Hessian.
        shape: the shape in which a user thinks of the parameters; `(size,)` unless set.
        passes: passes over the n×m pairs so far, by kind; a problem with pairs adds to them. None without pairs.
        n_passes: their sum.
        value_error: estimate of the absolute error of the value computed last, or of the one that came with the last
            gradient where that is larger, rounding aside; 0.0 if exact. Line searches do not trust differences below
            it.
        hessian_error: estimate of the relative error, in the spectral norm, of the Hessian returned last, rounding
            aside; 0.0 if exact. Eigenvalues are not trusted below it. A problem that knows more returns a
            `BracketedMatrix`, whose bounds count instead.

    Example: f(w) = ½‖w‖².

        >>> from ot_newton.minimize import minimize
        >>> from ot_newton.operators import IdentityOperator
        >>> class Bowl(Problem):
        ...     size, dtype, device = 3, torch.float64, torch.device("cpu")
        ...     def start(self, rng): return torch.randn(3, generator=rng, dtype=self.dtype)
        ...     def value(self, w): return 0.5 * w @ w
        ...     def value_and_grad(self, w, rtol=None): return self.value(w), w.clone()
        ...     def hessian(self, w, rtol=None): return IdentityOperator(3, self.dtype)
        >>> minimize(Bowl()).success
        True
    """

    size: int
    dtype: torch.dtype
    device: torch.device
    passes: Passes = Passes()
    value_error: float = 0.0
    hessian_error: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in which a user thinks of the parameters."""
        return (self.size,)

    @abstractmethod
    def start(self, rng: torch.Generator) -> torch.Tensor:
        """A starting point (size,), drawn from `rng` if it is random."""

    @abstractmethod
    def value(self, w: torch.Tensor) -> torch.Tensor:
        """f(w), a tensor of shape ()."""

    @abstractmethod
    def value_and_grad(self, w: torch.Tensor, rtol: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """f(w) of shape () and ∇f(w) of shape (size,)."""

    @abstractmethod
    def hessian(self, w: torch.Tensor, rtol: float | None = None) -> LinearOperator:
        """∇²f(w) as a symmetric operator of shape (size, size); a `MatrixOperator` where the matrix itself is cheap."""

    def hessian_at_hand(self, w: torch.Tensor) -> LinearOperator | None:
        """∇²f(w) where a matrix has been computed already, whatever its accuracy; None otherwise. It costs nothing.

        Sets `hessian_error`, as `hessian` does.
        """
        return None

    def check(self, w: torch.Tensor) -> torch.Tensor:
        """Return `w` if it is a point of this problem.

        Raises:
            TypeError: `w` is not a tensor of this problem's dtype.
            ValueError: wrong shape or device.
        """
        if not isinstance(w, torch.Tensor) or w.dtype != self.dtype:
            raise TypeError(f"expected w as a tensor of {self.dtype}, got {getattr(w, 'dtype', type(w).__name__)}")
        if w.shape != (self.size,):
            raise ValueError(f"expected w of shape ({self.size},), got {tuple(w.shape)}")
        if w.device != self.device:
            raise ValueError(f"expected w on {self.device}, got {w.device}")
        return w


class FunctionProblem(Problem):
    """A torch function as a problem; gradient and Hessian by automatic differentiation.

    Args:
        fun: maps a tensor of the shape of `x0` to a tensor of shape (), by differentiable torch operations.
        x0: the starting point, of any shape; anything that is not a tensor is read by numpy (so a list of floats is
            float64). It sets shape, dtype and device.
        vectorize: compute several Hessian columns by one vectorised backward pass (`torch.func.vmap`); faster where
            every operation in `fun` supports it.

    Raises:
        TypeError: `fun` is not callable or `x0` is not real floating point; later, `fun` does not return a tensor.
        ValueError: `x0` is empty or not finite; later, `fun` returns a tensor that is not of shape ().

    Example:

        >>> problem = FunctionProblem(lambda x: (x**4).sum(), [[1.0, 2.0]])
        >>> w = problem.start(torch.Generator())
        >>> problem.hessian(w).to_dense()
        tensor([[12.,  0.],
                [ 0., 48.]], dtype=torch.float64)
    """

    def __init__(self, fun: Callable[[torch.Tensor], torch.Tensor], x0: Any, *, vectorize: bool = False):
        if not callable(fun):
            raise TypeError(f"expected fun to be callable, got {type(fun).__name__}")
        x0 = as_point(x0)
        self.fun, self.vectorize = fun, vectorize
        self._x0 = x0
        self.size, self.dtype, self.device = x0.numel(), x0.dtype, x0.device

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `x0`, which `fun` is called with."""
        return tuple(self._x0.shape)

    def start(self, rng: torch.Generator) -> torch.Tensor:
        """`x0`, flat (size,)."""
        return self._x0.reshape(-1).clone()

    def value(self, w: torch.Tensor) -> torch.Tensor:
        """f(w), without building a graph."""
        with torch.no_grad():
            return self._call(self.check(w))

    def value_and_grad(self, w: torch.Tensor, rtol: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """f(w) and ∇f(w) by one backward pass; `rtol` has no effect."""
        leaf = self.check(w).detach().clone().requires_grad_()
        with torch.enable_grad():
            f = self._call(leaf)
        return f.detach(), _grad(f, leaf, create_graph=False)

    def hessian(self, w: torch.Tensor, rtol: float | None = None) -> LinearOperator:
        """∇²f(w) as an operator that runs one backward pass through the gradient's graph per column."""
        leaf = self.check(w).detach().clone().requires_grad_()
        with torch.enable_grad():
            g = _grad(self._call(leaf), leaf, create_graph=True)

        def product(v: torch.Tensor) -> torch.Tensor:  # (size,) or, vectorised, (k, size)
            if not g.requires_grad or v.numel() == 0:
                return torch.zeros_like(v)
            v = v.contiguous()
            (hv,) = torch.autograd.grad(
                g, leaf, v, retain_graph=True, is_grads_batched=v.ndim == 2, materialize_grads=True
            )
            return hv

        return FunctionOperator(
            (self.size, self.size),
            matvec=None if self.vectorize else product,
            matmat=(lambda V: product(V.T).T) if self.vectorize else None,
            dtype=self.dtype,
            device=self.device,
            symmetric=True,
        )

    def _call(self, w: torch.Tensor) -> torch.Tensor:
        f = self.fun(w.reshape(self.shape))
        if not isinstance(f, torch.Tensor):
            raise TypeError(f"expected fun to return a tensor, got {type(f).__name__}")
        if f.shape != ():
            raise ValueError(f"expected fun to return a tensor of shape (), got {tuple(f.shape)}")
        return f


def as_point(x0: Any) -> torch.Tensor:
    """Read `x0` as a real floating-point tensor without a graph, keeping shape, dtype and device.

    Raises:
        TypeError: not real floating point.
        ValueError: empty or not finite.
    """
    x0 = x0.detach() if isinstance(x0, torch.Tensor) else torch.tensor(np.asarray(x0))
    if not x0.dtype.is_floating_point:
        raise TypeError(f"expected x0 of a real floating dtype, got {x0.dtype}")
    if x0.numel() == 0:
        raise ValueError(f"expected x0 with at least one entry, got shape {tuple(x0.shape)}")
    if not bool(torch.isfinite(x0).all()):
        raise ValueError("expected x0 to be finite, got NaN or infinity")
    return x0


def _grad(f: torch.Tensor, leaf: torch.Tensor, *, create_graph: bool) -> torch.Tensor:
    # a function that ignores its argument has gradient zero, not an error
    if not f.requires_grad:
        return torch.zeros_like(leaf)
    (g,) = torch.autograd.grad(f, leaf, create_graph=create_graph, materialize_grads=True)
    return g
