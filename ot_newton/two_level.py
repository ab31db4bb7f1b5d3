"""Sinkhorn sweeps that correct their slow modes on the way, with Anderson extrapolation on top.

Near the solution a sweep is `psi ← G(psi)` with the Jacobian `J = D_c⁻¹ Pᵀ D_r⁻¹ P`, whose eigenvalues near 1 are what
makes plain Sinkhorn slow. A block V of displacements rides along in the two passes of a sweep, which returns J V; with
`M = VᵀD_cV` and `H = VᵀD_cJV` the step gains the two-level correction

    psi ← G(psi) + J V (M - H)⁻¹ VᵀD_c (G(psi) - psi),

and `V ← J V` is subspace iteration, so the block turns into the slow modes at no extra pass. Anderson mixing
(Walker & Ni 2011, SIAM J. Numer. Anal. 49:1715) takes care of the rest. A step that lowers the dual is undone, and the
radius that holds each mode grows while its slope lasts: clusters far apart have potentials of many eps to go.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ot_newton.pairs import Pairs
from ot_newton.potentials import Potentials, Watch, centred, dual
from ot_newton.schur import factor_q, on_host, small_eigh
from ot_newton.status import Status

WIDTH = 32
MEMORY = 8
START = 0.7
CLIP = 4.0
EMPTY = 1e-10
LEAST = 1e-4  # of the longest column, what another one adds at least
FLAT = 1e-7
GROW = 4.0


class _Anderson:
    """Extrapolation of a fixed-point iteration from its last steps, in the metric of the marginals."""

    def __init__(self) -> None:
        self.points: list[Tensor] = []
        self.residuals: list[Tensor] = []

    def reset(self) -> None:
        self.points.clear()
        self.residuals.clear()

    def mix(self, point: Tensor, residual: Tensor, root: Tensor) -> Tensor:
        """The extrapolated point, given where the last step led and by which residual."""
        self.points, self.residuals = [*self.points[-MEMORY:], point], [*self.residuals[-MEMORY:], residual]
        if len(self.points) == 1:
            return point
        D = (torch.stack(self.residuals, 1).diff(dim=1) * root[:, None]).to(torch.float64)
        A = D.T @ D
        A.diagonal().add_(1e-10 * A.diagonal().max() + torch.finfo(torch.float64).tiny)
        theta = torch.linalg.solve(A, D.T @ (residual * root).to(torch.float64))
        return point - torch.stack(self.points, 1).diff(dim=1) @ theta.to(point.dtype)


def ritz_steps(V: Tensor, JV: Tensor, residual: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Ritz displacements (m, k) and the share (k,) of each in `J V (M - H)⁻¹ VᵀD_c residual`.

    Directions of V without mass or already exhausted are left out.
    """
    cV = c[:, None] * V
    M, H, right = on_host(cV.T @ V, cV.T @ JV, cV.T @ residual)
    E = _whitening((M + M.T) / 2)
    theta, F = small_eigh(E.T @ ((H + H.T) / 2) @ E)
    F = E @ F
    share = (F.T @ right) / (1 - theta).clamp_min(FLAT)
    return JV @ F.to(V), share.to(V)


def _whitening(M: Tensor) -> Tensor:
    """E (k, j) with `Eᵀ M E = I`, from all that M (k, k) does not hold as rounding."""
    L, failed = torch.linalg.cholesky_ex(M)
    sizes = L.diagonal()
    if len(M) and not int(failed) and float(sizes.min()) > LEAST * float(sizes.max()):
        return torch.linalg.solve_triangular(L.T, torch.eye(len(M), dtype=M.dtype, device=M.device), upper=True)
    scale, E = small_eigh(M)
    keep = scale > LEAST**2 * scale[-1:]
    return E[:, keep] / scale[keep].sqrt()


def capped(modes: Tensor, share: Tensor, radius: float) -> Tensor:
    """Shares (k,) such that no mode displaces a potential by more than `radius`."""
    reach = modes.abs().amax(0) * share.abs()
    return share * (radius / reach.clamp_min(radius))


def correction(V: Tensor, JV: Tensor, residual: Tensor, c: Tensor) -> Tensor:
    """`J V (M - H)⁻¹ VᵀD_c residual`, (m,)."""
    modes, share = ritz_steps(V, JV, residual, c)
    return modes @ share


