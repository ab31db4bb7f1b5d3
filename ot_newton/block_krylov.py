"""The space behind `eigsh`: block Lanczos with full reorthogonalisation and thick restarts.

    A V = V T + Q R Eᵀ,   VᵀV = I,   VᵀQ = 0,   E the last columns of the identity

V (n, m) grows by the block Q (n, b); a Ritz pair T s = θ s has ‖A V s − θ V s‖ = ‖R Eᵀ s‖. A restart keeps V S for the
best vectors S and goes on with Q, so that the relation survives with a full T. Every block is orthogonalised twice
against all of V, and again after its factorisation. A block that loses rank (singular values of Q R up to
8 eps ‖A‖) is filled up with random vectors, which brings in further copies of a multiple eigenvalue.
References: Wu and Simon, Thick-restart Lanczos method for large symmetric eigenvalue problems, SIAM J. Matrix Anal.
Appl. 22 (2000); Giraud, Langou and Rozložník, Comput. Math. Appl. 50 (2005): twice is enough; Morgan and Zeng, Harmonic
projection methods for large non-symmetric eigenvalue problems, Numer. Linear Algebra Appl. 5 (1998).
"""

from collections.abc import Callable

import torch
from torch import Tensor


class KrylovSpace:
    """V, T and the next block, for one operator, with at most `capacity` vectors.

    Vectors live on the operator's device in the working dtype; T and R are float64 on the CPU. `locked` (n, l): vectors
    to stay orthogonal to, so that the space sees A on their complement only. `noise` is the largest ‖VᵀA q − (A V)ᵀq‖
    for a unit q before the first restart: rounding if A is symmetric, more if it is inexact or not symmetric.
    """

    def __init__(
        self,
        apply: Callable[[Tensor], Tensor],
        start: Tensor,
        capacity: int,
        eps: float,
        rng: torch.Generator,
        locked: Tensor | None = None,
        anorm: float = 0.0,
    ) -> None:
        n = start.shape[0]
        self.apply, self.eps, self.rng = apply, eps, rng
        self.n_locked = 0 if locked is None else locked.shape[1]
        self.capacity = min(capacity, n - self.n_locked)
        self.basis = start.new_zeros(n, self.n_locked + self.capacity)  # (n, l + capacity)
        if locked is not None:
            self.basis[:, : self.n_locked] = locked
        self.size = 0
        self.T = torch.zeros(self.capacity, self.capacity, dtype=torch.float64, device="cpu")
        # coupling of the last block to the next, (b_next, b)
        self.R = torch.zeros(0, 0, dtype=torch.float64, device="cpu")
        self.anorm = anorm
        self.noise = 0.0
        self.finite, self.restarted = True, False
        self.coupling: Tensor | None = None  # Vᵀ A Q as symmetry foretells it, (m, b)
        self.next = self._orthonormal(start, floor=0.0)[0]

    @property
    def V(self) -> Tensor:
        """The basis (n, m), without the locked vectors."""
        return self.basis[:, self.n_locked : self.n_locked + self.size]

    @property
    def full(self) -> bool:
        """Whether the space cannot take another block."""
        return self.exhausted or self.size + self.next.shape[1] > self.capacity

    @property
    def exhausted(self) -> bool:
        """Whether V and the locked vectors span everything, so that T is exact."""
        return self.n_locked + self.size >= self.basis.shape[0]

    def expand(self) -> None:
        """Take the next block into V: one product with A. Sets `finite` to False, and stops, if it is not finite."""
        Q = self.next
        b, m, start = Q.shape[1], self.size + Q.shape[1], self.n_locked + self.size
        W = self.apply(Q)
        self.basis[:, start : start + b] = Q
        H = self.basis[:, : start + b].mT @ W  # (l + m, b), the first Gram-Schmidt pass
        W = W - self.basis[:, : start + b] @ H
        evidence = torch.cat([H[self.n_locked :], torch.linalg.vector_norm(W, dim=0)[None]]).double().cpu()
        if not bool(evidence.isfinite().all()):
            self.finite = False
            return
        columns, self.size = evidence[:-1], m
        if self.coupling is not None:
            surprise = columns[: m - b] - self.coupling
            self.noise = max(self.noise, float(torch.linalg.vector_norm(surprise, dim=0).amax()))
        self.T[:m, m - b : m] = columns
        self.T[m - b : m, :m] = columns.mT
        self.T[m - b : m, m - b : m] = (columns[m - b :] + columns[m - b :].mT) / 2
        self.anorm = max(self.anorm, float(torch.linalg.vector_norm(evidence, dim=0).amax()))
        self.next, self.R = self._orthonormal(W, floor=8 * self.eps * self.anorm)
        if not self.restarted:
            before = torch.zeros(m - b, self.R.shape[0], dtype=torch.float64, device="cpu")
            self.coupling = torch.cat([before, self.R.mT])

    def residuals(self, S: Tensor) -> Tensor:
        """‖A V s − V (T s)‖ for the columns s of S (m, c), by the Krylov relation."""
        return torch.linalg.vector_norm(self.R @ S[self.size - self.R.shape[1] : self.size], dim=0)

    def ritz(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues (m,) ascending and eigenvectors (m, m) of T."""
        return torch.linalg.eigh(self.T[: self.size, : self.size])

    def harmonic(self) -> Tensor:
        """Harmonic Ritz vectors with respect to 0, unit columns (m, m), the values smallest in magnitude first.

        (T + T⁻¹ E RᵀR Eᵀ) g = θ g, as the definite pencil T g = μ G g with G = T² + E RᵀR Eᵀ and μ = 1/θ.
        """
        m, T = self.size, self.T[: self.size, : self.size]
        RE = torch.zeros(self.R.shape[0], m, dtype=torch.float64, device="cpu")
        RE[:, m - self.R.shape[1] :] = self.R
        _, sigma, Zh = torch.linalg.svd(torch.cat([T, RE]), full_matrices=False)
        half = Zh.mT / sigma.clamp_min(self.eps * self.anorm or 1.0)
        mu, Y = torch.linalg.eigh(half.mT @ T @ half)
        S = half @ Y[:, mu.abs().argsort(descending=True)]
        return S / torch.linalg.vector_norm(S, dim=0)

    def restart(self, S: Tensor, *, harmonic: bool = False) -> None:
        """Keep span(V S), S (m, p) with orthonormal columns, and go on with the block that carries all residuals."""
        m, p = self.size, S.shape[1]
        block = self.next
        if harmonic and self.R.numel():
            # The residuals of harmonic pairs lie in the span of Q − V T⁻¹ E Rᵀ.
            E = torch.eye(m, dtype=torch.float64, device="cpu")[:, m - self.R.shape[1] :]
            T = self.T[:m, :m]
            shift = self.eps * self.anorm * torch.eye(m, dtype=torch.float64, device="cpu")
            K = torch.linalg.solve(T + shift, E @ self.R.mT)
            block = block - self.V @ K.to(block)
        kept = self.V @ S.to(self.basis)  # (n, p)
        self.basis[:, self.n_locked : self.n_locked + p] = kept
        T = S.mT @ self.T[:m, :m] @ S
        self.size = p
        self.T.zero_()
        self.T[:p, :p] = (T + T.mT) / 2
        self.restarted, self.coupling = True, None
        self.R = torch.zeros(0, 0, dtype=torch.float64, device="cpu")
        if harmonic:
            self.next = self._orthonormal(block, floor=0.0)[0]

    def _orthonormal(self, W: Tensor, floor: float) -> tuple[Tensor, Tensor]:
        """An orthonormal block Q ⟂ V and R with W ≈ Q R; directions below the floor are replaced by random ones.

        The columns of Q beyond the rank of W have zero rows in R.
        """
        n, b = W.shape
        taken = self.basis[:, : self.n_locked + self.size]
        Q, R = torch.linalg.qr(self._clean(W, taken, 1 if floor else 2))
        U, sigma, Vh = torch.linalg.svd(R.double().cpu(), full_matrices=False)
        keep = sigma > floor
        R = (sigma[:, None] * Vh)[keep]
        Q = Q @ U[:, keep].to(Q)
        room = min(b, n - taken.shape[1])
        if Q.shape[1] < room:
            fresh = self._clean(gaussian(n, room - Q.shape[1], self.rng).to(W), torch.cat([taken, Q], 1), 2)
            Q = torch.cat([Q, fresh / torch.linalg.vector_norm(fresh, dim=0)], 1)
            R = torch.cat([R, torch.zeros(room - R.shape[0], R.shape[1], dtype=torch.float64, device="cpu")])
        Q, R = Q[:, :room], R[:room]
        Q, signs = torch.linalg.qr(self._clean(Q, taken, 1))
        return Q * signs.diagonal().sign(), R

    @staticmethod
    def _clean(W: Tensor, basis: Tensor, passes: int) -> Tensor:
        for _ in range(passes):
            W = W - basis @ (basis.mT @ W)
        return W


def gaussian(n: int, columns: int, rng: torch.Generator) -> Tensor:
    """Standard normal vectors (n, columns), the same on every device: drawn in float64 where the generator lives."""
    return torch.randn(n, columns, generator=rng, dtype=torch.float64, device=rng.device)
