"""The debiased Sinkhorn divergence: zero at x = y, positive elsewhere, smooth in both.

    S(x, y) = OT(x, y) - ½ OT(x, x) - ½ OT(y, y) + (eps/2) (Σa - Σb)²

(Feydy et al. 2019, AISTATS; with marginals at a price: Séjourné et al. 2019, arXiv:1910.12958). The three problems
are solved each in its own way, the last two by one potential; see `self_transport`. All three values are duals, lower
bounds with errors of second order in what the solves left, and are added in float64.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ot_newton.batch import passed_on
from ot_newton.cost import Cost, make_cost
from ot_newton.envelope import loss
from ot_newton.hessian import DEFAULT_RTOL, PlanHessian, joint_product
from ot_newton.operators import LinearOperator
from ot_newton.pairs import Counted, Passes
from ot_newton.plan import Plan
from ot_newton.self_transport import SelfHessian, SelfPlan, solve_self
from ot_newton.sinkhorn import ConvergenceWarning, Initial, solve
from ot_newton.status import Status
from ot_newton.unbalanced import UnbalancedPlan, check_unbalanced, solve_unbalanced
from ot_newton.validate import check_integer, check_measures, check_nonnegative, check_positive


@dataclass(frozen=True, eq=False)
class Divergence(Counted):
    """The divergence with the three plans it is made of.

    Attributes:
        plan: from x to y; a `Plan`, or an `UnbalancedPlan` where there is a reach.
        self_x, self_y: the symmetric plans of x and of y to themselves.
    """

    plan: Plan
    self_x: SelfPlan
    self_y: SelfPlan

    @property
    def status(self) -> Status:
        """CONVERGED, or the status of the first of the three solves that did not."""
        return next((p.status for p in (self.plan, self.self_x, self.self_y) if not p.status.success), Status.CONVERGED)

    @property
    def converged(self) -> bool:
        """Whether all three solves reached the tolerance."""
        return self.status.success

    @property
    def error(self) -> float:
        """The largest marginal error of the three."""
        return max(self.plan.error, self.self_x.error, self.self_y.error)

    @property
    def passes(self) -> Passes:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Passes that the three solves took; those of the self-terms are over n×n and m×m pairs."""
        return self.plan.passes + self.self_x.passes + self.self_y.passes

    def exact_value(self) -> Tensor:
        """`value` in float64 whatever the dtype of the points."""
        masses = self.self_x.penalty.mass - self.self_y.penalty.mass
        own = self.self_x.exact_value() + self.self_y.exact_value()
        return _dual(self.plan) - own + self.plan.eps / 2 * masses**2

    def value(self) -> Tensor:
        """S(x, y), shape ()."""
        return self.exact_value().to(self.plan.x.dtype)

    def grad(self) -> Tensor:
        """∇_x S, (n, d)."""
        return self.plan.grad() - self.self_x.grad()

    def grad_y(self) -> Tensor:
        """∇_y S, (m, d)."""
        return self.plan.grad_y() - self.self_y.grad()

    def hessian(self, **options) -> "DivergenceHessian":
        """∇²_x S as an operator on (n·d); see `DivergenceHessian` for the options."""
        return DivergenceHessian(self, **options)

    def __repr__(self) -> str:
        n, m = self.plan.shape
        return f"Divergence({n}×{m}, eps={self.plan.eps:g}, status={self.status.value}, passes={self.n_passes})"


