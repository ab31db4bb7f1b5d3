"""Gauss quadrature of a spectral measure μ, and rigorous bounds of what it leaves out.

m Lanczos steps from a unit vector v give nodes θ_j and weights τ_j, Σ τ_j = 1, with  Σ τ_j p(θ_j) = ∫ p dμ = vᵀ p(A) v
for every polynomial p of degree below 2m. For anything else,
    Σ_{i<j} τ_i ≤ μ(−∞, θ_j) ≤ μ(−∞, θ_j] ≤ Σ_{i≤j} τ_i                    (Chebyshev, Markov, Stieltjes)
    |∫ f dμ − Σ τ_j f(θ_j)| ≤ 2 min ‖f − p‖_∞  over p of degree < 2m        (on an interval that holds the spectrum)
Reference: Golub and Meurant, Matrices, Moments and Quadrature with Applications (2010), chapters 2 and 6; Chen, Trogdon
and Ubaru, Analysis of stochastic Lanczos quadrature for spectrum approximation (2021), arXiv:2105.06595.
"""

import math
from collections.abc import Callable

import numpy as np
import scipy.fft
import scipy.special
import torch
from torch import Tensor

_RESOLVED = 9.0  # Chebyshev coefficients of a Gaussian of width s fall like exp(−(k s)² / 2): at k s = 9 below rounding


def gauss(alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes, ascending, and weights (c, m) of tridiagonal matrices with diagonals alpha, off-diagonals beta (c, m)."""
    off = beta[:, :-1]
    T = torch.diag_embed(alpha) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)  # (c, m, m)
    nodes, S = torch.linalg.eigh(T)
    return nodes, S[:, 0] ** 2


def share_below(nodes: Tensor, weights: Tensor, x: Tensor, exact: Tensor, slack: float) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds (c, g) of μ(−∞, x) for rules (c, m), x (g,), where nodes are known within the slack.

    exact (c,): whether μ is the rule itself, because the Krylov space is invariant.
    """
    c, m = nodes.shape
    ends = weights.new_tensor([0.0, 1.0]).expand(c, 2)
    sums = torch.cat([ends[:, :1], weights.cumsum(1)[:, :-1], ends[:, 1:]], 1)  # (c, m + 1), all of μ being 1
    left, right = ((x + shift).expand(c, -1).contiguous() for shift in (-slack, slack))
    surely = torch.searchsorted(nodes, left)  # (c, g), nodes that lie below x whatever the rounding
    perhaps = torch.searchsorted(nodes, right, right=True)
    open_end = (~exact).long()[:, None]
    return sums.gather(1, (surely - open_end).clamp_min(0)), sums.gather(1, (perhaps + open_end).clamp_max(m))


def gaussian_error(nodes: Tensor, weights: Tensor, x: Tensor, sigma: float, exact: Tensor) -> tuple[Tensor, Tensor]:
    """How far ∫ K dμ may lie below and above Σ τ K(θ) by the first bound: (g,) ≥ 0, means over the rules (c, m).

    K(t) is the density at x (g,) of a normal distribution with mean t and standard deviation sigma. By parts, the error
    is −∫ K' (M − G) dt with the distribution functions M and G of μ and the rule, and −τ_j ≤ M − G ≤ τ_{j+1} between
    two nodes.
    """
    edge = nodes.new_full((len(nodes), 1), math.inf)
    t = torch.cat([-edge, nodes, edge], 1)[:, :, None]  # (c, m + 2, 1)
    tau = torch.nn.functional.pad(weights * (~exact)[:, None], (1, 1))[:, :, None]
    rise = gaussian(torch.minimum(t, x) - x, sigma).diff(dim=1)  # (c, m + 1, g), of K where it grows with t
    fall = -gaussian(torch.maximum(t, x) - x, sigma).diff(dim=1)
    below = (rise * tau[:, 1:] + fall * tau[:, :-1]).sum(1).mean(0)
    above = (rise * tau[:, :-1] + fall * tau[:, 1:]).sum(1).mean(0)
    return below, above


def polynomial_error(x: Tensor, sigma: float, interval: tuple[float, float], steps: int) -> Tensor:
    """The second bound (g,) for the same kernels and a spectrum within the interval; inf where it would say nothing.

    The best approximation is replaced by the Chebyshev series, cut off after the degree 2 · steps − 1.
    """
    low, high = interval
    degree, half = 2 * steps - 1, (high - low) / 2
    if not (math.isfinite(half) and degree * sigma > half):
        return torch.full_like(x, math.inf)
    terms = degree + math.ceil(_RESOLVED * half / sigma) + 16
    angles = (torch.arange(terms, dtype=torch.float64) + 0.5) * (math.pi / terms)
    t = (low + high) / 2 + half * torch.cos(angles)
    values = gaussian(x[:, None] - t, sigma)  # (g, terms)
    coefficients = torch.from_numpy(np.asarray(scipy.fft.dct(values.numpy(), axis=1))) / terms
    return 2 * coefficients[:, degree + 1 :].abs().sum(1)


def gaussian(distance: Tensor, sigma: float) -> Tensor:
    """The density of a normal distribution at this distance from its mean."""
    return torch.exp(-0.5 * (distance / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))


def spectral_interval(nodes: Tensor, n: int, exact: bool, miss: float) -> tuple[float, float]:
    """An interval that holds the spectrum, with probability 1 − miss over the random starts of the rules (c, m).

    λ_max ≤ θ_max + (λ_max − λ_min) t² with t = ln(1.648 √n / δ) / (2m − 1) for a start uniform on the sphere
    (Kuczyński and Woźniakowski 1992, SIAM J. Matrix Anal. Appl. 13:1094), δᶜ = miss / 2 as c starts are independent.
    """
    c, m = nodes.shape
    low, high = float(nodes.min()), float(nodes.max())
    if exact:
        return low, high
    delta = (miss / 2) ** (1 / c)
    t2 = (math.log(1.648 * math.sqrt(n) / delta) / (2 * m - 1)) ** 2
    if 2 * t2 >= 1:
        return -math.inf, math.inf
    margin = (high - low) * t2 / (1 - 2 * t2)
    return low - margin, high + margin


def share_interval(low: Tensor, high: Tensor, n: int, probes: int, confidence: float) -> tuple[Tensor, Tensor]:
    """Confidence limits (g,) of the share p of eigenvalues below a point, from bounds of the mean over the probes.

    For r = p n eigenvalues and v uniform on the sphere, vᵀ P v has the distribution Beta(r / 2, (n − r) / 2); the mean
    over N probes is taken as Beta(p κ, (1 − p) κ) with κ = N (n + 2) / 2 − 1, which has the same mean and variance.
    The limits are the shares at which the mean seen would lie on the edge of the central interval.
    """
    kappa, tail = probes * (n + 2) / 2 - 1, (1 - confidence) / 2
    seen_low, seen_high = low.clamp(0, 1).numpy(), high.clamp(0, 1).numpy()

    def solve(too_small: Callable[[np.ndarray], np.ndarray]) -> Tensor:
        left, right = np.zeros(low.shape), np.ones(low.shape)
        for _ in range(60):
            p = (left + right) / 2
            below = too_small(p)
            left, right = np.where(below, p, left), np.where(below, right, p)
        return torch.from_numpy((left + right) / 2)

    lower = solve(lambda p: scipy.special.betaincc(p * kappa, (1 - p) * kappa, seen_low) < tail)
    upper = solve(lambda p: scipy.special.betainc(p * kappa, (1 - p) * kappa, seen_high) >= tail)
    return lower, upper
