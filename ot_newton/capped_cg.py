"""Conjugate gradients for a Newton step that leaves with a direction of negative curvature if there is one.

Solves (H + 2ε I) d = −g until ‖r‖ ≤ rtol ‖g‖. Iterates and directions are watched for vᵀ(H + 2ε I) v ≤ ε ‖v‖², that is
vᵀHv ≤ −ε ‖v‖²; a residual that falls more slowly than the condition number allows betrays such a v as well. Capped CG
of Royer, O'Neill and Wright 2020, Math. Program. 180:451, Algorithm 1, with one product per iteration, with the radius
of Steihaug 1983, and with the plain residual test in place of its worst-case one.
"""

from dataclasses import dataclass
from math import inf, isfinite, log, sqrt

import torch

from ot_newton.operators import LinearOperator
from ot_newton.status import Status


@dataclass(frozen=True)
class NewtonDirection:
    """What capped CG found.

    Attributes:
        vector: d (n,), with gᵀd ≤ 0.
        slope, curvature: gᵀd and dᵀHd, with H undamped.
        status: CONVERGED; BOUNDARY, ‖d‖ = radius; MAX_ITER, d is the best so far and still a descent direction;
            NEGATIVE_CURVATURE, dᵀHd ≤ −ε ‖d‖²; NONFINITE, H or g is not finite.
        norm: largest ‖Hv‖/‖v‖ seen, an estimate of ‖H‖ from below.
        n_matvec: products with H, one per iteration.
    """

    vector: torch.Tensor
    slope: float
    curvature: float
    status: Status
    norm: float
    n_matvec: int


def capped_cg(
    H: LinearOperator,
    g: torch.Tensor,
    *,
    rtol: float,
    damping: float,
    norm: float = 0.0,
    radius: float = inf,
    maxiter: int | None = None,
) -> NewtonDirection:
    """A Newton direction, or a direction of negative curvature, for a gradient g (n,).

    Args:
        H: symmetric operator (n, n), possibly indefinite.
        g: gradient.
        rtol: relative residual at which the solution is good enough.
        damping: ε relative to ‖H‖, as far as that is known after the first product. Negative curvature above −ε is
            ignored, so it should exceed the relative error of H.
        norm: what is known of ‖H‖ from earlier points.
        radius: stop where the iterate leaves this ball.
        maxiter: 2n + 10 by default.

    Example:

        >>> from ot_newton.operators import DiagonalOperator
        >>> H = DiagonalOperator(torch.tensor([1.0, -2.0], dtype=torch.float64))
        >>> capped_cg(H, torch.ones(2, dtype=torch.float64), rtol=0.1, damping=1e-8).status.value
        'negative_curvature'
    """
    maxiter = 2 * len(g) + 10 if maxiter is None else maxiter
    known, n_before = norm, H.n_matvec
    y, Hy, yy = torch.zeros_like(g), torch.zeros_like(g), 0.0
    r, p, Hp_old, beta = g, -g, Hy, 0.0
    rr0 = rr = float(g @ g)
    shift: float | None = None
    history: list[tuple[float, float, float]] = []  # α_j, ‖r_j‖², ‖p_j‖²

    def result(d: torch.Tensor, Hd: torch.Tensor, status: Status) -> NewtonDirection:
        slope, curvature = torch.stack([g @ d, d @ Hd]).tolist()
        if slope > 0:
            d, slope = -d, -slope
        return NewtonDirection(d, slope, curvature, status, norm, H.n_matvec - n_before)

    if not rr0:
        return result(y, Hy, Status.CONVERGED)
    for j in range(maxiter):
        Hp = H @ p
        Hr = beta * Hp_old - Hp  # because r_j = β p_{j−1} − p_j
        pp, pHp, HpHp, HrHr, yp = torch.stack([p @ p, p @ Hp, Hp @ Hp, Hr @ Hr, y @ p]).tolist()
        if not isfinite(pp + HpHp):
            return result(y, Hy, Status.NONFINITE)
        norm = max(norm, sqrt(HpHp / pp), sqrt(HrHr / rr))
        shift = damping * norm if shift is None else shift
        curvature = pHp + 2 * shift * pp
        if curvature <= shift * pp:
            return result(p, Hp, Status.NEGATIVE_CURVATURE)

        alpha = rr / curvature
        if yy + 2 * alpha * yp + alpha * alpha * pp >= radius * radius:
            gap = radius * radius - yy
            tau = gap / (yp + sqrt(yp * yp + pp * gap))  # ‖y + τ p‖ = radius; yᵀp ≥ 0 in CG
            return result(y + tau * p, Hy + tau * Hp, Status.BOUNDARY)
        y, Hy = y + alpha * p, Hy + alpha * Hp
        r = r + alpha * (Hp + 2 * shift * p)
        rr_new, yHy, yy, HyHy = torch.stack([r @ r, y @ Hy, y @ y, Hy @ Hy]).tolist()
        norm = max(norm, sqrt(HyHy / yy))
        history.append((alpha, rr, pp))
        if yHy + 2 * shift * yy <= shift * yy:
            return result(y, Hy, Status.NEGATIVE_CURVATURE)
        if sqrt(rr_new) <= rtol * sqrt(rr0):
            return result(y, Hy, Status.CONVERGED)
        if shift and 0.5 * log(rr / rr0) > _log_cap(norm / shift, j):
            i = _slow_since(history, shift)
            if i is not None:
                early = capped_cg(H, g, rtol=0.0, damping=damping, norm=known, maxiter=i).vector
                d = y - early
                return result(d, H @ d, Status.NEGATIVE_CURVATURE)
        beta, rr = rr_new / rr, rr_new
        p, Hp_old = beta * p - r, Hp
    return result(y, Hy, Status.MAX_ITER)


def _log_cap(norm_over_shift: float, j: int) -> float:
    """log of √T τ^{j/2}, which bounds ‖r_j‖/‖r_0‖ wherever H + 2εI ⪰ εI; κ = ‖H̄‖/ε, τ = √κ/(√κ + 1)."""
    kappa = norm_over_shift + 2
    tau = sqrt(kappa) / (sqrt(kappa) + 1)
    return log(2 * kappa**2 / (1 - sqrt(tau))) + 0.5 * j * log(tau)


def _slow_since(history: list[tuple[float, float, float]], shift: float) -> int | None:
    """An i for which d = y_{j+1} − y_i has dᵀH̄d < ε ‖d‖², from the scalars of CG alone.

    d = Σ α_l p_l, l = i..j, with p_lᵀH̄p_l = ‖r_l‖²/α_l, p_lᵀH̄p_k = 0 and p_lᵀp_k = ‖p_l‖² ‖r_k‖²/‖r_l‖² for k > l.
    """
    energy = length2 = later = 0.0  # later: Σ α_k ‖r_k‖² over k > l
    found = None
    for i in reversed(range(len(history))):
        alpha, rr, pp = history[i]
        energy += alpha * rr
        length2 += alpha * alpha * pp + 2 * alpha * pp / rr * later
        later += alpha * rr
        if energy < shift * length2:
            found = i
    return found
