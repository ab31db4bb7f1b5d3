"""Exact Hessian of `L(W) = OT_eps(X W, y)` for a linear model, from transported moments and one block solve.

In the directions `E_kl` of W (p, q) the sources move by `X_k e_l`. With `Z = X W` centred, `PX = PᵀX` (m, p),
`PXZ = Pᵀ(X⊗Z)` (m, p, q) and the row moments `M_i = Σ_j P_ij y_j y_jᵀ`,

    ρ[:, kl] = 2s X_k (r Z_l - (P y)_l),    κ[:, kl] = 2s (PXZ[:, k, l] - PX[:, k] y_l),
    H = Σ_i (X_i X_iᵀ) ⊗ (2s r_i I - (4s²/eps) Σ_j P_ij (Z_i - y_j)(Z_i - y_j)ᵀ)  +  (ρᵀ D_r⁻¹ ρ + BᵀS⁺B)/eps,

where B and S belong to the Schur complement of `response`. The last term is positive semidefinite and a Galerkin
solution approaches it from below, so an unfinished solve gives a matrix below H whose error is quadratic in the residual.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ot_newton.hessian import row_moments
from ot_newton.plan import Plan
from ot_newton.response import respond
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
    """The exact Hessian for the marginals that the plan has; X is (n, p), the plan goes from X W to y under "sqeuclidean".

    `rtol` bounds the relative residual of every column of the block solve.
    """
    pairs, r, eps, s2 = plan.pairs, plan.row_sums, plan.eps, 2 * plan.pairs.scale
    before = pairs.passes.total
    n, p = X.shape
    Z, y = pairs.source.points, pairs.target.points  # (n, q), (m, q)
    q = Z.shape[1]
    moved = plan.adjoint(torch.cat([X, (X[:, :, None] * Z[:, None, :]).reshape(n, p * q)], 1))
    PX, PXZ = moved[:, :p], moved[:, p:].reshape(-1, p, q)
    rho = s2 * (X[:, :, None] * (r[:, None] * Z - plan.Py)[:, None, :]).reshape(n, p * q)
    kappa = s2 * (PXZ - PX[:, :, None] * y[:, None, :]).reshape(-1, p * q)
    answer = respond(
        pairs, plan.phi, plan.psi, r, plan.col_sums, rho / eps, kappa / eps,
        rtol=rtol, modes=plan.modes if modes is None else modes, max_iter=max_iter,
    )  # fmt: skip
    spread = _spread(plan)
    local = s2 * (r[:, None, None] * torch.eye(q, dtype=X.dtype, device=X.device) - (s2 / eps) * spread)
    explicit = torch.einsum("ni,njl,nk->ijkl", X, local, X).reshape(p * q, p * q)
    implicit = rho.T @ answer.dphi + kappa.T @ answer.dpsi
    H = explicit + implicit
    H = (H + H.T) / 2
    residual = float(answer.residual.max())
    size = torch.linalg.matrix_norm(H, 2)
    error = float(residual**2 * torch.linalg.matrix_norm(implicit, 2) / size) if float(size) > 0 else 0.0
    return LinearModelHessian(
        H, answer.dphi, answer.dpsi, residual, error, answer.status, pairs.passes.total - before, answer.modes
    )


def _spread(plan: Plan) -> Tensor:
    """`Σ_j P_ij (Z_i - y_j)(Z_i - y_j)ᵀ`, (n, q, q)."""
    Z, r, Py = plan.pairs.source.points, plan.row_sums, plan.Py
    cross = Z[:, :, None] * Py[:, None, :]
    return r[:, None, None] * Z[:, :, None] * Z[:, None, :] - cross - cross.transpose(1, 2) + row_moments(plan)
