"""Exact Hessian of `L(θ) = OT_eps(z(θ), y)` at a plan, from products with the Jacobian J of z and no pair stored.

With g and T the gradient and the Hessian of the transport value in the points, `∇²L = JᵀTJ + Σ_i ∇²<g_i, z_i>`.
For the matrix let parameter k move the sources by `J_k` (n, d), let `ȳ_i` and `Σ_i` be mean and covariance of the
target that source i is sent to, and S the Schur complement of `response`. Eliminating the potentials leaves

    B[:, k] = 2s (Pᵀ(ȳ·J_k) - Σ_d y_d PᵀJ_kd),
    JᵀTJ = Jᵀ [r (2s I - (4s²/eps) Σ)] J  +  BᵀS⁺B/eps,

the formula of `linear_model` for `J_(kl) = X_k e_l`. All columns of B share one block solve; unfinished, it leaves the
matrix below the truth by the square of its residual.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ot_newton.hessian import PlanHessian
from ot_newton.linear_model import conditional_moments
from ot_newton.linearised import Linearised
from ot_newton.operators import LinearOperator
from ot_newton.pairs import Counted, Passes
from ot_newton.plan import Plan
from ot_newton.response import respond_schur
from ot_newton.schur import SchurSpace

CHUNK = 64


@dataclass(frozen=True, eq=False)
class PulledBackMatrix(Counted):
    """∇²L as a matrix, with its evidence.

    Attributes:
        matrix: (p, p), symmetric.
        dphi, dpsi: (n, p) and (m, p), response of f/eps and g/eps to each parameter.
        residual: largest relative residual of the block solve.
        error: estimate of the relative error of the matrix in the spectral norm.
        passes, n_passes: passes that it took, by kind and in all.
        modes: slow modes for the next solve.
    """

    matrix: Tensor
    dphi: Tensor
    dpsi: Tensor
    residual: float
    error: float
    passes: Passes
    modes: Tensor


def pulled_back_matrix(plan: Plan, model: Linearised, *, rtol: float = 1e-6, max_iter: int = 60) -> PulledBackMatrix:
    """∇²L for the marginals of a plan from z to the targets; `model` is z around its parameters (p,).

    `rtol` bounds the relative residual of every column of the block solve.
    """
    pairs, cost, z = plan.pairs, plan.cost, plan.x
    before, s2 = pairs.passes, 2 * pairs.scale
    x, y, d = pairs.source.points, pairs.target.points, z.shape[1]
    mean, covariance = conditional_moments(plan)
    local = s2 * torch.eye(d, dtype=z.dtype, device=z.device) - (s2**2 / pairs.eps) * covariance
    local = plan.row_sums[:, None, None] * local  # (n, d, d)
    identity = torch.eye(model.size, dtype=z.dtype, device=z.device)
    explicit, rho_r, B = [], [], []
    for V in identity.split(CHUNK, 1):
        moved = model.push(V)  # (n, d, k)
        A = cost.push(z, moved)
        bent, curvature = cost.pull(z, local @ A), cost.curvature(z, plan.embedded_grad(), moved)
        explicit.append(model.pull(bent if curvature is None else bent + curvature))
        rho_r.append(s2 * torch.einsum("nd,ndk->nk", x - mean, A))
        carried = torch.cat([torch.einsum("nd,ndk->nk", mean, A), A.flatten(1)], 1)  # (n, k + dk)
        sent, PA = plan.adjoint(carried).split([V.shape[1], d * V.shape[1]], 1)
        B.append(s2 * (sent - torch.einsum("md,mdk->mk", y, PA.unflatten(1, A.shape[1:]))))
    explicit, rho_r, B = torch.cat(explicit, 1), torch.cat(rho_r, 1), torch.cat(B, 1)

    space = SchurSpace(pairs, plan.phi, plan.psi, plan.row_sums, plan.col_sums)
    answer = respond_schur(space, rho_r / pairs.eps, B / pairs.eps, rtol=rtol, modes=plan.modes, max_iter=max_iter)
    implicit, bend = B.T @ answer.dpsi, model.bend(plan.grad(), identity)
    H = explicit + implicit + bend
    H, residual = (H + H.T) / 2, float(answer.residual.max())
    whole, *parts = (float(torch.linalg.matrix_norm(M)) for M in (H, explicit, implicit, bend))
    error = (residual**2 * parts[1] + 30 * plan.error * sum(parts)) / whole if whole else 0.0
    return PulledBackMatrix(H, answer.dphi, answer.dpsi, residual, error, pairs.passes - before, answer.modes)


class PulledBackHessian(LinearOperator):
    """∇²L as an operator (p, p) for the marginals of a plan from z to the targets; k columns share all passes.

    Args:
        plan: from z to the targets.
        model: z around its parameters (p,).
        rtol: relative residual to which the response of the potentials to each direction is solved.
        spent: called after each product with the passes that it took and the largest residual of its response.

    >>> from ot_newton.linearised import Vectorised
    >>> from ot_newton.sinkhorn import solve
    >>> y = torch.tensor([[0.5], [2.0]]).double()
    >>> shift = Vectorised(lambda w: torch.tensor([[0.0], [3.0]]).double() + w, torch.ones(1).double())
    >>> round(float(PulledBackHessian(solve(shift.image, y, eps=1.0), shift) @ torch.ones(1).double()), 6)
    2.0
    """

    symmetric = True

    def __init__(
        self,
        plan: Plan,
        model: Linearised,
        *,
        rtol: float | None = None,
        spent: Callable[[Passes, float], None] | None = None,
    ) -> None:
        super().__init__((model.size, model.size), plan.x.dtype, plan.x.device)
        self.model, self.slope, self.spent = model, plan.grad(), spent
        self.transport: PlanHessian = plan.hessian(rtol=rtol)

    def _matmat(self, V: Tensor) -> Tensor:
        if V.shape[1] == 0:
            return torch.zeros_like(V)
        T, pairs = self.transport, self.transport.plan.pairs
        before = pairs.passes
        A = self.model.push(V)  # (n, d, k)
        TA = T.matmat(A.flatten(0, 1)).reshape(A.shape)
        answer = T.last_response
        assert answer is not None
        T.plan = T.plan.with_modes(answer.modes)  # slow modes are the same in all directions
        if self.spent is not None:
            self.spent(pairs.passes - before, float(answer.residual.max()))
        return self.model.pull(TA) + self.model.bend(self.slope, V)
