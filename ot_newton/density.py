"""The density of a symmetric operator's eigenvalues, by stochastic Lanczos quadrature, and counts of eigenvalues.

    tr f(A) = n E[vᵀ f(A) v] ≈ n mean_v Σ_j τ_j f(θ_j),   v uniform on the unit sphere,

with the nodes θ and weights τ of the Lanczos process from v. Over the probes v, vᵀ f(A) v has the variance
2 / (n + 2) Var f, the variance of f over the eigenvalues, which the same quadrature gives: the statistical error
is known from a single probe on and falls with n. What the quadrature leaves out is bounded in `quadrature`.
References: Ubaru, Chen and Saad, Fast estimation of tr(f(A)) via stochastic Lanczos quadrature, SIAM J. Matrix Anal.
Appl. 38 (2017); Chen, Trogdon and Ubaru, Randomized matrix-free quadrature, arXiv:2204.01941 (2022).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ot_newton.block_krylov import gaussian as gaussian_vectors
from ot_newton.lanczos import lanczos
from ot_newton.operators import aslinearoperator, require_symmetric
from ot_newton.quadrature import (
    gauss,
    gaussian,
    gaussian_error,
    polynomial_error,
    share_below,
    share_interval,
    spectral_interval,
)
from ot_newton.status import Status
from ot_newton.trace import TraceEstimate, require_confidence, student

SEED = 0x0DE_5171_5EED  # of the probes, unlike any that a problem is likely to draw from
_MOST_ENTRIES = 2**22  # of a kernel at nodes and points, at once


@dataclass(frozen=True)
class Band:
    """A function of x (g,): its estimate and, at each point by itself, limits that hold with this confidence."""

    x: Tensor
    value: Tensor
    lower: Tensor
    upper: Tensor
    confidence: float
    status: Status


@dataclass(frozen=True)
class Count:
    """How many eigenvalues lie below a point: an estimate, and limits that hold with this confidence."""

    value: float
    lower: int
    upper: int
    confidence: float
    n_matvec: int
    status: Status


@dataclass(frozen=True)
class SpectralDensity:
    """Quadrature rules for the eigenvalues of an operator with n rows, one rule a probe; float64 on the CPU.

    nodes, weights (c, m): each row of weights sums to 1 and is never renormalised. alpha, beta (c, m): the tridiagonal
    matrices behind them. exact (c,): whether a probe's Krylov space is invariant, so that its rule has no error.
    rounding: how far nodes may be off by rounding. After a product that is not finite the status is `NONFINITE`
    and all numbers are NaN.
    """

    nodes: Tensor
    weights: Tensor
    alpha: Tensor
    beta: Tensor
    exact: Tensor
    n: int
    rounding: float
    n_matvec: int
    status: Status

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest node, which lie within the spectrum."""
        return float(self.nodes.min()), float(self.nodes.max())

    @property
    def sigma(self) -> float:
        """The default smoothing: the range over the number of steps (|λ| or 1 over it where all nodes are equal)."""
        low, high = self.range
        return (high - low if high - low > self.rounding else abs(high) or 1.0) / self.nodes.shape[1]

    def density(self, grid: Tensor | None = None, *, sigma: float | None = None, confidence: float = 0.95) -> Band:
        """The density at the grid (g,), smoothed by a normal distribution of standard deviation sigma.

        The band is for the smoothed density of the true eigenvalues, n⁻¹ Σ_i N(x; λ_i, σ²): Student's t times the
        standard error, and the smaller of the two bounds of the quadrature's error. Below the default sigma the second
        soon exceeds the density itself; more steps allow a smaller one. By default 512 points that cover the range.
        Raises `ValueError` for a sigma or confidence out of range.
        """
        require_confidence(confidence)
        sigma = self.sigma if sigma is None else sigma
        if self.status.success and not (sigma > 0 and math.isfinite(sigma)):
            raise ValueError(f"expected a finite sigma > 0, got {sigma}")
        low, high = self.range
        reach = 4 * sigma
        x = torch.linspace(low - reach, high + reach, 512, dtype=torch.float64) if grid is None else _points(grid)
        miss = (1 - confidence) / 10  # spent on the interval that holds the spectrum
        quantile = student(confidence + miss, self._dof)
        if not self.status.success:
            return self._unknown(x, confidence)
        pieces = [self._smoothed(piece, sigma) for piece in x.split(max(1, _MOST_ENTRIES // self.nodes.numel()))]
        mean, error, below, above = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        interval = spectral_interval(self.nodes, self.n, bool(self.exact.all()), miss)
        smooth, spread = polynomial_error(x, sigma, interval, self.nodes.shape[1]), quantile * error
        lower = (mean - torch.minimum(below, smooth) - spread).clamp_min(0)
        upper = (mean + torch.minimum(above, smooth) + spread).clamp_max(gaussian(torch.zeros(()), sigma))
        return Band(x, mean, lower, upper, confidence, self.status)

    def cdf(self, grid: Tensor | None = None, *, confidence: float = 0.95) -> Band:
        """The share of eigenvalues below each point of the grid (g,), without smoothing; by default 512 points.

        The band joins the distribution of the share over the probes, which is known, with the first bound of
        `quadrature` on both sides: its width at x is at least the weight of the nodes beside x, so counts are sharp in
        gaps of the spectrum only.
        """
        require_confidence(confidence)
        low, high = self.range
        x = torch.linspace(low, high, 512, dtype=torch.float64) if grid is None else _points(grid)
        if not self.status.success:
            return self._unknown(x, confidence)
        least, most = (s.mean(0) for s in share_below(self.nodes, self.weights, x, self.exact, self.rounding))
        value = self._mean((self.nodes[:, :, None] < x).double())
        miss = (1 - confidence) / 10  # spent on the interval that holds the spectrum
        lower, upper = share_interval(least, most, self.n, len(self.nodes), confidence + miss)
        start, end = spectral_interval(self.nodes, self.n, bool(self.exact.all()), miss)
        upper = torch.where(x < start - self.rounding, 0.0, upper)
        lower = torch.where(x > end + self.rounding, 1.0, lower)
        return Band(x, value, lower, upper, confidence, self.status)

    def count_below(self, x: float, *, confidence: float = 0.95) -> Count:
        """How many eigenvalues lie below x, as `cdf` says, and no fewer than the nodes prove.

        Below x lie at least as many eigenvalues as nodes of any one probe, and likewise above (Cauchy's interlacing).
        """
        _require_point(x)
        band = self.cdf(torch.tensor([float(x)], dtype=torch.float64), confidence=confidence)
        if not self.status.success:
            return Count(math.nan, 0, self.n, confidence, self.n_matvec, self.status)
        lower, upper = math.ceil(self.n * float(band.lower) - 1e-9), math.floor(self.n * float(band.upper) + 1e-9)
        proved = int((self.nodes < x - self.rounding).sum(1).max())
        excluded = int((self.nodes > x + self.rounding).sum(1).max())
        lower, upper = (min(max(limit, proved), self.n - excluded) for limit in (lower, upper))
        value = min(max(self.n * float(band.value), lower), upper)
        return Count(value, lower, upper, confidence, self.n_matvec, self.status)

    def trace_of(self, f: Callable[[Tensor], Tensor]) -> TraceEstimate:
        """tr f(A), f applied to the eigenvalues; f maps float64 tensors elementwise.

        `quadrature_error` is by how much the last quarter of the steps changed the value; it is 0 for polynomials of
        degree below 3m/2. `status` is `NONFINITE` if f is not finite at a node.
        """
        if not self.status.success:
            return TraceEstimate(math.nan, math.nan, self._dof, self.n_matvec, self.status)
        values = f(self.nodes)
        if not isinstance(values, Tensor) or values.shape != self.nodes.shape:
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"expected f to return a tensor of shape {tuple(self.nodes.shape)}, got {got}")
        values = values[..., None]
        value, error = (self.n * float(s) for s in (self._mean(values), self._standard_error(values)))
        short = max(1, 3 * self.nodes.shape[1] // 4)
        nodes, weights = gauss(self.alpha[:, :short], self.beta[:, :short])
        change = torch.where(self.exact, 0.0, (weights * f(nodes)).sum(1) - (self.weights * values[..., 0]).sum(1))
        quadrature = self.n * abs(float(change.mean()))
        if not math.isfinite(value + error + quadrature):
            return TraceEstimate(math.nan, math.nan, self._dof, self.n_matvec, Status.NONFINITE)
        return TraceEstimate(value, error, self._dof, self.n_matvec, Status.CONVERGED, quadrature)

    def logdet(self, *, tol: float | None = None) -> TraceEstimate:
        """log det A for a positive definite A.

        Raises `ValueError` if a node is ≤ tol (by default the rounding level): the operator then has an eigenvalue that
        is, and its determinant is zero, negative, or beyond this precision.
        """
        tol = self.rounding if tol is None else tol
        smallest = self.range[0]
        if smallest <= tol:
            raise ValueError(f"expected a positive definite operator, got an eigenvalue ≤ {smallest:.3g}")
        return self.trace_of(torch.log)

    @property
    def _dof(self) -> int:
        return max(len(self.nodes) - 1, 1)

    def _mean(self, values: Tensor) -> Tensor:
        """Mean over the eigenvalues of a function with these values (c, m, g) at the nodes."""
        return torch.einsum("cm,cmg->cg", self.weights, values).mean(0)

    def _standard_error(self, values: Tensor) -> Tensor:
        variance = self._mean((values - self._mean(values)) ** 2)
        return (2 * variance / ((self.n + 2) * len(self.nodes))).sqrt()

    def _smoothed(self, x: Tensor, sigma: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The density at x (g,), its standard error, and how far the quadrature may lie above and below it."""
        kernel = gaussian(self.nodes[:, :, None] - x, sigma)  # (c, m, g)
        below, above = gaussian_error(self.nodes, self.weights, x, sigma, self.exact)
        return self._mean(kernel), self._standard_error(kernel), below, above

    def _unknown(self, x: Tensor, confidence: float) -> Band:
        nan = torch.full_like(x, math.nan)
        return Band(x, nan, nan, nan, confidence, self.status)


def spectral_density(
    A: Any,
    *,
    n_probes: int = 8,
    steps: int = 64,
    block_size: int | None = None,
    rng: torch.Generator | None = None,
) -> SpectralDensity:
    """The distribution of the eigenvalues of a symmetric operator or matrix A (n, n).

    It takes n_probes · min(steps, n) products with A. n_probes: random vectors, uniform on the sphere; the larger n,
    the fewer it takes. steps: of the Lanczos process, which resolve the spectrum to about its range over steps.
    block_size: probes that advance side by side, one block product a step (all by default); each keeps its min(steps,
    n) vectors until it is done. A product that is not finite ends it with `Status.NONFINITE`, all numbers being NaN.

    Raises `ValueError` for counts below 1 and for an operator that is not square or known to be unsymmetric.

    >>> H = torch.diag(torch.linspace(-1, 3, 1000, dtype=torch.float64))
    >>> spectrum = spectral_density(H)
    >>> band = spectrum.density(torch.tensor([1.0]))
    >>> bool(band.lower < 0.25 < band.upper), spectrum.n_matvec
    (True, 512)
    >>> low, high = spectrum.trace_of(torch.exp).interval()
    >>> bool(low < torch.linspace(-1, 3, 1000).exp().sum() < high)
    True
    """
    A = aslinearoperator(A)
    require_symmetric(A)
    n, before = A.shape[0], A.n_matvec
    for name, count in (("n_probes", n_probes), ("steps", steps), ("block_size", block_size or 1), ("n", n)):
        if count < 1:
            raise ValueError(f"expected {name} ≥ 1, got {count}")
    rng = torch.Generator().manual_seed(SEED) if rng is None else rng
    m, block = min(steps, n), n_probes if block_size is None else block_size
    probes = gaussian_vectors(n, n_probes, rng).to(A.device)
    alpha, beta = (torch.full((n_probes, m), math.nan, dtype=torch.float64) for _ in range(2))
    for start in range(0, n_probes, block):
        part = slice(start, start + block)
        run = lanczos(A, probes[:, part], steps=m, rng=rng)
        if not run.status.success:
            nan, never = torch.full_like(alpha, math.nan), torch.zeros(n_probes, dtype=torch.bool)
            return SpectralDensity(nan, nan, nan, nan, never, n, math.nan, A.n_matvec - before, run.status)
        alpha[part], beta[part] = run.alpha, run.beta
    nodes, weights = gauss(alpha, beta)
    exact = (beta == 0).any(1) | (m == n)
    eps = torch.finfo(A.dtype).eps
    rounding = min(64 * eps, math.sqrt(eps)) * float(nodes.abs().max())
    return SpectralDensity(nodes, weights, alpha, beta, exact, n, rounding, A.n_matvec - before, Status.CONVERGED)


def count_below(
    A: Any,
    x: float,
    *,
    confidence: float = 0.95,
    n_probes: int = 8,
    steps: int = 64,
    block_size: int | None = None,
    rng: torch.Generator | None = None,
) -> Count:
    """How many eigenvalues of a symmetric operator or matrix A (n, n) lie below x, with confidence limits.

    The limits are close only where x lies in a gap of the spectrum, see `SpectralDensity.cdf`. Other arguments and
    errors as in `spectral_density`; `ValueError` also unless 0 < confidence < 1.

    >>> H = torch.diag(torch.cat([torch.full((20,), -1.0), torch.linspace(1, 2, 80)]).double())
    >>> count = count_below(H, 0.0)
    >>> count.lower <= 20 <= count.upper
    True
    """
    require_confidence(confidence)
    _require_point(x)
    density = spectral_density(A, n_probes=n_probes, steps=steps, block_size=block_size, rng=rng)
    return density.count_below(x, confidence=confidence)


def _points(grid: Tensor) -> Tensor:
    if not isinstance(grid, Tensor) or grid.ndim != 1:
        got = tuple(grid.shape) if isinstance(grid, Tensor) else type(grid).__name__
        raise ValueError(f"expected a grid of shape (g,), got {got}")
    return grid.detach().to("cpu", torch.float64)


def _require_point(x: float) -> None:
    if not math.isfinite(x):
        raise ValueError(f"expected a finite point, got {x}")
