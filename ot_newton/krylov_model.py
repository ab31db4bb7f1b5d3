"""The quadratic model gᵀs + ½ sᵀHs where H is diagonal: on the whole space, or on a Krylov space of g that grows.

    H V = V T + r eᵀ,   VᵀV = I,   V e₁ ∥ g,   T = S Θ Sᵀ:   the model on s = V S y is  cᵀy + ½ yᵀΘy,  c = SᵀVᵀg

Every rule that keeps y short (ball, cubic, |Θ|) has H s + g = −μ s + r eᵀS y, so one number tells when the space is
large enough, and a space that is large enough serves any number of rules without another product with H.
Reference: Gould, Lucidi, Roma and Toint, Solving the trust-region subproblem using the Lanczos method, SIAM J. Optim. 9
(1999).
"""

from collections.abc import Callable
from math import isfinite, nan

import torch
from torch import Tensor

from ot_newton.block_krylov import KrylovSpace
from ot_newton.certificate import Certificate, rounding, smallest_eigenvalue, spectrum
from ot_newton.operators import LinearOperator, MatrixOperator

Rule = Callable[[Tensor, Tensor], tuple[Tensor, float]]  # Θ and c (m,) to y (m,) and μ, 0 if y is not held back

_SEED = 0x6C72_7472_0C07  # unlike any that a problem is likely to draw from
_MOST_VECTORS, _MOST_ENTRIES = 300, 2**25  # of a space unless more are asked for


class EigenModel:
    """The model in the eigencoordinates of a basis Q (n, m).

    Attributes:
        values, coefficients: Θ (m,) ascending and c (m,), in float64 on the CPU.
        floor: eigenvalues within it of zero are not told from zero; `values` holds `floor` in their place.
        lowest, scale: least and largest in magnitude of the eigenvalues, as computed.
        finite: whether the products with H so far, and g, were.
    """

    def __init__(self, relative_floor: float) -> None:
        self._relative_floor = relative_floor
        self.finite = True

    def _set(self, theta: Tensor, coefficients: Tensor) -> None:
        self.lowest, self.scale = float(theta[0]), float(theta.abs().max())
        self.floor = self._relative_floor * self.scale
        self.values = torch.where(theta.abs() <= self.floor, self.floor, theta)  # still ascending
        self.coefficients = coefficients

    @property
    def bounded(self) -> bool:
        """Whether the model has a minimiser."""
        return bool(self.values[0] > 0)

    def lift(self, y: Tensor) -> Tensor:
        """Q y (n,)."""
        raise NotImplementedError

    def solve(self, rule: Rule, tol: float, *, hard_case: bool = False) -> tuple[Tensor, float]:
        """y (m,) and μ by the rule, on a space so large that ‖H s + g + μ s‖ ≤ tol.

        With `hard_case`, the smallest eigenvalue of H is computed too, and where it lies below −μ the space of g is
        joined by that of its vector. Zeros and NaN where H or g is not finite.
        """
        return rule(self.values, self.coefficients) if self.finite else (torch.zeros_like(self.values), nan)


class MatrixModel(EigenModel):
    """The model on the whole space, by a full eigendecomposition; complete from the start."""

    def __init__(self, H: MatrixOperator, g: Tensor, *, error: float) -> None:
        super().__init__(rounding(H) + error)
        theta, self._Q = spectrum(H)
        self._like = g
        c = self._Q.mT @ g.to(self._Q)
        self.finite = bool((theta.isfinite() & c.isfinite()).all())
        self._set(theta, c)

    def lift(self, y: Tensor) -> Tensor:
        return (self._Q @ y).to(self._like)


class KrylovModel(EigenModel):
    """The model on a Krylov space of g of at most `capacity` vectors; if None, 300 or as many as memory allows."""

    def __init__(self, H: LinearOperator, g: Tensor, *, error: float, capacity: int | None = None) -> None:
        super().__init__(rounding(H) + error)
        n = len(g)
        self._H, self._g, self._error = H, g, error
        self._capacity = min(n, capacity or min(_MOST_VECTORS, max(_MOST_ENTRIES // n, 32)))
        self._evidence: Certificate | None = None
        self._begin(None)

    def grow(self) -> None:
        """Add an eighth to the space, one block at least."""
        space, goal = self._space, self._space.size * 9 // 8
        while not space.full:
            space.expand()
            if not space.finite:
                self._fail()
                return
            if space.size >= goal:
                break
        theta, self._S = space.ritz()
        self._set(theta, self._S[: len(self._start)].mT @ self._start)

    def lift(self, y: Tensor) -> Tensor:
        return self._space.V @ (self._S @ y).to(self._g) if self.finite else torch.zeros_like(self._g)

    def solve(self, rule: Rule, tol: float, *, hard_case: bool = False) -> tuple[Tensor, float]:
        y, mu = self._converged(rule, tol)
        if hard_case and self.finite and self._evidence is None and not self._space.exhausted:
            rng = torch.Generator().manual_seed(_SEED)
            self._evidence = smallest_eigenvalue(self._H, error=self._error, rng=rng)
        if self._evidence is not None and self._evidence.lambda_min < min(-mu, self.lowest) - self._evidence.noise:
            self._begin(self._evidence.vector)
            y, mu = self._converged(rule, tol)
        return y, mu

    def _begin(self, beside: Tensor | None) -> None:
        """A space of g, and of another vector beside it."""
        g = self._g
        largest = float(g.abs().amax())
        if not isfinite(largest):
            self._fail()
            return
        start = g[:, None] / (largest or 1.0)
        if beside is not None:
            start = torch.cat([start, beside[:, None]], 1)
        rng, eps, H = torch.Generator().manual_seed(_SEED), torch.finfo(g.dtype).eps, self._H
        capacity = max(self._capacity, start.shape[1])
        self._space = KrylovSpace(lambda V: H.matmat(V).detach(), start, capacity, eps, rng)
        self._start = (self._space.next.mT.double() @ g.double()).cpu()  # g in the first block
        self.grow()

    def _converged(self, rule: Rule, tol: float) -> tuple[Tensor, float]:
        while self.finite:
            y, mu = rule(self.values, self.coefficients)
            if self._space.full or float(self._space.residuals((self._S @ y)[:, None])[0]) <= tol:
                return y, mu
            self.grow()
        return torch.zeros_like(self.values), nan

    def _fail(self) -> None:
        self.finite = False
        self._set(torch.full((1,), nan, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))


def local_model(H: LinearOperator, g: Tensor, *, error: float = 0.0, capacity: int | None = None) -> EigenModel:
    """The model of H and g (n,): on the whole space if H is a matrix, on a growing Krylov space otherwise.

    `error` is the relative error of H. Eigenvalues within it, or within rounding, of zero count as slightly positive.
    """
    if isinstance(H, MatrixOperator):
        return MatrixModel(H, g, error=error)
    return KrylovModel(H, g, error=error, capacity=capacity)
