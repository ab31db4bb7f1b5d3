"""Unbalanced optimal transport: marginals that may miss their weights, at a price.

    OT(x, y) = min_P <P, C> + eps KL(P | a⊗b) + ρ₁ KL(P1 | a) + ρ₂ KL(Pᵀ1 | b),    KL(p | q) = Σ p log(p/q) - p + q,

with `ρ = reach²` in units of the cost; a reach of None keeps that marginal exact (semi-unbalanced). At the optimum
`P_ij = a_i b_j exp((f_i + g_j - C_ij)/eps)`, `P1 = a exp(-f/ρ₁)`, `Pᵀ1 = b exp(-g/ρ₂)` (Chizat, Peyré, Schmitzer &
Vialard 2018, Math. Comp. 87:2563; Séjourné, Feydy, Vialard, Trouvé & Peyré 2019, arXiv:1910.12958). Mass is destroyed
and created rather than moved much further than the reach.
"""

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ot_newton.cost import make_cost
from ot_newton.envelope import loss
from ot_newton.hessian import joint_product
from ot_newton.pairs import Pairs
from ot_newton.penalty import Penalty
from ot_newton.plan import Plan
from ot_newton.potentials import Watch
from ot_newton.relaxed_solver import Penalties, annealed, relaxed
from ot_newton.sinkhorn import ConvergenceWarning, Initial, initial_potentials
from ot_newton.validate import (
    as_real,
    check_integer,
    check_measures,
    check_nonnegative,
    check_pairs,
    check_positive,
    check_weights,
)

if TYPE_CHECKING:
    from ot_newton.unbalanced_hessian import UnbalancedHessian

Reach = float | tuple[float | None, float | None]
MASSES = ("a tensor or array of weights", "convert with .double() or .float()")
HOT = 100.0  # largest s|x|²/eps without annealing


@dataclass(frozen=True, eq=False, repr=False)
class UnbalancedPlan(Plan):
    """A plan whose marginals miss their weights at a price; what a `Plan` can be asked, this one can be.

    Attributes beyond those of `Plan`, and those that mean something else:
        row_sums, col_sums: the marginals P1 (n,) and Pᵀ1 (m,), which are not a and b.
        error: `|P1 - a exp(-f/ρ₁)|₁ + |Pᵀ1 - b exp(-g/ρ₂)|₁` relative to the mass |P|: how far the potentials are from
            the fixed point, where P has just the marginals that they ask for. For a side with exact marginal the term
            is its marginal error.
        phi, psi: potentials in units of eps for weights of sum 1 and without the norms, `f/eps + log Σa - norm`.
        rho: (ρ₁, ρ₂) in units of the cost, None for a side with exact marginal.
    """

    rho: tuple[float | None, float | None] = (None, None)

    @cached_property
    def penalties(self) -> Penalties:
        """What each side asks for."""
        first, second = Penalty.pair(self.eps, self.rho, self.a, self.b)
        return first.on(self.pairs.source), second.on(self.pairs.target)

    @cached_property
    def f(self) -> Tensor:
        """Potential of the sources in units of the cost, (n,)."""
        return self.pairs.source.whole(self.phi - self.penalties[0].log_mass, self.eps)

    @cached_property
    def g(self) -> Tensor:
        """Potential of the targets in units of the cost, (m,)."""
        return self.pairs.target.whole(self.psi - self.penalties[1].log_mass, self.eps)

    @property
    def mass(self) -> Tensor:
        """|P|, what is transported; shape ()."""
        return self.row_sums.sum(dtype=torch.float64).to(self.phi.dtype)

    def value(self) -> Tensor:
        """The dual value, shape (): a lower bound of OT(x, y), off by O(error²)."""
        return self.exact_value().to(self.phi.dtype)

    def dual_value(self) -> Tensor:
        """The same as `value`."""
        return self.value()

    def exact_value(self) -> Tensor:
        """`value` in float64 whatever the dtype of the points."""
        first, second = self.penalties
        x, y = self.pairs.source, self.pairs.target
        mass = self.row_sums.sum(dtype=torch.float64)
        worth = first.worth(x.weights, self.phi) + second.worth(y.weights, self.psi)
        return self.eps * (worth + first.mass * second.mass - mass)

    def grad_a(self) -> Tensor:
        """Derivative of the value in a, `ρ₁ (1 - e) - eps e + eps Σb` with `e = exp(-f/ρ₁)`, (n,)."""
        first, second = self.penalties
        return self.eps * first.weight_gradient(self.phi, second.mass)

    def grad_b(self) -> Tensor:
        """Derivative of the value in b, (m,)."""
        first, second = self.penalties
        return self.eps * second.weight_gradient(self.psi, first.mass)

    def hessian(self, **options) -> "UnbalancedHessian":
        """∇²_x of the value as an operator on (n·d); options as in `PlanHessian`, without damping."""
        from ot_newton.unbalanced_hessian import UnbalancedHessian

        return UnbalancedHessian(self, **options)

    def __repr__(self) -> str:
        return f"Unbalanced{super().__repr__()[:-1]}, mass={float(self.mass):.3g})"


