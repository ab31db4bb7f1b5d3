"""The Hessian `H = A + eps BᵀS⁺B` of a loss that transports, on a growing space, with a bracket at every stage.

S is the Schur complement of `response` and Q an orthonormal basis of the space. Projection on it leaves the residual
R = B - S Q (QᵀSQ)⁻¹QᵀB and lies below H by a quadratic form in it,

    H_Q = A + eps BᵀQ (QᵀSQ)⁻¹ QᵀB ⪯ H,    H - H_Q = eps RᵀS⁺R ⪯ eps RᵀR/θ,

(Hestenes & Stiefel 1952, J. Res. Natl. Bur. Stand. 49:409, section 6), where θ bounds the part of S that R still sees.
The plan held fixed while the points move bounds H from above for certain: H ⪯ C, C the curvature of its cost. For a
plan whose marginals are wrong by (b - c) the potentials are off by δ with <P, δ²> = (b - c)ᵀS⁺(b - c), which
changes H in first order by -eps <P, δ w²>, w the rate of log P along a direction, and eps <P, w²> = C - H.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nan, sqrt

import torch
from torch import Tensor

from ot_newton.operators import MatrixOperator
from ot_newton.potentials import ILLEGIBLE, resolution
from ot_newton.schur import SchurSpace, on_host, small_eigh, start_block
from ot_newton.status import Status

UNSEEN = 10.0  # times RᵀR/θ, with the θ of the steps so far: by how much the modes not met yet may be slower
TAILS = 16.0  # <P, δ w²> relative to <P, δ²>^½ <P, w²>, √3 for a normal w, more where outliers carry it
SECOND = 24.0  # the same for the second order, <P, δ² w²> relative to its estimate
SHARE = 0.5  # of the change to the first order that may be wrong
SHARP = 1e-4  # relative effect of the marginals from which on it is computed
CAP = 5.0  # eps, of what the correction of the marginals moves a potential along one mode
FLAT = 1e-6  # Ritz value below which a mode is not moved
PATIENCE = 4  # steps without progress near the floor of the dtype
Shift = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, float]]


class BracketedMatrix(MatrixOperator):
    """A symmetric matrix (n, n) that stands for one between two others, `lower` ⪯ H ⪯ `upper` by semidefinite order.

    So the smallest eigenvalues of `lower` and `upper` bracket that of H. What vouches for the two is told by whoever
    makes them.
    """

    def __init__(self, matrix: Tensor, lower: Tensor, upper: Tensor) -> None:
        super().__init__(matrix, symmetric=True)
        self.lower, self.upper = lower, upper


@dataclass(frozen=True, eq=False)
class Move:
    """What k moves of the points do at fixed potentials.

    Attributes:
        explicit: A, (k, k).
        ceiling: C, (k, k).
        rho_r: (n, k), displacement of phi that keeps the row sums right.
        rhs: (m, k), right-hand sides of the Schur complement for the response of psi.
    """

    explicit: Tensor
    ceiling: Tensor
    rho_r: Tensor
    rhs: Tensor


class GalerkinHessian:
    """`A + eps BᵀS⁺B` projected on a space that `solve` makes grow.

    Args:
        move: what the directions do.
        space: the space, still empty.
        marginal: (m,), by how much the plan misses its marginals, reduced to the target side.

    Attributes:
        B: (m, k + 1), the right-hand sides in the scaling of the space, the last one for the marginals.
        matrix: H_Q, (k, k), in float64 on the CPU like everything of that size.
        coordinates: of the solutions in the basis of the space, (j, k + 1).
        change: of the matrix in the last step, relative to it.
    """

    def __init__(self, move: Move, space: SchurSpace, marginal: Tensor) -> None:
        self.space, self.eps, self._rho_r = space, space.pairs.eps, move.rho_r
        self.B = space.project(space.root_inv[:, None] * torch.cat([move.rhs, marginal[:, None]], 1))
        self.explicit, self.ceiling, self._gram = on_host(move.explicit, move.ceiling, self.B.T @ self.B)
        self.matrix, self.change, self.complete = self.explicit, inf, False
        self.coordinates, self._squares = space.Q.T @ self.B, self._gram.diagonal()
        self._stages: list[tuple[Tensor, Tensor]] = []
        self._corrected: tuple[Tensor, Tensor, float, float] | None = None

    def solve(self, modes: Tensor | None, done: Callable[["GalerkinHessian"], bool], max_iter: int) -> Status:
        """Grow until `done`, the space is complete, or rounding ends the progress; two passes a step.

        `modes` (m, j) are slow displacements of the target potential to start with.
        """
        self.space.expand(start_block(self.space, self.B, modes))
        floor, best, since = 1e3 * torch.finfo(self.B.dtype).eps, inf, 0
        for step in range(max_iter + 1):
            self._project()
            self.complete = self.space.Q.shape[1] >= len(self.B) - 1
            since = 0 if self.worst < 0.7 * best else since + 1
            best = min(best, self.worst)
            if done(self):
                return Status.CONVERGED
            if since >= PATIENCE and best < floor:
                return Status.STALLED
            if step < max_iter and self.space.grow() == 0:
                self.complete, self.change = True, self.worst
                return Status.CONVERGED if done(self) else Status.STALLED
        return Status.MAX_ITER

    @property
    def residual(self) -> Tensor:
        """Norms of the columns of R relative to those of B, (k + 1,); 0 where B is 0."""
        zero = torch.zeros_like(self._squares)
        return torch.where(self._squares > 0, self._gram.diagonal() / self._squares, zero).sqrt()

    @property
    def worst(self) -> float:
        """Largest relative residual among the columns that the matrix is made of."""
        return float(self.residual[:-1].max())

    def responses(self) -> tuple[Tensor, Tensor]:
        """Displacements of the two potentials in units of eps, (n, k) and (m, k)."""
        space, y = self.space, self.coordinates[:, :-1]
        return self._rho_r - space.r_inv[:, None] * (space.PQ @ y), space.displacements(y)

    def _project(self) -> None:
        self._stages.append((self.matrix, self._unanswered))
        self._corrected = None
        self.coordinates, R = self.space.solve(self.B)
        answered = self.B[:, :-1].T @ (self.space.Q @ self.coordinates[:, :-1])
        answered, self._gram = on_host(answered, R.T @ R)
        matrix = self.explicit + self.eps * (answered + answered.T) / 2
        size = torch.linalg.matrix_norm(matrix)
        self.change = float(torch.linalg.matrix_norm(matrix - self.matrix) / size) if float(size) > 0 else 0.0
        self.matrix = matrix

    @property
    def _unanswered(self) -> Tensor:
        """`eps RᵀR`, (k, k)."""
        return self.eps * self._gram[:-1, :-1]

    @property
    def _lowest_direction(self) -> Tensor:
        return small_eigh(self.matrix)[1][:, 0]

    @property
    def _floor(self) -> Tensor:
        """No conditional covariance of the targets exceeds the square of their radius."""
        pairs = self.space.pairs
        radius = float((pairs.target.points**2).sum(1).max())
        return (1 - 2 * pairs.scale / self.eps * radius) * self.ceiling

    def _slowest(self, lowest: Tensor) -> float:
        """The least θ with which `eps RᵀR/θ` of an earlier stage foretold how far the matrix has risen since.

        Looked at in the mean over all directions and in that of the smallest eigenvalue, `lowest` (k,).
        """
        ratios = []
        for before, unanswered in self._stages:
            risen = self.matrix - before
            ratios.append(unanswered.trace() / risen.trace())
            ratios.append((lowest @ unanswered @ lowest) / (lowest @ risen @ lowest))
        found = torch.stack(ratios)
        found = found[(found > 0) & torch.isfinite(found)]
        return min(1.0, float(found.min())) if len(found) else 1.0

    def correction(self) -> tuple[Tensor, Tensor, float, float]:
        """Answer to the marginal residual, mode by mode: flat modes held back, each displacement at most `CAP` eps.

        Returns it and its transport, in the scaling of the space, its `<P, δ²>`, and that of what was held back.
        """
        if self._corrected is None:
            self._corrected = self._correct()
        return self._corrected

    def _correct(self) -> tuple[Tensor, Tensor, float, float]:
        space = self.space
        theta, E = (t.to(self.B.dtype) for t in space.ritz())
        wanted = E.T @ (space.Q.T @ self.B[:, -1])
        share = wanted / theta.clamp_min(FLAT)
        reach = space.displacements(E).abs().amax(0) * share.abs()
        share = share * (CAP / reach.clamp_min(CAP))
        theta = theta.clamp_min(64 * torch.finfo(theta.dtype).eps)
        taken, left = torch.stack([share @ (theta * share), ((wanted - theta * share) ** 2 / theta).sum()]).tolist()
        return space.Q @ (E @ share), space.PQ @ (E @ share), taken, left

    def bracket(self, shift: Shift) -> "Bracket":
        """H at converged potentials, and what is known about it; two passes where the marginals are not right.

        `shift` maps a correction ξ (m,) of the target potential, its average under each row (n,) and a direction (k,)
        to the change of the matrix to the first order, and the scale of the second (`marginal_shift.shift`).

        That an unfinished solve lies below is certain, and that the ceiling lies above. `upper` is the ceiling or,
        where that is lower at its smallest eigenvalue, an estimate: the rise in the last step plus ten times
        `eps RᵀR/θ` on top of the matrix. What the marginals do beyond the first order is an estimate too, and rounding
        is bounded by the size of what is added up. Where the marginals are too wrong for two orders, or the exponents
        cannot be told apart in this dtype, nothing is left but what the geometry says: `C (1 - τ max|y|²)` ⪯ H ⪯ C,
        τ = 2s/eps.
        """
        lowest, identity = self._lowest_direction, torch.ones_like(self.matrix[0]).diag()
        theta = self._slowest(lowest)
        x, Px, taken, left = self.correction()
        residual, whole = float(self._gram[-1, -1]), float(self._squares[-1])
        missing = self.space.r_inv * (self.space.pairs.source.weights - self.space.r)
        left = left + min(UNSEEN * residual, whole) / theta + float(missing @ (self.space.r * missing))
        rounded = resolution(self.space.pairs, self.space.phi, self.space.psi)
        matrix, spread, beyond, slack = self.matrix, self.ceiling - self.matrix, SECOND * taken, 0 * identity
        if TAILS * sqrt(taken) <= SHARP:
            beyond = TAILS * sqrt(taken)
        elif beyond < 1:
            space = self.space
            change, second = shift(space.root_inv * x, space.r_inv * Px, lowest.to(self.B))
            (change,) = on_host(change)
            matrix, beyond = matrix + change, beyond + SECOND * second
            slack = SHARE * _largest(change) * identity
        slack = slack + (beyond + TAILS * (sqrt(left) + rounded)) * spread
        unanswered = self._unanswered / theta
        parts = (self.explicit, self.matrix - self.explicit, matrix, unanswered, slack)
        explicit, implicit, size, unseen, slackness = map(_largest, parts)
        rounding = 8 * sqrt(len(identity)) * torch.finfo(self.B.dtype).eps * (explicit + implicit) * identity
        rise = torch.zeros_like(matrix) if self.complete else self.matrix - self._stages[-1][0]
        lower, upper = matrix - slack - rounding, matrix + rise + UNSEEN * unanswered + slack + rounding
        ceiling, far = self.ceiling + rounding, beyond >= 1 or rounded > ILLEGIBLE
        if far:
            lower = self._floor - rounding
        if far or (len(self._stages) < 2 and not self.complete) or _lowest(ceiling) < _lowest(upper):
            upper = ceiling
        error = (2 * unseen + 0.3 * slackness + float(rounding[0, 0])) / size if size > 0 else 0.0
        return Bracket(matrix.to(self.B), lower, upper, error if error >= 0 else inf)


@dataclass(frozen=True, eq=False)
class Bracket:
    """A Hessian (k, k) at converged potentials: `matrix`, its estimate, `lower` ⪯ H ⪯ `upper`, and the relative error.

    The bounds are in float64 on the CPU. `error` is an estimate in the spectral norm; `GalerkinHessian.bracket` says
    what is certain.
    """

    matrix: Tensor
    lower: Tensor
    upper: Tensor
    error: float

    @property
    def operator(self) -> BracketedMatrix:
        """The matrix as an operator that carries its bracket."""
        return BracketedMatrix(self.matrix, self.lower, self.upper)


def _largest(matrix: Tensor) -> float:
    """The spectral norm of a symmetric matrix on the CPU; NaN if it is not finite."""
    if not bool(matrix.isfinite().all()):
        return nan
    return float(torch.linalg.eigvalsh(matrix).abs().max())


def _lowest(matrix: Tensor) -> float:
    return float(torch.linalg.eigvalsh(matrix.to("cpu", torch.float64))[0])