class DivergenceHessian(LinearOperator):
    """∇²_x of the divergence at its plans, a symmetric operator of shape (n·d, n·d) on row-major points.

    Args:
        divergence: where the Hessian is taken.
        rtol: relative residual to which the responses of the potentials are solved; by default 1e-9 in float64 and
            1e-5 in float32. The evidence of the last product is in `last_residual`.

    `matmat` with k columns shares all passes between them.

    >>> x, y = torch.tensor([[0.0], [1.0], [3.0]]).double(), torch.tensor([[0.5], [2.0]]).double()
    >>> H = solve_divergence(x, y, eps=1.0).hessian()
    >>> H.shape
    (3, 3)
    """

    symmetric = True

    def __init__(self, divergence: Divergence, *, rtol: float | None = None) -> None:
        x = divergence.plan.x
        super().__init__((x.numel(), x.numel()), x.dtype, x.device)
        self.divergence = divergence
        self._cross, self._own = divergence.plan.hessian(rtol=rtol), SelfHessian(divergence.self_x, rtol=rtol)

    @property
    def cross(self) -> PlanHessian:
        """∇²_x of OT(x, y)."""
        return self._cross

    @property
    def own(self) -> SelfHessian:
        """∇²_x of ½ OT(x, x)."""
        return self._own

    @property
    def last_residual(self) -> float | None:
        """The worst relative residual of the responses of the last product; None before the first."""
        if self._cross.last_response is None or self._own.last_residual is None:
            return None
        return max(float(self._cross.last_response.residual.max()), self._own.last_residual)

    def _matmat(self, V: Tensor) -> Tensor:
        return self._cross.matmat(V) - self._own.matmat(V)


def solve_divergence(
    x: Any,
    y: Any,
    eps: float,
    *,
    a: Any = None,
    b: Any = None,
    reach: float | None = None,
    cost: str = "sqeuclidean",
    scale: float = 1.0,
    tol: float | None = None,
    max_iter: int = 5000,
    init: Initial = None,
    backend: str = "auto",
) -> Divergence:
    """Solve the three problems of `S(x, y) = OT(x, y) - ½ OT(x, x) - ½ OT(y, y) + (eps/2)(Σa - Σb)²`.

    Args:
        x, y: points (n, d) and (m, d).
        a, b: weights, 1/n and 1/m where None. With a reach of any total mass, else of sum 1.
        reach: None for exact marginals; otherwise as in `solve_unbalanced`, one number: with a reach of its own for
            each side the divergence of a measure from itself would not be 0.
        eps, cost, scale, tol, max_iter, backend: as in `solve`.
        init: a plan from x to y, or its potentials (f, g), to start from.

    Raises:
        TypeError, ValueError: for inputs that are not what is said above, before any work.

    Warns:
        ConvergenceWarning: for each of the three problems whose tolerance was not reached.
    """
    if reach is None:
        x, y, a, b = (t.detach() for t in check_measures(x, y, a, b))
    else:
        reach = check_positive(reach, "reach")
        x, y, a, b = (t.detach() for t in check_unbalanced(x, y, a, b))
    max_iter = check_integer(max_iter, "max_iter")
    tol = check_nonnegative(tol, "tol") if tol is not None else (1e-6 if x.dtype == torch.float64 else 1e-5)
    options: dict[str, Any] = {"cost": cost, "scale": scale, "tol": tol, "max_iter": max_iter, "backend": backend}
    with passed_on(stacklevel=2):
        if reach is None:
            plan = solve(x, y, eps, a=a, b=b, init=init, **options)
        else:
            plan = solve_unbalanced(x, y, eps, reach, a=a, b=b, init=init, **options)
    kind: Cost = make_cost(cost, scale)
    rho = None if reach is None else reach**2
    own = [solve_self(points, w, plan.eps, kind, rho, tol, max_iter, backend) for points, w in ((x, a), (y, b))]
    for name, found in zip("xy", own, strict=True):
        if not found.status.success:
            message = f"{name} to itself: error {found.error:.1e} ({found.status.value}). {found.status.advice}"
            warnings.warn(message, ConvergenceWarning, stacklevel=2)
    return Divergence(plan, *own)


def _dual(plan: Plan) -> Tensor:
    """The dual value of a plan in float64, shape ()."""
    if isinstance(plan, UnbalancedPlan):
        return plan.exact_value()
    f, g = (torch.where(w > 0, p, 0).to(torch.float64) for w, p in ((plan.a, plan.f), (plan.b, plan.g)))
    gap = plan.eps * (plan.a.sum(dtype=torch.float64) - plan.row_sums.sum(dtype=torch.float64))
    return plan.a.to(torch.float64) @ f + plan.b.to(torch.float64) @ g + gap


