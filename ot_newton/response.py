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

import torch
from torch import Tensor

from ot_newton.pairs import Pairs
from ot_newton.status import Status

BLOCK = 64


@dataclass(frozen=True, eq=False)
class Response:
    """Answer of the dimensionless potentials to k moves, with the evidence for it.

    Attributes:
        dphi: (n, k), in units of eps.
        dpsi: (m, k), in units of eps, with `c·dpsi = 0`.
        residual: (k,), true relative residual of each column in the normalised scaling.
        status: CONVERGED, MAX_ITER, or STALLED where rounding ends the progress.
        n_passes: passes this took.
        modes: (min(n, m), j), slow displacements of the potentials on the smaller side, to be handed to the next solve.
    """

    dphi: Tensor
    dpsi: Tensor
    residual: Tensor
    status: Status
    n_passes: int
    modes: Tensor


def inverse(weights: Tensor) -> Tensor:
    """1/w, and 0 where the weight is 0: such a point carries no mass and nothing depends on its potential."""
    return torch.where(weights > 0, 1 / weights, torch.zeros_like(weights))


def small_eigh(T: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a small symmetric matrix; on the CPU, where that is fast and reliable."""
    theta, E = torch.linalg.eigh(T.cpu())
    return theta.to(T.device), E.to(T.device)


def orthonormal(V: Tensor, Q: Tensor, tol: float) -> Tensor:
    """Orthonormal basis of the columns of V, orthogonal to Q: two Gram-Schmidt passes, dependent ones dropped."""
    length = torch.linalg.vector_norm(V, dim=0)
    V = V[:, length > 0] / length[length > 0]
    for _ in range(2):
        V = V - Q @ (Q.T @ V)
        Q_new, R = torch.linalg.qr(V)
        U, s, _ = torch.linalg.svd(R.cpu())
        V = Q_new @ U[:, s > tol].to(V.device)
    return V


class SchurSpace:
    """A growing space on the target side on which `(I - KᵀK) h = B` is solved by Galerkin projection."""

    def __init__(self, pairs: Pairs, phi: Tensor, psi: Tensor, r: Tensor, c: Tensor, damping: float = 0.0) -> None:
        self.pairs, self.phi, self.psi, self.damping = pairs, phi, psi, damping
        self.r_inv, self.root, self.root_inv = inverse(r), c.sqrt(), inverse(c).sqrt()
        self.gauge = self.root / torch.linalg.vector_norm(self.root)
        m, n = len(c), len(r)
        self.Q, self.SQ, self.PQ = c.new_empty(m, 0), c.new_empty(m, 0), c.new_empty(n, 0)
        self.T = torch.empty(0, 0, dtype=torch.float64, device=c.device)
        self.n_new = 0
        self._ritz: tuple[Tensor, Tensor] | None = None

    def project(self, V: Tensor) -> Tensor:
        """Remove the gauge from the columns of V (m, k)."""
        return V - self.gauge[:, None] * (self.gauge @ V)

    def product(self, V: Tensor) -> tuple[Tensor, Tensor]:
        """`(I - KᵀK + damping) V` (m, k), gauge removed, and `P D_c^-½ V` (n, k); two passes."""
        PV = self.pairs.apply(self.phi, self.psi, self.root_inv[:, None] * V)
        KKV = self.root_inv[:, None] * self.pairs.adjoint(self.phi, self.psi, self.r_inv[:, None] * PV)
        return self.project((1 + self.damping) * V - KKV), PV

    def expand(self, V: Tensor) -> int:
        """Add the columns of V (m, k) to the space; returns how many were new. Two passes."""
        tol = 1e-10 if V.dtype == torch.float64 else 1e-5
        new = orthonormal(self.project(V), torch.cat([self.gauge[:, None], self.Q], 1), tol)
        self.n_new = new.shape[1]
        if self.n_new:
            S_new, P_new = self.product(new)
            self.Q, self.SQ = torch.cat([self.Q, new], 1), torch.cat([self.SQ, S_new], 1)
            self.PQ = torch.cat([self.PQ, P_new], 1)
            side, old = (self.Q.T @ S_new).to(torch.float64), len(self.T)
            corner = (side[old:] + side[old:].T) / 2
            self.T = torch.cat([torch.cat([self.T, side[:old]], 1), torch.cat([side[:old].T, corner], 1)], 0)
            self._ritz = None
        return self.n_new

    def grow(self) -> int:
        """Expand by the operator applied to the columns added last."""
        return self.expand(self.SQ[:, -self.n_new :])

    def ritz(self) -> tuple[Tensor, Tensor]:
        """Ritz values (j,), ascending, and their vectors in coordinates of the basis (j, j), in float64."""
        if self._ritz is None:
            self._ritz = small_eigh(self.T)
        return self._ritz

    def solve(self, B: Tensor) -> tuple[Tensor, Tensor]:
        """Galerkin solution in coordinates of the basis (j, k), and its true residual (m, k). No pass."""
        theta, E = self.ritz()
        cut = 64 * torch.finfo(B.dtype).eps
        weight = torch.where(theta > cut, 1 / theta.clamp_min(cut), torch.zeros_like(theta))
        y = (E * weight) @ (E.T @ (self.Q.T @ B).to(torch.float64))
        y = y.to(B.dtype)
        return y, B - self.SQ @ y

    def slow_modes(self, k: int) -> Tensor:
        """Displacements of the potential along the k slowest Ritz vectors, (m, k)."""
        E = self.ritz()[1][:, :k].to(self.Q.dtype)
        return self.root_inv[:, None] * (self.Q @ E)


def start_block(space: SchurSpace, B: Tensor, modes: Tensor | None, width: int = BLOCK, seed: int = 0) -> Tensor:
    """Right-hand sides (normalised), then slow modes of a neighbour, then random columns, up to `width` columns."""
    length = torch.linalg.vector_norm(B, dim=0).clamp_min(torch.finfo(B.dtype).tiny)
    parts = [B / length]
    room = max(0, width - B.shape[1])
    if modes is not None and len(modes) == len(B):
        parts.append(space.root[:, None] * modes[:, :room])
        room -= parts[-1].shape[1]
    rng = torch.Generator(device=B.device).manual_seed(seed)
    parts.append(torch.randn(len(B), room, generator=rng, dtype=B.dtype, device=B.device))
    return torch.cat(parts, 1)


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
    before = pairs.passes.total
    space = SchurSpace(pairs, phi, psi, r, c, damping)
    rho_r = space.r_inv[:, None] * rho
    rhs = kappa - pairs.adjoint(phi, psi, rho_r)
    answer = respond_schur(space, rho_r, rhs, rtol=rtol, modes=modes, method=method, max_iter=max_iter)
    return replace(answer, n_passes=pairs.passes.total - before)


def respond_schur(
    space: "SchurSpace",
    rho_r: Tensor,
    rhs: Tensor,
    *,
    rtol: float,
    modes: Tensor | None = None,
    method: str = "block",
    max_iter: int = 40,
) -> Response:
    """`respond` where `ρ/r` (n, k) and the right-hand side `κ - Pᵀ(ρ/r)` (m, k) of the Schur complement are known."""
    before = space.pairs.passes.total
    B = space.project(space.root_inv[:, None] * rhs)
    if method == "block":
        h, Ph, residual, status = _block_krylov(space, B, modes, rtol, max_iter)
        modes = space.slow_modes(BLOCK)
    elif method == "cg":
        h, residual, status = _conjugate_gradients(space, B, rtol, max_iter)
        Ph = space.pairs.apply(space.phi, space.psi, space.root_inv[:, None] * h)
        modes = B.new_empty(len(B), 0)
    else:
        raise ValueError(f"method: expected 'block' or 'cg', got {method!r}")
    dphi = rho_r - space.r_inv[:, None] * Ph
    return Response(dphi, space.root_inv[:, None] * h, residual, status, space.pairs.passes.total - before, modes)


def relative(R: Tensor, B: Tensor) -> Tensor:
    """Norm of each column of R relative to that of B, (k,); 0 where B is 0."""
    size = torch.linalg.vector_norm(B, dim=0)
    return torch.where(size > 0, torch.linalg.vector_norm(R, dim=0) / size, torch.zeros_like(size))


def _block_krylov(
    space: SchurSpace, B: Tensor, modes: Tensor | None, rtol: float, max_iter: int
) -> tuple[Tensor, Tensor, Tensor, Status]:
    space.expand(start_block(space, B, modes))
    best, since, status = float("inf"), 0, Status.MAX_ITER
    floor = 1e3 * torch.finfo(B.dtype).eps
    y, R = space.solve(B)
    for _ in range(max_iter):
        residual = relative(R, B)
        worst = float(residual.max())
        since = 0 if worst < 0.7 * best else since + 1
        best = min(best, worst)
        if worst <= rtol:
            status = Status.CONVERGED
            break
        if (since >= 4 and best < floor) or space.grow() == 0:
            status = Status.STALLED
            break
        y, R = space.solve(B)
    return space.Q @ y, space.PQ @ y, relative(R, B), status


def _conjugate_gradients(space: SchurSpace, B: Tensor, rtol: float, max_iter: int) -> tuple[Tensor, Tensor, Status]:
    """Conjugate gradients on every column by itself; the columns share the passes. All of `max_iter` if rtol is 0."""
    x, R, size = torch.zeros_like(B), B.clone(), torch.linalg.vector_norm(B, dim=0)
    # Below rounding of the right-hand side a column is done: going on would divide what has underflowed.
    floor = torch.finfo(B.dtype).eps * size
    D, rr = R.clone(), (R * R).sum(0)
    zero = torch.zeros_like(rr)
    for _ in range(max_iter):
        length = torch.linalg.vector_norm(R, dim=0)
        if rtol > 0 and bool((length <= torch.maximum(rtol * size, floor)).all()):
            break
        SD, _ = space.product(D)
        curvature = (D * SD).sum(0)
        active = (length > floor) & (curvature > 0)
        alpha = torch.where(active, rr / torch.where(active, curvature, zero + 1), zero)
        x, R = x + alpha * D, R - alpha * SD
        rr_new = (R * R).sum(0)
        D = R + torch.where(active, rr_new / torch.where(active, rr, zero + 1), zero) * D
        rr = rr_new
    residual = relative(R, B)
    worst = float(residual.max())
    if worst <= rtol:
        return x, residual, Status.CONVERGED
    return x, residual, Status.STALLED if bool((residual * size <= floor).all()) else Status.MAX_ITER
