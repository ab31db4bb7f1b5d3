"""The trace of a symmetric operator from a few products with it, with standard errors.

For v uniform on the sphere of radius √n, vᵀ A v has the mean tr A and the variance 2n/(n + 2) (‖A‖_F² − (tr A)²/n), and
‖A v‖² has the mean ‖A‖_F²: the products that give the estimate also give its variance, however few they are. The spread
of the estimates alone does not: random signs repeat themselves exactly on [[0, 1], [1, 0]] half of the time.
References: Hutchinson, Commun. Stat. 18 (1989); Cortinovis and Kressner, On randomized trace estimates for indefinite
matrices, Found. Comput. Math. 22 (2022); Meyer, Musco, Musco and Woodruff, Hutch++: optimal stochastic trace
estimation, SOSA (2021); Epperly, Tropp and Webber, XTrace: making the most of every sample in stochastic trace
estimation, SIAM J. Matrix Anal. Appl. 45 (2024).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import scipy.special
import torch
from torch import Tensor

from ot_newton.block_krylov import gaussian
from ot_newton.lanczos import working_product
from ot_newton.operators import aslinearoperator, require_symmetric
from ot_newton.status import Status

SEED = 0x07_2ACE_5EED  # of the random vectors, unlike any that a problem is likely to draw from
_LEAST = {"hutchinson": 1, "hutch++": 3, "xtrace": 4}  # products


@dataclass(frozen=True)
class TraceEstimate:
    """A trace with its standard error and the degrees of freedom for Student's t; `math.inf` for a normal error.

    quadrature_error: an estimate of the error that more probes would not remove; 0 for `trace`. n_matvec: the products
    that this estimate rests on. `status` is `NONFINITE`, and the numbers NaN, if a product was not finite.
    """

    value: float
    standard_error: float
    dof: float
    n_matvec: int
    status: Status = Status.CONVERGED
    quadrature_error: float = 0.0

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Limits between which the trace lies with this probability. Raises `ValueError` unless 0 < confidence < 1."""
        require_confidence(confidence)
        radius = student(confidence, self.dof) * self.standard_error + self.quadrature_error
        return self.value - radius, self.value + radius


def trace(A: Any, *, method: str = "xtrace", budget: int = 64, rng: torch.Generator | None = None) -> TraceEstimate:
    """tr A for a symmetric operator or matrix A (n, n) from at most `budget` products with it.

    method: "hutchinson" averages vᵀ A v, with an error like ‖A‖_F √(2 / budget). "hutch++" spends two thirds of the
    products on a subspace where the trace is exact; "xtrace" lets each product serve both ends. These two win where
    few eigenvalues hold most of ‖A‖_F and lose little elsewhere. All are unbiased and apply A to blocks: one for
    Hutchinson, three or two for the others. With n ≤ budget, n products give the trace itself.

    The standard error is absolute: near tr A = 0 no relative error is meaningful. The result is a float, summed in
    float64. Raises `ValueError` for an unknown method, a budget below 1, 3 and 4 in turn, and for an operator that is
    not square or known to be unsymmetric.

    >>> H = torch.diag(torch.linspace(-1, 2, 1000, dtype=torch.float64))
    >>> estimate = trace(H, budget=100)
    >>> low, high = estimate.interval(0.99)
    >>> bool(low <= 500 <= high), estimate.n_matvec
    (True, 100)
    """
    A = aslinearoperator(A)
    require_symmetric(A)
    n, before = A.shape[0], A.n_matvec
    if method not in _LEAST:
        raise ValueError(f"expected a method in {', '.join(_LEAST)}, got {method!r}")
    if budget < _LEAST[method]:
        raise ValueError(f"expected a budget of at least {_LEAST[method]} products for {method}, got {budget}")
    eps = torch.finfo(A.dtype).eps
    if n <= budget:
        dense = A.to_dense().double()
        value = float(dense.diagonal().sum())
        sampled = value, 0.0, math.inf, float(torch.linalg.matrix_norm(dense)) if n else 0.0
    else:
        apply, dtype = working_product(A)
        rng = torch.Generator().manual_seed(SEED) if rng is None else rng

        def draw(columns: int) -> Tensor:
            return gaussian(n, columns, rng).to(A.device, dtype)

        sampled = {"hutchinson": _hutchinson, "hutch++": _hutch_pp, "xtrace": _xtrace}[method](apply, draw, n, budget)
    value, error, dof, frobenius = sampled
    n_matvec = A.n_matvec - before
    if not math.isfinite(value + error + frobenius):
        return TraceEstimate(math.nan, math.nan, dof, n_matvec, Status.NONFINITE)
    return TraceEstimate(value, max(error, eps * math.sqrt(n) * frobenius), dof, n_matvec)


def require_confidence(confidence: float) -> None:
    """Raise `ValueError` unless 0 < confidence < 1."""
    if not 0 < confidence < 1:
        raise ValueError(f"expected 0 < confidence < 1, got {confidence}")


