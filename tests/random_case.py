"""A random problem for the fuzz, and the dense float64 referee of its answers."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ot_newton import (
    Plan,
)
from ot_newton.sinkhorn import METHODS


@dataclass
class Case:
    """One random problem, and the random numbers of its seed."""

    seed: int

    def __post_init__(self) -> None:
        self.rng = torch.Generator().manual_seed(self.seed)
        self.n, self.m, self.d = self.integer(1, 24), self.integer(1, 24), self.integer(1, 6)
        self.dtype = self.pick(2 * [torch.float64, torch.float32] + [torch.float16, torch.bfloat16])
        self.backend = self.pick(["auto", "dense", "blocked"])
        self.method = self.pick(["auto", "auto", *METHODS])
        self.cost, self.scale = self.pick(["sqeuclidean", "sqeuclidean", "cosine"]), self.pick([1.0, 0.5, 3.0])
        size = 10.0 ** self.integer(-6, 6) if self.dtype in (torch.float64, torch.float32) else 1.0
        offset = self.pick([0.0, 0.0, 1.0, 100.0])
        self.x, self.y = (self.cloud(k, size, offset) for k in (self.n, self.m))
        self.a, self.b = self.weights(self.n), self.weights(self.m)
        typical = self.scale * (1.0 if self.cost == "cosine" else size**2)
        self.eps = typical * 10.0 ** (4 * self.uniform() - 3)
        self.options = {
            "a": self.a, "b": self.b, "cost": self.cost, "scale": self.scale, "backend": self.backend,
            "method": self.method, "max_iter": self.pick([1, 3, 30, 300]), "anneal": self.pick([None, None, 1.0, 0.5]),
        }  # fmt: skip

    def uniform(self) -> float:
        return float(torch.rand((), generator=self.rng))

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.rng))

    def pick(self, choices: list):
        return choices[self.integer(0, len(choices) - 1)]

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng, dtype=torch.float64)

    def cloud(self, n: int, size: float, offset: float) -> Tensor:
        points = self.randn(n, self.d)
        if self.uniform() < 0.3:  # duplicates
            points = points[torch.randint(0, n, (n,), generator=self.rng)]
        if self.uniform() < 0.2:  # two clusters
            points[: n // 2] += 5
        points = ((points + offset) * size).to(self.dtype)
        layout = self.integer(0, 3)
        if layout == 1:
            return points.T.contiguous().T
        if layout == 2:
            wide = torch.full((2 * n, 2 * self.d), math.nan, dtype=self.dtype)
            wide[::2, ::2] = points
            return wide[::2, ::2]
        return points[:1].expand(n, -1) if layout == 3 and self.uniform() < 0.2 else points

    def weights(self, n: int) -> Tensor | None:
        kind = self.integer(0, 3)
        if kind == 0:
            return None
        w = torch.rand(n, generator=self.rng, dtype=torch.float64) + 1e-3
        if kind == 2:
            w[torch.rand(n, generator=self.rng) < 0.4] = 0
            w[self.integer(0, n - 1)] = 1
        if kind == 3:
            w = w ** self.integer(1, 8)
        return (w / w.sum()).to(torch.float32 if self.dtype in (torch.float16, torch.bfloat16) else self.dtype)

    def __str__(self) -> str:
        return (
            f"seed={self.seed}: {self.n}×{self.m}×{self.d} {str(self.dtype)[6:]} eps={self.eps:.3g} cost={self.cost} "
            f"scale={self.scale} backend={self.backend} method={self.method} max_iter={self.options['max_iter']} "
            f"anneal={self.options['anneal']} weights={self.a is not None}/{self.b is not None}"
        )


class Dense:
    """The plan at the potentials that were returned, formed in float64 from points as they were given."""

    def __init__(self, plan: Plan) -> None:
        x, y = (plan.cost.embed(t.double()) for t in (plan.x, plan.y))
        self.x, self.y, self.s, self.eps = x - x.mean(0), y - x.mean(0), plan.cost.scale, plan.eps
        self.C = self.s * (self.x[:, None] - self.y).square().sum(2)
        self.a, self.b, self.f, self.g = (t.double() for t in (plan.a, plan.b, plan.f, plan.g))
        self.exponent = (self.f[:, None] + self.g - self.C) / self.eps
        # a weight of 0 beats any exponent
        self.P = torch.exp(self.exponent + self.a.log()[:, None] + self.b.log())
        self.r, self.c = self.P.sum(1), self.P.sum(0)
        self.error = float((self.r - self.a).abs().sum() + (self.c - self.b).abs().sum())
        # the exponents as the backends add them up, from products of centred coordinates
        centre = (self.a @ self.x + self.b @ self.y) / 2
        held_a, held_b = self.a > 0, self.b > 0
        reach = max(float((t - centre).square().sum(1).max()) for t in (self.x, self.y)) * self.s / self.eps
        potentials = [*self.f[held_a].abs().tolist(), *self.g[held_b].abs().tolist()]
        logs = -min(float(self.a[held_a].log().min()), float(self.b[held_b].log().min()))
        length = 4 * reach + 2 * max(potentials) / self.eps + logs + self.x.shape[1] + 10
        # how the points themselves are held: relative to the offset from the origin
        self.delta = 4 * torch.finfo(plan.f.dtype).eps * length

    @property
    def value(self) -> float:
        return float(self.r @ supported(self.f, self.r) + self.c @ supported(self.g, self.c))

    @property
    def grad(self) -> Tensor:
        return 2 * self.s * (self.r[:, None] * self.x - self.P @ self.y)

    @property
    def spread(self) -> float:
        return float(max(self.x.norm(dim=1).max(), self.y.norm(dim=1).max()))

    def hessian(self) -> tuple[Tensor, float] | None:
        """∇²_x at these potentials, (n·d, n·d), and the condition of the response; None where that is not solvable.

        Everything in averages over rows and columns, so that points of hardly any mass are as exact as the others:
        `dphi + R dpsi = rho/r` and `Cᵀ dphi + dpsi = kappa/c` with R = P/r, C = P/c and one potential fixed.
        """
        (n, d), m, s2 = self.x.shape, len(self.y), 2 * self.s
        R, C = (self.exponent + self.b.log()).softmax(1), (self.exponent + self.a.log()[:, None]).softmax(0)
        sigma = torch.linalg.svdvals((R * C).sqrt())  # of P/√(r c); its largest is 1
        gap = 1 - float(sigma[1]) ** 2 if len(sigma) > 1 else 1.0
        if gap < 1e-6:
            return None
        N = (s2 / self.eps) * (self.x[:, None] - self.y)  # (n, m, d)
        rho, kappa = torch.zeros(n, n, d, dtype=torch.float64), (C[:, :, None] * N).permute(1, 0, 2)
        rho[range(n), range(n)] = (R[:, :, None] * N).sum(1)
        system = torch.eye(n + m, dtype=torch.float64)
        system[:n, n:], system[n:, :n] = R, C.T
        rhs = torch.cat([rho.reshape(n, n * d), kappa.reshape(m, n * d)])  # (n + m, n·d)
        fixed = n + int(self.c.argmax())
        free = [k for k in range(n + m) if k != fixed]
        answer = torch.zeros_like(rhs)
        answer[free] = torch.linalg.solve(system[free][:, free], rhs[free])
        moved = answer[:n, None] + answer[n:]  # (n, m, n·d), of the exponent
        for i in range(n):
            moved[i, :, i * d : (i + 1) * d] -= N[i]
        implicit = torch.einsum("ij,ijd,ijk->idk", self.P, N, moved).reshape(n * d, n * d)
        return s2 * self.r.repeat_interleave(d).diag() + self.eps * implicit, 1 / gap


def supported(potential: Tensor, weights: Tensor) -> Tensor:
    return torch.where(weights > 0, potential, torch.zeros_like(potential))
