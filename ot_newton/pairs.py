"""All n×m pairs of one transport problem at one temperature: the only place that knows how a cost becomes a score.

With centred points the cost is `C_ij = s|x_i|² + s|y_j|² - 2s x_i·y_j`, so the plan
`P_ij = a_i b_j exp((f_i + g_j - C_ij)/eps)` is a biased dot product (FlashSinkhorn, arXiv:2602.03067, Proposition 1).
Potentials are kept dimensionless here, `phi = f/eps` and `psi = g/eps`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ot_newton.kernels import dispatch

COLUMNS_PER_PASS = 64


@dataclass
class Passes:
    """Sweeps over all n×m pairs, by kind. A sweep that carries up to 64 columns counts as one."""

    half_steps: int = 0
    applications: int = 0
    columns: int = 0

    @property
    def total(self) -> int:
        """All passes, whatever they were for."""
        return self.half_steps + self.applications

    def count_application(self, columns: int) -> None:
        """Count a transport application of this many columns."""
        self.applications += -(-columns // COLUMNS_PER_PASS)
        self.columns += columns


@dataclass(frozen=True, eq=False)
class Side:
    """The points of one side with all that a score needs of them."""

    points: Tensor  # (n, d), relative to the common centroid
    weights: Tensor  # (n,)
    query: Tensor  # (n, d), the points times 2s/eps
    norm: Tensor  # (n,), s|x|²/eps
    bias: Tensor  # (n,), log weight minus norm

    @classmethod
    def at(cls, points: Tensor, weights: Tensor, factor: float) -> "Side":
        """The side for `factor` = s/eps."""
        norm = (points * points).sum(1) * factor
        return cls(points, weights, points * (2 * factor), norm, weights.log() - norm)


@dataclass(frozen=True, eq=False)
class Pairs:
    """All pairs of a source and a target point, with cost `s|x - y|²` at temperature eps; counts its passes."""

    source: Side
    target: Side
    eps: float
    scale: float
    backend: str
    passes: Passes

    @classmethod
    def of(
        cls, x: Tensor, y: Tensor, a: Tensor, b: Tensor, eps: float, scale: float = 1.0, backend: str = "auto"
    ) -> "Pairs":
        """Pairs of x (n, d) with weights a (n,) and y (m, d) with weights b (m,), all of one dtype and device.

        Points are stored relative to their common centroid, which changes no cost and keeps rounding small.
        """
        wide = [t.to(torch.float64) for t in (x, y, a, b)]
        centre = (wide[2] @ wide[0] + wide[3] @ wide[1]) / 2
        source = Side.at((wide[0] - centre).to(x.dtype), a, scale / eps)
        target = Side.at((wide[1] - centre).to(x.dtype), b, scale / eps)
        return cls(source, target, eps, scale, dispatch.resolve(backend, x.device, x.dtype), Passes())

    def at(self, eps: float) -> "Pairs":
        """The same pairs at another temperature, on the same count of passes."""
        source, target = (Side.at(s.points, s.weights, self.scale / eps) for s in (self.source, self.target))
        return replace(self, source=source, target=target, eps=eps)

    def swapped(self) -> "Pairs":
        """The same problem with sources and targets exchanged, on the same count of passes."""
        return replace(self, source=self.target, target=self.source)

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        return len(self.source.points), len(self.target.points)

    def row(self, psi: Tensor, guess: Tensor | None = None) -> Tensor:
        """`phi_i = -log Σ_j b_j exp(psi_j - C_ij/eps)`, shape (n,): the half-step that makes the row sums equal a.

        A guess of the result, if there is one, makes the pass cheaper.
        """
        self.passes.half_steps += 1
        x, y = self.source, self.target
        anchor = None if guess is None else x.norm - guess
        return x.norm - dispatch.lse(x.query, y.points, psi + y.bias, anchor=anchor, backend=self.backend)

    def col(self, phi: Tensor, guess: Tensor | None = None) -> Tensor:
        """`psi_j = -log Σ_i a_i exp(phi_i - C_ij/eps)`, (m,): the half-step that makes the column sums equal b."""
        return self.swapped().row(phi, guess)

    def row_with(self, psi: Tensor, V: Tensor, guess: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`row(psi)` and, riding on the same pass, `D_a⁻¹ P V` of the plan it makes; shapes (n,) and (n, c)."""
        self.passes.half_steps += 1
        self.passes.columns += V.shape[1]
        x, y = self.source, self.target
        anchor = None if guess is None else x.norm - guess
        log_sum, mean = dispatch.attend(x.query, y.points, psi + y.bias, V, anchor=anchor, backend=self.backend)
        return x.norm - log_sum, mean

    def col_with(self, phi: Tensor, U: Tensor, guess: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`col(phi)` and, riding on the same pass, `D_b⁻¹ Pᵀ U` of the plan it makes; shapes (m,) and (m, c)."""
        return self.swapped().row_with(phi, U, guess)

    def apply(self, phi: Tensor, psi: Tensor, V: Tensor) -> Tensor:
        """Transport application `P V`, shape (n, c)."""
        self.passes.count_application(V.shape[1])
        x, y = self.source, self.target
        return dispatch.apply(x.query, y.points, phi + x.bias, psi + y.bias, V, backend=self.backend)

    def adjoint(self, phi: Tensor, psi: Tensor, U: Tensor) -> Tensor:
        """Transport application `Pᵀ U`, shape (m, c)."""
        return self.swapped().apply(psi, phi, U)

    def hadamard(self, phi: Tensor, psi: Tensor, A: Tensor, B: Tensor, V: Tensor) -> Tensor:
        """Hadamard-weighted transport `(P ∘ A Bᵀ) V`, shape (n, c)."""
        self.passes.count_application(V.shape[1])
        x, y = self.source, self.target
        return dispatch.hadamard(x.query, y.points, phi + x.bias, psi + y.bias, A, B, V, backend=self.backend)
