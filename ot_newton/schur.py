"""A growing space on which the Schur complement `I - KᵀK` of the response system is known, and solved by projection.

See `response` for the system. The space is orthonormal and orthogonal to the gauge `√c`; two passes add a block to it.
"""

import torch
from torch import Tensor

from ot_newton.pairs import Pairs

BLOCK = 64
ROUNDING = 16  # times the resolution of the dtype: what Ritz values are uncertain by
MANY = 512  # columns, above which the slowest Ritz vectors are found by themselves


def inverse(weights: Tensor) -> Tensor:
    """1/w, and 0 where w is 0, or so near it that 1/w overflows: nothing depends on the potential of such a point."""
    held = weights >= torch.finfo(weights.dtype).tiny
    return torch.where(held, 1 / weights, torch.zeros_like(weights))


def small_eigh(T: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a small symmetric matrix; on the CPU, where that is fast and reliable.

    All of them NaN where the matrix is not finite, which LAPACK would raise an error for.
    """
    here = T.cpu()
    if not bool(here.isfinite().all()):
        return torch.full_like(T[0], torch.nan), torch.full_like(T, torch.nan)
    theta, E = torch.linalg.eigh(here)
    return theta.to(T.device), E.to(T.device)


def on_host(*parts: Tensor) -> list[Tensor]:
    """Small tensors in float64 on the CPU, by one transfer: a GPU would wait longer for each step of their algebra."""
    flat = torch.cat([part.to(torch.float64).reshape(-1) for part in parts]).cpu()
    pieces = flat.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def factor_q(V: Tensor, least: float = 1e-5) -> Tensor:
    """The orthonormal factor of V = QR, (m, k).

    For float32 by the Cholesky factor of the Gram matrix in float64, two products instead of a factorisation of a tall
    matrix, which takes a GPU longer than a pass; by that factorisation where V is worse conditioned than 1/least.
    """
    if V.dtype == torch.float32 and V.shape[1]:
        Q = _cholesky_q(V, least, relative=True)
        if Q is not None:
            return Q
    return torch.linalg.qr(V).Q


def _cholesky_q(V: Tensor, least: float, *, relative: bool = False) -> Tensor | None:
    """The orthonormal factor, or None where a column adds less than `least`, or that part of the longest, to others."""
    wide = V.to(torch.float64)
    gram = (wide.T @ wide).cpu()
    L, info = torch.linalg.cholesky_ex(gram)
    size = float(gram.diagonal().max()) ** 0.5 if relative else 1.0
    if int(info) or not float(L.diagonal().min()) > least * size:
        return None
    identity = torch.eye(len(L), dtype=L.dtype, device=L.device)
    inverse_factor = torch.linalg.solve_triangular(L, identity, upper=False).T
    return (wide @ inverse_factor.to(V.device)).to(V.dtype)


def orthonormal(V: Tensor, Q: Tensor, tol: float) -> Tensor:
    """Orthonormal basis of the columns of V, orthogonal to Q: two Gram-Schmidt passes, dependent ones dropped."""
    length = torch.linalg.vector_norm(V, dim=0)
    V = V / length.clamp_min(torch.finfo(V.dtype).tiny)
    V = _basis(V - Q @ (Q.T @ V), tol)
    return _basis(V - Q @ (Q.T @ V), None)


def _basis(V: Tensor, tol: float | None) -> Tensor:
    """Orthonormal basis of the columns of V (m, k), singular values up to `tol` dropped; none where it is None.

    For float32 from the Gram matrix in float64, which holds the squares of all that float32 resolves.
    """
    if V.dtype == torch.float64:
        Q, R = torch.linalg.qr(V)
        if tol is None or not bool(R.isfinite().all()):
            return Q
        U, s, _ = torch.linalg.svd(R.cpu())
        return Q @ U[:, s > tol].to(V.device)
    if tol is not None and V.shape[1]:
        sound = _cholesky_q(V, 100 * tol)  # nothing to drop, as a rule
        if sound is not None:
            return sound
    wide = V.to(torch.float64)
    gram = wide.T @ wide
    if tol is None:
        return torch.linalg.solve_triangular(torch.linalg.cholesky_ex(gram).L, wide.T, upper=False).T.to(V.dtype)
    squares, E = small_eigh(gram)
    keep = squares > tol**2
    return (wide @ (E[:, keep] / squares[keep].sqrt())).to(V.dtype)


class SchurSpace:
    """A growing space on the target side on which `(I - KᵀK) h = B` is solved by Galerkin projection."""

    def __init__(self, pairs: Pairs, phi: Tensor, psi: Tensor, r: Tensor, c: Tensor, damping: float = 0.0) -> None:
        self.pairs, self.phi, self.psi, self.damping = pairs, phi, psi, damping
        self._row_means = pairs.row_averager(psi, phi)
        self._col_means = pairs.swapped().row_averager(phi, psi)
        self.r, self.r_inv, self.root, self.root_inv = r, inverse(r), c.sqrt(), inverse(c).sqrt()
        self.gauge = self.root / torch.linalg.vector_norm(self.root)
        m, n = len(c), len(r)
        self.Q, self.SQ, self.PQ = c.new_empty(m, 0), c.new_empty(m, 0), c.new_empty(n, 0)
        self.T = torch.empty(0, 0, dtype=torch.float64, device=c.device)
        self.n_new = 0
        self._ritz: tuple[Tensor, Tensor] | None = None
        self._L, self._positive = self.T, True

    def project(self, V: Tensor) -> Tensor:
        """Remove the gauge from the columns of V (m, k)."""
        return torch.addmm(V, self.gauge[:, None], (self.gauge @ V)[None], alpha=-1)

    def product(self, V: Tensor) -> tuple[Tensor, Tensor]:
        """`(I - KᵀK + damping) V` (m, k), gauge removed, and `D_r⁻¹ P D_c^-½ V` (n, k); two passes.

        Made of averages that each pass normalises by itself, so that the gauge is a null vector to rounding even where
        the exponents are not.
        """
        means = self._row_means(self.root_inv[:, None] * V)
        shifted = (1 + self.damping) * V if self.damping else V
        return self.project(torch.addcmul(shifted, self.root[:, None], self._col_means(means), value=-1)), means

    def expand(self, V: Tensor) -> int:
        """Add the columns of V (m, k) to the space; returns how many were new. Two passes."""
        tol = 1e-10 if V.dtype == torch.float64 else 1e-5
        new = orthonormal(self.project(V), torch.cat([self.gauge[:, None], self.Q], 1), tol)
        self.n_new = new.shape[1]
        if self.n_new:
            S_new, means = self.product(new)
            self.Q, self.SQ = torch.cat([self.Q, new], 1), torch.cat([self.SQ, S_new], 1)
            self.PQ = torch.cat([self.PQ, self.r[:, None] * means], 1)
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
        """Galerkin solution in coordinates of the basis (j, k), and its true residual (m, k). No pass.

        A few solves with `T + τ`, each on the residual of T, are the pseudo-inverse but for Ritz values near τ, which
        is rounding: what they leave of a component is `(τ/(θ + τ))³`, and they magnify none by more than 3/τ. Where
        T + τ is not positive, directions whose Ritz value is rounding are left out instead.
        """
        right, L = (self.Q.T @ B).to(torch.float64), self._factor()
        if L is None:  # rounding was larger than that
            tau, (theta, E) = self._tau, self.ritz()
            weight = torch.where(theta > 4 * tau, 1 / theta.clamp_min(4 * tau), torch.zeros_like(theta))
            y = (E * weight) @ (E.T @ right)
        else:
            y = torch.cholesky_solve(right, L)
            for _ in range(2):
                y = y + torch.cholesky_solve(right - self.T @ y, L)
        y = y.to(B.dtype)
        return y, B - self.SQ @ y

    @property
    def _tau(self) -> float:
        return ROUNDING * torch.finfo(self.Q.dtype).eps

    def _factor(self) -> Tensor | None:
        """The Cholesky factor of T + τ, of which only the new rows are computed; None where T + τ is not positive."""
        old = len(self._L)
        if self._positive and old < len(self.T):
            side = torch.linalg.solve_triangular(self._L, self.T[:old, old:], upper=False)
            corner = self.T[old:, old:] - side.T @ side
            corner.diagonal().add_(self._tau)
            corner, failed = torch.linalg.cholesky_ex(corner)
            self._positive = not int(failed)
            self._L = torch.cat([torch.cat([self._L, torch.zeros_like(side)], 1), torch.cat([side.T, corner], 1)], 0)
        return self._L if self._positive else None

    def slowest(self, k: int) -> Tensor:
        """The k slowest Ritz vectors in coordinates of the basis, (j, k), orthonormal, in float64.

        In a large space by inverse iteration: a mode comes out less exact the less it differs from those that follow.
        """
        L = self._factor() if len(self.T) > MANY else None
        if L is None:
            return self.ritz()[1][:, :k]
        rng = torch.Generator(device=L.device).manual_seed(len(L))
        X = torch.randn(len(L), 2 * k, generator=rng, dtype=L.dtype, device=L.device)
        for _ in range(3):
            X = torch.linalg.qr(torch.cholesky_solve(X, L)).Q
        return X @ small_eigh(X.T @ self.T @ X)[1][:, :k]

    def displacements(self, y: Tensor) -> Tensor:
        """Displacements of the potential, (m, k), for vectors in coordinates of the basis, (j, k)."""
        return self.root_inv[:, None] * (self.Q @ y.to(self.Q.dtype))

    def slow_modes(self, k: int) -> Tensor:
        """Displacements of the potential along the k slowest Ritz vectors, (m, k)."""
        return self.displacements(self.slowest(k))


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


def relative(R: Tensor, B: Tensor) -> Tensor:
    """Norm of each column of R relative to that of B, (k,); 0 where B is 0."""
    size = torch.linalg.vector_norm(B, dim=0)
    return torch.where(size > 0, torch.linalg.vector_norm(R, dim=0) / size, torch.zeros_like(size))
