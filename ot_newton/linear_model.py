"""Exact Hessian of `L(W) = OT_eps(X W, y)` for a linear model, from transported moments and one block solve.

In the directions `E_kl` of W (p, q) the sources move by `X_k e_l`. Let `ȳ_i` and `Σ_i` be mean and covariance of the
target that source i is sent to, and S the Schur complement of `response`. Eliminating the potentials leaves

    B[:, kl] = 2s (Pᵀ(X_k ȳ_l) - (PᵀX_k) y_l),
    H = Σ_i r_i X_i X_iᵀ ⊗ (2s I - (4s²/eps) Σ_i)  +  BᵀS⁺B/eps.

The last term is positive semidefinite and a Galerkin solution approaches it from below, so an unfinished solve gives a
matrix below H whose error is quadratic in the residual; `galerkin` brackets H by it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ot_newton.galerkin import Bracket, GalerkinHessian, Move
from ot_newton.kernels.precision import full_precision
from ot_newton.marginal_shift import Moments, shift
from ot_newton.pairs import Counted, Pairs, Passes
from ot_newton.plan import Plan
from ot_newton.schur import SchurSpace
from ot_newton.status import Status

MODES = 64


@dataclass(frozen=True, eq=False)
class LinearModelHessian(Counted):
    """The (pq, pq) Hessian of a linear model at a plan, with its evidence.

    Attributes:
        known: the matrix (pq, pq), row-major in W (p, q), with its bracket and an estimate of its error.
        dphi, dpsi: (n, pq) and (m, pq), response of f/eps and g/eps to each entry of W.
        residual: largest relative residual of the block solve.
        status: of the block solve.
        passes, n_passes: passes that the matrix took, by kind and in all.
        modes: slow modes for the next solve.
    """

    known: Bracket
    dphi: Tensor
    dpsi: Tensor
    residual: float
    status: Status
    passes: Passes
    modes: Tensor

    @property
    def matrix(self) -> Tensor:
        """(pq, pq), symmetric."""
        return self.known.matrix

    @property
    def error(self) -> float:
        """Estimate of the relative error of the matrix in the spectral norm."""
        return self.known.error


@full_precision
def linear_model_grad(plan: Plan, X: Tensor) -> Tensor:
    """`∇L = Xᵀ ∇_x OT`, (p, q), for a plan from X W to y; one pass, shared with the Hessian."""
    return X.T @ plan.embedded_grad()


@full_precision
def linear_model_hessian(
    plan: Plan, X: Tensor, *, rtol: float = 1e-6, modes: Tensor | None = None, max_iter: int = 60
) -> LinearModelHessian:
    """The exact Hessian for the marginals of a plan from X W to y, X (n, p), under "sqeuclidean", with its bracket.

    `rtol` bounds the relative residual of every column of the block solve, which ends after `max_iter` steps of two
    passes; stopped early it still gives a bracket.
    """
    pairs, r, c = plan.pairs, plan.row_sums, plan.col_sums
    before = pairs.passes
    mean, covariance = conditional_moments(plan)
    missing = torch.where(r > 0, pairs.source.weights / r - 1, torch.zeros_like(r))  # (n,)
    columns = torch.cat([carried(X, mean), missing[:, None]], 1)
    moved = c[:, None] * pairs.col_means(plan.phi, columns, plan.psi)
    at = Moments(plan.phi, plan.psi, r, c, mean, covariance, moved[:, : X.shape[1]])
    move = moves(pairs, X, at, moved[:, X.shape[1] : -1])
    H = GalerkinHessian(move, SchurSpace(pairs, plan.phi, plan.psi, r, c), pairs.target.weights - c - moved[:, -1])
    status = H.solve(plan.modes if modes is None else modes, lambda now: now.worst <= rtol, max_iter)
    dphi, dpsi = H.responses()
    known = H.bracket(lambda *x: shift(pairs, X, at, dpsi, move.rho_r - dphi, *x))
    passes, modes = pairs.passes - before, H.space.slow_modes(MODES)
    return LinearModelHessian(known, dphi, dpsi, H.worst, status, passes, modes)


def carried(X: Tensor, mean: Tensor) -> Tensor:
    """Columns `[X, X⊗ȳ]` (n, p + pq) whose transport `moves` needs."""
    return torch.cat([X, (X[:, :, None] * mean[:, None, :]).flatten(1)], 1)


def moves(pairs: Pairs, X: Tensor, at: Moments, sent: Tensor) -> Move:
    """What the entries of W do at fixed potentials, given `sent = Pᵀ(X⊗ȳ)`, (m, pq)."""
    s2, y = 2 * pairs.scale, pairs.target.points
    weighted, tau = at.r[:, None] * X, s2 / pairs.eps
    identity, wanted = torch.eye(y.shape[1], dtype=X.dtype, device=X.device), pairs.source.weights[:, None] * X
    held, ceiling = (s2 * torch.kron(X.T @ t, identity) for t in (weighted, wanted))
    spread = torch.einsum("ni,njl,nk->ijkl", weighted, at.covariance, X).reshape(held.shape)
    rho_r = tau * (X[:, :, None] * (pairs.source.points - at.mean)[:, None, :]).flatten(1)
    rhs = tau * (sent - (at.PX[:, :, None] * y[:, None, :]).flatten(1))
    return Move(held - s2 * tau * spread, ceiling, rho_r, rhs)


def conditional_moments(plan: Plan) -> tuple[Tensor, Tensor]:
    """Mean (n, q) and covariance (n, q, q) of the centred target that a source is sent to; 0 without mass. One pass."""
    y = plan.pairs.target.points
    q = y.shape[1]
    i, j = torch.triu_indices(q, q, device=y.device)
    columns = torch.cat([y, y[:, i] * y[:, j]], 1)
    mean, upper = plan.pairs.row_means(plan.psi, columns, plan.phi).split([q, len(i)], 1)
    second = upper.new_empty(len(upper), q, q)
    second[:, i, j], second[:, j, i] = upper, upper
    held = (plan.row_sums > 0).to(mean)
    covariance = second - mean[:, :, None] * mean[:, None, :]
    return held[:, None] * mean, held[:, None, None] * covariance
