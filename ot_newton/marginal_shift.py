"""How the Hessian of a linear model changes as wrong marginals are put right, to the first order.

A direction k of W changes log P by `w^k_ij = β^k_j + τ X_ia y_jl`, centred within each row i, with τ = 2s/eps and the
response β of psi; a correction ξ of psi by `δ_ij = ξ_j`, likewise centred. By the envelope theorem (the response
minimises a quadratic form, so its own change does not count)

    dH_kl = -eps Σ_ij P_ij δ_ij w^k_ij w^l_ij,

third moments that two passes give for all pairs of directions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ot_newton.pairs import Pairs


@dataclass(frozen=True, eq=False)
class Moments:
    """A plan's potentials and marginals with the moments that the Hessian was made of.

    Attributes:
        phi, psi, r, c: potentials in units of eps and marginals, (n,) and (m,).
        mean, covariance: of the target of each source, (n, q) and (n, q, q).
        PX: `PᵀX`, (m, p).
    """

    phi: Tensor
    psi: Tensor
    r: Tensor
    c: Tensor
    mean: Tensor
    covariance: Tensor
    PX: Tensor


def shift(
    pairs: Pairs, X: Tensor, at: Moments, beta: Tensor, beta_mean: Tensor, xi: Tensor, xi_mean: Tensor, v: Tensor
) -> tuple[Tensor, float]:
    """The change of the Hessian (pq, pq) to the first order in ξ, and the relative scale of the second order.

    beta (m, pq) and xi (m,) come with their averages under each row of the plan, (n, pq) and (n,). The second order is
    that of <P, w²> in the direction v (pq,), `Σ_i r_i (exp(σ²_i) - 1) E_i[w²] / <P, w²>` with σ²_i the variance of ξ in
    row i. Two passes.
    """
    eps, y, r, mean = pairs.eps, pairs.target.points, at.r[:, None], at.mean
    q, k, p = y.shape[1], beta.shape[1], X.shape[1]
    tau = 2 * pairs.scale / eps
    i, j = torch.triu_indices(q, q, device=y.device)
    x, x_mean = xi[:, None], xi_mean[:, None]
    response = (beta @ v)[:, None]
    columns = [x * beta, x * y, x * (y[:, i] * y[:, j]), x * x, response * response, response * y]
    rows = pairs.row_means(at.psi, torch.cat(columns, 1), at.phi)
    x_beta, x_y, upper, xx, response_square, response_y = rows.split([k, q, len(i), 1, 1, q], 1)
    x_yy = upper.new_empty(len(X), q, q)
    x_yy[:, i, j], x_yy[:, j, i] = upper, upper
    sent = at.c[:, None] * pairs.col_means(at.phi, torch.cat([x_mean, x_mean * X], 1), at.psi)

    once = beta_mean.T @ (r * x_beta)
    responses = beta.T @ ((at.c[:, None] * x - sent[:, :1]) * beta) - once - once.T
    responses = responses + 2 * beta_mean.T @ (r * x_mean * beta_mean)
    crossed = torch.einsum("mk,ma,ml->kal", beta, x * at.PX - sent[:, 1:], y)
    crossed = crossed - torch.einsum("nk,na,nl->kal", beta_mean, r * X, x_y - 2 * x_mean * mean)
    crossed = (crossed - torch.einsum("nk,na,nl->kal", x_beta, r * X, mean)).reshape(k, p * q)
    skewness = x_yy - x_mean[:, :, None] * (at.covariance - mean[:, :, None] * mean[:, None, :])
    skewness = skewness - mean[:, :, None] * x_y[:, None, :] - x_y[:, :, None] * mean[:, None, :]
    change = responses + tau * (crossed + crossed.T) + tau**2 * _weighted(r * X, skewness, X)
    along, response_mean = tau * X @ v.view(p, q), beta_mean @ v  # (n, q), (n,)
    rate = response_square[:, 0] - response_mean**2 + torch.einsum("nl,nlm,nm->n", along, at.covariance, along)
    rate = rate + 2 * (along * (response_y - response_mean[:, None] * mean)).sum(1)
    rate = at.r * rate.clamp_min(0)
    variance = (xx - x_mean**2)[:, 0].clamp(0, 50)
    second = torch.expm1(variance) @ rate / rate.sum().clamp_min(torch.finfo(rate.dtype).tiny)
    return -eps * change, float(second)


def _weighted(left: Tensor, blocks: Tensor, right: Tensor) -> Tensor:
    """`Σ_i left_i right_iᵀ ⊗ blocks_i`, (pq, pq)."""
    size = left.shape[1] * blocks.shape[1]
    return torch.einsum("na,nlm,nb->albm", left, blocks, right).reshape(size, size)
