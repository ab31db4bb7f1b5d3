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
from ot_newton.pairs import Pairs
from ot_newton.plan import Plan
from ot_newton.response import respond_schur
from ot_newton.schur import SchurSpace, inverse
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
    pairs = plan.pairs
    before = pairs.passes.total
    mean, covariance = conditional_moments(plan)
    explicit, rho_r, B = moves(pairs, X, plan.row_sums, mean, covariance, plan.adjoint(carried(X, mean)))
    space = SchurSpace(pairs, plan.phi, plan.psi, plan.row_sums, plan.col_sums)
    modes = plan.modes if modes is None else modes
    answer = respond_schur(space, rho_r / plan.eps, B / plan.eps, rtol=rtol, modes=modes, max_iter=max_iter)
    implicit = B.T @ answer.dpsi
    H = explicit + (implicit + implicit.T) / 2
    residual = float(answer.residual.max())
    size = torch.linalg.matrix_norm(H, 2)
    error = float(residual**2 * torch.linalg.matrix_norm(implicit, 2) / size) if float(size) > 0 else 0.0
    return LinearModelHessian(
        H, answer.dphi, answer.dpsi, residual, error, answer.status, pairs.passes.total - before, answer.modes
    )


def carried(X: Tensor, mean: Tensor) -> Tensor:
    """Columns `[X, X⊗ȳ]` (n, p + pq) whose transport `moves` needs."""
    return torch.cat([X, (X[:, :, None] * mean[:, None, :]).flatten(1)], 1)


def moves(
    pairs: Pairs, X: Tensor, r: Tensor, mean: Tensor, covariance: Tensor, moved: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What the moves of W do at fixed potentials: the first term of H (pq, pq), `ρ/r` (n, pq) and B (m, pq).

    `moved` is `Pᵀ carried(X, mean)`, (m, p + pq).
    """
    s2, y, p = 2 * pairs.scale, pairs.target.points, X.shape[1]
    q = y.shape[1]
    local = s2 * torch.eye(q, dtype=X.dtype, device=X.device) - (s2**2 / pairs.eps) * covariance
    explicit = torch.einsum("ni,njl,nk->ijkl", r[:, None] * X, local, X).reshape(p * q, p * q)
    rho_r = s2 * (X[:, :, None] * (pairs.source.points - mean)[:, None, :]).flatten(1)
    return explicit, rho_r, s2 * (moved[:, p:] - (moved[:, :p, None] * y[:, None, :]).flatten(1))


def conditional_moments(plan: Plan) -> tuple[Tensor, Tensor]:
    """Mean (n, q) and covariance (n, q, q) of the centred target that a source is sent to; 0 without mass."""
    inverse_r = inverse(plan.row_sums)
    mean = inverse_r[:, None] * plan.Py
    return mean, inverse_r[:, None, None] * row_moments(plan) - mean[:, :, None] * mean[:, None, :]
