"""Preconditioned conjugate gradients from zero, with a trust radius and an exit on nonpositive curvature.

Minimises ½ xᵀA x − bᵀx over growing Krylov spaces:  α = rᵀz / pᵀAp,  x += α p,  r −= α Ap,  z = M r,  p = z + β p.
Reference: Steihaug, The conjugate gradient method and trust regions in large scale optimization, SIAM J. Numer. Anal.
20 (1983); the norms ‖·‖ of M⁻¹ by the recurrences of Conn, Gould and Toint, Trust-Region Methods (2000), section 7.5.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ot_newton.status import Status

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class KrylovRun:
    """What one run from zero found: x, its residual, and the evidence."""

    x: Tensor
    residual: Tensor
    residual_norm: float
    n_iter: int
    status: Status
    anorm: float
    x_norm: float
    npc_direction: Tensor | None = None
    npc_curvature: float | None = None


def dot(x: Tensor, y: Tensor) -> Tensor:
    """xᵀy accumulated in float64, a tensor without dimensions: float32 vectors neither overflow nor underflow."""
    return torch.dot(x.double(), y.double())


def conjugate_gradient(
    apply: Map,
    b: Tensor,
    *,
    target: float,
    maxiter: int,
    precondition: Map | None,
    radius: float | None,
    eps: float,
    callback: Callable[[Tensor], object] | None,
) -> KrylovRun:
    """Solve A x = b (n,) from x = 0 until ‖b − A x‖ ≤ target.

    All decisions of one iteration read one transfer of six scalars, made after the next residual is queued: one
    synchronisation and exactly one product with A per iteration.
    """
    x, r = torch.zeros_like(b), b
    z = r if precondition is None else precondition(r)
    p, rz = z, dot(r, z)
    rz_now, r_norm, x_norm = rz.item(), float(torch.linalg.vector_norm(b, dtype=torch.float64)), 0.0
    _require_positive(rz_now)
    anorm, x_largest = 0.0, 0.0
    xx, xp, pp = 0.0, 0.0, rz_now  # ‖x‖², xᵀp, ‖p‖² in the norm of M⁻¹

    def finish(status: Status, n_iter: int, npc: bool = False, curvature: float | None = None) -> KrylovRun:
        direction = torch.where(dot(b, p) < 0, -p, p) if npc else None
        return KrylovRun(x, r, r_norm, n_iter, status, anorm, x_largest, direction, curvature)

    for n_iter in range(1, maxiter + 1):
        Ap = apply(p)
        pAp = dot(p, Ap)
        alpha = rz / pAp
        x_new, r_new = x + alpha * p, r - alpha * Ap
        z_new = r_new if precondition is None else precondition(r_new)
        rz_new, rr_new = dot(r_new, z_new), dot(r_new, r_new)
        scalars = torch.stack([pAp, dot(p, p), dot(Ap, Ap), rz_new, rr_new, dot(x_new, x_new)]).tolist()
        curvature, p_squared, Ap_squared, rz_next, rr_next, xx_next = scalars
        if not (math.isfinite(curvature) and math.isfinite(Ap_squared)):
            return finish(Status.NONFINITE, n_iter)
        anorm = max(anorm, math.sqrt(Ap_squared / p_squared))
        if curvature <= eps * p_squared * anorm:
            quotient = curvature / p_squared
            if radius is not None:
                step = to_boundary(xx, xp, pp, radius)
                x, r = x + step * p, r - step * Ap
                r_norm = float(torch.linalg.vector_norm(r, dtype=torch.float64))
            return finish(Status.NEGATIVE_CURVATURE, n_iter, npc=True, curvature=quotient)
        step = rz_now / curvature
        xx_new = xx + 2 * step * xp + step * step * pp
        if radius is not None and xx_new >= radius * radius:
            step = to_boundary(xx, xp, pp, radius)
            x, r = x + step * p, r - step * Ap
            r_norm = float(torch.linalg.vector_norm(r, dtype=torch.float64))
            return finish(Status.BOUNDARY, n_iter)
        if not (math.isfinite(rz_next) and math.isfinite(rr_next) and math.isfinite(xx_next)):
            return finish(Status.NONFINITE, n_iter)
        x, r, r_norm, x_norm = x_new, r_new, math.sqrt(rr_next), math.sqrt(xx_next)
        x_largest = max(x_largest, x_norm)
        if callback is not None:
            callback(x)
        if r_norm <= target:
            return finish(Status.CONVERGED, n_iter)
        _require_positive(rz_next)
        beta = rz_next / rz_now
        xx, xp, pp = xx_new, beta * (xp + step * pp), rz_next + beta * beta * pp
        p, rz, rz_now = z_new + beta * p, rz_new, rz_next
    return finish(Status.MAX_ITER, maxiter)


def to_boundary(xx: float, xp: float, pp: float, radius: float) -> float:
    """The nonnegative τ with ‖x + τ p‖ = radius, from ‖x‖², xᵀp, ‖p‖², without cancellation."""
    inside = max(radius * radius - xx, 0.0)
    root = math.sqrt(xp * xp + pp * inside)
    return inside / (xp + root) if xp > 0 else (root - xp) / pp


def _require_positive(rz: float) -> None:
    if rz <= 0:
        raise ValueError(f"expected a positive definite preconditioner, got rᵀM r = {rz:.3g}")
