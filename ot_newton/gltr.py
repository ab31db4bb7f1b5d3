"""The trust-region subproblem min gᵀs + ½ sᵀHs, ‖s‖ ≤ Δ, for indefinite H: to its global minimiser, hard case included.

The Krylov space of g grows until ‖(H + μ) s + g‖ is small; on it the subproblem is tridiagonal and solved exactly. If
that space has missed an eigenvalue below −μ (the hard case), the eigenvector is taken in and the space grown once more.
Reference: Gould, Lucidi, Roma and Toint, Solving the trust-region subproblem using the Lanczos method, SIAM J. Optim. 9
(1999).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor

from ot_newton.krylov_model import local_model
from ot_newton.operators import LinearOperator, aslinearoperator, require_like, require_symmetric
from ot_newton.secular import ball_minimiser, cubic_minimiser, decrease
from ot_newton.status import Status


@dataclass(frozen=True)
class RegularStep:
    """A minimiser s (n,) of a quadratic that is kept short, with its evidence.

    Attributes:
        step: s.
        decrease: −(gᵀs + ½ sᵀHs).
        multiplier: μ ≥ 0 with (H + μ) s ≈ −g and, probably, H + μ ⪰ 0.
        status: CONVERGED, s is the minimiser of the quadratic itself; BOUNDARY, μ > 0 keeps it short; NONFINITE.
        lambda_bound: least Rayleigh quotient of H met, an upper bound of its smallest eigenvalue.
        n_matvec: products with H.
    """

    step: Tensor
    decrease: float
    multiplier: float
    status: Status
    lambda_bound: float
    n_matvec: int


def gltr(
    A: Any, g: Tensor, radius: float, *, rtol: float = 1e-6, maxiter: int | None = None, hard_case: bool = True
) -> RegularStep:
    """Minimise gᵀs + ½ sᵀA s over ‖s‖ ≤ radius, for a symmetric operator or matrix A (n, n) and g (n,).

    rtol: of ‖(A + μ) s + g‖ to ‖g‖. maxiter: largest Krylov space, 300 or fewer by default. hard_case: compute
    the smallest eigenvalue too, by Lanczos from a random start; if False, s may minimise over the Krylov space only.

    Raises `ValueError` for shapes, dtypes or devices that do not fit, for an operator known to be unsymmetric, and for
    a radius that is not positive and finite.

    >>> found = gltr(torch.diag(torch.tensor([-1.0, 1.0])), torch.tensor([0.0, 2.0]), 2.0)
    >>> found.step.abs().round(decimals=4), round(found.multiplier, 4)
    (tensor([1.7321, 1.0000]), 1.0)
    """
    if not (radius > 0 and isfinite(radius)):
        raise ValueError(f"expected a finite radius > 0, got {radius}")
    return _solve(A, g, lambda values, c: ball_minimiser(values, c, radius), rtol, maxiter, hard_case)


def cubic_step(
    A: Any, g: Tensor, sigma: float, *, rtol: float = 1e-6, maxiter: int | None = None, hard_case: bool = True
) -> RegularStep:
    """Minimise gᵀs + ½ sᵀA s + σ/3 ‖s‖³ for σ > 0; the multiplier is σ ‖s‖. Otherwise as `gltr`.

    >>> cubic_step(torch.diag(torch.tensor([0.0, 1.0])), torch.tensor([-4.0, 0.0]), 1.0).step.round(decimals=4)
    tensor([2., 0.])
    """
    if not (sigma > 0 and isfinite(sigma)):
        raise ValueError(f"expected a finite sigma > 0, got {sigma}")
    return _solve(A, g, lambda values, c: cubic_minimiser(values, c, sigma), rtol, maxiter, hard_case)


def _solve(
    A: Any,
    g: Tensor,
    rule: Callable[[Tensor, Tensor], tuple[Tensor, float]],
    rtol: float,
    maxiter: int | None,
    hard_case: bool,
) -> RegularStep:
    H: LinearOperator = aslinearoperator(A)
    check_system(H, g, rtol, maxiter)
    before = H.n_matvec
    g = g.detach()
    model = local_model(H, g, capacity=maxiter)
    y, mu = model.solve(rule, rtol * float(torch.linalg.vector_norm(g, dtype=torch.float64)), hard_case=hard_case)
    if not model.finite:
        return RegularStep(torch.zeros_like(g), 0.0, nan, Status.NONFINITE, nan, H.n_matvec - before)
    status = Status.BOUNDARY if mu > 0 else Status.CONVERGED
    promised = decrease(model.values, model.coefficients, y)
    return RegularStep(model.lift(y), promised, mu, status, model.lowest, H.n_matvec - before)


def check_system(H: LinearOperator, g: Any, rtol: float, maxiter: int | None) -> None:
    """Raise `ValueError` or `TypeError` unless H, g and the tolerances are what they should be."""
    require_symmetric(H)
    require_like(g, H, "g")
    if g.shape != (H.shape[0],):
        raise ValueError(f"expected g of shape {(H.shape[0],)}, got {tuple(g.shape)}")
    if not rtol > 0:
        raise ValueError(f"expected rtol > 0, got {rtol}")
    if maxiter is not None and maxiter < 1:
        raise ValueError(f"expected maxiter ≥ 1, got {maxiter}")
