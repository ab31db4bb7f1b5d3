"""The same regression without this library's solvers: alternating Sinkhorn for the potentials, CG for the responses."""

import torch
from torch import Tensor

from ot_newton.experiments.passes_point import system
from ot_newton.operators import LinearOperator, MatrixOperator
from ot_newton.plan import Plan
from ot_newton.problems.shuffled_regression import ShuffledRegression
from ot_newton.response_cg import conjugate_gradients
from ot_newton.sinkhorn import solve_checked

COARSEST = 0.019  # relative accuracy of a gradient: what the block solve gives where 0.05 is asked for
TIGHTEST_CG = 1e-8


class PlainRegression(ShuffledRegression):
    """`ShuffledRegression` with the same accuracies by plain solvers, which start from the last potentials.

    The Hessian's columns share the passes of CG, which favours it: the ledger's `columns` says what they cost one by
    one.

    Args:
        most: passes that one solve may take.
    """

    def __init__(self, X: Tensor, Y: Tensor, eps: float, *, most: int, backend: str) -> None:
        super().__init__(X, Y, eps, backend=backend)
        self.most = most

    def value_and_grad(self, w: Tensor, rtol: float | None = None) -> tuple[Tensor, Tensor]:
        """L(w), (), and ∇L(w), (size,), from a plan of alternating sweeps."""
        return super().value_and_grad(w, rtol if rtol is None else min(rtol, COARSEST))

    def solve_plan(self, w: Tensor, tol: float) -> Plan:
        """The plan at w with marginal error at most `tol`, by alternating sweeps from the last one."""
        plan, w_plan = self.plan, self._plan_w
        here = plan is not None and w_plan is not None and torch.equal(w_plan, w)
        if plan is not None and here and (plan.error <= tol or not plan.converged):
            return plan
        init = None if plan is None else (plan.f, plan.g)
        plan = solve_checked(
            self.design @ w.reshape(self.shape), self.Y, self.a, self.b, self.eps, self.cost, tol, "alternating",
            max(1, self.most // 2), 1.0, init, self.backend,
        )  # fmt: skip
        self.passes += plan.passes
        self.plan, self._plan_w = plan, w.clone()
        return plan

    def hessian_at_hand(self, w: Tensor) -> None:
        """None: gradients come without a Hessian."""

    def hessian(self, w: Tensor, rtol: float | None = None) -> LinearOperator:
        """∇²L(w), to about `rtol`: in `hᵀ(2B - Sh)` an error of the responses h enters squared."""
        rtol = TIGHTEST_CG if rtol is None else rtol
        plan = self.solve_plan(w, max(self._tightest, 0.1 * rtol))
        before = plan.pairs.passes
        space, B, explicit = system(plan, self.design)
        h, _, _ = conjugate_gradients(space, B, max(0.3 * rtol**0.5, TIGHTEST_CG), self.most // 2)
        implicit = self.eps * (h.T @ (2 * B - space.product(h)[0]))
        self.passes += plan.pairs.passes - before
        self.hessian_error = rtol
        return MatrixOperator(explicit + (implicit + implicit.T) / 2, symmetric=True)
