"""Finding the wanted eigenpairs in a Krylov space: which ones, when to stop, and whether a copy is missing.

A Krylov space of block size b holds at most b copies of an eigenvalue. Where more are wanted, the converged vectors
are locked and their complement is searched from a fresh random block. A missed eigenvector u with eigenvalue λ leaves
uᵀr = (λ − θ) uᵀy in the residual r of a Ritz pair (θ, y) of the complement, so a residual far below the distance of θ
to the wanted set rules it out, unless the start was nearly orthogonal to u.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ot_newton.block_krylov import KrylovSpace, gaussian
from ot_newton.status import Status

WHICH = ("LM", "SM", "LA", "SA", "BE")
CLEAR = 1e-4  # residual / distance below which a missing copy is ruled out


def ranked(theta: Tensor, which: str) -> Tensor:
    """Indices of the values theta (m,), the most wanted first. "BE" takes from the top and the bottom in turn."""
    if which == "BE":
        ascending = theta.argsort()
        m = len(theta)
        turns = torch.stack([ascending.flip(0), ascending], 1).reshape(-1)  # top, bottom, next to top, ...
        return turns[:m]
    key = theta.abs() if which in ("LM", "SM") else theta
    return key.argsort(descending=which[0] == "L")


@dataclass(frozen=True)
class Found:
    """Ritz values (c,), vectors (n, c), estimated residuals (c,), how the search ended, scale and noise of A, cost.

    `complete`: the space was everything, so nothing can be missing.
    """

    theta: Tensor
    Y: Tensor
    residuals: Tensor
    status: Status
    anorm: float
    noise: float
    restarts: int
    complete: bool


@dataclass(frozen=True)
class Search:
    """How to look for eigenpairs: the operator's product, the order, the tolerance, and the size of space and block."""

    apply: Callable[[Tensor], Tensor]
    which: str
    tol: float
    eps: float
    block: int
    capacity: int
    rng: torch.Generator

    def threshold(self, theta: Tensor, anorm: float, noise: float) -> Tensor:
        """The residual at which a Ritz pair is as good as asked, or as rounding and noise let it be."""
        return (self.tol * theta.abs()).clamp_min(max(8 * self.eps * anorm, noise))

    def run(self, start: Tensor, k: int, maxiter: int, copies: int) -> Found:
        """The k most wanted pairs from a start block (n, b) that is sure to meet `copies` copies of any eigenvalue."""
        found = self._in_space(KrylovSpace(self.apply, start, self.capacity, self.eps, self.rng), k, maxiter)
        ends = 2 if self.which == "BE" else 1
        count, n = ends, start.shape[0]
        while copies < k < n and found.status.success and not found.complete:
            block = gaussian(n, min(self.block, n - k), self.rng).to(start)
            space = KrylovSpace(self.apply, block, self.capacity, self.eps, self.rng, found.Y, found.anorm)
            clear = partial(self._clear, found.theta)
            more = self._in_space(space, min(count, n - k), maxiter - found.restarts, clear)
            found, changed = self._merge(found, more, k)
            if not changed:
                break
            count = max(ends, self.block)
        return found

    def _in_space(
        self,
        space: KrylovSpace,
        k: int,
        maxiter: int,
        clear: Callable[[Tensor, Tensor], bool] | None = None,
    ) -> Found:
        """Expand and restart one space until its k most wanted pairs converge, or `clear` says they do not matter."""
        restarts, checked = 0, 0
        while True:
            while not space.full:
                space.expand()
                if not space.finite:
                    return self._found(space, k, Status.NONFINITE, restarts)
                if space.size < k or (space.size < checked + 8 + checked // 8 and not space.full):
                    continue
                checked = space.size
                theta, S = self._wanted(space, k)
                residuals = space.residuals(S)
                done = bool((residuals <= self.threshold(theta, space.anorm, space.noise)).all())
                if done or space.exhausted or (clear is not None and clear(theta, residuals)):
                    return self._found(space, k, Status.CONVERGED, restarts)
            if restarts >= maxiter:
                return self._found(space, k, Status.MAX_ITER, restarts)
            restarts, checked = restarts + 1, 0
            self._restart(space, k)

    def _wanted(self, space: KrylovSpace, k: int) -> tuple[Tensor, Tensor]:
        """The k most wanted Ritz values and orthonormal coordinates (m, k) of their vectors."""
        if self.which == "SM" and not space.exhausted:
            S = torch.linalg.qr(space.harmonic()[:, :k])[0]
            theta, U = torch.linalg.eigh(S.mT @ space.T[: space.size, : space.size] @ S)
            return theta, S @ U
        theta, S = space.ritz()
        best = ranked(theta, self.which)[:k]
        return theta[best], S[:, best]

    def _restart(self, space: KrylovSpace, k: int) -> None:
        m, b = space.size, space.next.shape[1]
        keep = max(k, min(k + (m - k) // 2, m - 2 * b))
        if self.which == "SM":
            space.restart(torch.linalg.qr(space.harmonic()[:, :keep])[0], harmonic=True)
        else:
            theta, S = space.ritz()
            space.restart(S[:, ranked(theta, self.which)[:keep]])

    def _found(self, space: KrylovSpace, k: int, status: Status, restarts: int) -> Found:
        if space.size >= k:
            theta, S = self._wanted(space, k)
            Y, residuals = space.V @ S.to(space.basis), space.residuals(S)
        else:
            theta = residuals = torch.full((k,), math.nan, dtype=torch.float64, device="cpu")
            Y = space.basis.new_full((space.basis.shape[0], k), math.nan)
        return Found(theta, Y, residuals, status, space.anorm, space.noise, restarts, space.exhausted)

    def _outside(self, wanted: Tensor, theta: Tensor) -> Tensor:
        """How far each value of theta (c,) is from entering the wanted set; negative if it belongs there."""
        match self.which:
            case "LA":
                return wanted.min() - theta
            case "SA":
                return theta - wanted.max()
            case "LM":
                return wanted.abs().min() - theta.abs()
            case "SM":
                return theta.abs() - wanted.abs().max()
        ascending = wanted.sort().values
        low = len(wanted) // 2
        below = theta - ascending[low - 1] if low else torch.full_like(theta, math.inf)
        return torch.minimum(ascending[low] - theta, below)

    def _clear(self, wanted: Tensor, theta: Tensor, residuals: Tensor) -> bool:
        return bool((residuals <= CLEAR * self._outside(wanted, theta)).all())

    def _merge(self, found: Found, more: Found, k: int) -> tuple[Found, bool]:
        """The k best of both, and whether anything in `more` belongs to them."""
        found = replace(
            found,
            status=more.status,
            anorm=max(found.anorm, more.anorm),
            noise=max(found.noise, more.noise),
            restarts=found.restarts + more.restarts,
        )
        slack = 2 * self.threshold(more.theta, found.anorm, found.noise)
        enters = self._outside(found.theta, more.theta) < -slack
        if not (more.status.success and bool(enters.any())):
            return found, False
        theta = torch.cat([found.theta, more.theta[enters]])
        Y = torch.cat([found.Y, more.Y[:, enters.to(found.Y.device)]], 1)
        residuals = torch.cat([found.residuals, more.residuals[enters]])
        best = ranked(theta, self.which)[:k]
        return replace(found, theta=theta[best], Y=Y[:, best.to(Y.device)], residuals=residuals[best]), True
