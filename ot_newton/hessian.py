"""Hessian of the transport value in the points, as an operator; no pair is ever stored.

For directions A of x and B of y the cost moves by `2s N`, `N_ij = (x_i - y_j)·(A_i - B_j)`, the potentials answer by
(dphi, dpsi) (see `response`), and the plan changes by `dP = P∘(dphi_i + dpsi_j - 2s N_ij/eps)`:

    H_x(A, B) = 2s (r∘A - P B - dP y),    H_y(A, B) = 2s (c∘B - Pᵀ A - dPᵀ x).

The part of dP without the potentials is indefinite, the part with them positive semidefinite: a negative eigenvalue is
a saddle of the loss. Every term is a transport application, or a Hadamard-weighted one (FlashSinkhorn,
arXiv:2602.03067, section 4). For A alone and few dimensions the Hadamard term is `M_i A_i` with the row moments
`M_i = Σ_j P_ij y_j y_jᵀ`, one application per plan instead of one per direction.
"""

import warnings
from functools import cached_property

import torch
from torch import Tensor

from ot_newton.kernels.precision import full_precision
from ot_newton.moves import Rows, gradient_change, move, squares, symmetric, takes_along
from ot_newton.operators import LinearOperator
from ot_newton.plan import Plan
from ot_newton.response import Response, respond
from ot_newton.sinkhorn import ConvergenceWarning
from ot_newton.status import Status
from ot_newton.validate import check_integer, check_nonnegative, check_positive

MOMENT_DIMENSIONS = 16
DEFAULT_RTOL = {torch.float64: 1e-9, torch.float32: 1e-5}


def row_moments(plan: Plan) -> Tensor:
    """`M_i = Σ_j P_ij y_j y_jᵀ`, (n, d, d), from d(d+1)/2 columns of one transport application."""
    y = plan.pairs.target.points
    return symmetric(plan.apply(squares(y)), y.shape[1])


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

    `matmat` with k columns shares all passes between them. Raises TypeError for what is no plan, ValueError for
    an unknown method or a bad tolerance.

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
        if not isinstance(plan, Plan):
            raise TypeError(f"plan: expected a Plan, got {type(plan).__name__}; solve(x, y, eps) returns one")
        n, d = plan.x.shape
        super().__init__((n * d, n * d), plan.x.dtype, plan.x.device)
        if method not in ("block", "cg"):
            raise ValueError(f"method: expected 'block' or 'cg', got {method!r}")
        self.plan, self.method = plan, method
        self.damping, self.max_iter = check_nonnegative(damping, "damping"), check_integer(max_iter, "max_iter")
        self.rtol = DEFAULT_RTOL[plan.x.dtype] if rtol is None else check_positive(rtol, "rtol")
        self.last_response: Response | None = None

    @cached_property
    def moments(self) -> Tensor:
        """Row moments of the plan, (n, d, d); one pass for every 64 columns, once."""
        return row_moments(self.plan)

    @full_precision
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

    def _marginal_change(self, answer: Response) -> tuple[Tensor | None, Tensor | None]:
        """How the marginals follow the potentials, (n, k) and (m, k); None where they are fixed."""
        return None, None

    def _weighted(self, A: Tensor) -> Tensor:
        """`(P ∘ (A yᵀ)) y` for each column of A, (n, d, k)."""
        if A.shape[1] <= MOMENT_DIMENSIONS:
            return torch.einsum("nde,nek->ndk", self.moments, A)
        y, plan = self.plan.pairs.target.points, self.plan
        columns = [plan.pairs.hadamard_means(plan.psi, a.contiguous(), y, y, plan.phi) for a in A.unbind(2)]
        return plan.row_sums[:, None, None] * torch.stack(columns, 2)


def sides(plan: Plan) -> tuple[Rows, Rows]:
    """The plan seen from its sources and from its targets."""
    pairs, phi, psi = plan.pairs, plan.phi, plan.psi
    return Rows(pairs, phi, psi, plan.row_sums), Rows(pairs.swapped(), psi, phi, plan.col_sums)


@full_precision
def joint_product(plan: Plan, A: Tensor | None, B: Tensor | None, **options) -> tuple[Tensor, Tensor]:
    """`(H_x(A, B), H_y(A, B))` for a direction A (n, d) of the embedded x and B (m, d) of y; None is 0.

    Options as in `plan.hessian`. Warns `ConvergenceWarning` where the response of the potentials was not found.
    """
    H = plan.hessian(**options)
    rows, columns = sides(plan)
    x, y = plan.pairs.source.points, plan.pairs.target.points
    A, B = (torch.zeros_like(p) if V is None else V for p, V in ((x, A), (y, B)))
    A, B = A[:, :, None], B[:, :, None]
    Py, Ptx = (None, None) if takes_along(x.shape[1]) else (plan.Py, plan.Ptx)
    of_x, of_y = move(rows, A, B, Py), move(columns, B, A, Ptx)
    answer = H._respond(rows.rate * of_x.first, rows.rate * of_y.first)
    if answer.status in (Status.MAX_ITER, Status.NONFINITE):
        worst = float(answer.residual.max())
        message = f"response of the potentials: relative residual {worst:.1e} ({answer.status.value})"
        warnings.warn(f"{message}. {answer.status.advice}", ConvergenceWarning, stacklevel=3)
    dr, dc = H._marginal_change(answer)
    Hx = gradient_change(rows, of_x, answer.dphi, answer.dpsi, dr)
    Hy = gradient_change(columns, of_y, answer.dpsi, answer.dphi, dc)
    return Hx[:, :, 0], Hy[:, :, 0]
