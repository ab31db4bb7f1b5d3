"""Second derivatives of the unbalanced transport value: the response of the potentials has no null vector.

A move of the points changes the marginals by (ρ, κ) at fixed potentials. Now the marginals may follow, by
`dr = -τ₁ r∘dphi` and `dc = -τ₂ c∘dpsi`, `τ = eps/ρ_penalty`, so

    (1 + τ₁) r∘dphi + P dpsi = ρ,    Pᵀ dphi + (1 + τ₂) c∘dpsi = κ,

positive definite. Without dphi: `[(1 + τ₁)(1 + τ₂) D_c - Pᵀ D_r⁻¹ P] dpsi = (1 + τ₁) κ - Pᵀ(ρ/r)`. The constants are an
exact eigenvector, since `P1 = r` and `Pᵀ1 = c`: with `Σρ = Σκ` they answer by `τ₁ Σκ / (damping Σc)`,
`damping = (1 + τ₁)(1 + τ₂) - 1`. The rest is found by block Krylov.
"""

import torch
from torch import Tensor

from ot_newton.hessian import PlanHessian, sides
from ot_newton.pairs import Passes
from ot_newton.relaxed_solver import damping_of, held
from ot_newton.response import Response, respond_schur
from ot_newton.schur import SchurSpace, inverse
from ot_newton.status import Status
from ot_newton.unbalanced import UnbalancedPlan


def respond_relaxed(
    plan: UnbalancedPlan, rho: Tensor, kappa: Tensor, *, rtol: float, method: str = "block", max_iter: int = 200
) -> Response:
    """Response of the potentials to the changes rho (n, k) and kappa (m, k), of one total, of the marginals."""
    rows, columns = sides(plan)
    penalties, swap = plan.penalties, len(plan.a) < len(plan.b)
    if swap:
        rows, columns, rho, kappa, penalties = columns, rows, kappa, rho, penalties[::-1]
    r, c = held(rows.r), held(columns.r)
    if not bool(c.any()):  # no mass that could move
        still = torch.zeros_like(kappa if swap else rho), torch.zeros_like(rho if swap else kappa)
        nothing = torch.zeros_like(rho[0]), Status.CONVERGED, Passes(), kappa.new_empty(len(kappa), 0)
        return Response(*still, *nothing)
    tau, damping = penalties[0].tau, damping_of(plan.penalties)
    space = SchurSpace(rows.pairs, rows.phi, rows.psi, r, c, damping)
    rho_r = inverse(r)[:, None] * rho
    rhs = (1 + tau) * kappa - columns.apply(rho_r)
    answer = respond_schur(space, rho_r, rhs, rtol=rtol, modes=plan.modes, method=method, max_iter=max_iter)
    constant = (tau / damping) * (kappa.sum(0) / c.sum())
    dphi, dpsi = (answer.dphi - constant) / (1 + tau), answer.dpsi + constant
    if swap:
        dphi, dpsi = dpsi, dphi
    passes = answer.passes + Passes.application(rho.shape[1])
    return Response(dphi, dpsi, answer.residual, answer.status, passes, answer.modes)


class UnbalancedHessian(PlanHessian):
    """∇²_x of the unbalanced value at a plan, a symmetric operator of shape (n·d, n·d) on row-major points.

    Args:
        plan: where the Hessian is taken; it is exact for the weights of which the plan is the optimal one.
        rtol, method, max_iter: as in `PlanHessian`. The last product's evidence is in `last_response`.

    >>> from ot_newton.unbalanced import solve_unbalanced
    >>> x, y = torch.tensor([[0.0], [1.0], [3.0]]).double(), torch.tensor([[0.5], [2.0]]).double()
    >>> H = solve_unbalanced(x, y, eps=1.0, reach=2.0).hessian()
    >>> H.shape
    (3, 3)
    """

    plan: UnbalancedPlan

    def __init__(
        self, plan: UnbalancedPlan, *, rtol: float | None = None, method: str = "block", max_iter: int = 200
    ) -> None:
        super().__init__(plan, rtol=rtol, method=method, max_iter=max_iter)

    def _respond(self, rho: Tensor, kappa: Tensor) -> Response:
        self.last_response = respond_relaxed(
            self.plan, rho, kappa, rtol=self.rtol, method=self.method, max_iter=self.max_iter
        )
        return self.last_response

    def _marginal_change(self, answer: Response) -> tuple[Tensor, Tensor]:
        plan, (first, second) = self.plan, self.plan.penalties
        dr = -first.tau * plan.row_sums[:, None] * answer.dphi
        return dr, -second.tau * plan.col_sums[:, None] * answer.dpsi

    def _embedded(self, A: Tensor) -> Tensor:
        frozen = super()._embedded(A)  # at fixed marginals, but with the response of free ones
        assert self.last_response is not None
        dr, _ = self._marginal_change(self.last_response)
        pairs = self.plan.pairs
        return frozen + 2 * pairs.scale * pairs.source.points[:, :, None] * dr[:, None]