def check_reach(reach: Any) -> tuple[float | None, float | None]:
    """(ρ₁, ρ₂) of a reach or a pair of them. Raises TypeError or ValueError; one side at least must be finite."""
    pair = tuple(reach) if isinstance(reach, tuple | list) else (reach, reach)
    if len(pair) != 2:
        raise ValueError(f"reach: expected a number above 0 or a pair of them, got {len(pair)} values")
    if pair == (None, None):
        raise ValueError(
            "reach: expected a number above 0 on one side at least, got None; use `solve` or `ot_loss` for exact "
            "marginals on both sides"
        )
    first, second = (None if r is None else check_positive(r, "reach") for r in pair)
    rho = [None if r is None else check_positive(r * r, "reach²") for r in (first, second)]
    return rho[0], rho[1]


def check_unbalanced(x: Any, y: Any, a: Any, b: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both measures of an unbalanced problem: as for a balanced one, but of any mass above 0."""
    x, y, uniform_a, uniform_b = check_measures(x, y, None, None)
    a = uniform_a if a is None else check_weights(as_real(a, "a", *MASSES), len(x), x, "a")
    b = uniform_b if b is None else check_weights(as_real(b, "b", *MASSES), len(y), y, "b")
    for name, weights in (("a", a), ("b", b)):
        mass = float(weights.detach().sum(dtype=torch.float64))
        if not 0 < mass < float("inf"):
            raise ValueError(f"{name}: expected a finite total mass above 0, got {mass:g}")
    return x, y, a, b


def solve_unbalanced(
    x: Any,
    y: Any,
    eps: float,
    reach: Reach,
    *,
    a: Any = None,
    b: Any = None,
    cost: str = "sqeuclidean",
    scale: float = 1.0,
    tol: float | None = None,
    max_iter: int = 5000,
    init: Initial = None,
    backend: str = "auto",
) -> UnbalancedPlan:
    """Solve `min_P <P, C> + eps KL(P | a⊗b) + ρ₁ KL(P1 | a) + ρ₂ KL(Pᵀ1 | b)`, `ρ = reach²`; never forms P.

    Args:
        x, y: points (n, d) and (m, d), float32 or float64 (the dtype of everything returned).
        eps: temperature in the units of the cost.
        reach: a length, or one for each side (of a and of b); None for a side keeps its marginal exact. In units of the
            cost `ρ = reach²`: with `scale=0.5` and `eps = blur²` these are the blur and reach of GeomLoss at p = 2.
        a, b: weights (n,) and (m,) ≥ 0 of any total mass above 0, zeros allowed; 1/n and 1/m where None.
        cost, scale: as in `solve`.
        tol: bound of `UnbalancedPlan.error`; by default 1e-6 in float64 and 1e-5 in float32.
        max_iter: sweeps of two passes that may be spent.
        init: a plan, or its potentials (f, g), to start from.
        backend: "auto", "dense", "blocked" or "triton".

    Raises:
        TypeError, ValueError: for inputs that are not what is said above, before any work.

    Warns:
        ConvergenceWarning: where the tolerance was not reached; the message says why and what to try.

    >>> x, y = torch.tensor([[0.0], [1.0], [9.0]]).double(), torch.tensor([[0.0], [1.0]]).double()
    >>> plan = solve_unbalanced(x, y, eps=0.1, reach=1.0)
    >>> plan.converged, bool(plan.row_sums[2] < 1e-4)
    (True, True)
    """
    x, y, a, b = (t.detach() for t in check_unbalanced(x, y, a, b))
    eps, rho = check_positive(eps, "eps"), check_reach(reach)
    kind = make_cost(cost, check_positive(scale, "scale"))
    max_iter = check_integer(max_iter, "max_iter")
    tol = check_nonnegative(tol, "tol") if tol is not None else (1e-6 if x.dtype == torch.float64 else 1e-5)
    first, second = Penalty.pair(eps, rho, a, b)
    tx, ty = kind.embed(x), kind.embed(y)
    for name, points in (("x", tx), ("y", ty)):
        if not bool(torch.isfinite(points).all()):
            raise ValueError(f"{name}: expected points whose cost is finite, got a zero vector or an overflow")
    pairs = check_pairs(Pairs.of(tx, ty, a / first.mass, b / second.mass, eps, kind.scale, backend))
    first, second = first.on(pairs.source), second.on(pairs.target)
    # The semi-dual lives on the smaller side.
    swap = len(x) < len(y)
    side, penalties = (pairs.swapped(), (second, first)) if swap else (pairs, (first, second))
    watch = Watch(side, tol, 2 * max_iter)
    state, status = relaxed(side, penalties, _start(init, pairs, side, penalties, watch), watch)
    phi, psi, r, c = state.phi, state.psi, state.r, state.c
    if swap:
        phi, psi, r, c = psi, phi, c, r
    total = pairs.passes.total
    plan = UnbalancedPlan(
        x=x, y=y, a=a, b=b, phi=phi, psi=psi, eps=eps, row_sums=r, col_sums=c, error=float(state.error), status=status,
        n_iter=(total + 1) // 2, passes=pairs.passes, cost=kind, pairs=pairs, modes=state.modes, rho=rho,
    )  # fmt: skip
    if not plan.converged:
        message = f"relative residual {plan.error:.1e} after {total} passes ({status.value}). {status.advice}"
        warnings.warn(message, ConvergenceWarning, stacklevel=2)
    return plan


def _start(init: Initial, pairs: Pairs, side: Pairs, penalties: Penalties, watch: Watch) -> Tensor:
    """The potential of the targets of `side`, which is `pairs` or swapped, to start from."""
    if init is not None:
        return initial_potentials(init, pairs, side is not pairs)[1] + penalties[1].log_mass
    if float(max(side.source.norm.max(), side.target.norm.max())) > HOT:
        return annealed(side, penalties, watch)
    return penalties[1].start(side.target)


@dataclass(frozen=True, eq=False)
class _Term:
    """An unbalanced plan as a function of (x, y, a, b) to be differentiated."""

    plan: UnbalancedPlan
    rtol: float | None

    def value(self) -> Tensor:
        return self.plan.exact_value()

    def gradient(self, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        plan = self.plan
        parts = (plan.embedded_grad, plan.embedded_grad_y, plan.grad_a, plan.grad_b)
        return tuple(part() if need else None for part, need in zip(parts, needs, strict=True))

    def product(self, *directions: Tensor | None) -> tuple[Tensor, ...]:
        return joint_product(self.plan, *directions, rtol=self.rtol)


def unbalanced_ot_loss(
    x: Any,
    y: Any,
    eps: Any,
    reach: Reach,
    *,
    a: Any = None,
    b: Any = None,
    cost: str = "sqeuclidean",
    scale: float = 1.0,
    hvp_rtol: float | None = None,
    init: Any = None,
    **options: Any,
) -> Tensor:
    """The unbalanced transport value as a tensor of shape () that can be differentiated twice.

    Args:
        x, y: points (n, d) and (m, d); either or both may require gradients, twice. Batches (B, n, d) and (B, m, d)
            give B values, (B,), as a loop over B would; `eps`, weights and `init` are then as in `solve_batch`.
        a, b: weights of any mass, once differentiable; there is no constraint, so the gradient has no open constant.
        reach, eps, cost, scale, init, options: as in `solve_unbalanced`.
        hvp_rtol: relative residual of the response in a double backward; by default 1e-9 (float64) or 1e-5 (float32).

    Raises what `solve_unbalanced` raises, and RuntimeError for second derivatives in the weights. Warns
    `ConvergenceWarning` as `solve_unbalanced` does, and where the response of the potentials was not found in a double
    backward.

    >>> x = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64, requires_grad=True)
    >>> y = torch.tensor([[0.5], [2.0]], dtype=torch.float64)
    >>> bool(unbalanced_ot_loss(x, y, eps=1.0, reach=2.0) < unbalanced_ot_loss(x, y, eps=1.0, reach=4.0))
    True
    """
    return loss(
        x, y, eps, a, b, check=check_unbalanced, solver=solve_unbalanced, term=_Term,
        cost=cost, scale=scale, hvp_rtol=hvp_rtol, init=init, reach=reach, **options,
    )  # fmt: skip
