"""The problem that every library is timed on, and a float64 referee of its answers that uses nothing of the library.

    C_ij = |x_i - y_j|²,   P_ij = a_i b_j exp((f_i + g_j - C_ij)/eps),   value = <a, f> + <b, g>,   a, b uniform

The libraries stop after so many iterations, not at the optimum, so the referee repeats their iterations: f before g
for the alternating ones (Sinkhorn 1967), both at once and averaged under a falling temperature for GeomLoss
(Feydy, "Geometric data analysis, beyond convolutions", 2020, algorithm 3.6). Its Hessian product solves for the
response of the potentials with the plan formed, by conjugate gradients.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

SAMPLED_ROWS = 256
HALVINGS = 7  # of the temperature, in the averaged iteration: with its ends, nine sweeps
CHUNK = {"cpu": 1 << 22, "cuda": 1 << 27}  # entries of a block of pairs
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Clouds:
    """Points uniform in the unit cube, moved by `shift`, times `scale`; eps is for the unit cube and scales along."""

    n: int
    d: int
    eps: float = 0.1
    iterations: int = 10
    cg_iterations: int = 50
    seed: int = 0
    shift: float = 0.0
    scale: float = 1.0

    @property
    def temperature(self) -> float:
        """eps in the units of these points."""
        return self.eps * self.scale**2

    @cached_property
    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """x and y, float32 of shape (n, d)."""
        rng = np.random.default_rng(self.seed)
        x, y = (((rng.random((self.n, self.d)) + self.shift) * self.scale).astype(np.float32) for _ in range(2))
        return x, y

    def direction(self, *, constant: bool = False) -> np.ndarray:
        """A direction of x, (n, d), float32: normal, or the same for all points."""
        rng = np.random.default_rng(self.seed + 1)
        A = rng.standard_normal((1 if constant else self.n, self.d)).astype(np.float32)
        return np.array(np.broadcast_to(A, (self.n, self.d)))

    @property
    def rows(self) -> np.ndarray:
        """The rows on which answers are compared."""
        chosen = np.random.default_rng(self.seed + 2).permutation(self.n)[:SAMPLED_ROWS]
        return np.sort(chosen)

    @property
    def averaged_temperatures(self) -> list[float]:
        """Temperatures of the averaged iteration: the first one twice, halved to just above eps, then eps."""
        return [self.temperature * 2 ** (k - 0.5) for k in (HALVINGS, *range(HALVINGS, 0, -1), 0.5)]


@dataclass(frozen=True)
class Task:
    """Something to time: `answer` turns what `run` returned into arrays that the referee knows, in our convention.

    `passes` is the number of sweeps over all pairs where it is known beforehand, `count` a counter of them; `columns`
    are in flight at once.
    """

    run: Callable[[], Any]
    answer: Callable[[Any], Arrays]
    passes: int | None = None
    count: Callable[[], int] | None = None
    columns: int = 0
    detail: str = ""


class Referee:
    """The right answers, in float64.

    Args:
        clouds: the problem.
        device: where it computes.
        saved: what `prepare` returned; without it only what follows from the asked potentials can be judged.
    """

    def __init__(self, clouds: Clouds, device: str, saved: Arrays | None = None) -> None:
        self.clouds, self.eps, self.saved = clouds, clouds.temperature, saved
        wide = [torch.as_tensor(p, device=device).to(torch.float64) for p in clouds.points]
        centre = (wide[0].mean(0) + wide[1].mean(0)) / 2
        self.x, self.y = (p - centre for p in wide)
        self.log_weight = -math.log(clouds.n)
        self.rows = torch.as_tensor(clouds.rows, device=device)

    def softmin(self, x: Tensor, y: Tensor, g: Tensor, eps: float) -> Tensor:
        """`-eps log Σ_j b_j exp((g_j - C_ij)/eps)`, (len(x),)."""
        norm, blocks = (y * y).sum(1), []
        for block in x.split(max(1, CHUNK[x.device.type] // len(y))):
            score = torch.addmm(g - norm, block, y.T, alpha=2.0).mul_(1 / eps)
            blocks.append((block * block).sum(1) - eps * (torch.logsumexp(score, 1) + self.log_weight))
        return torch.cat(blocks)

    def row(self, g: Tensor) -> Tensor:
        """f for g, (n,)."""
        return self.softmin(self.x, self.y, g, self.eps)

    def plan(self, f: Tensor, g: Tensor, x: Tensor | None = None) -> Tensor:
        """The plan at potentials f of the points x (by default all) and g, (len(f), n)."""
        x = self.x if x is None else x
        P = torch.addmm(g - (self.y * self.y).sum(1), x, self.y.T, alpha=2.0)
        return P.add_((f - (x * x).sum(1))[:, None]).mul_(1 / self.eps).add_(2 * self.log_weight).exp_()

    def tensor(self, array: np.ndarray) -> Tensor:
        """An array as float64 on the referee's device."""
        return torch.as_tensor(array, device=self.x.device).to(torch.float64)

    def expected(self, kind: str, iterate: str, answer: Arrays) -> np.ndarray | None:
        """The right value of `answer[kind]`, on the sampled rows; None where it is not known.

        `iterate` says at which potentials a library evaluates: "plan" (f, g before the last half-step), "pair" (f and
        g as they end), "ahead" (one more half-step f after them), "averaged".
        """
        if kind == "potential":
            if self.saved is not None:
                return self._iterate(iterate)[0][self.rows].cpu().numpy()
            return self.softmin(self.x[self.rows], self.y, self.tensor(answer["g"]), self.eps).cpu().numpy()
        if kind == "hvp":
            if self.saved is not None:
                return self.saved["hvp"]
            return 2 / self.clouds.n * self.clouds.direction(constant=True)[self.clouds.rows].astype(float)
        if kind == "value":
            return np.array(self._value(iterate)) if self.saved else None
        f, g = (
            self._evaluated(iterate) if self.saved else (self.tensor(answer["f"])[self.rows], self.tensor(answer["g"]))
        )
        P, x = self.plan(f, g, self.x[self.rows]), self.x[self.rows]
        if kind == "gradient":
            return (2 * (P.sum(1, keepdim=True) * x - P @ self.y)).cpu().numpy()
        V = self.tensor(answer["V"])
        if kind == "hadamard":
            P = P * (self.tensor(self.clouds.direction())[self.rows] @ V.T)
        return (P @ V).cpu().numpy()

    def _iterate(self, iterate: str) -> tuple[Tensor, Tensor]:
        assert self.saved is not None
        names = ("averaged_f", "averaged_g") if iterate == "averaged" else ("f", "after")
        f, g = (self.tensor(self.saved[name]) for name in names)
        return f, g

    def _value(self, iterate: str) -> float:
        f, g = self._iterate(iterate)
        if iterate == "plan":
            assert self.saved is not None
            before = self.tensor(self.saved["before"])
            return float(f.mean() + torch.exp((before - g) / self.eps) @ before / len(g))
        return float(f.mean() + g.mean())

    def _evaluated(self, iterate: str) -> tuple[Tensor, Tensor]:
        """f on the sampled rows, and g, of the plan that the gradient belongs to."""
        assert self.saved is not None
        f, after = self._iterate(iterate)
        if iterate == "pair":
            return f[self.rows], after
        before = {"plan": "before", "ahead": "after", "averaged": "averaged_before"}[iterate]
        g = self.tensor(self.saved[before])
        return self.softmin(self.x[self.rows], self.y, g, self.eps), g

    def prepare(self, *, product: bool = True) -> Arrays:
        """Every iterate that a library may end at, and the Hessian product on the sampled rows."""
        f = before = after = torch.zeros_like(self.x[:, 0])
        for _ in range(self.clouds.iterations):
            before, f = after, self.row(after)
            after = self.softmin(self.y, self.x, f, self.eps)
        saved = {"f": f, "before": before, "after": after, **self._averaged()}
        if product:
            saved["hvp"] = self.product(f, before, self.tensor(self.clouds.direction()))
        return {name: tensor.cpu().numpy() for name, tensor in saved.items()}

    def _averaged(self) -> dict[str, Tensor]:
        temperatures, zero = self.clouds.averaged_temperatures, torch.zeros_like(self.x[:, 0])
        sweep = lambda f, g, eps: (self.softmin(self.x, self.y, g, eps), self.softmin(self.y, self.x, f, eps))  # noqa: E731
        f, g = sweep(zero, zero, temperatures[0])
        for eps in temperatures:
            f, g = ((new + old) / 2 for new, old in zip(sweep(f, g, eps), (f, g), strict=True))
        last_f, last_g = sweep(f, g, self.eps)
        return {"averaged_before": g, "averaged_f": last_f, "averaged_g": last_g}

    def product(self, f: Tensor, g: Tensor, A: Tensor, rtol: float = 1e-11, max_iter: int = 1500) -> Tensor:
        """`(H A)` on the sampled rows, for the plan at (f, g) with the plan formed; memory O(n²)."""
        P, rate = self.plan(f, g), 2 / self.eps
        r, c, z = P.sum(1), P.sum(0), (self.x * A).sum(1)
        rho = rate * (r * z - (A * (P @ self.y)).sum(1))
        kappa = rate * (P.T @ z - (self.y * (P.T @ A)).sum(1))
        weight = c.rsqrt()
        gauge = c.sqrt() / torch.linalg.vector_norm(c.sqrt())
        residual = weight * (kappa - P.T @ (rho / r))
        residual = residual - (gauge @ residual) * gauge
        h, p, rr = torch.zeros_like(residual), residual, residual @ residual
        limit = rtol**2 * rr
        for _ in range(max_iter):
            if rr <= limit:
                break
            q = weight * p
            Sp = p - weight * (P.T @ ((P @ q) / r))
            Sp = Sp - (gauge @ Sp) * gauge
            step = rr / (p @ Sp)
            h, residual = h + step * p, residual - step * Sp
            rr, old = residual @ residual, rr
            p = residual + (rr / old) * p
        dpsi = weight * h
        dphi = (rho - P @ dpsi) / r
        rows, A = self.rows, A[self.rows]
        moved = (self.x[rows] * A).sum(1, keepdim=True) - A @ self.y.T  # (rows, n): (x_i - y_j)·A_i
        dP = P[rows] * (dphi[rows, None] + dpsi - rate * moved)
        return 2 * (r[rows, None] * A - dP @ self.y)


def errors(answer: Arrays, referee: Referee, iterate: str) -> dict[str, float]:
    """Relative error of each part of an answer on the sampled rows; of a potential the largest, in units of eps.

    A potential is compared up to a constant, which is no part of it.
    """
    found: dict[str, float] = {}
    for kind in ("potential", "value", "gradient", "transport", "hadamard", "hvp"):
        right = referee.expected(kind, iterate, answer) if kind in answer else None
        if right is None:
            continue
        got = np.asarray(answer[kind], dtype=float)
        if kind == "value":
            found[kind] = float(abs(got - right) / abs(right))
            continue
        gap = got[referee.clouds.rows] - right
        if kind == "potential":
            found[kind] = float(np.abs(gap - gap.mean()).max() / referee.eps)
        else:
            found[kind] = float(np.linalg.norm(gap) / np.linalg.norm(right))
    return {kind: error if math.isfinite(error) else math.inf for kind, error in found.items()}