def orthonormal_under(V: Tensor, c: Tensor) -> Tensor:
    """Columns spanning V, orthonormal under c and orthogonal to the constants."""
    root = c.sqrt()
    Q = factor_q(root[:, None] * centred(V, c))
    return torch.where(root[:, None] > 0, Q / root[:, None], torch.zeros_like(Q))


@dataclass(frozen=True, eq=False)
class _Step:
    """Where a corrected step came from: the state, its dual value, the moves of the slow modes, their slope there."""

    state: Potentials
    height: Tensor
    slow: Tensor
    slope: Tensor
    held: bool  # whether the trust radius cut a mode short

    @classmethod
    def of(cls, state: Potentials, height: Tensor, modes: Tensor, share: Tensor, radius: float, b: Tensor) -> "_Step":
        held = capped(modes, share, radius)
        slow = modes @ held
        return cls(state, height, slow, (b - state.c) @ slow, not torch.equal(held, share))

    def radius(self, radius: float, c: Tensor, b: Tensor) -> float:
        """The next trust radius, from the slope of the dual along the moves where they led."""
        left = float(((b - c) @ self.slow) / self.slope)
        if left > 0.5 and self.held:
            return radius * GROW
        return max(radius / GROW, CLIP / 16) if left < -0.5 else radius


def two_level(
    pairs: Pairs,
    psi: Tensor,
    watch: Watch,
    *,
    modes: Tensor | None = None,
    guess: Tensor | None = None,
    latest: bool = False,
) -> tuple[Potentials, Status]:
    """Iterate from psi (m,) until `watch` says stop; `modes` (m, k) are displacements to start the block from.

    With none of them (m, 0) these are plain sweeps with Anderson extrapolation, exact to the last digit.

    Returns the state of the smallest error, or the `latest`: on the way to a far solution the error stays put.
    """
    m, b = len(psi), pairs.target.weights
    rng = torch.Generator(device=psi.device).manual_seed(0)
    V = torch.randn(m, min(WIDTH, m - 1), generator=rng, dtype=psi.dtype, device=psi.device) if modes is None else modes
    anderson, radius, least, best = _Anderson(), CLIP, float("inf"), None
    last: _Step | None = None
    while True:
        phi, U = pairs.row_with(psi, V, guess) if V.shape[1] else (pairs.row(psi, guess), V)
        height = dual(pairs, phi, psi)
        if watch.left() > 1 and last is not None and float(last.state.error) > 1e-3 and not _rose(height, last.height):
            psi, guess, last, radius = last.state.ahead, last.state.phi, None, max(radius / GROW, CLIP / 16)
            anderson.reset()
            continue
        ahead, JV = pairs.col_with(phi, U, psi) if V.shape[1] else (pairs.col(phi, psi), V)
        state = Potentials.after_sweep(pairs, phi, psi, ahead, V)
        status = watch.check(state)
        if status is not None:
            return (state if latest or best is None or status.success or state.error <= best.error else best), status
        error, guess, c = float(state.error), phi, state.c
        if last is not None:
            radius = last.radius(radius, c, b)
        if best is not None and last is not None and error > 3 * least:
            anderson.reset()
            if error > 30 * least:
                psi, guess, last, least = best.ahead, best.phi, None, 4 * least
                continue
        if error < least:
            best, least = state, error
        if float((c / b).nan_to_num(1.0).min()) < EMPTY:
            psi, last = ahead, None
            anderson.reset()
            continue
        V, JV = centred(V, c), centred(JV, c)
        step, last = centred(ahead - psi, c), None
        if error < START:
            last = _Step.of(state, height, *ritz_steps(V, JV, step, c), radius, b)
            step = step + last.slow
        V = orthonormal_under(JV, c) if V.shape[1] else V
        guess, psi = state.level()
        psi = psi + step
        if last is None or last.held:
            anderson.reset()
        else:
            psi = anderson.mix(psi, step, c.sqrt())


def _rose(height: Tensor, before: Tensor) -> bool:
    """Whether the dual did not fall, rounding aside."""
    return bool(height >= before - 1e-12 * before.abs())