def student(confidence: float, dof: float) -> float:
    """The half width of the central interval of Student's t that has this probability."""
    p = (1 + confidence) / 2
    return float(scipy.special.ndtri(p) if math.isinf(dof) else scipy.special.stdtrit(dof, p))


Sampled = tuple[float, float, float, float]  # trace, standard error, degrees of freedom, ‖A‖_F
Apply = Callable[[Tensor], Tensor]
Draw = Callable[[int], Tensor]


def _hutchinson(apply: Apply, draw: Draw, n: int, budget: int) -> Sampled:
    V = _on_sphere(draw(budget), n)
    W = apply(V)
    value, error, frobenius = _average(V, W, W, n)
    return value, error, max(budget - 1, 1), frobenius


def _hutch_pp(apply: Apply, draw: Draw, n: int, budget: int) -> Sampled:
    k = budget // 3
    Y = apply(draw(k))
    Q = torch.linalg.qr(Y)[0]  # (n, k)
    Z = apply(Q)
    V = draw(budget - 2 * k)
    for _ in range(2):
        V = V - Q @ (Q.mT @ V)
    V = _on_sphere(V, n - k)
    W = apply(V)
    rest, error, rest_norm = _average(V, W, W - Q @ (Q.mT @ W), n - k)
    captured = float(_dots(Q, Z).sum())
    return captured + rest, error, max(V.shape[1] - 1, 1), math.hypot(rest_norm, float(_dots(Z, Z).sum().sqrt()))


def _xtrace(apply: Apply, draw: Draw, n: int, budget: int) -> Sampled:
    """The mean over i of tr(Q_iᵀ A Q_i) + u_iᵀ A u_i, Q_i a basis of A times all test vectors but the i-th.

    Q_i Q_iᵀ = Q (I − s_i s_iᵀ) Qᵀ for A Ω = Q R and s_i the normalised i-th column of R⁻ᵀ; u_i is the part of ω_i
    outside Q_i, scaled to the length √(n − l + 1). What two test vectors have in common enters both their estimates,
    which can double the variance of the mean: the spread and the known variance of uᵀ A u are added.
    """
    l = budget // 2
    V = _on_sphere(draw(l), n)  # Ω
    Y = apply(V)
    if not bool(Y.isfinite().all()):
        return math.nan, math.nan, l - 1, math.nan
    Q, R = torch.linalg.qr(Y)
    Z = apply(Q)  # (n, l)
    H, W, R = (B.double().cpu() for B in (Q.mT @ Z, Q.mT @ V, R))
    S = _leave_one_out(R, torch.finfo(Y.dtype).eps)

    def without_own(B: Tensor) -> Tensor:
        return B - S * (S * B).sum(0)

    X = without_own(W).to(Q)  # Q X is the part of Ω inside, column by column
    U, AU = V - Q @ X, Y - Z @ X
    scale = math.sqrt(n - l + 1) / torch.linalg.vector_norm(U, dim=0)
    U, AU = U * scale, AU * scale
    outside = AU - Q @ without_own((Q.mT @ AU).double().cpu()).to(Q)
    _, known, _ = _average(U, AU, outside, n - l + 1)
    estimates = H.trace() - (S * (H @ S)).sum(0) + _dots(U, AU).cpu()
    error = math.hypot(float(estimates.std()) / math.sqrt(l), known)
    return float(estimates.mean()), error, l - 1, float(_dots(Y, Y).mean().sqrt())


def _leave_one_out(R: Tensor, eps: float) -> Tensor:
    """Unit columns s_i (l, l) orthogonal to all columns of R but the i-th, for a triangular R of any rank."""
    scale = torch.linalg.matrix_norm(R)
    pivots = R.diagonal()
    floor = eps * (scale if bool(scale > 0) else 1.0)
    R = R + torch.diag(torch.where(pivots.abs() < floor, floor - pivots, 0.0))
    S = torch.linalg.solve_triangular(R, torch.eye(len(R), dtype=R.dtype, device=R.device), upper=True).mT
    S = S / S.abs().amax(0)
    return S / torch.linalg.vector_norm(S, dim=0)


def _average(V: Tensor, W: Tensor, inside: Tensor, n: int) -> tuple[float, float, float]:
    """Mean of vᵀw, its standard error by the variance above, and ‖A‖_F, for v of length √n in n dimensions.

    inside: the part of w in these dimensions. ‖A‖_F² − (tr A)²/n is taken as the mean of ‖A v − (tr A / n) v‖².
    """
    values, frobenius2 = _dots(V, W), _dots(inside, inside).mean()
    mean = values.mean()
    rest = inside.double() - (mean / n) * V.double()
    variance = 2 * n / (n + 2) * _dots(rest, rest).mean()
    return float(mean), math.sqrt(float(variance) / V.shape[1]), math.sqrt(float(frobenius2))


def _on_sphere(V: Tensor, n: int) -> Tensor:
    return V * (math.sqrt(n) / torch.linalg.vector_norm(V, dim=0))


def _dots(V: Tensor, W: Tensor) -> Tensor:
    """Products of corresponding columns, summed in float64."""
    return (V.double() * W.double()).sum(0)
