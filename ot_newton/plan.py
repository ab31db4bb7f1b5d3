"""The transport plan `P_ij = a_i b_j exp((f_i + g_j - C_ij)/eps)`: what can be asked of it, without ever forming it.

Stopped early, a plan has marginals `r = P1` and `c = Pᵀ1` other than a and b. Value, gradient and Hessian are exact for
the problem with marginals (r, c), so they agree with each other at any stopping point:

    value = <r, f> + <c, g>,    ∇_{x_i} = 2s (r_i x_i - (P y)_i).
"""

from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ot_newton.cost import Cost
from ot_newton.pairs import Counted, Pairs, Passes
from ot_newton.status import Status

if TYPE_CHECKING:
    from ot_newton.hessian import PlanHessian

DENSE_LIMIT = 10_000_000


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Counted):
    """An entropic transport plan between x (n, d) and y (m, d), given by its potentials.

    Attributes:
        x, y: the points as they were given.
        a, b: the weights that were asked for, (n,) and (m,).
        f, g: potentials (n,) and (m,), in the units of the cost.
        phi, psi: the same in units of eps and without the norms of the points, as `Pairs` keeps them.
        eps: temperature, in the units of the cost.
        row_sums, col_sums: the marginals r = P1 (n,) and c = Pᵀ1 (m,) that the plan has.
        error: L1 marginal error |r - a|₁ + |c - b|₁.
        status: how the solve ended; `status.advice` says what to try next.
        n_iter, passes, n_passes: iterations, and passes over the n×m pairs by kind and in all, that the solve took.
        backend: what did the passes.
        modes: slow modes of the potentials, reused by later solves; may be empty.
    """

    x: Tensor
    y: Tensor
    a: Tensor
    b: Tensor
    phi: Tensor
    psi: Tensor
    eps: float
    row_sums: Tensor
    col_sums: Tensor
    error: float
    status: Status
    n_iter: int
    passes: Passes
    cost: Cost
    pairs: Pairs
    modes: Tensor | None = field(default=None)

    @property
    def backend(self) -> str:
        """The backend that does the passes."""
        return self.pairs.backend

    @property
    def converged(self) -> bool:
        """Whether the marginal error reached the tolerance."""
        return self.status.success

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        return self.pairs.shape

    def moved(self, dphi: Tensor, dpsi: Tensor) -> "Plan":
        """A starting point for a neighbouring problem: this plan's potentials moved by eps·(dphi, dpsi)."""
        return replace(self, phi=self.phi + dphi, psi=self.psi + dpsi)

    def with_modes(self, modes: Tensor) -> "Plan":
        """The same plan with fresher slow modes for later solves."""
        other = copy(self)  # keeps what has been computed
        other.__dict__["modes"] = modes
        return other

    def __repr__(self) -> str:
        n, m = self.shape
        return (
            f"Plan({n}×{m}, eps={self.eps:g}, status={self.status.value}, error={self.error:.1e}, "
            f"passes={self.n_passes}, backend={self.backend})"
        )

    @cached_property
    def f(self) -> Tensor:
        """Potential of the sources in units of the cost, (n,)."""
        return self.pairs.source.whole(self.phi, self.eps)

    @cached_property
    def g(self) -> Tensor:
        """Potential of the targets in units of the cost, (m,)."""
        return self.pairs.target.whole(self.psi, self.eps)

    def apply(self, V: Tensor) -> Tensor:
        """`P V` for V of shape (m,) or (m, k), as r times averages. One pass for every 64 columns."""
        V, single = _columns(V, len(self.b), "V", self.b)
        out = self.row_sums[:, None] * self.row_means(V)
        return out[:, 0] if single else out

    def adjoint(self, U: Tensor) -> Tensor:
        """`Pᵀ U` for U of shape (n,) or (n, k), as c times averages. One pass for every 64 columns."""
        U, single = _columns(U, len(self.a), "U", self.a)
        out = self.col_sums[:, None] * self.col_means(U)
        return out[:, 0] if single else out

    def row_means(self, V: Tensor) -> Tensor:
        """`(P V)_i / r_i`, (n, k) for V (m, k), normalised in the pass itself; one pass for every 64 columns."""
        return self.pairs.row_means(self.psi, V, self.phi)

    def col_means(self, U: Tensor) -> Tensor:
        """`(Pᵀ U)_j / c_j`, (m, k) for U (n, k), normalised in the pass itself; one pass for every 64 columns."""
        return self.pairs.col_means(self.phi, U, self.psi)

    @cached_property
    def Py(self) -> Tensor:
        """`P T(y)` of the embedded, centred targets, (n, d); one pass, once."""
        return self.apply(self.pairs.target.points)

    @cached_property
    def Ptx(self) -> Tensor:
        """`Pᵀ T(x)` of the embedded, centred sources, (m, d); one pass, once."""
        return self.adjoint(self.pairs.source.points)

    def barycenters(self) -> Tensor:
        """Where each source point is sent on average, `(P y)_i / r_i`, (n, d); NaN for a source without mass."""
        shift = self.y.mean(0)
        mean = self.row_means(self.y - shift) + shift
        return torch.where(self.row_sums[:, None] > 0, mean, torch.full_like(mean, torch.nan))

    def value(self) -> Tensor:
        """`<P, C> + eps KL(P | a⊗b) = <r, f> + <c, g>` for the marginals that the plan has; shape ().

        Both have one mass but for rounding, by which the constant between f and g would show: that of r is taken.
        """
        r, c = (w.sum(dtype=torch.float64) for w in (self.row_sums, self.col_sums))
        second = _dot(self.col_sums, self.g).to(torch.float64) * (r / c)
        return (_dot(self.row_sums, self.f) + second).to(self.phi.dtype)

    def dual_value(self) -> Tensor:
        """`<a, f> + <b, g> + eps (1 - |P|₁)`, shape (): a lower bound of OT_eps(a, b), off by O(error²)."""
        mass = self.row_sums.sum(dtype=torch.float64)
        gap = self.eps * (1 - mass)
        return _dot(self.a, self.f) + _dot(self.b, self.g) + gap.to(self.phi.dtype)

    def grad(self) -> Tensor:
        """∇_x of the value at fixed marginals, `2s (r_i x_i - (P y)_i)` by rows, (n, d)."""
        return self.cost.pull(self.x, self.embedded_grad()[:, :, None])[:, :, 0]

    def embedded_grad(self) -> Tensor:
        """Gradient in the embedded sources, (n, d)."""
        return 2 * self.pairs.scale * (self.row_sums[:, None] * self.pairs.source.points - self.Py)

    def grad_y(self) -> Tensor:
        """∇_y of the value at fixed marginals, (m, d)."""
        return self.cost.pull(self.y, self.embedded_grad_y()[:, :, None])[:, :, 0]

    def embedded_grad_y(self) -> Tensor:
        """Gradient in the embedded targets, (m, d)."""
        return 2 * self.pairs.scale * (self.col_sums[:, None] * self.pairs.target.points - self.Ptx)

    def hessian(self, **options) -> "PlanHessian":
        """∇²_x of the value as an operator on (n·d); see `PlanHessian` for the options."""
        from ot_newton.hessian import PlanHessian

        return PlanHessian(self, **options)

    def to_dense(self) -> Tensor:
        """The plan as an (n, m) tensor. Raises ValueError above ten million entries: use `apply` there."""
        n, m = self.shape
        if n * m > DENSE_LIMIT:
            raise ValueError(f"to_dense: expected n·m ≤ {DENSE_LIMIT}, got {n}·{m}; use apply() and adjoint()")
        return self.apply(torch.eye(m, dtype=self.b.dtype, device=self.b.device))


def _dot(weights: Tensor, potential: Tensor) -> Tensor:
    """`<weights, potential>` in float64, returned in the dtype of the potential; weight 0 counts as 0."""
    held = torch.where(weights > 0, potential, torch.zeros_like(potential))
    return (weights.to(torch.float64) @ held.to(torch.float64)).to(potential.dtype)


def _columns(V: Tensor, rows: int, name: str, like: Tensor) -> tuple[Tensor, bool]:
    """V as a matrix with `rows` rows, and whether it came as a vector."""
    if not isinstance(V, Tensor) or V.ndim not in (1, 2) or len(V) != rows:
        raise ValueError(f"{name}: expected shape ({rows},) or ({rows}, k), got {tuple(getattr(V, 'shape', ()))}")
    V = V.to(dtype=like.dtype, device=like.device).contiguous()
    return V.reshape(rows, -1), V.ndim == 1
