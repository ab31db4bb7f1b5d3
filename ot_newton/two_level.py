"""Sinkhorn sweeps that correct their slow modes on the way, with Anderson extrapolation on top.

Near the solution a sweep is `psi ← G(psi)` with the Jacobian `J = D_c⁻¹ Pᵀ D_r⁻¹ P`, whose eigenvalues near 1 are what
makes plain Sinkhorn slow. A block V of displacements rides along in the two passes of a sweep, which returns J V; with
`M = VᵀD_cV` and `H = VᵀD_cJV` the step gains the two-level correction

    psi ← G(psi) + J V (M - H)⁻¹ VᵀD_c (G(psi) - psi),

and `V ← J V` is subspace iteration, so the block turns into the slow modes at no extra pass. Anderson mixing
(Walker & Ni 2011, SIAM J. Numer. Anal. 49:1715) takes care of the rest. A step that lowers the dual is undone.
"""

import torch
from torch import Tensor

from ot_newton.pairs import Pairs
from ot_newton.potentials import Potentials, Watch, centred, dual
from ot_newton.schur import small_eigh
from ot_newton.status import Status

WIDTH = 32
MEMORY = 8
START = 0.7
CLIP = 4.0
EMPTY = 1e-10


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


def correction(V: Tensor, JV: Tensor, residual: Tensor, c: Tensor) -> Tensor:
    """`J V (M - H)⁻¹ VᵀD_c residual`, directions of V without mass or already exhausted left out."""
    cV = c[:, None] * V
    M, H = (cV.T @ V).to(torch.float64), (cV.T @ JV).to(torch.float64)
    scale, E = small_eigh((M + M.T) / 2)
    keep = scale > 1e-8 * scale[-1]
    E = E[:, keep] / scale[keep].sqrt()
    theta, F = small_eigh(E.T @ ((H + H.T) / 2) @ E)
    F = E @ F
    y = F @ ((F.T @ (cV.T @ residual).to(torch.float64)) / (1 - theta).clamp_min(1e-7))
    return JV @ y.to(V.dtype)


def orthonormal_under(V: Tensor, c: Tensor) -> Tensor:
    """Columns spanning V, orthonormal under c and orthogonal to the constants."""
    root = c.sqrt()
    Q = torch.linalg.qr(root[:, None] * centred(V, c)).Q
    return torch.where(root[:, None] > 0, Q / root[:, None], torch.zeros_like(Q))


def two_level(
    pairs: Pairs, psi: Tensor, watch: Watch, *, modes: Tensor | None = None, guess: Tensor | None = None
) -> tuple[Potentials, Status]:
    """Iterate from psi (m,) until `watch` says stop; `modes` (m, k) are displacements to start the block from."""
    m = len(psi)
    rng = torch.Generator(device=psi.device).manual_seed(0)
    V = torch.randn(m, min(WIDTH, m), generator=rng, dtype=psi.dtype, device=psi.device) if modes is None else modes
    anderson, trust, least, best = _Anderson(), 1.0, float("inf"), None
    pending: tuple[Potentials, Tensor] | None = None
    while True:
        phi, U = pairs.row_with(psi, V, guess)
        height = dual(pairs, phi, psi)
        undoable = watch.left() > 1
        if undoable and pending is not None and float(pending[0].error) > 1e-3 and not _rose(height, pending[1]):
            psi, guess, pending, trust = pending[0].ahead, pending[0].phi, None, max(trust / 2, 1 / 16)
            anderson.reset()
            continue
        ahead, JV = pairs.col_with(phi, U, psi)
        state = Potentials.after_sweep(pairs, phi, psi, ahead, V)
        status = watch.check(state)
        if status is not None:
            return (state if best is None or status.success or state.error <= best.error else best), status
        error, guess, c = float(state.error), phi, state.c
        if best is not None and pending is not None and error > 3 * least:
            anderson.reset()
            if error > 30 * least:
                psi, guess, pending, least = best.ahead, best.phi, None, 4 * least
                continue
        if error < least:
            best, least = state, error
        if float((c / pairs.target.weights).nan_to_num(1.0).min()) < EMPTY:
            psi, pending = ahead, None
            anderson.reset()
            continue
        V, JV = centred(V, c), centred(JV, c)
        step, clipped = centred(ahead - psi, c), True
        pending = None
        if error < START:
            slow = correction(V, JV, step, c)
            largest = float(slow.abs().max())
            share = min(1.0, CLIP * trust / max(largest, 1e-300)) if largest == largest else 0.0
            step, clipped = step + share * slow if share else step, share < 1
            trust = trust if clipped else min(1.0, 2 * trust)
            pending = (state, height)
        V = orthonormal_under(JV, c)
        psi = centred(psi, c) + step
        if clipped:
            anderson.reset()
        else:
            psi = anderson.mix(psi, step, c.sqrt())


def _rose(height: Tensor, before: Tensor) -> bool:
    """Whether the dual did not fall, rounding aside."""
    return bool(height >= before - 1e-12 * before.abs())
