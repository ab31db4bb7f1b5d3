"""Dense float64 referees: entropic transport with the plan formed, every derivative from the plain formulas.

Nothing of the library is used here. Derivatives of the cost matrix come from `torch.func`, the response of the
potentials from a pseudoinverse of the full system, and `unrolled` differentiates through the Sinkhorn iterations.
"""

import math
from functools import cached_property

import torch
from torch import Tensor


def pts(n: int, d: int, seed: float = 0) -> Tensor:
    """Points `round(128 sin(1.3k² + 0.7k + seed))/64` for k = 1..n·d, row-major, (n, d)."""
    k = torch.arange(1, n * d + 1, dtype=torch.float64)
    return (torch.round(128 * torch.sin(1.3 * k * k + 0.7 * k + seed)) / 64).reshape(n, d)


def wts(n: int, seed: float = 0) -> Tensor:
    """Weights proportional to `1.5 + sin(2.1 i + seed)`, (n,)."""
    w = 1.5 + torch.sin(2.1 * torch.arange(n, dtype=torch.float64) + seed)
    return w / w.sum()


def cost_matrix(x: Tensor, y: Tensor, cost: str = "sqeuclidean", scale: float = 1.0) -> Tensor:
    """`scale·|x_i - y_j|²`, or `scale·(1 - cos(x_i, y_j))`, (n, m)."""
    if cost == "cosine":
        return scale * (1 - (x @ y.T) / (x.norm(dim=1)[:, None] * y.norm(dim=1)))
    return scale * ((x[:, None] - y) ** 2).sum(2)


def row_potential(C: Tensor, b: Tensor, g: Tensor, eps: float) -> Tensor:
    """`f_i = -eps log Σ_j b_j exp((g_j - C_ij)/eps)`."""
    return -eps * torch.logsumexp((g - C) / eps + b.log(), dim=1)


