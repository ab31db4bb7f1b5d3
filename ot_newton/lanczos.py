"""Eigenvalues of symmetric operators: the Lanczos process itself, and `eigsh`.

    A V = V T + β_m v_{m+1} e_mᵀ,   VᵀV = I,   T tridiagonal with diagonal α and off-diagonal β

Each step reorthogonalises twice against all earlier vectors. β ≤ 64 eps ‖A‖ is a breakdown: the eigenvalues of T so
far are exact, β becomes 0 and the process goes on with a new random vector orthogonal to the others.
References: Paige, Error analysis of the Lanczos algorithm for tridiagonalizing a symmetric matrix, IMA J. Appl. Math.
18 (1976); Parlett, The Symmetric Eigenvalue Problem (1998), chapters 11 to 13.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ot_newton.block_krylov import gaussian
from ot_newton.operators import LinearOperator, aslinearoperator, require_symmetric
from ot_newton.ritz_search import WHICH, Found, Search
from ot_newton.status import Status
from ot_newton.validate import check_nonnegative, is_integer

_SEED = 0x5EED_1A2C_2057_E165  # a start of our own: no user's seed gives the same vectors
LOOK_EVERY = {"cuda": 8}  # steps between two looks at the coefficients, which make a device wait; 1 elsewhere
_MOST_VECTORS, _MOST_ENTRIES = 300, 2**25  # of a space before it restarts, unless k asks for more


@dataclass(frozen=True)
class Tridiagonal:
    """T and V of `lanczos`: alpha (m,), beta (m,) in float64 on the CPU, V (n, m); a leading batch for many starts.

    beta[i] couples vectors i and i + 1, 0 where the process broke down; beta[-1] is what the last step left over.
    """

    alpha: Tensor
    beta: Tensor
    V: Tensor
    status: Status
    n_matvec: int

    @property
    def T(self) -> Tensor:
        """The tridiagonal matrix (m, m), with the batch in front if there is one."""
        off = self.beta[..., :-1]
        return torch.diag_embed(self.alpha) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)


@dataclass(frozen=True)
class EigenPairs:
    """Eigenvalues w (k,) ascending and orthonormal vectors V (n, k), with evidence; unpacks to `(w, V)`.

    residuals (k,): ‖A y − w y‖ by true products; some eigenvalue lies within the residual of each w. converged (k,):
    whether it is below max(tol |w|, 64 eps ‖A‖). noise: how far products with A departed from symmetry, the scale below
    which residuals mean nothing. The entry of each vector that is largest in magnitude is positive.
    """

    w: Tensor
    V: Tensor
    residuals: Tensor
    converged: Tensor
    status: Status
    noise: float
    n_matvec: int

    @property
    def success(self) -> bool:
        """Whether all k pairs converged."""
        return self.status.success

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.w, self.V))


def lanczos(
    A: Any,
    v0: Tensor | None = None,
    *,
    steps: int = 64,
    rng: torch.Generator | None = None,
) -> Tridiagonal:
    """m = min(steps, n) steps of the Lanczos process for a symmetric operator or matrix A (n, n).

    v0: a start (n,), or c starts (n, c), which run side by side, one block product a step, and give results with a
    leading c; random by default. The process never stops early: after a breakdown it goes on with a random vector, so
    that m = n finds every eigenvalue. A product that is not finite ends it with `Status.NONFINITE` and the steps
    before it.

    Raises `ValueError` for a start that is zero, not finite or of another shape, and for steps < 1.

    >>> T = lanczos(torch.diag(torch.tensor([1.0, 2.0, 3.0])), torch.ones(3), steps=3).T
    >>> torch.linalg.eigvalsh(T).round(decimals=4)
    tensor([1., 2., 3.], dtype=torch.float64)
    """
    A = aslinearoperator(A)
    require_symmetric(A)
    _require_integers(steps=steps)
    if steps < 1:
        raise ValueError(f"expected steps ≥ 1, got {steps}")
    rng, before, n = _generator(rng), A.n_matvec, A.shape[0]
    apply, dtype = working_product(A)
    start = gaussian(n, 1, rng).to(A.device, dtype) if v0 is None else _checked_start(v0, A).to(dtype)
    process = _Lockstep(apply, start, min(steps, n), torch.finfo(A.dtype).eps, rng)
    done = process.run()
    alpha, beta, V = process.alpha[:, :done], process.beta[:, :done], process.basis[:, :done].mT.to(A.dtype)
    if v0 is None or v0.ndim == 1:
        alpha, beta, V = alpha[0], beta[0], V[0]
    status = Status.CONVERGED if done == min(steps, n) else Status.NONFINITE
    return Tridiagonal(alpha, beta, V, status, A.n_matvec - before)


class _Lockstep:
    """Lanczos from c starts side by side: basis (c, m, n), alpha and beta (c, m)."""

    def __init__(
        self, apply: Callable[[Tensor], Tensor], start: Tensor, steps: int, eps: float, rng: torch.Generator
    ) -> None:
        n, c = start.shape
        self.apply, self.steps, self.eps, self.rng = apply, steps, eps, rng
        self.basis = start.new_zeros(c, steps + 1, n)
        self.basis[:, 0] = start.mT / torch.linalg.vector_norm(start, dim=0)[:, None]
        self.alpha = torch.zeros(c, steps, dtype=torch.float64, device="cpu")
        self.beta = torch.zeros(c, steps, dtype=torch.float64, device="cpu")
        self.anorm = torch.zeros(c, dtype=torch.float64, device="cpu")

    def run(self) -> int:
        """All steps, the host looking at the coefficients every few of them; the number of finite steps."""
        done, stride = 0, LOOK_EVERY.get(self.basis.device.type, 1)
        while done < self.steps:
            ahead = range(done, min(done + stride, self.steps))
            coefficients = torch.stack([self._step(j) for j in ahead]).cpu()  # (steps ahead, 2, c)
            for j, (alpha, beta) in zip(ahead, coefficients, strict=True):
                if not bool((alpha.isfinite() & beta.isfinite()).all()):
                    return j
                previous = self.beta[:, j - 1] if j else torch.zeros_like(alpha)
                self.anorm = torch.maximum(self.anorm, alpha.abs() + previous + beta)
                broken = beta <= min(64 * self.eps, self.eps**0.5) * self.anorm
                self.alpha[:, j], self.beta[:, j] = alpha, torch.where(broken, 0.0, beta)
                done = j + 1
                if bool(broken.any()) and done < self.steps:
                    self._renew(j + 1, broken)
                    break
        return done

    def _step(self, j: int) -> Tensor:
        """Vector j + 1 from vector j; returns alpha and beta of the step, (2, c)."""
        v, V = self.basis[:, j], self.basis[:, : j + 1]
        w = self.apply(v.mT).mT  # (c, n)
        alpha = torch.linalg.vecdot(v.double(), w.double())
        w = _orthogonal(_orthogonal(w, V), V)
        beta = torch.linalg.vector_norm(w, dim=1, dtype=torch.float64)
        self.basis[:, j + 1] = w / torch.where(beta > 0, beta, 1.0).to(w)[:, None]
        return torch.stack([alpha, beta])

    def _renew(self, j: int, broken: Tensor) -> None:
        """A random vector j, orthogonal to those before it, for each process that broke down."""
        c, _, n = self.basis.shape
        V = self.basis[:, :j]
        w = gaussian(n, c, self.rng).mT.to(V)
        w = _orthogonal(_orthogonal(w, V), V)
        w = w / torch.linalg.vector_norm(w, dim=1, keepdim=True)
        w = _orthogonal(w, V)
        w = w / torch.linalg.vector_norm(w, dim=1, keepdim=True)
        self.basis[:, j] = torch.where(broken.to(V.device)[:, None], w, self.basis[:, j])


def eigsh(
    A: Any,
    k: int = 6,
    *,
    which: str = "LM",
    v0: Tensor | None = None,
    ncv: int | None = None,
    maxiter: int | None = None,
    tol: float = 0.0,
    block_size: int | None = None,
    rng: torch.Generator | None = None,
) -> EigenPairs:
    """k eigenvalues and vectors of a symmetric operator or matrix A (n, n), 1 ≤ k ≤ n, by thick-restart block Lanczos.

    which: "LA" largest, "SA" smallest, "LM" largest in magnitude, "SM" smallest in magnitude, "BE" half from either end
    (one more from the top if k is odd). v0: a first guess (n,) or (n, c), joined by random vectors. ncv: most vectors
    of the space, k < ncv ≤ n; by default up to 300, fewer where n is large. maxiter: most restarts, 500 by default.
    tol: relative tolerance on the residuals, 0 for rounding level. block_size: random columns a product; the default
    min(k, 8) lets a block operator work on many at once, and 1 needs the fewest columns. Multiple eigenvalues come with
    all their copies: see `ritz_search`.

    The status is `CONVERGED` only if all k residuals, recomputed by true products, are within tolerance; `STALLED` if
    rounding or noise in A keeps them above it, `MAX_ITER`, or `NONFINITE` (values are then NaN).
    Raises `ValueError` for an unknown `which`, for k, ncv, tol or v0 out of range, and for an operator known to be
    unsymmetric.

    >>> w, V = eigsh(torch.diag(torch.tensor([-5.0, -1.0, 0.1, 4.0])), k=2, which="LM")
    >>> w
    tensor([-5.,  4.])
    """
    A = aslinearoperator(A)
    require_symmetric(A)
    n, before = A.shape[0], A.n_matvec
    _check_counts(n, k, which, ncv, maxiter, tol, block_size)
    rng, eps = _generator(rng), torch.finfo(A.dtype).eps
    apply, dtype = working_product(A)
    guess = torch.zeros(n, 0, dtype=dtype, device=A.device) if v0 is None else _checked_start(v0, A).to(dtype)
    block = min(n, block_size or min(k, 8), n if ncv is None else max((ncv - k) // 4, 1))
    start = torch.cat([guess / torch.linalg.vector_norm(guess, dim=0), gaussian(n, block, rng).to(guess)], 1)[:, :n]
    roomy = max(2 * k + 1, k + 8 * start.shape[1], min(_MOST_VECTORS, _MOST_ENTRIES // n))
    capacity = min(n, roomy if ncv is None else max(ncv, k + start.shape[1]))
    search = Search(apply, which, tol, eps, block, capacity, rng)

    left = 500 if maxiter is None else maxiter
    found = search.run(start, k, left, copies=block)
    pairs = _verified(found, A, apply, tol)
    if pairs.status is Status.STALLED and 0 < found.restarts < left and found.noise <= 64 * eps * found.anorm:
        # Many restarts have let rounding creep into the Krylov relation: a few steps from the vectors renew it.
        found = search.run(pairs.V.to(dtype), k, left - found.restarts, copies=k)
        pairs = _verified(found, A, apply, tol)
    return replace(pairs, n_matvec=A.n_matvec - before)


def _verified(found: Found, A: LinearOperator, apply: Callable[[Tensor], Tensor], tol: float) -> EigenPairs:
    """The Rayleigh-Ritz pairs of the vectors found, with residuals by true products, and the status these deserve."""
    n, k = found.Y.shape
    finite = bool(found.theta.isfinite().all())
    Y = torch.linalg.qr(found.Y)[0] if finite else found.Y
    AY = apply(Y) if finite else Y
    projected = (Y.mT @ AY).double().cpu()
    if not bool(projected.isfinite().all()):
        nan = torch.full((n, k), torch.nan, dtype=A.dtype, device=A.device)
        failed = torch.zeros(k, dtype=torch.bool, device=A.device)
        return EigenPairs(nan[0], nan, nan[0], failed, Status.NONFINITE, found.noise, 0)
    w, U = torch.linalg.eigh((projected + projected.mT) / 2)
    Y, AY, values = Y @ U.to(Y), AY @ U.to(Y), w.to(Y)
    residuals = torch.linalg.vector_norm(AY - Y * values, dim=0)
    anorm, eps = max(found.anorm, float(w.abs().amax())), torch.finfo(A.dtype).eps
    converged = residuals <= (tol * values.abs()).clamp_min(min(64 * eps, eps**0.5) * anorm)
    status = Status.STALLED if found.status.success and not bool(converged.all()) else found.status
    largest = Y.gather(0, Y.abs().argmax(0, keepdim=True))  # (1, k)
    Y = torch.where(largest < 0, -Y, Y)
    w, V, residuals = (t.to(A.dtype) for t in (values, Y, residuals))
    return EigenPairs(w, V, residuals, converged, status, found.noise, 0)


def working_product(A: LinearOperator) -> tuple[Callable[[Tensor], Tensor], torch.dtype]:
    """V ↦ A V detached, in the dtype for orthogonalisation: A's own, or float32 if A works in half precision."""
    if torch.finfo(A.dtype).bits >= 32:
        return lambda V: A.matmat(V).detach(), A.dtype
    return lambda V: A.matmat(V.to(A.dtype)).detach().float(), torch.float32


