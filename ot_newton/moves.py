"""How the gradient of a transport value changes with the points, seen from one side of the plan.

A direction A of the sources and B of the targets moves the cost by `2s N`, `N_ij = (x_i - y_j)·(A_i - B_j)`. Where the
potentials answer by (dphi, dpsi) and the row sums by dr, the plan moves by `dP = P∘(dphi_i + dpsi_j - 2s N_ij/eps)`
and the gradient `2s (r∘x - P y)` by

    2s (r∘A + dr∘x - P B - dP y).

Every term is a transport application (FlashSinkhorn, arXiv:2602.03067, section 4). In few dimensions the Hadamard term
`Σ_j P_ij (x_i·B_j + y_j·A_i) y_j` is one too, of the products `B_j y_jᵀ` and `y_j y_jᵀ`, and all ride on one pass up to
d = 5.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ot_newton.pairs import Pairs, Passes

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


def squares(y: Tensor) -> Tensor:
    """The products `y_j y_jᵀ`, (m, d(d+1)/2), upper triangles by rows; `symmetric` unfolds averages of them."""
    i, j = torch.triu_indices(y.shape[1], y.shape[1], device=y.device)
    return y[:, i] * y[:, j]


def symmetric(upper: Tensor, d: int) -> Tensor:
    """Symmetric matrices (n, d, d) from their upper triangles (n, d(d+1)/2)."""
    i, j = torch.triu_indices(d, d, device=upper.device)
    full = upper.new_empty(len(upper), d, d)
    full[:, i, j], full[:, j, i] = upper, upper
    return full


def takes_along(d: int) -> bool:
    """Whether `P y` costs the move of one direction no pass more in d dimensions."""
    return Passes.application(1 + 3 * d).total == Passes.application(1 + 2 * d).total


def move(rows: Rows, A: Tensor, B: Tensor, Py: Tensor | None = None) -> Move:
    """The move of the rows along A (n, d, k) and B (m, d, k); `Py` (n, d) is taken along where it is not known.

    One application of d²(k + ½) + O(dk) columns in few dimensions; else of O(dk), and a Hadamard pass a direction.
    """
    x, y = rows.pairs.source.points, rows.pairs.target.points
    n, m, d, k = len(x), len(y), x.shape[1], A.shape[2]
    zA, zB = (torch.einsum("nd,ndk->nk", p, V) for p, V in ((x, A), (y, B)))
    columns = [zB, B.reshape(m, d * k), (y[:, :, None] * zB[:, None]).reshape(m, d * k)]
    if d <= PRODUCT_DIMENSIONS:
        columns += [squares(y), torch.einsum("mdk,me->mdke", B, y).reshape(m, -1)]
    columns += [y] if Py is None else []
    PzB, PB, PzBy, *rest = rows.apply(torch.cat(columns, 1)).split([c.shape[1] for c in columns], 1)
    PB, PzBy, Py = PB.reshape(n, d, k), PzBy.reshape(n, d, k), rest[-1] if Py is None else Py
    if d <= PRODUCT_DIMENSIONS:
        crossed = torch.einsum("nf,nfke->nek", x, rest[1].reshape(n, d, k, d))
        crossed = crossed + torch.einsum("nef,nfk->nek", symmetric(rest[0], d), A)
    else:
        crossed = torch.stack([_hadamard(rows, A[:, :, i], B[:, :, i]) for i in range(k)], 2)
    first = rows.r[:, None] * zA + PzB - torch.einsum("nd,ndk->nk", x, PB) - torch.einsum("nd,ndk->nk", Py, A)
    return Move(A, first, Py[:, :, None] * zA[:, None] + PzBy - crossed, PB, Py)


def _hadamard(rows: Rows, A: Tensor, B: Tensor) -> Tensor:
    """`Σ_j P_ij (x_i·B_j + y_j·A_i) y_j`, (n, d), for one direction."""
    x, y = rows.pairs.source.points, rows.pairs.target.points
    means = rows.pairs.hadamard_means(rows.psi, torch.cat([x, A], 1), torch.cat([B, y], 1), y, rows.phi)
    return rows.r[:, None] * means


def gradient_change(rows: Rows, at: Move, dphi: Tensor, dpsi: Tensor, dr: Tensor | None = None) -> Tensor:
    """`2s (r∘A + dr∘x - P B - dP y)`, (n, d, k), for answers dphi, dr (n, k) and dpsi (m, k); dr is 0 where None."""
    x, y = rows.pairs.source.points, rows.pairs.target.points
    n, d, k = at.A.shape
    moved = rows.apply((y[:, :, None] * dpsi[:, None]).reshape(len(y), d * k)).reshape(n, d, k)
    dPy = at.Py[:, :, None] * dphi[:, None] + moved - rows.rate * at.moment
    rest = rows.r[:, None, None] * at.A
    if dr is not None:
        rest = rest + x[:, :, None] * dr[:, None]
    return 2 * rows.pairs.scale * (rest - at.carried - dPy)