def potentials(C: Tensor, a: Tensor, b: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Converged potentials: annealed sweeps, then Newton on the semi-dual with a dense pseudoinverse."""
    g, t = torch.zeros_like(b), max(float(C.max()), eps)
    while t > eps:
        t = max(0.7 * t, eps)
        for _ in range(20):
            g = row_potential(C.T, a, row_potential(C, b, g, t), t)
    best, since = (math.inf, g), 0
    while since < 4:
        f = row_potential(C, b, g, eps)
        P = plan_matrix(C, a, b, f, g, eps)
        c = P.sum(0)
        error = float((c - b).abs().sum())
        best, since = ((error, g), 0) if error < 0.9 * best[0] else (best, since + 1)
        if error < 1e-15:
            break
        S = torch.diag(c) - P.T @ (P / torch.where(a > 0, a, 1.0)[:, None])
        step, here = eps * torch.linalg.pinv(S, hermitian=True) @ (b - c), a @ f + b @ g
        for halving in range(30):
            trial = g + step / 2**halving
            if a @ row_potential(C, b, trial, eps) + b @ trial >= here - 1e-15 * abs(here):
                break
        # A sweep after the Newton step keeps g of points without weight, and rounding, in order.
        g = row_potential(C.T, a, row_potential(C, b, trial, eps), eps)
    return row_potential(C, b, best[1], eps), best[1]


def plan_matrix(C: Tensor, a: Tensor, b: Tensor, f: Tensor, g: Tensor, eps: float) -> Tensor:
    """`a_i b_j exp((f_i + g_j - C_ij)/eps)`, (n, m)."""
    return a[:, None] * b * torch.exp((f[:, None] + g - C) / eps)


class Referee:
    """One transport problem with everything dense; `at` given potentials, the one with the marginals they induce."""

    def __init__(
        self, x, y, eps, *, a=None, b=None, cost="sqeuclidean", scale=1.0, at: tuple[Tensor, Tensor] | None = None
    ) -> None:
        self.x, self.y = x.double(), y.double()
        n, m = len(x), len(y)
        self.a = torch.full((n,), 1 / n, dtype=torch.float64) if a is None else a.double()
        self.b = torch.full((m,), 1 / m, dtype=torch.float64) if b is None else b.double()
        self.eps, self.cost, self.scale = eps, cost, scale
        self.C = cost_matrix(self.x, self.y, cost, scale)
        if at is None:
            self.a, self.b = self.a / self.a.sum(), self.b / self.b.sum()
        self.f, self.g = potentials(self.C, self.a, self.b, eps) if at is None else (t.double() for t in at)
        self.P = plan_matrix(self.C, self.a, self.b, self.f, self.g, eps)
        self.r, self.c = self.P.sum(1), self.P.sum(0)
        assert at is not None or self.error < 1e-12

    @property
    def error(self) -> float:
        """L1 marginal error."""
        return float((self.r - self.a).abs().sum() + (self.c - self.b).abs().sum())

    @property
    def value(self) -> Tensor:
        """`<P, C> + eps KL(P | a⊗b)` from its definition."""
        reference = self.a[:, None] * self.b
        held = self.P > 0
        return (self.P * self.C).sum() + self.eps * (self.P[held] * (self.P[held] / reference[held]).log()).sum()

    def _moved_cost(self, z: Tensor) -> Tensor:
        n, d = self.x.shape
        return cost_matrix(z[: n * d].reshape(n, d), z[n * d :].reshape(-1, d), self.cost, self.scale)

    @cached_property
    def z(self) -> Tensor:
        """All coordinates, those of x first, ((n + m) d,)."""
        return torch.cat([self.x.reshape(-1), self.y.reshape(-1)])

    @cached_property
    def J(self) -> Tensor:
        """∂C_ij/∂z, (n, m, (n + m) d)."""
        return torch.func.jacrev(self._moved_cost)(self.z)

    @property
    def grad_x(self) -> Tensor:
        """Envelope theorem: `Σ_ij P_ij ∂C_ij/∂x`, (n, d)."""
        return torch.einsum("ij,ijz->z", self.P, self.J)[: self.x.numel()].reshape(self.x.shape)

    @property
    def grad_y(self) -> Tensor:
        """`Σ_ij P_ij ∂C_ij/∂y`, (m, d)."""
        return torch.einsum("ij,ijz->z", self.P, self.J)[self.x.numel() :].reshape(self.y.shape)

    @property
    def explicit(self) -> Tensor:
        """Hessian at frozen potentials, of size (n + m) d."""
        bend = torch.func.jacrev(torch.func.grad(lambda z: (self.P * self._moved_cost(z)).sum()))(self.z)
        return bend - torch.einsum("ij,ijy,ijz->yz", self.P, self.J, self.J) / self.eps

    @property
    def response(self) -> Tensor:
        """Derivatives of the stacked potentials (f, g) in z, (n + m, (n + m) d), by a pseudoinverse."""
        system = torch.cat(
            [torch.cat([self.r.diag(), self.P], 1), torch.cat([self.P.T, self.c.diag()], 1)], 0
        )  # singular: the constants
        moved = torch.einsum("ij,ijz->ijz", self.P, self.J)
        return torch.linalg.pinv(system, hermitian=True, rtol=1e-13) @ torch.cat([moved.sum(1), moved.sum(0)], 0)

    @cached_property
    def hessian(self) -> Tensor:
        """Joint Hessian of the value in (x, y), explicit plus implicit part, of size (n + m) d."""
        moved = torch.einsum("ij,ijz->ijz", self.P, self.J)
        implicit = torch.cat([moved.sum(1), moved.sum(0)], 0).T @ self.response / self.eps
        return self.explicit + (implicit + implicit.T) / 2

    @property
    def hessian_x(self) -> Tensor:
        """∇²_x, (n·d, n·d)."""
        size = self.x.numel()
        return self.hessian[:size, :size]


def unrolled(x, y, eps, *, a, b, cost="sqeuclidean", scale=1.0, sweeps=300) -> Tensor:
    """The dual value after so many recorded sweeps: differentiate it and torch walks through every iteration."""
    C, g = cost_matrix(x, y, cost, scale), torch.zeros_like(b)
    for _ in range(sweeps):
        f = row_potential(C, b, g, eps)
        g = row_potential(C.T, a, f, eps)
    return a @ row_potential(C, b, g, eps) + b @ g


def relative(got: Tensor, want: Tensor) -> float:
    """Largest entry of the difference relative to the largest entry wanted; NaN counts as infinite."""
    size = want.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    return float(((got.double() - want).abs().max() / size).nan_to_num(nan=math.inf))
