"""How the potentials answer a move of the points: a singular symmetric system solved for many right-hand sides at once.

A move changes the marginals by (ρ, κ) at fixed potentials, and the potentials restore them:

    r∘dphi + P dpsi = ρ,    Pᵀ dphi + c∘dpsi = κ.

With `K = D_r^-½ P D_c^-½` and `h = D_c^½ dpsi` the Schur complement is `(I - KᵀK) h = D_c^-½ (κ - Pᵀ(ρ/r))`: spectrum
in [0, 1], the single null vector `√c` (the gauge, projected out), and few slow modes near 0, one for each pair of
clusters that hardly exchange mass. Block Krylov with a Galerkin solution on the whole space (O'Leary 1980, Linear
Algebra Appl. 29:293) finds all columns in few passes, since a pass carries 64 columns as cheaply as one; slow modes of
a neighbouring point and random columns fill the block. Conjugate gradients need less memory and more passes.
"""

from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import Tensor

from ot_newton.kernels.precision import full_precision
from ot_newton.pairs import Counted, Pairs, Passes
from ot_newton.response_cg import conjugate_gradients
from ot_newton.schur import BLOCK, SchurSpace, relative, start_block
from ot_newton.status import Status


@dataclass(frozen=True, eq=False)
class Response(Counted):
    """Answer of the dimensionless potentials to k moves, with the evidence for it.

    Attributes:
        dphi: (n, k), in units of eps.
        dpsi: (m, k), in units of eps, with `c·dpsi = 0`.
        residual: (k,), true relative residual of each column in the normalised scaling.
        status: CONVERGED, MAX_ITER, STALLED where rounding ends the progress, or NONFINITE.
        passes, n_passes: passes this took, by kind and in all.
        modes: (min(n, m), j), slow displacements of the potentials on the smaller side, to be handed to the next solve.
    """

    dphi: Tensor
    dpsi: Tensor
    residual: Tensor
    status: Status
    passes: Passes
    modes: Tensor


def respond(
    pairs: Pairs,
    phi: Tensor,
    psi: Tensor,
    r: Tensor,
    c: Tensor,
    rho: Tensor,
    kappa: Tensor,
    *,
    rtol: float = 1e-6,
    modes: Tensor | None = None,
    method: str = "block",
    damping: float = 0.0,
    max_iter: int = 40,
) -> Response:
    """Response of the potentials to the changes `rho` (n, k) and `kappa` (m, k) of the marginals.

    r (n,) and c (m,) are the marginals of the plan at (phi, psi). `rtol` bounds the true relative residual of every
    column; `method` is "block" or "cg"; `damping` adds that multiple of diag(c) to the Schur complement, which
    reproduces published results and makes the answer inexact. The right-hand side must be orthogonal to the constants,
    which every move of the points is; any other part is dropped. Works on the smaller side.
    """
    if len(r) < len(c):
        out = respond(
            pairs.swapped(), psi, phi, c, r, kappa, rho,
            rtol=rtol, modes=modes, method=method, damping=damping, max_iter=max_iter,
        )  # fmt: skip
        shift = (c @ out.dphi) / c.sum()
        return replace(out, dphi=out.dpsi + shift, dpsi=out.dphi - shift)
    before = pairs.passes
    space = SchurSpace(pairs, phi, psi, r, c, damping)
    rho_r = space.r_inv[:, None] * rho
    rhs = kappa - pairs.adjoint(phi, psi, rho_r)
    answer = respond_schur(space, rho_r, rhs, rtol=rtol, modes=modes, method=method, max_iter=max_iter)
    return replace(answer, passes=pairs.passes - before)


@full_precision
def respond_schur(
    space: SchurSpace,
    rho_r: Tensor,
    rhs: Tensor,
    *,
    rtol: float,
    modes: Tensor | None = None,
    method: str = "block",
    max_iter: int = 40,
) -> Response:
    """`respond` where `ρ/r` (n, k) and the right-hand side `κ - Pᵀ(ρ/r)` (m, k) of the Schur complement are known.

    Where one of them is not finite all of the answer is NaN, with the status NONFINITE.
    """
    if not bool(torch.isfinite(rhs).all() & torch.isfinite(rho_r).all()):  # LAPACK would raise an error for it
        dphi, dpsi, residual = (torch.full_like(t, torch.nan) for t in (rho_r, rhs, rhs[0]))
        return Response(dphi, dpsi, residual, Status.NONFINITE, Passes(), rhs.new_empty(len(rhs), 0))
    before = space.pairs.passes
    B = space.project(space.root_inv[:, None] * rhs)
    if method == "block":
        h, Ph, residual, status = _block_krylov(space, B, modes, rtol, max_iter)
        modes = space.slow_modes(BLOCK)
    elif method == "cg":
        h, residual, status = conjugate_gradients(space, B, rtol, max_iter)
        Ph = space.pairs.apply(space.phi, space.psi, space.root_inv[:, None] * h)
        modes = B.new_empty(len(B), 0)
    else:
        raise ValueError(f"method: expected 'block' or 'cg', got {method!r}")
    dphi = rho_r - space.r_inv[:, None] * Ph
    return Response(dphi, space.root_inv[:, None] * h, residual, status, space.pairs.passes - before, modes)


def grow(space: SchurSpace, width: int = BLOCK) -> int:
    """Expand the space by the operator applied to the columns added last, filled up with random ones.

    Columns drop out as modes become exact, and exact slow modes in the start block drop out at once. A narrow block
    would take more steps, and passes, for what is left.
    """
    V = space.SQ[:, space.SQ.shape[1] - space.n_new :]
    rng = torch.Generator(device=V.device).manual_seed(space.Q.shape[1])
    fill = torch.randn(len(V), max(0, width - V.shape[1]), generator=rng, dtype=V.dtype, device=V.device)
    return space.expand(torch.cat([V, fill], 1))


def _block_krylov(
    space: SchurSpace, B: Tensor, modes: Tensor | None, rtol: float, max_iter: int
) -> tuple[Tensor, Tensor, Tensor, Status]:
    space.expand(start_block(space, B, modes))
    mark, since, status = float("inf"), 0, Status.MAX_ITER
    floor = 1e3 * torch.finfo(B.dtype).eps
    y, R = space.solve(B)
    for _ in range(max_iter):
        residual = relative(R, B)
        worst = float(residual.max())
        mark, since = (worst, 0) if worst < 0.7 * mark else (mark, since + 1)
        if worst <= rtol:
            status = Status.CONVERGED
            break
        if not isfinite(worst):
            status = Status.NONFINITE
            break
        if (since >= 4 and mark < floor) or grow(space) == 0:
            status = Status.STALLED
            break
        y, R = space.solve(B)
    return space.Q @ y, space.PQ @ y, relative(R, B), status
