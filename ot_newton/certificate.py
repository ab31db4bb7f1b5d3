"""The smallest eigenvalue of a symmetric operator H, as evidence: a lower bound, an upper bound and a verdict.

A matrix that comes with its own bracket, `lower` ⪯ H ⪯ `upper`, hands it down to λ_min by Weyl's monotonicity theorem.
Otherwise any Rayleigh quotient bounds λ_min from above. From below, m steps of Lanczos from a random start in n
dimensions leave
    λ_min ≥ θ_min − (λ_max − λ_min) t²,   t = ln(1.648 √n / δ) / (2m − 1),
with probability 1 − δ (Kuczyński and Woźniakowski 1992, SIAM J. Matrix Anal. Appl. 13:1094); the same bound at the
other end replaces the unknown spread by (θ_max − θ_min) / (1 − 2t²). Small operators are diagonalised instead.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import ceil, inf, log, nan, sqrt
from typing import Any

import torch

from ot_newton.block_krylov import KrylovSpace, gaussian
from ot_newton.galerkin import BracketedMatrix
from ot_newton.operators import LinearOperator, MatrixOperator, aslinearoperator

DENSE_LIMIT = 128  # up to here the bound above would ask for n steps anyway
LARGE_DENSE_LIMIT = 2048  # for a matrix that exists already
SEED = 0x0C07_5EED  # of the random start, unlike any seed that a problem is likely to draw from
LOOK_EVERY = 8  # steps of Lanczos between two looks at the bounds


class Verdict(StrEnum):
    """What is known about the sign of the smallest eigenvalue."""

    NEGATIVE = "negative"
    NONNEGATIVE = "nonnegative"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Certificate:
    """The smallest eigenvalue of a Hessian with its evidence. All numbers in the units of the Hessian.

    For an operator of which only an error is told, `upper` is the Rayleigh quotient plus `noise` and certain as far as
    the noise is; `lower` is certain in the same sense where the operator was diagonalised, else it holds with
    probability `confidence` over the random start. For a matrix with a bracket both are what the bracket says, and as
    certain as that is (`GalerkinHessian.bracket`).

    Attributes:
        lambda_min: Rayleigh quotient of `vector`, the best single number; `lower` ≤ `lambda_min` ≤ `upper`.
        lower, upper: bounds of the smallest eigenvalue.
        vector: unit vector (n,) that belongs to `lambda_min`.
        scale: the spectral norm, estimated from below.
        noise: error of the eigenvalues by rounding and by the operator's own error.
        tolerance: `lower` may lie this far below zero and still count as nonnegative.
        confidence: probability of `lower` over the random start; 1.0 where none was needed.
        n_matvec: products with H that it took.
    """

    lambda_min: float
    lower: float
    upper: float
    vector: torch.Tensor
    scale: float
    noise: float
    tolerance: float
    confidence: float
    n_matvec: int

    @property
    def verdict(self) -> Verdict:
        """NEGATIVE if `upper` < 0, NONNEGATIVE if `lower` ≥ −`tolerance`, else UNDECIDED."""
        if self.upper < 0:
            return Verdict.NEGATIVE
        return Verdict.NONNEGATIVE if self.lower >= -self.tolerance else Verdict.UNDECIDED

    @property
    def relative(self) -> float:
        """λ_min / ‖H‖; zero for the zero operator."""
        return self.lambda_min / self.scale if self.scale else self.lambda_min


def smallest_eigenvalue(
    H: Any,
    *,
    rtol: float = 1e-3,
    error: float = 0.0,
    confidence: float = 0.99,
    maxiter: int = 1024,
    rng: torch.Generator | None = None,
) -> Certificate:
    """The smallest eigenvalue of a symmetric operator (n, n), with bounds on both sides.

    A matrix, or an operator of at most 128 rows, is diagonalised in float64, a `BracketedMatrix` with both its bounds.
    For anything larger the Krylov space of a random vector grows until the sign is decided, and a negative eigenvalue
    known to a tenth, or until it has `maxiter` dimensions. An operator with a value that is not finite gives NaN and
    the verdict UNDECIDED.

    Args:
        H: symmetric operator, or a matrix as a tensor, a numpy array or one of scipy's.
        rtol: with a NONNEGATIVE verdict λ_min ≥ −rtol ‖H‖; the number of products grows like 1/√rtol.
        error: relative error of H in the spectral norm, by which the bounds are widened; a bracket knows better.
        confidence: probability of the lower bound over the random start.
        maxiter: largest dimension of the Krylov space.
        rng: source of the random start; a private one if None.

    Raises:
        TypeError: H is no operator and no matrix.
        ValueError: H is not square, or an argument is out of range.

    Example:

        >>> from ot_newton.operators import DiagonalOperator
        >>> H = DiagonalOperator(torch.tensor([2.0, -0.002], dtype=torch.float64))
        >>> smallest_eigenvalue(H).verdict.value
        'negative'
    """
    H = aslinearoperator(H)
    n = H.shape[0]
    if H.shape != (n, n) or n == 0:
        raise ValueError(f"expected a square operator with at least one row, got shape {H.shape}")
    if not (0 < rtol < 1 and 0 < confidence < 1 and error >= 0 and maxiter > 1):
        raise ValueError(
            "expected 0 < rtol < 1, 0 < confidence < 1, error ≥ 0 and maxiter > 1, "
            f"got {rtol}, {confidence}, {error} and {maxiter}"
        )
    if n <= (LARGE_DENSE_LIMIT if isinstance(H, MatrixOperator) else DENSE_LIMIT):
        return dense_certificate(*spectrum(H), H, rtol=rtol, error=error)
    rng = torch.Generator().manual_seed(SEED) if rng is None else rng
    return _krylov_certificate(H, rtol, error, confidence, maxiter, rng)


def spectrum(H: LinearOperator) -> tuple[torch.Tensor, torch.Tensor]:
    """All eigenvalues (n,), ascending, and eigenvectors (n, n) of a small symmetric operator, in float64 on the CPU.

    NaN throughout if the matrix is not finite.
    """
    matrix = _symmetric(H.to_dense())
    if bool(matrix.isnan().any()):
        return matrix.diagonal().clone(), matrix
    values, vectors = torch.linalg.eigh(matrix)
    return values, vectors


def dense_certificate(
    values: torch.Tensor, vectors: torch.Tensor, H: LinearOperator, *, rtol: float, error: float
) -> Certificate:
    """The evidence in a full spectrum of H, as `spectrum` returns it."""
    scale, lowest = float(values.abs().max()), float(values[0])
    rounded = rounding(H) * scale
    noise = error * scale + rounded
    lower, upper = lowest - noise, lowest + noise
    if isinstance(H, BracketedMatrix):
        lower, upper = (float(torch.linalg.eigvalsh(_symmetric(M))[0]) for M in (H.lower, H.upper))
        lower, upper = min(lower, lowest) - rounded, max(upper, lowest) + rounded
    return Certificate(
        lambda_min=lowest,
        lower=lower,
        upper=upper,
        vector=vectors[:, 0].to(H.device, H.dtype),
        scale=scale,
        noise=noise,
        tolerance=rtol * scale,
        confidence=1.0,
        n_matvec=0 if isinstance(H, MatrixOperator) else len(values),
    )


def _symmetric(matrix: torch.Tensor) -> torch.Tensor:
    """Its symmetric part in float64 on the CPU; NaN throughout if it is not finite."""
    matrix = matrix.to("cpu", torch.float64)
    return (matrix + matrix.T) / 2 if bool(torch.isfinite(matrix).all()) else torch.full_like(matrix, nan)


def _krylov_certificate(
    H: LinearOperator, rtol: float, error: float, confidence: float, maxiter: int, rng: torch.Generator
) -> Certificate:
    n, before = H.shape[0], H.n_matvec
    looks = maxiter // LOOK_EVERY + 1
    miss = log(1.648 * sqrt(n) * 2 * looks / (1 - confidence))  # both ends, at every look
    capacity = min(n, maxiter, ceil(0.5 + miss / sqrt(2 * rtol)) + LOOK_EVERY)  # until 2t² ≤ rtol
    start = gaussian(n, 1, rng).to(H.device, H.dtype)
    space = KrylovSpace(H.matmat, start, capacity, torch.finfo(H.dtype).eps, rng)
    relative_noise = error + rounding(H)
    scale = lower = nan
    S = torch.ones(1, 1, dtype=torch.float64)
    while not space.full:
        space.expand()
        if not space.finite:
            break
        if space.size % LOOK_EVERY and not space.full:
            continue
        theta, S = space.ritz()
        low, high = float(theta[0]), float(theta[-1])
        t2 = 0.0 if space.exhausted else (miss / (2 * space.size - 1)) ** 2
        scale = max(abs(low), abs(high))
        noise = relative_noise * scale
        lower = low - t2 * (high - low) / (1 - 2 * t2) - noise if 2 * t2 < 1 else -inf
        settled = float(space.residuals(S[:, :1])) <= 0.1 * abs(low)
        if lower >= -rtol * scale or (low < -noise and settled):
            break
    if space.finite:
        y = space.V @ S[: space.size, 0].to(space.V)
        y = y / torch.linalg.vector_norm(y)
        lowest = float(y @ (H @ y))
    else:
        y, lowest, lower = start[:, 0], nan, nan
    return Certificate(
        lambda_min=lowest,
        lower=min(lower, lowest - relative_noise * scale),
        upper=lowest + relative_noise * scale,
        vector=y,
        scale=scale,
        noise=relative_noise * scale,
        tolerance=rtol * scale,
        confidence=1.0 if space.exhausted else confidence,
        n_matvec=H.n_matvec - before,
    )


def rounding(H: LinearOperator) -> float:
    """Relative error of an eigenvalue by rounding in products of H's dtype."""
    return 8 * sqrt(H.shape[0]) * torch.finfo(H.dtype).eps
