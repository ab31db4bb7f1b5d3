"""How the gradient of a transport value changes with the points, seen from one side of the plan.

A direction A of the sources and B of the targets moves the cost by `2s N`, `N_ij = (x_i - y_j)·(A_i - B_j)`. Where the
potentials answer by (dphi, dpsi) and the row sums by dr, the plan moves by `dP = P∘(dphi_i + dpsi_j - 2s N_ij/eps)`
and the gradient `2s (r∘x - P y)` by

    2s (r∘A + dr∘x - P B - dP y).

Every term is a transport application (FlashSinkhorn, arXiv:2602.03067, section 4). In few dimensions the Hadamard term
`Σ_j P_ij (x_i·B_j + y_j·A_i) y_j` is one too, of the products `B_j y_jᵀ` and `y_j y_jᵀ`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ot_newton.pairs import Pairs

PRODUCT_DIMENSIONS = 8


@dataclass(frozen=True, eq=False)
class Rows:
    """A plan seen from its sources: dimensionless potentials phi (n,), psi (m,) and row sums r (n,)."""

    pairs: Pairs
    phi: Tensor
    psi: Tensor
    r: Tensor

    @property
    def rate(self) -> float:
        """2s/eps, what turns a product of points into an exponent."""
        return 2 * self.pairs.scale / self.pairs.eps

    def apply(self, V: Tensor) -> Tensor:
        """`P V`, (n, c), as row sums times averages."""
        return self.r[:, None] * self.pairs.row_means(self.psi, V, self.phi)


@dataclass(frozen=True, eq=False)
class Move:
    """What k directions A (n, d, k) and B (m, d, k) do to the rows of a plan at fixed potentials.

    Attributes:
        A: the directions of the sources, (n, d, k).
        first: `Σ_j P_ij N_ij`, (n, k).
        moment: `Σ_j P_ij N_ij y_j`, (n, d, k).
        carried: `P B`, (n, d, k).
        Py: (n, d).
    """

    A: Tensor
    first: Tensor
    moment: Tensor
    carried: Tensor
    Py: Tensor


def move(rows: Rows, A: Tensor, B: Tensor) -> Move:
    """The move of the rows along A (n, d, k) and B (m, d, k); (1 + d)² k columns, or a pass more for each direction."""
    x, y = rows.pairs.source.points, rows.pairs.target.points
    n, m, d, k = len(x), len(y), x.shape[1], A.shape[2]
    zA, zB = (torch.einsum("nd,ndk->nk", p, V) for p, V in ((x, A), (y, B)))
    columns = [y, zB, B.reshape(m, d * k), (y[:, :, None] * zB[:, None]).reshape(m, d * k)]
    if d <= PRODUCT_DIMENSIONS:
        columns += [torch.einsum("md,me->mde", y, y).reshape(m, -1), torch.einsum("mdk,me->mdke", B, y).reshape(m, -1)]
    sums = rows.apply(torch.cat(columns, 1)).split([c.shape[1] for c in columns], 1)
    Py, PzB, PB, PzBy = sums[0], sums[1], sums[2].reshape(n, d, k), sums[3].reshape(n, d, k)
    if d <= PRODUCT_DIMENSIONS:
        crossed = torch.einsum("nf,nfke->nek", x, sums[5].reshape(n, d, k, d))
        crossed = crossed + torch.einsum("nfk,nfe->nek", A, sums[4].reshape(n, d, d))
    else:
        crossed = torch.stack([_hadamard(rows, A[:, :, i], B[:, :, i]) for i in range(k)], 2)
    first = rows.r[:, None] * zA + PzB - torch.einsum("nd,ndk->nk", x, PB) - torch.einsum("nd,ndk->nk", Py, A)
    return Move(A, first, Py[:, :, None] * zA[:, None] + PzBy - crossed, PB, Py)


def _hadamard(rows: Rows, A: Tensor, B: Tensor) -> Tensor:
    """`Σ_j P_ij (x_i·B_j + y_j·A_i) y_j`, (n, d), for one direction."""
    x, y = rows.pairs.source.points, rows.pairs.target.points
    means = rows.pairs.hadamard_means(rows.psi, torch.cat([x, A], 1), torch.cat([B, y], 1), y, rows.phi)
    return rows.r[:, None] * means


def gradient_change(rows: Rows, at: Move, dphi: Tensor, dpsi: Tensor, dr: Tensor) -> Tensor:
    """`2s (r∘A + dr∘x - P B - dP y)`, (n, d, k), for answers dphi, dr (n, k) and dpsi (m, k)."""
    x, y = rows.pairs.source.points, rows.pairs.target.points
    n, d, k = at.A.shape
    moved = rows.apply((y[:, :, None] * dpsi[:, None]).reshape(len(y), d * k)).reshape(n, d, k)
    dPy = at.Py[:, :, None] * dphi[:, None] + moved - rows.rate * at.moment
    rest = rows.r[:, None, None] * at.A + x[:, :, None] * dr[:, None]
    return 2 * rows.pairs.scale * (rest - at.carried - dPy)
