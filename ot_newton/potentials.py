"""The state that every solver of the dual shares: potentials with the error they have, and the limits to obey.

With `phi = row(psi)` the row sums are a exactly, and one more half-step `psi⁺ = col(phi)` tells the column sums without
an extra pass: `c = b exp(psi - psi⁺)`. So a sweep of two passes yields the next potential and the error of this one.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ot_newton.pairs import Pairs
from ot_newton.status import Status

ILLEGIBLE = 1e-3


@dataclass(frozen=True, eq=False)
class Potentials:
    """Potentials, as `Pairs` keeps them, with the marginals and the L1 error that their plan has.

    `ahead` is the target potential one half-step further, and `modes` (m, k) are slow displacements of it, if known.
    """

    phi: Tensor
    psi: Tensor
    r: Tensor
    c: Tensor
    error: Tensor
    ahead: Tensor
    modes: Tensor | None = None

    @classmethod
    def after_sweep(
        cls, pairs: Pairs, phi: Tensor, psi: Tensor, ahead: Tensor, modes: Tensor | None = None
    ) -> "Potentials":
        """The state for `phi = row(psi)` and `ahead = col(phi)`."""
        b = pairs.target.weights
        gap = torch.where(b > 0, psi - ahead, torch.zeros_like(b))
        error = (b * torch.expm1(gap)).abs().sum(dtype=torch.float64)
        return cls(phi, psi, pairs.source.weights, b * torch.exp(gap), error, ahead, modes)

    def level(self) -> tuple[Tensor, Tensor]:
        """phi and psi of the same plan with one mean, so that neither is larger than it must be."""
        shift = ((self.c @ self.psi) / self.c.sum() - (self.r @ self.phi) / self.r.sum()) / 2
        return self.phi + shift, self.psi - shift


def dual(pairs: Pairs, phi: Tensor, psi: Tensor) -> Tensor:
    """Dual value in units of eps, `(a·f + b·g)/eps` in float64, for `phi = row(psi)`."""
    a, b = pairs.source.weights.to(torch.float64), pairs.target.weights.to(torch.float64)
    psi = torch.where(b > 0, psi.to(torch.float64), torch.zeros_like(b))
    phi = torch.where(a > 0, phi.to(torch.float64), torch.zeros_like(a))
    return a @ phi + b @ psi + pairs.dual_of_norms


def resolution(pairs: Pairs, phi: Tensor, psi: Tensor) -> float:
    """Relative error of each P_ij from rounding its exponent; a marginal error below it means little.

    Where P_ij is not negligible the score `2s x_i·y_j/eps` is about as large as the potentials that it meets.
    """
    sides = (pairs.source.weights, phi), (pairs.target.weights, psi)
    largest = [torch.where(w > 0, potential.abs(), torch.zeros_like(w)).max() for w, potential in sides]
    return torch.finfo(psi.dtype).eps * (float(torch.maximum(*largest)) + 1)


def centred(psi: Tensor, c: Tensor) -> Tensor:
    """psi (m,) or (m, k) less its mean under c: the gauge fixed."""
    return psi - (c @ psi) / c.sum()


def in_gauge(pairs: Pairs, phi: Tensor | None, psi: Tensor) -> tuple[Tensor | None, Tensor]:
    """The same plan with the constant that makes psi 0 in the mean, so that neither is larger than it must be."""
    b = pairs.target.weights.to(torch.float64)
    shift = (b @ torch.where(b > 0, psi.to(torch.float64), 0.0)).to(psi.dtype)
    return None if phi is None else phi + shift, psi - shift


@dataclass
class Watch:
    """Decides when a solver stops: tolerance, budget of passes, values that are not finite, or rounding.

    Rounding is to blame when the best error has not fallen for `patience` passes although it is already near what the
    exponents can resolve, or when they resolve so little that even an error of zero says nothing.
    """

    pairs: Pairs
    tol: float
    limit: int
    patience: int = 16
    best: float = field(default=float("inf"), init=False)
    improved: int = field(default=0, init=False)  # passes when the best error fell last

    def left(self) -> int:
        """Passes left of the budget."""
        return self.limit - self.pairs.passes.total

    def check(self, state: Potentials) -> Status | None:
        """The status to stop with, or None to go on."""
        error = float(state.error)
        if error <= self.tol:
            return Status.CONVERGED if self.resolution(state) < ILLEGIBLE else Status.STALLED
        if error != error or error == float("inf"):
            return Status.NONFINITE
        floor = self.resolution(state)
        if error < (0.95 if self.best > floor else 0.5) * self.best:
            self.best, self.improved = error, self.pairs.passes.total
        if self.best < 16 * floor and self.pairs.passes.total - self.improved >= self.patience:
            return Status.STALLED
        return Status.PASS_LIMIT if self.left() < 2 else None

    def resolution(self, state: Potentials) -> float:
        """Relative error of each P_ij from rounding its exponent."""
        return resolution(self.pairs, state.phi, state.psi)


@dataclass
class Handover(Watch):
    """A watch that also stops below a coarser error, to hand over to Newton's method, but not while sweeps fly.

    A Newton step costs a few passes at least, and a sweep that divides the error by five gains as much in two.
    """

    below: float = float("inf")
    flying: float = 0.2
    previous: float = field(default=float("inf"), init=False)

    def check(self, state: Potentials) -> Status | None:
        """The status to stop with, CONVERGED at a handover too, or None to go on."""
        error = float(state.error)
        slow, self.previous = error > self.flying * self.previous, error
        status = super().check(state)
        return Status.CONVERGED if status is None and slow and error <= self.below else status
