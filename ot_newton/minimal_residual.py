"""Preconditioned MINRES from zero for symmetric A, definite or not, singular or not.

Lanczos  A y_t = β_t u_{t-1} + α_t u_t + β_{t+1} u_{t+1},  y = M u,  uᵀy = 1,  and one reflection a step on the
tridiagonal matrix; x_t minimises ‖b − A x‖ in the norm of M. The residual r_{t-1} has curvature −φ²_{t-1} c_{t-1} γ_t
and ‖A r_{t-1}‖ = φ_{t-1} √(γ_t² + δ²_{t+1}), both known before the step: a nonpositive curvature costs nothing to see,
and r_{t-1} in the null space of A means that x_{t-1} is a least-squares solution. Rounding hides that point: near it
‖A r‖ dips to about √eps ‖A‖ ‖r‖, then x explodes while ‖r‖ stands still. So the x of the deepest dip is kept; it is the
answer once x has moved by ‖r‖² / ‖A r‖, far enough to have removed an r with that curvature, and has not.
References: Paige and Saunders, Solution of sparse indefinite systems of linear equations, SIAM J. Numer. Anal. 12
(1975); Liu and Roosta, MINRES: from negative curvature detection to monotonicity properties, SIAM J. Optim. 32 (2022).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ot_newton.conjugate_gradient import KrylovRun, Map, dot
from ot_newton.status import Status


def minimal_residual(
    apply: Map,
    b: Tensor,
    *,
    target: float,
    maxiter: int,
    precondition: Map | None,
    stop_on_npc: bool,
    eps: float,
    callback: Callable[[Tensor], object] | None,
) -> KrylovRun:
    """Solve A x = b (n,) from x = 0 until ‖b − A x‖ ≤ target or x is a least-squares solution.

    One synchronisation (two with a preconditioner) and exactly one product with A per iteration.
    """
    x, r, r_norm = torch.zeros_like(b), b, float(torch.linalg.vector_norm(b, dtype=torch.float64))
    y = b if precondition is None else precondition(b)
    beta = _root(dot(b, y).item())
    u, y, u_old, z = b / beta, y / beta, torch.zeros_like(b), y  # z = M r
    w = w_old = torch.zeros_like(b)
    phi, cosine, sine, delta, epsilon, beta = beta, -1.0, 0.0, 0.0, 0.0, 0.0
    anorm, npc, npc_curvature = 0.0, None, None
    dip: Dip | None = None

    def finish(status: Status, n_iter: int) -> KrylovRun:
        found = (x, r, r_norm) if dip is None or status.success else (dip.x, dip.r, dip.r_norm)
        x_norm = float(torch.linalg.vector_norm(found[0], dtype=torch.float64))
        return KrylovRun(*found, n_iter, status, anorm, x_norm, npc, npc_curvature)

    for n_iter in range(1, maxiter + 1):
        q = apply(y)
        alpha_t = dot(y, q)
        q = q - alpha_t * u - beta * u_old
        y_next = q if precondition is None else precondition(q)
        alpha, beta_squared = torch.stack([alpha_t, dot(q, y_next)]).tolist()
        if not (math.isfinite(alpha) and math.isfinite(beta_squared)):
            return finish(Status.NONFINITE, n_iter)
        beta_next = _root(beta_squared)
        anorm = max(anorm, math.hypot(alpha, beta, beta_next))

        delta_now = cosine * delta + sine * alpha
        gamma = sine * delta - cosine * alpha
        epsilon_next, delta_next = sine * beta_next, -cosine * beta_next
        ratio = math.hypot(gamma, delta_next)  # ‖A r‖ / ‖r‖ before this step
        if ratio <= math.sqrt(eps) * anorm and (dip is None or ratio < dip.ratio):
            dip = Dip(x, r, r_norm, phi, ratio)
        pivot = math.hypot(gamma, beta_next)
        if ratio <= 64 * eps * anorm or pivot <= eps * anorm or (dip is not None and dip.explains(x, phi)):
            return finish(Status.INCONSISTENT, n_iter)
        if npc is None and cosine * gamma >= -eps * anorm:
            npc, npc_curvature = z / torch.linalg.vector_norm(z), -cosine * gamma
            if stop_on_npc:
                return finish(Status.NEGATIVE_CURVATURE, n_iter)

        cosine, sine = gamma / pivot, beta_next / pivot
        w, w_old = (y - delta_now * w - epsilon * w_old) / pivot, w
        x = x + cosine * phi * w
        phi_next = sine * phi
        if beta_next > 0:
            u, u_old, y = q / beta_next, u, y_next / beta_next
        else:
            u, u_old, y = torch.zeros_like(u), u, torch.zeros_like(y)
        r = sine * sine * r - phi_next * cosine * u
        z = r if precondition is None else sine * sine * z - phi_next * cosine * y
        phi = phi_next
        if dip is not None and phi <= 0.5 * dip.phi:
            dip = None
        r_norm = phi if precondition is None else float(torch.linalg.vector_norm(r, dtype=torch.float64))
        delta, epsilon, beta = delta_next, epsilon_next, beta_next
        if callback is not None:
            callback(x)
        if r_norm <= target:
            return finish(Status.CONVERGED, n_iter)
    return finish(Status.MAX_ITER, maxiter)


@dataclass(frozen=True)
class Dip:
    """The iterate whose residual came closest to the null space: ratio = ‖A r‖ / ‖r‖, phi = ‖r‖ in the norm of M."""

    x: Tensor
    r: Tensor
    r_norm: float
    phi: float
    ratio: float

    def explains(self, x: Tensor, phi: float) -> bool:
        """Whether x has moved so far since the dip, to so little effect, that the residual here cannot be removed."""
        moved = float(torch.linalg.vector_norm(x - self.x, dtype=torch.float64))
        return phi > 0.9 * self.phi and moved * self.ratio >= self.phi


def _root(squared: float) -> float:
    if squared < 0:
        raise ValueError(f"expected a positive definite preconditioner, got rᵀM r = {squared:.3g}")
    return math.sqrt(squared)
