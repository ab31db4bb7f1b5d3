"""All n×m pairs of one transport problem at one temperature: the only place that knows how a cost becomes a score.

With centred points the cost is `C_ij = s|x_i|² + s|y_j|² - 2s x_i·y_j`, so the plan
`P_ij = a_i b_j exp((f_i + g_j - C_ij)/eps)` is a biased dot product (FlashSinkhorn, arXiv:2602.03067, Proposition 1).
Potentials are kept dimensionless here, and without the norms,

    phi_i = (f_i - s|x_i|²)/eps,   psi_j = (g_j - s|y_j|²)/eps,   P_ij = a_i b_j exp(phi_i + psi_j + 2s x_i·y_j/eps),

since in many dimensions the norms are most of a potential, and most of what rounding would take from it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ot_newton.graphs import repeated
from ot_newton.kernels import dispatch
from ot_newton.labels import Labels

COLUMNS_PER_PASS = 64
FEW_PAIRS = 1 << 28
LOOK_EVERY = 4


@dataclass(frozen=True)
class Passes:
    """Sweeps over all n×m pairs, by kind. A sweep that carries up to 64 columns counts as one."""

    half_steps: int = 0
    applications: int = 0
    columns: int = 0

    @classmethod
    def application(cls, columns: int) -> "Passes":
        """A transport application of this many columns."""
        return cls(0, -(-columns // COLUMNS_PER_PASS), columns)

    @property
    def total(self) -> int:
        """All passes, whatever they were for."""
        return self.half_steps + self.applications

    def __add__(self, other: "Passes") -> "Passes":
        """Both together."""
        return Passes(
            self.half_steps + other.half_steps, self.applications + other.applications, self.columns + other.columns
        )

    def __sub__(self, before: "Passes") -> "Passes":
        """What has come since `before`."""
        return Passes(
            self.half_steps - before.half_steps,
            self.applications - before.applications,
            self.columns - before.columns,
        )


class Ledger:
    """The running count of what several views of the same pairs take."""

    def __init__(self) -> None:
        self.passes = Passes()

    def add(self, passes: Passes) -> None:
        """Count these too."""
        self.passes += passes


class Counted:
    """Something that took passes, or takes them."""

    passes: Passes

    @property
    def n_passes(self) -> int:
        """All passes, whatever they were for."""
        return self.passes.total


@dataclass(frozen=True, eq=False)
class Side:
    """The points of one side with all that a score `query·key` needs of them."""

    points: Tensor  # (n, d), relative to the common centroid
    weights: Tensor  # (n,)
    log_weights: Tensor  # (n,)
    query: Tensor  # (n, d) and more with labels, the points times 2s/eps
    key: Tensor  # (n, d) and more with labels, the points
    norm: Tensor  # (n,), s|x|²/eps in float64

    @classmethod
    def at(cls, points: Tensor, weights: Tensor, factor: float, labels: tuple[Tensor, Tensor] | None = None) -> "Side":
        """The side for `factor` = s/eps and columns of labels for query and key."""
        wide = points.to(torch.float64)
        query, key = points * (2 * factor), points
        if labels is not None:
            query, key = torch.cat([query, labels[0]], 1), torch.cat([key, labels[1]], 1)
        return cls(points, weights, weights.log(), query, key, (wide * wide).sum(1) * factor)

    def reduced(self, potential: Tensor, eps: float) -> Tensor:
        """What `Pairs` keeps of a potential in units of the cost, `potential/eps - norm`; both (n,)."""
        return (potential.to(torch.float64) / eps - self.norm).to(self.points.dtype)

    def whole(self, reduced: Tensor, eps: float) -> Tensor:
        """The potential in units of the cost; the inverse of `reduced`."""
        return (eps * (reduced + self.norm)).to(self.points.dtype)


@dataclass(frozen=True, eq=False)
class Pairs:
    """All pairs of a source and a target point, with cost `s|x - y|²` at temperature eps; counts its passes."""

    source: Side
    target: Side
    eps: float
    scale: float
    backend: str
    ledger: Ledger
    labels: Labels | None
    precision: str
    operands: dispatch.Operands | None  # what the backend made of the points, once

    @classmethod
    def of(
        cls,
        x: Tensor,
        y: Tensor,
        a: Tensor,
        b: Tensor,
        eps: float,
        scale: float = 1.0,
        backend: str = "auto",
        labels: Labels | None = None,
        precision: str = "fp32",
    ) -> "Pairs":
        """Pairs of x (n, d) with weights a (n,) and y (m, d) with weights b (m,), all of one dtype and device.

        Points are stored relative to their common centroid, which changes no cost and keeps rounding small.
        """
        wide = [t.to(torch.float64) for t in (x, y, a, b)]
        centre = (wide[2] @ wide[0] + wide[3] @ wide[1]) / 2
        x, y = (wide[0] - centre).to(x.dtype), (wide[1] - centre).to(x.dtype)
        backend = dispatch.resolve(backend, x.device, x.dtype)
        return cls._made(x, y, a, b, eps, scale, backend, Ledger(), labels, precision)

    @classmethod
    def _made(
        cls, x: Tensor, y: Tensor, a: Tensor, b: Tensor, eps: float, scale: float, backend: str, ledger: Ledger,
        labels: Labels | None, precision: str,
    ) -> "Pairs":  # fmt: skip
        columns = (None, None) if labels is None else labels.columns(eps)
        source, target = Side.at(x, a, scale / eps, columns[0]), Side.at(y, b, scale / eps, columns[1])
        operands = dispatch.prepare(source.query, target.key, precision=precision, backend=backend)
        return cls(source, target, eps, scale, backend, ledger, labels, precision, operands)

    def at(self, eps: float) -> "Pairs":
        """The same pairs at another temperature, on the same count of passes."""
        x, y = self.source, self.target
        return self._made(
            x.points, y.points, x.weights, y.weights, eps, self.scale, self.backend, self.ledger, self.labels,
            self.precision,
        )  # fmt: skip

    def swapped(self) -> "Pairs":
        """The same problem with sources and targets exchanged, on the same count of passes."""
        operands = None if self.operands is None else (self.operands[1], self.operands[0])
        labels = None if self.labels is None else self.labels.swapped()
        return replace(self, source=self.target, target=self.source, labels=labels, operands=operands)

    @property
    def passes(self) -> Passes:
        """Passes so far."""
        return self.ledger.passes

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        return len(self.source.points), len(self.target.points)

    @cached_property
    def dual_of_norms(self) -> Tensor:
        """What the norms add to the dual value, in units of eps and in float64; shape ()."""
        x, y = self.source, self.target
        return x.weights.to(torch.float64) @ x.norm + y.weights.to(torch.float64) @ y.norm

    @property
    def look_every(self) -> int:
        """Iterations between two looks at a result, which make the device wait."""
        return LOOK_EVERY if self._brief else 1

    @property
    def forgiving(self) -> bool:
        """Whether a guess that may be off by several units saves time; where averages are taken in fp16 it costs."""
        return self.backend != "triton"

    @property
    def _brief(self) -> bool:
        """Whether the device takes no longer for a pass than the host for its launch."""
        n, m = self.shape
        return self.backend == "triton" and n * m < FEW_PAIRS

    def repeated(self, step: Callable[[], None]) -> Callable[[], None]:
        """`step` to be called again and again, replayed by one launch where that saves time, every pass counted."""
        if not self._brief:
            return step
        cost = Passes()
        replay = repeated(step, self.source.points.device)

        def call() -> None:
            nonlocal cost
            before = self.passes
            replay()
            if self.passes == before:  # a replay runs the passes without the code that counts them
                self.ledger.add(cost)
            cost = self.passes - before

        return call

    @property
    def _how(self) -> dict[str, Any]:
        return {"operands": self.operands, "backend": self.backend}

    def row(self, psi: Tensor, guess: Tensor | None = None) -> Tensor:
        """`phi_i = -log Σ_j b_j exp(psi_j + 2s x_i·y_j/eps)`, (n,): the half-step that makes the row sums equal a.

        A guess of the result, if there is one, makes the pass cheaper.
        """
        if guess is not None:
            return self.row_change(psi, guess)[0]
        self.ledger.add(Passes(half_steps=1))
        x, y = self.source, self.target
        return -dispatch.lse(x.query, y.key, psi + y.log_weights, **self._how)

    def col(self, phi: Tensor, guess: Tensor | None = None) -> Tensor:
        """`psi_j = -log Σ_i a_i exp(phi_i + 2s x_i·y_j/eps)`, (m,), which makes the column sums equal b."""
        return self.swapped().row(phi, guess)

    def row_change(self, psi: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
        """`row(psi)` and `guess - row(psi)`, the logarithm of what the row sums are off by; both (n,)."""
        self.ledger.add(Passes(half_steps=1))
        x, y = self.source, self.target
        return dispatch.half_step(x.query, y.key, psi + y.log_weights, guess, **self._how)

    def col_change(self, phi: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
        """`col(phi)` and `guess - col(phi)`, the logarithm of what the column sums are off by; both (m,)."""
        return self.swapped().row_change(phi, guess)

    def row_with(self, psi: Tensor, V: Tensor, guess: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`row(psi)` and, riding on the same pass, `D_a⁻¹ P V` of the plan it makes; shapes (n,) and (n, c)."""
        self.ledger.add(Passes(half_steps=1, columns=V.shape[1]))
        log_sum, means = self._averager(psi, guess)(V)
        return -log_sum, means

    def col_with(self, phi: Tensor, U: Tensor, guess: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`col(phi)` and, riding on the same pass, `D_b⁻¹ Pᵀ U` of the plan it makes; shapes (m,) and (m, c)."""
        return self.swapped().row_with(phi, U, guess)

    def row_means(self, psi: Tensor, V: Tensor, guess: Tensor | None = None) -> Tensor:
        """`D_r⁻¹ P V`, (n, c), the average of V under each row of a plan with target potential psi.

        The pass normalises what it adds, so the averages of ones are one whatever the exponents round to; `guess` is
        the source potential.
        """
        return self.row_averager(psi, guess)(V)

    def col_means(self, phi: Tensor, U: Tensor, guess: Tensor | None = None) -> Tensor:
        """`D_c⁻¹ Pᵀ U`, (m, c), the average of U under each column of a plan with source potential phi."""
        return self.swapped().row_means(phi, U, guess)

    def row_averager(self, psi: Tensor, guess: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        """`row_means` as a function of V."""
        average = self._averager(psi, guess)

        def means(V: Tensor) -> Tensor:
            self.ledger.add(Passes.application(V.shape[1]))
            return average(V)[1]

        return means

    def _averager(self, psi: Tensor, guess: Tensor | None) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        x, y = self.source, self.target
        bias = dispatch.padded(psi + y.log_weights, backend=self.backend)
        anchor = None if guess is None else -guess
        return lambda V: dispatch.attend(x.query, y.key, bias, V, anchor=anchor, **self._how)

    def apply(self, phi: Tensor, psi: Tensor, V: Tensor) -> Tensor:
        """Transport application `P V`, shape (n, c)."""
        self.ledger.add(Passes.application(V.shape[1]))
        x, y = self.source, self.target
        return dispatch.apply(x.query, y.key, phi + x.log_weights, psi + y.log_weights, V, **self._how)

    def adjoint(self, phi: Tensor, psi: Tensor, U: Tensor) -> Tensor:
        """Transport application `Pᵀ U`, shape (m, c)."""
        return self.swapped().apply(psi, phi, U)

    def hadamard(self, phi: Tensor, psi: Tensor, A: Tensor, B: Tensor, V: Tensor) -> Tensor:
        """Hadamard-weighted transport `(P ∘ A Bᵀ) V`, shape (n, c)."""
        self.ledger.add(Passes.application(V.shape[1]))
        x, y = self.source, self.target
        u, v = phi + x.log_weights, psi + y.log_weights
        return dispatch.hadamard(x.query, y.key, u, v, A, B, V, **self._how)

    def hadamard_means(self, psi: Tensor, A: Tensor, B: Tensor, V: Tensor, guess: Tensor) -> Tensor:
        """`(D_r⁻¹ P ∘ A Bᵀ) V`, (n, c), normalised in the pass itself; `guess` is the source potential."""
        self.ledger.add(Passes.application(V.shape[1]))
        x, y = self.source, self.target
        return dispatch.hadamard(x.query, y.key, None, psi + y.log_weights, A, B, V, anchor=-guess, **self._how)