@dataclass(frozen=True, eq=False)
class _Term:
    """The divergence as a function of (x, y, a, b) to be differentiated."""

    divergence: Divergence
    rtol: float | None

    def value(self) -> Tensor:
        return self.divergence.exact_value()

    def gradient(self, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        plan, own_x, own_y = self.divergence.plan, self.divergence.self_x, self.divergence.self_y
        parts = (
            lambda: plan.embedded_grad() - own_x.embedded_grad(),
            lambda: plan.embedded_grad_y() - own_y.embedded_grad(),
            lambda: self._in_weights(plan.f, plan.a, own_x, 1.0),
            lambda: self._in_weights(plan.g, plan.b, own_y, -1.0),
        )
        return tuple(part() if need else None for part, need in zip(parts, needs, strict=True))

    def _in_weights(self, potential: Tensor, weights: Tensor, own: SelfPlan, sign: float) -> Tensor:
        plan = self.divergence.plan
        if not isinstance(plan, UnbalancedPlan):
            return potential - weights @ potential - own.grad_a()
        masses = self.divergence.self_x.penalty.mass - self.divergence.self_y.penalty.mass
        across = plan.grad_a() if sign > 0 else plan.grad_b()
        return across - own.grad_a() + sign * plan.eps * masses

    def product(self, *directions: Tensor | None) -> tuple[Tensor, ...]:
        plan, own = self.divergence.plan, (self.divergence.self_x, self.divergence.self_y)
        rtol = DEFAULT_RTOL[plan.x.dtype] if self.rtol is None else self.rtol
        across = joint_product(plan, *directions, rtol=rtol)
        return tuple(
            part if A is None else part - p.product(A[:, :, None], rtol)[0][:, :, 0]
            for part, p, A in zip(across, own, directions, strict=True)
        )


def sinkhorn_divergence(
    x: Any,
    y: Any,
    eps: Any,
    *,
    a: Any = None,
    b: Any = None,
    reach: float | None = None,
    cost: str = "sqeuclidean",
    scale: float = 1.0,
    hvp_rtol: float | None = None,
    init: Any = None,
    **options: Any,
) -> Tensor:
    """The debiased divergence S(x, y) as a tensor of shape () that can be differentiated twice.

    Args:
        x, y: points (n, d) and (m, d); either or both may require gradients, twice. Batches (B, n, d) and (B, m, d)
            give B values, (B,), as a loop over B would; `eps`, weights and `init` are then as in `solve_batch`.
        a, b: weights, once differentiable; without a reach up to an additive constant, as in `ot_loss`.
        hvp_rtol: relative residual of the responses in a double backward; by default 1e-9 (float64) or 1e-5 (float32).
        reach, eps, cost, scale, init, options: as in `solve_divergence`.

    S ≥ 0, with 0 at x = y. What is computed differs from S by rounding and by what the solves left: by O(eps·error²),
    and up to O(eps·error) where clusters hardly exchange mass. Where they converged to the default tolerance and c is
    the largest cost, it is at least -1e-7 (c + eps) in float64 and -1e-6 (c + eps) in float32.
    Plain `OT(x, x)` is not 0: that is the bias taken out here.

    Raises what `solve_divergence` raises, and RuntimeError for second derivatives in the weights. Warns
    `ConvergenceWarning` as it does.

    >>> x = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64)
    >>> bool(sinkhorn_divergence(x, x, eps=1.0).abs() < 1e-12), bool(sinkhorn_divergence(x, x + 1, eps=1.0) > 0.9)
    (True, True)
    """
    check = check_measures if reach is None else check_unbalanced
    return loss(
        x, y, eps, a, b, check=check, solver=solve_divergence, term=_Term,
        cost=cost, scale=scale, hvp_rtol=hvp_rtol, init=init, reach=reach, **options,
    )  # fmt: skip
