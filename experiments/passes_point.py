"""A point of the regression with all that the pass counts need there, and the dense answers they are judged by.

With `S = D_c - PᵀD_r⁻¹P` and the right-hand sides B the Hessian is `A + eps BᵀS⁺B`; see `linear_model`. The dense
answer forms P and a pseudoinverse, and shares no pass with what it judges.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property

import torch
from torch import Tensor

from ot_newton.experiments.run import Row
from ot_newton.krylov import cg
from ot_newton.linear_model import carried, conditional_moments, linear_model_hessian, moves
from ot_newton.marginal_shift import Moments
from ot_newton.operators import FunctionOperator
from ot_newton.pairs import Passes
from ot_newton.plan import Plan
from ot_newton.problems.shuffled_regression import ShuffledRegression
from ot_newton.schur import SchurSpace, start_block

DENSE_UP_TO = 3000
TIGHT = 1e-10
NEAR_RTOL = 0.1  # of the Hessian at the neighbour, which leaves its slow modes
THIN = 0.8  # a curve keeps the iterations that lower the error by this factor, and those that meet a goal


def ledger(passes: Passes, before: Passes | None = None) -> Row:
    """The passes by kind since `before`, as columns of a row."""
    spent = passes if before is None else passes - before
    return {"passes": spent.total, **asdict(spent)}


def dense_hessian(P: Tensor, X: Tensor, y: Tensor, scale: float, eps: float) -> Tensor:
    """The Hessian (pq, pq) of the regression for the marginals of a plan P (n, m), by the plain formulas."""
    r, c, s2 = P.sum(1), P.sum(0), 2 * scale
    mean = P @ y / r[:, None]
    second = torch.einsum("ij,jk,jl->ikl", P, y, y)
    spread = second - r[:, None, None] * mean[:, :, None] * mean[:, None, :]  # r_i Σ_i
    identity = torch.eye(y.shape[1], dtype=P.dtype, device=P.device)
    held = s2 * torch.kron(X.T @ (r[:, None] * X), identity)
    explicit = held - s2**2 / eps * torch.einsum("ni,njl,nk->ijkl", X, spread, X).reshape(held.shape)
    sent = P.T @ (X[:, :, None] * mean[:, None, :]).flatten(1)
    B = (s2 * (sent - ((P.T @ X)[:, :, None] * y[:, None, :]).flatten(1))) / c.sqrt()[:, None]
    K = P / (r.sqrt()[:, None] * c.sqrt())
    theta, E = torch.linalg.eigh(torch.eye(len(c), dtype=P.dtype, device=P.device) - K.T @ K)
    E, theta = E[:, 1:], theta[1:]  # without the gauge
    seen = E.T @ B
    answered = theta > 64 * torch.finfo(P.dtype).eps
    return explicit + seen[answered].T @ (seen[answered] / theta[answered, None]) / eps


def system(plan: Plan, X: Tensor) -> tuple[SchurSpace, Tensor, Tensor]:
    """The space at a plan, still empty, the right-hand sides B (m, pq) in its scaling, and A (pq, pq); two passes."""
    pairs, c = plan.pairs, plan.col_sums
    mean, covariance = conditional_moments(plan)
    moved = c[:, None] * pairs.col_means(plan.phi, carried(X, mean), plan.psi)
    PX, sent = moved.split([X.shape[1], moved.shape[1] - X.shape[1]], 1)
    move = moves(pairs, X, Moments(plan.phi, plan.psi, plan.row_sums, c, mean, covariance, PX), sent)
    space = SchurSpace(pairs, plan.phi, plan.psi, plan.row_sums, c)
    return space, space.project(space.root_inv[:, None] * move.rhs), move.explicit


@dataclass(frozen=True, eq=False)
class Point:
    """A point w of a problem, its plan to rounding, and the slow modes of a point one step of `step` an entry away."""

    problem: ShuffledRegression
    w: Tensor
    step: float
    seed: int

    @cached_property
    def plan(self) -> Plan:
        """The plan at w."""
        return self.problem.solve_plan(self.w, TIGHT)

    @property
    def X(self) -> Tensor:
        """The sources (n, p)."""
        return self.problem.design

    @cached_property
    def near_modes(self) -> Tensor:
        """Slow modes (m, k) that a rough Hessian at the neighbouring point leaves behind."""
        signs = torch.randn(len(self.w), generator=self._rng(), dtype=torch.float64).sign().to(self.w)
        plan = self.problem.solve_plan(self.w + self.step * signs, TIGHT)
        return linear_model_hessian(plan, self.X, rtol=NEAR_RTOL, modes=plan.modes).modes

    @cached_property
    def exact(self) -> Tensor:
        """The Hessian (pq, pq): dense up to 3000 points, from a converged block solve above that."""
        if max(self.plan.shape) > DENSE_UP_TO:
            return linear_model_hessian(self.plan, self.X, rtol=1e-12, max_iter=200).matrix
        pairs = self.plan.pairs
        return dense_hessian(self.plan.to_dense(), self.X, pairs.target.points, pairs.scale, pairs.eps)

    def _rng(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def product(self, method: str, most: int) -> Iterator[Row]:
        """One Hessian-vector product: its relative error after every iteration, the passes of the response alone."""
        space, B, explicit = system(self.plan, self.X)
        v = torch.randn(B.shape[1], generator=self._rng(), dtype=torch.float64).to(B)
        b, exact = B @ v, self.exact @ v
        before = space.pairs.passes

        def row(h: Tensor) -> Row:
            error = explicit @ v + space.pairs.eps * (B.T @ h) - exact
            return {"error": float(error.norm() / exact.norm())} | ledger(space.pairs.passes, before)

        if method == "CG":
            rows: list[Row] = []
            S = FunctionOperator(
                (len(b), len(b)), matvec=lambda u: space.product(u[:, None])[0][:, 0], dtype=b.dtype, device=b.device,
                symmetric=True,
            )  # fmt: skip
            cg(S, b, rtol=1e-13, maxiter=most // 2, callback=lambda h: rows.append(row(h)))
            yield from rows
            return
        modes = self.near_modes if method.endswith("slow modes") else None
        for y in _growing(space, b[:, None], modes, 64, most):
            yield row((space.Q @ y)[:, 0])

    def hessian(self, block: str, most: int) -> Iterator[Row]:
        """The exact Hessian: its relative error after every step, and its bracket; the moments' two passes included."""
        exact, lowest = self.exact, float(torch.linalg.eigvalsh(self.exact)[0])
        if block == "columns":
            before = self.plan.pairs.passes
            space, B, explicit = system(self.plan, self.X)
            for y in _growing(space, B, None, 0, most):
                implicit = space.pairs.eps * B.T @ (space.Q @ y)
                error = float((explicit + (implicit + implicit.T) / 2 - exact).norm() / exact.norm())
                yield {"error": error, "exact": lowest} | ledger(space.pairs.passes, before)
            return
        modes = self.near_modes if block.endswith("slow modes") else self.X.new_empty(len(self.plan.b), 0)
        for steps in range(most // 2):
            before = self.plan.pairs.passes
            found = linear_model_hessian(self.plan, self.X, rtol=0.0, modes=modes, max_iter=steps)
            bracket = [float(torch.linalg.eigvalsh(t)[0]) for t in (found.known.lower, found.known.upper)]
            yield {
                "error": float((found.matrix - exact).norm() / exact.norm()),
                "lower": bracket[0], "upper": bracket[1], "exact": lowest,
            } | ledger(self.plan.pairs.passes, before)  # fmt: skip


def _growing(space: SchurSpace, B: Tensor, modes: Tensor | None, width: int, most: int) -> Iterator[Tensor]:
    """Galerkin solutions, in coordinates of the basis, on a space that grows by a block of `width` columns a step."""
    space.expand(start_block(space, B, modes, width))
    for _ in range(most // 2):
        yield space.solve(B)[0]
        if space.grow() == 0:
            return


def until(rows: Iterator[Row], goals: tuple[float, ...]) -> list[Row]:
    """The rows up to the last goal, thinned, but the first row that meets a goal is always among them."""
    kept: list[Row] = []
    left = sorted(goals, reverse=True)
    for row in rows:
        met = [goal for goal in left if row["error"] <= goal]
        if met or not kept or row["error"] <= THIN * kept[-1]["error"]:
            kept.append(row)
        left = left[len(met) :]
        if not left:
            break
    return kept
