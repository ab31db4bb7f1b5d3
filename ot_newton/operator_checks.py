"""`check_operator`: measure whether an operator is linear, symmetric, repeatable and the derivative of its gradient.

With random u, v of unit length, four products with A give  ‖Av − A'v‖ (repeated),  ‖A(u + v) − Au − Av‖  and
|uᵀAv − vᵀAu|, each over max(‖Au‖, ‖Av‖); central differences of a gradient g give  D_h = (g(x + hv) − g(x − hv)) / 2h
and, from D_2h, how far D_h itself may be trusted. Only the last test sees a product that is linear and symmetric but
lacks a term. The largest of the first three is the noise of A: curvatures below a few times it mean nothing.
Reference: Nocedal and Wright, Numerical Optimization (2006), section 8.1, for the step h = eps^(1/3).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ot_newton.block_krylov import gaussian
from ot_newton.operators import LinearOperator, aslinearoperator, require_like, require_symmetric


@dataclass(frozen=True)
class OperatorCheck:
    """Measured defects of an operator, each relative to its scale `anorm`; `problems` says in words which are too big.

    `gradient_error` is None where no gradient was given; it is relative to ‖Av‖ and `difference_error` is how much of
    it the finite difference itself may explain.
    """

    anorm: float
    asymmetry: float
    nonlinearity: float
    irreproducibility: float
    gradient_error: float | None
    difference_error: float | None
    tolerance: float
    problems: tuple[str, ...]

    @property
    def noise(self) -> float:
        """The largest relative defect of the products."""
        return max(self.asymmetry, self.nonlinearity, self.irreproducibility)

    @property
    def success(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def check_operator(
    A: Any,
    *,
    grad_fn: Callable[[Tensor], Tensor] | None = None,
    x: Tensor | None = None,
    rtol: float | None = None,
    strict: bool = True,
    rng: torch.Generator | None = None,
) -> OperatorCheck:
    """Check a square operator or matrix A (n, n) at the cost of four products, and four gradients with `grad_fn`.

    grad_fn, x: a gradient (n,) ↦ (n,) and the point (n,) at which A claims to be its derivative. rtol: the relative
    accuracy A claims; 100 eps by default, so exact products of any dtype pass and inexact ones must say how
    inexact they are. strict: raise on the first failure instead of returning it.

    Raises `ValueError` with the measured numbers if A is not linear, symmetric, repeatable or finite, or not the
    derivative of `grad_fn`; also if grad_fn comes without x or A is not square.

    >>> check_operator(torch.eye(3)).asymmetry
    0.0
    >>> check_operator(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), strict=False).success
    False
    """
    A = aslinearoperator(A)
    if A.shape[0] != A.shape[1]:
        require_symmetric(A)
    if (grad_fn is None) != (x is None):
        raise ValueError("expected grad_fn and x together, got one of them")
    rng = torch.Generator().manual_seed(0xC0FFEE_0DD) if rng is None else rng
    eps = torch.finfo(A.dtype).eps
    tolerance = 100 * eps if rtol is None else rtol

    probes = gaussian(A.shape[0], 2, rng).to(A.device)
    u, v = (probes / torch.linalg.vector_norm(probes, dim=0)).to(A.dtype).unbind(1)
    Av = A.matvec(v).detach().double()
    Au, again = A.matmat(torch.stack([u, v], 1)).detach().double().unbind(1)
    both = A.matvec(u + v).detach().double()
    u, v = u.double(), v.double()
    anorm = max(_norm(Au), _norm(Av))
    scale = anorm or 1.0
    asymmetry = abs(float(u @ Av - v @ Au)) / scale
    nonlinearity = _norm(both - Au - Av) / scale
    irreproducibility = _norm(Av - again) / scale

    problems = [
        f"expected {what} within {tolerance:.1e} of its scale, got {name} {value:.3g}"
        for what, name, value in (
            ("a repeatable operator", "‖Av − Av again‖ / ‖A‖ =", irreproducibility),
            ("a linear operator", "‖A(u + v) − Au − Av‖ / ‖A‖ =", nonlinearity),
            ("a symmetric operator", "|uᵀAv − vᵀAu| / ‖A‖ =", asymmetry),
        )
        if not value <= tolerance
    ]
    gradient_error = difference_error = None
    if grad_fn is not None and x is not None:
        gradient_error, difference_error = _gradient_errors(A, grad_fn, x, v, Av)
        allowed = max(tolerance, eps ** (1 / 3)) + 4 * difference_error
        if not gradient_error <= allowed:
            problems.append(
                f"expected the derivative of grad_fn within {allowed:.1e}, got ‖Av − differences‖ / ‖Av‖ = "
                f"{gradient_error:.3g}"
            )
    if strict and problems:
        raise ValueError("; ".join(problems))
    return OperatorCheck(
        anorm,
        asymmetry,
        nonlinearity,
        irreproducibility,
        gradient_error,
        difference_error,
        tolerance,
        tuple(problems),
    )


def _gradient_errors(
    A: LinearOperator, grad_fn: Callable[[Tensor], Tensor], x: Tensor, v: Tensor, Av: Tensor
) -> tuple[float, float]:
    """‖Av − D_h‖ and ‖D_h − D_2h‖, over the larger of ‖Av‖ and ‖D_h‖."""
    require_like(x, A, "x")
    if x.shape != (A.shape[0],):
        raise ValueError(f"expected x of shape {(A.shape[0],)}, got {tuple(x.shape)}")
    x = x.detach()
    h = torch.finfo(A.dtype).eps ** (1 / 3) * max(1.0, _norm(x))

    def difference(step: float) -> Tensor:
        forward, backward = x + (step * v).to(x), x - (step * v).to(x)
        length = (forward - backward).double() @ v  # the step as rounded
        return (grad_fn(forward).detach().double() - grad_fn(backward).detach().double()) / length

    near, far = difference(h), difference(2 * h)
    scale = max(_norm(Av), _norm(near)) or 1.0
    return _norm(Av - near) / scale, _norm(near - far) / scale


def _norm(v: Tensor) -> float:
    return float(torch.linalg.vector_norm(v, dtype=torch.float64))
