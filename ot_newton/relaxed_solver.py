"""Potentials of an unbalanced transport problem: translated sweeps, and Newton on the semi-dual where they are slow.

With a `Penalty` on each side the dual, in units of eps, is

    D(phi, psi) = Σ a (1 - exp(-τ₁ phi))/τ₁ + Σ b (1 - exp(-τ₂ psi))/τ₂ - |P|.

A sweep is `phi ← λ₁ row(psi)`, `psi ← λ₂ col(phi)`, after which both move by opposite constants so that the two sides
ask for the same mass; without that the mass converges at the rate λ₁λ₂ only (Séjourné, Vialard & Peyré 2022,
arXiv:2201.00730). The semi-dual `F(psi) = D(λ₁ row(psi), psi)` is strictly concave, with

    ∇F = b exp(-τ₂ psi) - c,    -(1 + τ₁) ∇²F = (1 + τ₁)(1 + τ₂) D_c - Pᵀ D_r⁻¹ P

at the fixed point. In the scaling of `schur` this is `(1 + damping) I - KᵀK`, `damping = (1 + τ₁)(1 + τ₂) - 1`, and the
constants stay an exact eigenvector: they are solved for in closed form, the rest by block Krylov.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ot_newton.kernels.precision import full_precision
from ot_newton.pairs import Pairs
from ot_newton.penalty import Penalty
from ot_newton.potentials import Potentials, Watch
from ot_newton.schur import BLOCK, SchurSpace, start_block
from ot_newton.status import Status

Penalties = tuple[Penalty, Penalty]
PATIENCE = 8  # sweeps that a Newton step may be worth
FAR = 0.5  # error above which sweeps go first
SWEEPS = 30  # sweeps in a row after which even far away a Newton step is tried
LONGEST = 10.0
HALVINGS = 6
OVERHEAD = HALVINGS + 5  # passes of a Newton step besides the growth of its space
COOLING = 0.25
WARM = 1e-2  # error to which each temperature is solved; with less the Newton steps of the next are short and many


def damping_of(penalties: Penalties) -> float:
    """`(1 + τ₁)(1 + τ₂) - 1`, the gap between the constants and the kernel of the Schur complement."""
    first, second = penalties[0].tau, penalties[1].tau
    return first + second + first * second


def held(marginal: Tensor) -> Tensor:
    """A marginal without what is too small to be divided by: points whose mass is destroyed all but entirely."""
    limits = torch.finfo(marginal.dtype)
    return torch.where(marginal > limits.tiny / limits.eps, marginal, 0)


def semi_dual(pairs: Pairs, penalties: Penalties, phi: Tensor, psi: Tensor) -> Tensor:
    """F(psi) for the best phi, in units of eps and in float64; shape ()."""
    first, second = penalties
    mass = torch.exp(first.log_asked(pairs.source.weights, phi))
    return first.worth(pairs.source.weights, phi) + second.worth(pairs.target.weights, psi) - mass


def _state(pairs: Pairs, penalties: Penalties, phi: Tensor, psi: Tensor, modes: Tensor | None) -> Potentials:
    """The state of a psi with its best phi; one pass. `error` is the L1 residual relative to the mass."""
    first, second = penalties
    b = pairs.target.weights
    half = pairs.col(phi, psi)
    gap = torch.where(b > 0, psi - half, torch.zeros_like(b))
    r, c, asked = first.asked(pairs.source.weights, phi), b * torch.exp(gap), second.asked(b, psi)
    mass = torch.maximum(r.sum(dtype=torch.float64), asked.sum(dtype=torch.float64))
    error = (c - asked).abs().sum(dtype=torch.float64) / mass.clamp_min(torch.finfo(psi.dtype).tiny)
    return Potentials(phi, psi, r, c, error, second.potential(half), modes)


def _translated(pairs: Pairs, penalties: Penalties, state: Potentials) -> Tensor:
    """The psi of the next sweep, moved by the constant that makes both sides ask for one mass."""
    first, second = penalties
    surplus = first.log_asked(pairs.source.weights, state.phi) - second.log_asked(pairs.target.weights, state.ahead)
    return state.ahead - (surplus / (first.tau + second.tau)).to(state.ahead.dtype)


def _direction(
    pairs: Pairs, penalties: Penalties, state: Potentials, tol: float, budget: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Newton displacement of psi (m,), the slope of F along it, and the slow modes found on the way (m, k)."""
    first, second = penalties
    damping = damping_of(penalties)
    space = SchurSpace(pairs, state.phi, state.psi, held(state.r), held(state.c), damping)
    gradient = second.asked(pairs.target.weights, state.psi) - state.c
    rhs = space.project((space.root_inv * gradient)[:, None])
    space.expand(start_block(space, rhs, state.modes))
    size, best = torch.linalg.vector_norm(rhs), float("inf")
    for _ in range(min(40, budget // 2)):
        left = float(torch.linalg.vector_norm(space.solve(rhs)[1]) / size)
        if not left > tol or (left > 0.99 * best and left < 1e-3) or space.grow() == 0:
            break
        best = min(best, left)
    d = space.displacements(space.solve(rhs)[0])[:, 0]
    # |c| = |P| is what the sources ask for; the sum of c would carry rounding that 1/damping makes large.
    ratio = second.log_asked(pairs.target.weights, state.psi) - first.log_asked(pairs.source.weights, state.phi)
    d = (1 + first.tau) * (d + (torch.expm1(ratio) / damping).to(d.dtype))
    # Entry by entry: a point of hardly any mass may be far from its place and must not hold up the others.
    d = d.clamp(-LONGEST, LONGEST)
    return d, gradient @ d, space.slow_modes(BLOCK - 1)


def _newton(pairs: Pairs, penalties: Penalties, state: Potentials, watch: Watch) -> Potentials | None:
    """The state after a Newton step, or None where no step along its direction raises F or lowers the error."""
    if watch.left() < OVERHEAD or not bool(held(state.c).any()):
        return None
    error = float(state.error)
    forcing = min(0.1, max(error, 0.3 * watch.tol / error))
    d, slope, modes = _direction(pairs, penalties, state, forcing, watch.left() - OVERHEAD)
    if not bool(slope > 0):
        return None
    here = semi_dual(pairs, penalties, state.phi, state.psi)
    noise = 8 * torch.finfo(d.dtype).eps * here.abs()
    t = 1.0
    for _ in range(HALVINGS):
        psi = state.psi + t * d
        phi = penalties[0].potential(pairs.row(psi, state.phi))
        gain = semi_dual(pairs, penalties, phi, psi) - here - 1e-4 * t * slope
        if bool(gain >= -noise):
            after = _state(pairs, penalties, phi, psi, modes)
            return after if bool((gain > noise) | (after.error < state.error)) else None
        t /= 2
    return None


@full_precision
def relaxed(pairs: Pairs, penalties: Penalties, psi: Tensor, watch: Watch) -> tuple[Potentials, Status]:
    """Iterate from psi (m,) until `watch` says stop; at least one penalty must be finite."""
    state = _state(pairs, penalties, penalties[0].potential(pairs.row(psi)), psi, None)
    best, before, sweeps = state, float("inf"), 0
    while True:
        status = watch.check(state)
        if status is not None:
            return (state if status.success or not best.error <= state.error else best), status
        best = state if bool(state.error <= best.error) else best
        error, after = float(state.error), None
        slow = error * min(error / before, 1.0) ** PATIENCE > watch.tol
        if sweeps > 1 and slow and (error < FAR or sweeps >= SWEEPS):
            after, sweeps = _newton(pairs, penalties, state, watch), 0
        elif before < float("inf"):
            sweeps += 1
        if after is None:
            psi = _translated(pairs, penalties, state)
            phi = penalties[0].potential(pairs.row(psi, state.phi))
            after, sweeps = _state(pairs, penalties, phi, psi, state.modes), max(sweeps, 1)
        elif error < FAR:
            sweeps = 2  # a Newton step that gained is followed by another
        state, before = after, error


def annealed(pairs: Pairs, penalties: Penalties, watch: Watch) -> Tensor:
    """A psi to start from: roughly solved at each temperature from the squared diameter to eps, in units of eps."""
    radius = max(float(side.norm.max()) for side in (pairs.source, pairs.target)) * pairs.eps
    temperature, psi = 4 * radius, None
    while temperature > pairs.eps and watch.left() > 8:
        near = pairs.at(temperature)
        first, second = (replace(p, tau=p.tau * temperature / pairs.eps) for p in penalties)
        hot = first.on(near.source), second.on(near.target)
        start = hot[1].start(near.target) if psi is None else psi
        found, _ = relaxed(near, hot, start, Watch(near, max(watch.tol, WARM), watch.limit - 2))
        cooler, mass = max(temperature * COOLING, pairs.eps), penalties[1].log_mass
        psi = (found.ahead - mass) * (temperature / cooler) + mass
        temperature = cooler
    return penalties[1].start(pairs.target) if psi is None else psi
