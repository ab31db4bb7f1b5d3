"""What one marginal of a plan is asked to be: equal to its weights, or close to them at a price.

The price `ρ KL(r | a)`, `KL(r | a) = Σ r log(r/a) - r + a`, has the conjugate that turns a half-step into
`phi = λ row(psi)` with `λ = ρ/(ρ + eps) = 1/(1 + τ)`, `τ = eps/ρ`, and asks for `r = a exp(-τ phi)` (Chizat, Peyré,
Schmitzer & Vialard 2018, Math. Comp. 87:2563). `τ = 0` is the balanced marginal.

Pairs hold weights of sum 1 and potentials without the norms of the points; the mass M of a side is part of its
potential there, `phi + log M - norm`.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ot_newton.pairs import Side


@dataclass(frozen=True, eq=False)
class Penalty:
    """One side: `tau` = eps/ρ, 0 where the marginal is exact, the logarithm of the total weight, and the norms."""

    tau: float
    log_mass: float
    norm: Tensor | float = 0.0

    @classmethod
    def of(cls, eps: float, rho: float | None, mass: float) -> "Penalty":
        """The penalty of weight rho (None: the marginal is exact) on weights of this total mass."""
        return cls(0.0 if rho is None else eps / rho, math.log(mass))

    @classmethod
    def pair(
        cls, eps: float, rho: tuple[float | None, float | None], a: Tensor, b: Tensor
    ) -> "tuple[Penalty, Penalty]":
        """Those of both sides. Masses that differ by rounding are taken as equal: a dear penalty would see it."""
        first, second = (float(w.sum(dtype=torch.float64)) for w in (a, b))
        if abs(first - second) <= 8 * torch.finfo(a.dtype).eps * first:
            second = first
        return cls.of(eps, rho[0], first), cls.of(eps, rho[1], second)

    def on(self, side: Side) -> "Penalty":
        """The same for potentials without the norms of these points."""
        return replace(self, norm=side.norm)

    def start(self, side: Side) -> Tensor:
        """What `Pairs` keeps of a potential that is 0 everywhere."""
        return (self.log_mass - side.norm).to(side.points.dtype)

    @property
    def mass(self) -> float:
        """The total weight."""
        return math.exp(self.log_mass)

    def potential(self, half_step: Tensor) -> Tensor:
        """The potential that is best for what `Pairs.row` returned."""
        if not self.tau:
            return half_step + self.log_mass
        whole = (half_step + self.norm) / (1 + self.tau)
        return (whole + self.log_mass - self.norm).to(half_step.dtype)

    def asked(self, weights: Tensor, potential: Tensor) -> Tensor:
        """The marginal `a exp(-τ phi)` that a potential asks for; weights of sum 1."""
        exponent = (1 + self.tau) * self.log_mass - self.tau * (potential + self.norm)
        return weights * torch.exp(exponent).to(weights.dtype)

    def log_asked(self, weights: Tensor, potential: Tensor) -> Tensor:
        """The logarithm of the total of `asked`, in float64 and free of underflow; shape ()."""
        wide = weights.to(torch.float64)
        log_weights = wide.log() - wide.sum().log()
        exponent = (1 + self.tau) * self.log_mass - self.tau * (potential.to(torch.float64) + self.norm)
        return torch.logsumexp(torch.where(weights > 0, log_weights + exponent, -math.inf), 0)

    def slope(self, potential: Tensor) -> Tensor:
        """`(1 - exp(-τ phi))/τ`, what a unit of weight adds to the dual in units of eps; phi where τ = 0. Float64."""
        phi = potential.to(torch.float64) + self.norm - self.log_mass
        return -torch.expm1(-self.tau * phi) / self.tau if self.tau > 0 else phi

    def worth(self, weights: Tensor, potential: Tensor) -> Tensor:
        """`Σ a (1 - exp(-τ phi))/τ`, the part of the dual of this side, in units of eps and in float64."""
        held = torch.where(weights > 0, self.slope(potential), 0.0)
        return self.mass * (weights.to(torch.float64) @ held)

    def weight_gradient(self, potential: Tensor, other_mass: float) -> Tensor:
        """Derivative of the value in the weights, in units of eps: slope less `exp(-τ phi)` plus the other mass."""
        phi = potential.to(torch.float64) + self.norm - self.log_mass
        return (self.slope(potential) - torch.exp(-self.tau * phi) + other_mass).to(potential.dtype)
