"""Hessian of the transport value in the points, as an operator; no pair is ever stored.

For directions A of x and B of y the cost moves by `2s N`, `N_ij = (x_i - y_j)·(A_i - B_j)`, the potentials answer by
(dphi, dpsi) (see `response`), and the plan changes by `dP = P∘(dphi_i + dpsi_j - 2s N_ij/eps)`:

    H_x(A, B) = 2s (r∘A - P B - dP y),    H_y(A, B) = 2s (c∘B - Pᵀ A - dPᵀ x).

The part of dP without the potentials is indefinite, the part with them positive semidefinite: a negative eigenvalue is
a saddle of the loss. Every term is a transport application, or a Hadamard-weighted one (FlashSinkhorn,
arXiv:2602.03067, section 4). For A alone and few dimensions the Hadamard term is `M_i A_i` with the row moments
`M_i = Σ_j P_ij y_j y_jᵀ`, one application per plan instead of one per direction.
"""

from functools import cached_property

import torch
from torch import Tensor

from ot_newton.operators import LinearOperator
from ot_newton.plan import Plan
from ot_newton.response import Response, respond
from ot_newton.validate import check_positive

MOMENT_DIMENSIONS = 16
DEFAULT_RTOL = {torch.float64: 1e-9, torch.float32: 1e-5}


def row_moments(plan: Plan) -> Tensor:
    """`M_i = Σ_j P_ij y_j y_jᵀ`, (n, d, d), from d(d+1)/2 columns of one transport application."""
    y = plan.pairs.target.points
    i, j = torch.triu_indices(y.shape[1], y.shape[1], device=y.device)
    upper = plan.apply(y[:, i] * y[:, j])  # (n, d(d+1)/2)
    M = upper.new_empty(len(upper), y.shape[1], y.shape[1])
    M[:, i, j], M[:, j, i] = upper, upper
    return M


class PlanHessian(LinearOperator):
    """∇²_x of `OT_eps(x, y)` at a plan, a symmetric operator of shape (n·d, n·d) on row-major points.

    Args:
        plan: where the Hessian is taken; it is exact for the marginals that the plan has.
        rtol: relative residual to which the response of the potentials is solved; by default 1e-9 in float64 and 1e-5
            in float32. The last product's evidence is in `last_response`.
        method: "block" (block Krylov) or "cg" (less memory, more passes).
        damping: multiple of diag(c) added to the Schur complement. 0 is exact; other values only serve to reproduce
            published results, which they make 10 to 70 % wrong.
        max_iter: steps of the response solve.

    `matmat` with k columns shares all passes between them. Raises ValueError for an unknown method or a bad tolerance.

    >>> from ot_newton.sinkhorn import solve
    >>> x, y = torch.tensor([[0.0], [1.0], [3.0]]).double(), torch.tensor([[0.5], [2.0]]).double()
    >>> H = solve(x, y, eps=1.0).hessian()
    >>> H.shape, bool(torch.allclose(H @ torch.ones(3).double(), 2 * torch.ones(3).double() / 3))
    ((3, 3), True)
    """

    symmetric = True

    def __init__(
        self,
        plan: Plan,
        *,
        rtol: float | None = None,
        method: str = "block",
        damping: float = 0.0,
        max_iter: int = 200,
    ) -> None:
        n, d = plan.x.shape
        super().__init__((n * d, n * d), plan.x.dtype, plan.x.device)
        if method not in ("block", "cg"):
            raise ValueError(f"method: expected 'block' or 'cg', got {method!r}")
        if not damping >= 0:
            raise ValueError(f"damping: expected a number ≥ 0, got {damping!r}")
        self.plan, self.method, self.damping, self.max_iter = plan, method, damping, max_iter
        self.rtol = DEFAULT_RTOL[plan.x.dtype] if rtol is None else check_positive(rtol, "rtol")
        self.last_response: Response | None = None

    @cached_property
    def moments(self) -> Tensor:
        """Row moments of the plan, (n, d, d); one pass for every 64 columns, once."""
        return row_moments(self.plan)

    def _matmat(self, V: Tensor) -> Tensor:
        n, d = self.plan.x.shape
        k = V.shape[1]
        A = V.reshape(n, d, k)
        cost, x = self.plan.cost, self.plan.x
        out = cost.pull(x, self._embedded(cost.push(x, A)))
        bend = cost.curvature(x, self.plan.embedded_grad(), A)
        return (out if bend is None else out + bend).reshape(n * d, k)

    def _embedded(self, A: Tensor) -> Tensor:
        """H A for directions A (n, d, k) of the embedded points."""
        plan, pairs = self.plan, self.plan.pairs
        n, d, k = A.shape
        x, y, eps, s2 = pairs.source.points, pairs.target.points, pairs.eps, 2 * pairs.scale
        z = torch.einsum("nd,ndk->nk", x, A)
        moved = plan.adjoint(torch.cat([z, A.reshape(n, d * k)], 1))  # (m, k + dk)
        rho = plan.row_sums[:, None] * z - torch.einsum("nd,ndk->nk", plan.Py, A)
        kappa = moved[:, :k] - torch.einsum("md,mdk->mk", y, moved[:, k:].reshape(-1, d, k))
        answer = self._respond(rho * (s2 / eps), kappa * (s2 / eps))
        carried = plan.apply(torch.einsum("mk,md->mdk", answer.dpsi, y).reshape(-1, d * k)).reshape(n, d, k)
        local = answer.dphi - (s2 / eps) * z
        dPy = torch.einsum("nk,nd->ndk", local, plan.Py) + carried + (s2 / eps) * self._weighted(A)
        return s2 * (plan.row_sums[:, None, None] * A - dPy)

    def _respond(self, rho: Tensor, kappa: Tensor) -> Response:
        plan = self.plan
        self.last_response = respond(
            plan.pairs, plan.phi, plan.psi, plan.row_sums, plan.col_sums, rho, kappa,
            rtol=self.rtol, modes=plan.modes, method=self.method, damping=self.damping, max_iter=self.max_iter,
        )  # fmt: skip
        return self.last_response

    def _weighted(self, A: Tensor) -> Tensor:
        """`(P ∘ (A yᵀ)) y` for each column of A, (n, d, k)."""
        if A.shape[1] <= MOMENT_DIMENSIONS:
            return torch.einsum("nde,nek->ndk", self.moments, A)
        y, plan = self.plan.pairs.target.points, self.plan
        columns = [plan.pairs.hadamard_means(plan.psi, a.contiguous(), y, y, plan.phi) for a in A.unbind(2)]
        return plan.row_sums[:, None, None] * torch.stack(columns, 2)


