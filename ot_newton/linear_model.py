"""Exact Hessian of `L(W) = OT_eps(X W, y)` for a linear model, from transported moments and one block solve.

In the directions `E_kl` of W (p, q) the sources move by `X_k e_l`. Let `ȳ_i` and `Σ_i` be mean and covariance of the
target that source i is sent to, and S the Schur complement of `response`. Eliminating the potentials leaves

    B[:, kl] = 2s (Pᵀ(X_k ȳ_l) - (PᵀX_k) y_l),
    H = Σ_i r_i X_i X_iᵀ ⊗ (2s I - (4s²/eps) Σ_i)  +  BᵀS⁺B/eps.

The last term is positive semidefinite and a Galerkin solution approaches it from below, so an unfinished solve gives a
matrix below H whose error is quadratic in the residual.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ot_newton.hessian import row_moments
from ot_newton.plan import Plan
from ot_newton.response import SchurSpace, inverse, respond_schur
from ot_newton.status import Status


@dataclass(frozen=True, eq=False)
class LinearModelHessian:
    """The (pq, pq) Hessian of a linear model at a plan, with its evidence.

    Attributes:
        matrix: (pq, pq), row-major in W (p, q), symmetric.
        dphi, dpsi: (n, pq) and (m, pq), response of f/eps and g/eps to each entry of W.
        residual: largest relative residual of the block solve.
        error: estimate of the relative error of the matrix in the spectral norm.
        status: of the block solve.
        n_passes: passes that the matrix took.
        modes: slow modes for the next solve.
    """

    matrix: Tensor
    dphi: Tensor
    dpsi: Tensor
    residual: float
    error: float
    status: Status
    n_passes: int
    modes: Tensor


def linear_model_grad(plan: Plan, X: Tensor) -> Tensor:
    """`∇L = Xᵀ ∇_x OT`, (p, q), for a plan from X W to y; one pass, shared with the Hessian."""
    return X.T @ plan.embedded_grad()


def linear_model_hessian(
    plan: Plan, X: Tensor, *, rtol: float = 1e-6, modes: Tensor | None = None, max_iter: int = 60
) -> LinearModelHessian:
    """The exact Hessian for the marginals of a plan from X W to y, X (n, p), under "sqeuclidean".

    `rtol` bounds the relative residual of every column of the block solve.
    """
    pairs, r, eps, s2 = plan.pairs, plan.row_sums, plan.eps, 2 * plan.pairs.scale
    before = pairs.passes.total
    n, p = X.shape
    y, q = pairs.target.points, pairs.target.points.shape[1]
    mean, covariance = conditional_moments(plan)
    moved = plan.adjoint(torch.cat([X, (X[:, :, None] * mean[:, None, :]).reshape(n, p * q)], 1))
    B = s2 * (moved[:, p:] - (moved[:, :p, None] * y[:, None, :]).reshape(-1, p * q))
    rho_r = s2 * (X[:, :, None] * (pairs.source.points - mean)[:, None, :]).reshape(n, p * q)
    space = SchurSpace(pairs, plan.phi, plan.psi, r, plan.col_sums)
    modes = plan.modes if modes is None else modes
    answer = respond_schur(space, rho_r / eps, B / eps, rtol=rtol, modes=modes, max_iter=max_iter)
    local = s2 * torch.eye(q, dtype=X.dtype, device=X.device) - (s2**2 / eps) * covariance
    explicit = torch.einsum("ni,njl,nk->ijkl", r[:, None] * X, local, X).reshape(p * q, p * q)
    implicit = B.T @ answer.dpsi
    H = explicit + (implicit + implicit.T) / 2
    residual = float(answer.residual.max())
    size = torch.linalg.matrix_norm(H, 2)
    error = float(residual**2 * torch.linalg.matrix_norm(implicit, 2) / size) if float(size) > 0 else 0.0
    return LinearModelHessian(
        H, answer.dphi, answer.dpsi, residual, error, answer.status, pairs.passes.total - before, answer.modes
    )


def conditional_moments(plan: Plan) -> tuple[Tensor, Tensor]:
    """Mean (n, q) and covariance (n, q, q) of the centred target that a source is sent to; 0 without mass."""
    inverse_r = inverse(plan.row_sums)
    mean = inverse_r[:, None] * plan.Py
    return mean, inverse_r[:, None, None] * row_moments(plan) - mean[:, :, None] * mean[:, None, :]
