"""Transport of a measure to itself: one potential, a symmetric plan, and a half of everything.

`½ OT(x, x)` is solved by one potential f for both sides. Squared distances make `exp(-C/eps)` positive semidefinite, so
`D_r⁻¹ P` has its spectrum in [0, 1] whatever eps is, the fixed point `phi = λ row(phi)` the Jacobian `-λ D_r⁻¹ P`, and

    phi ← phi + ω (λ row(phi) - phi),    ω = 2/(2 + λ),

gains a factor 3 or more for each pass (Feydy et al. 2019, AISTATS, with ω = ½). A move A of the points, which are both
sources and targets, changes the row sums at fixed potential by ρ, and the potential answers by

    [(1 + τ) I + D_r⁻¹ P] dphi = ρ/r,    spectrum in [1 + τ, 2 + τ],

for which the Chebyshev iteration gains a factor (1 + √2)² ≈ 6 for each pass (Golub & Varga 1961, Numer. Math. 3:147).
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ot_newton.cost import Cost
from ot_newton.hessian import DEFAULT_RTOL
from ot_newton.kernels.precision import full_precision
from ot_newton.moves import Rows, gradient_change, move, takes_along
from ot_newton.operators import LinearOperator
from ot_newton.pairs import Counted, Pairs, Passes
from ot_newton.penalty import Penalty
from ot_newton.potentials import Potentials, Watch
from ot_newton.relaxed_solver import held
from ot_newton.schur import inverse
from ot_newton.status import Status
from ot_newton.validate import check_positive


@dataclass(frozen=True, eq=False)
class SelfPlan(Counted):
    """The symmetric plan of `½ OT(x, x)`.

    Attributes:
        x: the points as they were given, (n, d).
        a: their weights, (n,).
        phi: potential in units of eps for weights of sum 1 and without the norms, as `Pairs` keeps it, (n,).
        row_sums: P1 = Pᵀ1, (n,).
        error: `2 |P1 - a exp(-f/ρ)|₁ / |P|`, the error of both sides.
        status: how the solve ended.
        passes, n_passes: passes over the n×n pairs that it took, by kind and in all.
        penalty: what the marginals are asked to be.
    """

    x: Tensor
    a: Tensor
    phi: Tensor
    row_sums: Tensor
    error: float
    status: Status
    passes: Passes
    cost: Cost
    pairs: Pairs
    penalty: Penalty

    @property
    def f(self) -> Tensor:
        """The potential in units of the cost, (n,)."""
        return self.pairs.source.whole(self.phi - self.penalty.log_mass, self.pairs.eps)

    @cached_property
    def rows(self) -> Rows:
        """The plan seen from its sources, which are its targets."""
        return Rows(self.pairs, self.phi, self.phi, self.row_sums)

    @cached_property
    def Px(self) -> Tensor:
        """`P x` of the embedded, centred points, (n, d); one pass, once."""
        return self.rows.apply(self.pairs.source.points)

    def exact_value(self) -> Tensor:
        """`½ OT(x, x)` from the dual, in float64: a lower bound, off by O(error²); shape ()."""
        worth = self.penalty.worth(self.pairs.source.weights, self.phi)
        mass = self.row_sums.sum(dtype=torch.float64)
        return self.pairs.eps * (worth + (self.penalty.mass**2 - mass) / 2)

    def embedded_grad(self) -> Tensor:
        """Gradient of `½ OT(x, x)` in the embedded points, `2s (r∘x - P x)`, (n, d)."""
        return 2 * self.pairs.scale * (self.row_sums[:, None] * self.pairs.source.points - self.Px)

    def grad(self) -> Tensor:
        """Gradient of `½ OT(x, x)` in the points, (n, d)."""
        return self.cost.pull(self.x, self.embedded_grad()[:, :, None])[:, :, 0]

    def grad_a(self) -> Tensor:
        """Derivative of `½ OT(x, x)` in the weights, (n,); for exact marginals up to a constant, its mean taken out."""
        if self.penalty.tau == 0:
            return self.f - self.a @ self.f
        return self.pairs.eps * self.penalty.weight_gradient(self.phi, self.penalty.mass)

    @full_precision
    def product(self, A: Tensor, rtol: float) -> tuple[Tensor, float]:
        """Hessian of `½ OT(x, x)` in the embedded points applied to A (n, d, k), and the residual it was solved to."""
        at = move(self.rows, A, A, None if takes_along(A.shape[1]) else self.Px)
        dphi, residual = self._respond(self.rows.rate * at.first, rtol)
        dr = -self.penalty.tau * self.row_sums[:, None] * dphi
        return gradient_change(self.rows, at, dphi, dphi, dr), residual

    def _respond(self, rho: Tensor, rtol: float) -> tuple[Tensor, float]:
        """dphi (n, k) for changes rho (n, k) of the row sums, and the worst relative residual, weighted by r."""
        average, r = self.pairs.row_averager(self.phi, self.phi), held(self.row_sums)[:, None]
        centre, radius, step = 1.5 + self.penalty.tau, 0.5, 1 / (3 + 2 * self.penalty.tau)
        R = inverse(r) * rho
        size = (r * R * R).sum(0).sqrt().clamp_min(torch.finfo(R.dtype).tiny)
        dphi, D, best = torch.zeros_like(R), R / centre, math.inf
        while True:
            dphi = dphi + D
            R = R - (1 + self.penalty.tau) * D - average(D)
            residual = float(((r * R * R).sum(0).sqrt() / size).max())
            if not rtol < residual < 0.7 * best:
                return dphi, residual
            best, next_step = residual, 1 / (2 * centre / radius - step)
            D = next_step * step * D + (2 * next_step / radius) * R
            step = next_step


class SelfHessian(LinearOperator):
    """∇²_x of `½ OT(x, x)`, symmetric of shape (n·d, n·d) on row-major points; `last_residual` is its evidence."""

    symmetric = True

    def __init__(self, plan: SelfPlan, *, rtol: float | None = None) -> None:
        super().__init__((plan.x.numel(), plan.x.numel()), plan.x.dtype, plan.x.device)
        self.plan = plan
        self.rtol = DEFAULT_RTOL[plan.x.dtype] if rtol is None else check_positive(rtol, "rtol")
        self.last_residual: float | None = None

    def _matmat(self, V: Tensor) -> Tensor:
        x, cost = self.plan.x, self.plan.cost
        A = V.reshape(*x.shape, V.shape[1])
        out, self.last_residual = self.plan.product(cost.push(x, A), self.rtol)
        out, bend = cost.pull(x, out), cost.curvature(x, self.plan.embedded_grad(), A)
        return (out if bend is None else out + bend).reshape(V.shape)


def solve_self(
    x: Tensor, a: Tensor, eps: float, cost: Cost, rho: float | None, tol: float, max_iter: int, backend: str
) -> SelfPlan:
    """The symmetric plan of checked points x (n, d) and weights a (n,), their marginals at the price rho or exact."""
    mass = float(a.sum(dtype=torch.float64))
    penalty, points, weights = Penalty.of(eps, rho, mass), cost.embed(x), a / mass
    pairs = Pairs.of(points, points, weights, weights, eps, cost.scale, backend)
    penalty, watch = penalty.on(pairs.source), Watch(pairs, tol, 2 * max_iter)
    phi = penalty.start(pairs.source)
    omega = 2 * (1 + penalty.tau) / (3 + 2 * penalty.tau)
    half = pairs.row(phi)
    while True:
        gap = torch.where(weights > 0, phi - half, torch.zeros_like(phi))
        r, asked = weights * torch.exp(gap), penalty.asked(weights, phi)
        total = torch.maximum(r.sum(dtype=torch.float64), asked.sum(dtype=torch.float64))
        error = 2 * (r - asked).abs().sum(dtype=torch.float64) / total.clamp_min(torch.finfo(phi.dtype).tiny)
        ahead = penalty.potential(half)
        status = watch.check(Potentials(phi, phi, r, r, error, ahead))
        if status is not None:
            break
        phi = phi + omega * (ahead - phi)
        half = pairs.row(phi, half)
    return SelfPlan(x, a, phi, r, float(error), status, pairs.passes, cost, pairs, penalty)