def joint_product(plan: Plan, A: Tensor | None, B: Tensor | None, **options) -> tuple[Tensor, Tensor]:
    """`(H_x(A, B), H_y(A, B))` for a direction A (n, d) of the embedded x and B (m, d) of y; None is 0."""
    pairs, phi, psi = plan.pairs, plan.phi, plan.psi
    x, y, eps, s2 = pairs.source.points, pairs.target.points, pairs.eps, 2 * pairs.scale
    A = torch.zeros_like(x) if A is None else A
    B = torch.zeros_like(y) if B is None else B
    r, c, d = plan.row_sums[:, None], plan.col_sums[:, None], x.shape[1]
    zA, zB = (x * A).sum(1, keepdim=True), (y * B).sum(1, keepdim=True)
    PB = plan.apply(torch.cat([zB, B, zB * y], 1))
    PA = plan.adjoint(torch.cat([zA, A, zA * x], 1))
    PzB, PB, PzBy = PB[:, :1], PB[:, 1 : d + 1], PB[:, d + 1 :]
    PzA, PA, PzAx = PA[:, :1], PA[:, 1 : d + 1], PA[:, d + 1 :]
    Py, Ptx, flipped = plan.Py, plan.Ptx, pairs.swapped()
    rho = r * zA + PzB - (x * PB).sum(1, keepdim=True) - (A * Py).sum(1, keepdim=True)
    kappa = PzA + c * zB - (B * Ptx).sum(1, keepdim=True) - (y * PA).sum(1, keepdim=True)
    options.setdefault("rtol", DEFAULT_RTOL[x.dtype])
    options.setdefault("modes", plan.modes)
    answer = respond(pairs, phi, psi, plan.row_sums, plan.col_sums, rho * (s2 / eps), kappa * (s2 / eps), **options)
    # Σ_j P_ij (x_i·B_j + y_j·A_i) y_j and Σ_i P_ij (x_i·B_j + y_j·A_i) x_i, each as one Hadamard-weighted transport
    over_y = r * pairs.hadamard_means(psi, torch.cat([x, A], 1), torch.cat([B, y], 1), y, phi)
    over_x = c * flipped.hadamard_means(phi, torch.cat([B, y], 1), torch.cat([x, A], 1), x, psi)
    rate = s2 / eps
    dPy = (answer.dphi - rate * zA) * Py + plan.apply(answer.dpsi * y) - rate * (PzBy - over_y)
    dPtx = (answer.dpsi - rate * zB) * Ptx + plan.adjoint(answer.dphi * x) - rate * (PzAx - over_x)
    return s2 * (r * A - PB - dPy), s2 * (c * B - PA - dPtx)