def _checked_start(v0: Tensor, A: LinearOperator) -> Tensor:
    if not isinstance(v0, Tensor) or v0.ndim not in (1, 2) or v0.shape[0] != A.shape[0]:
        got = tuple(v0.shape) if isinstance(v0, Tensor) else type(v0).__name__
        raise ValueError(f"expected a start of shape ({A.shape[0]},) or ({A.shape[0]}, c), got {got}")
    if v0.device != A.device:
        raise ValueError(f"expected a start on {A.device}, got {v0.device}")
    v0 = v0.detach().reshape(A.shape[0], -1)
    if not bool((v0.isfinite().all(0) & (v0 != 0).any(0)).all()):
        raise ValueError("expected a start that is finite and not zero")
    return v0


def _check_counts(
    n: int, k: int, which: str, ncv: int | None, maxiter: int | None, tol: float, block_size: int | None
) -> None:
    if which not in WHICH:
        raise ValueError(f"expected which in {', '.join(WHICH)}, got {which!r}")
    _require_integers(k=k, ncv=ncv, maxiter=maxiter, block_size=block_size)
    check_nonnegative(tol, "tol")
    if not 1 <= k <= n:
        raise ValueError(f"expected 1 ≤ k ≤ n = {n}, got {k}")
    if ncv is not None and not min(k + 1, n) <= ncv <= n:
        raise ValueError(f"expected k < ncv ≤ n = {n}, got {ncv}")
    if maxiter is not None and maxiter < 0:
        raise ValueError(f"expected maxiter ≥ 0, got {maxiter}")
    if block_size is not None and block_size < 1:
        raise ValueError(f"expected block_size ≥ 1, got {block_size}")


def _require_integers(**counts: Any) -> None:
    for name, count in counts.items():
        if count is not None and not is_integer(count):
            raise ValueError(f"expected {name} as an integer, got {count!r}")


def _generator(rng: torch.Generator | None) -> torch.Generator:
    return torch.Generator().manual_seed(_SEED) if rng is None else rng


def _orthogonal(w: Tensor, V: Tensor) -> Tensor:
    """w (c, n) less its parts along V (c, j, n): one block Gram-Schmidt pass."""
    return w - (V.mT @ (V @ w[:, :, None]))[:, :, 0]
