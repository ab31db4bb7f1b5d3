"""Value, gradient, exact Hessian and the next potentials of `L(W) = OT_eps(X W, y)` from one block solve.

The potentials need not be converged. One sweep carries everything that the derivatives need as extra columns: on the
way to `phi = row(psi)` the means and covariances of the targets, on the way back `PᵀX` and `Pᵀ(X⊗ȳ)`, and on both the
slow modes. A block Krylov space then answers the moves of W together with the marginal residual `b - c`. Its answer x
is the Newton correction of psi, which makes value and gradient right to second order in the marginal error,

    L ≈ a·f + b·g + ½ <b - c, x> eps,    ∇L ≈ (∇L at the plan) + Bᵀx,

while the answers to W predict the potentials at the next W. See `linear_model` for B and the Hessian.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ot_newton.galerkin import CAP, Bracket, GalerkinHessian
from ot_newton.kernels.precision import full_precision
from ot_newton.linear_model import MODES, carried, moves
from ot_newton.marginal_shift import Moments, shift
from ot_newton.pairs import Pairs
from ot_newton.potentials import Potentials, Watch, centred, dual, in_gauge
from ot_newton.schur import SchurSpace
from ot_newton.two_level import START, correction, orthonormal_under, two_level

WIDTH = 24
SWEEPS = 6
ANSWERED = 0.25  # of the marginal residual, what the block solve may leave
FAR = 1.0  # of the gradient, an estimate of the second order from which on it shows: it is several times too large
NEARER = 0.3  # of the marginal error, what is then asked for
CLOSE = 0.01  # of the marginal error that is allowed, one at which nothing is asked again, however flat L is


@dataclass(frozen=True, eq=False)
class OneShot:
    """What one block solve tells about W; see the module for the formulas.

    Attributes:
        value: (), L(W) with the error of the potentials corrected to second order.
        grad: (p, q), likewise.
        known: the Hessian (pq, pq) with its bracket and an estimate of its error.
        change: relative change of the matrix in the last step of the block solve.
        error: L1 marginal error of the plan that was used.
        value_error: estimate of the error of the value: its third order, and what flat modes held back may add.
        second: what the second order of the marginal error may change in the gradient, relative to it: what the first
            order changes, times the largest displacement of psi.
        f, g: corrected potentials, in units of the cost.
        dphi, dpsi: (n, pq) and (m, pq), their response to W in units of eps.
        modes: (m, k), slow displacements of psi.
    """

    value: Tensor
    grad: Tensor
    known: Bracket
    change: float
    error: float
    value_error: float
    second: float
    f: Tensor
    g: Tensor
    dphi: Tensor
    dpsi: Tensor
    modes: Tensor

    @property
    def matrix(self) -> Tensor:
        """(pq, pq), symmetric."""
        return self.known.matrix


@dataclass(frozen=True, eq=False)
class _Sweep:
    """A sweep with what rode on it: mean and second moment of the targets, `PᵀX` with `Pᵀ(X⊗ȳ)`, and the modes V."""

    state: Potentials
    V: Tensor
    JV: Tensor
    mean: Tensor
    second: Tensor
    moved: Tensor


def _sweep(pairs: Pairs, X: Tensor, psi: Tensor, guess: Tensor | None, V: Tensor) -> _Sweep:
    y, n = pairs.target.points, len(X)
    q, k = y.shape[1], V.shape[1]
    i, j = torch.triu_indices(q, q, device=y.device)
    phi, rows = pairs.row_with(psi, torch.cat([V, y, y[:, i] * y[:, j]], 1), guess if pairs.forgiving else None)
    mean, upper = rows[:, k : k + q], rows[:, k + q :]
    second = upper.new_empty(n, q, q)
    second[:, i, j], second[:, j, i] = upper, upper
    ahead, columns = pairs.col_with(phi, torch.cat([rows[:, :k], carried(X, mean)], 1), psi)
    state = Potentials.after_sweep(pairs, phi, psi, ahead, columns[:, :k])
    return _Sweep(state, V, columns[:, :k], mean, second, state.c[:, None] * columns[:, k:])


def _corrected(swept: _Sweep) -> tuple[Tensor, Tensor, Tensor]:
    """A guess of the next phi, the next psi, two-level corrected, and the block V to go on with."""
    state, c = swept.state, swept.state.c
    JV = centred(swept.JV, c)
    step = centred(state.ahead - state.psi, c)
    if float(state.error) < START:
        slow = correction(centred(swept.V, c), JV, step, c)
        step = step + slow * (CAP / slow.abs().max().clamp_min(CAP))
    phi, psi = state.level()
    return phi, psi + step, orthonormal_under(JV, c)


@full_precision
def one_shot(
    pairs: Pairs,
    X: Tensor,
    g: Tensor,
    *,
    guess: Tensor | None = None,
    modes: Tensor | None = None,
    coarse: float = 0.03,
    rtol: float = 0.3,
    max_iter: int = 12,
    budget: int = 1000,
) -> OneShot:
    """Evaluate at the points X W held by `pairs`, from a potential g (m,) that is right to a marginal error `coarse`.

    Where they are not, two-level sweeps bring them there first. The block solve goes on until the Hessian changes by
    less than `rtol` in a step, which leaves it much closer than that, and most of the marginal residual is answered.
    Where the marginal error is seen to matter in the second order, all of it is done once more at a smaller one.
    """
    phi = None if guess is None else pairs.source.reduced(guess, pairs.eps)
    phi, psi = in_gauge(pairs, phi, pairs.target.reduced(g, pairs.eps))
    rng = torch.Generator(device=psi.device).manual_seed(0)
    random = torch.randn(len(psi), WIDTH, generator=rng, dtype=psi.dtype, device=psi.device)
    V = random if modes is None or len(modes) != len(psi) or not modes.shape[1] else modes[:, :WIDTH]
    swept = _near(pairs, X, _sweep(pairs, X, psi, phi, V), coarse, budget)
    found = _finish(pairs, X, swept, rtol, max_iter)
    if not found.second > FAR or found.error < CLOSE * coarse:
        return found
    return _finish(pairs, X, _near(pairs, X, swept, NEARER * found.error, budget), rtol, max_iter)


def _near(pairs: Pairs, X: Tensor, swept: _Sweep, coarse: float, budget: int) -> _Sweep:
    """The first sweep, from this one on, whose marginal error is at most `coarse`."""
    for _ in range(SWEEPS):
        if float(swept.state.error) <= coarse or not bool((swept.state.c > 0).all()):
            break
        phi, psi, V = _corrected(swept)
        swept = _sweep(pairs, X, psi, phi, V)
    if not float(swept.state.error) <= coarse:
        watch = Watch(pairs, coarse, pairs.passes.total + budget)
        state, _ = two_level(pairs, swept.state.ahead, watch, modes=swept.V, guess=swept.state.phi)
        swept = _sweep(pairs, X, state.psi, state.phi, swept.V if state.modes is None else state.modes[:, :WIDTH])
    return swept


def _finish(pairs: Pairs, X: Tensor, swept: _Sweep, rtol: float, max_iter: int) -> OneShot:
    state, eps, r, mean = swept.state, pairs.eps, swept.state.r, swept.mean
    covariance = swept.second - mean[:, :, None] * mean[:, None, :]
    PX, sent = swept.moved.split([X.shape[1], swept.moved.shape[1] - X.shape[1]], 1)
    at = Moments(state.phi, state.psi, r, state.c, mean, covariance, PX)
    move, space = moves(pairs, X, at, sent), SchurSpace(pairs, state.phi, state.psi, r, state.c)
    H = GalerkinHessian(move, space, pairs.target.weights - state.c)
    H.solve(state.modes, lambda now: now.change < rtol and float(now.residual[-1]) < ANSWERED, max_iter)
    dphi, dpsi = H.responses()
    known = H.bracket(lambda *x: shift(pairs, X, at, dpsi, move.rho_r - dphi, *x))
    x, Px, _, left = H.correction()
    shifted = space.root_inv * x
    slope = 2 * pairs.scale * (X.T @ (r[:, None] * (pairs.source.points - mean)))  # (p, q)
    change = eps * (H.B[:, :-1].T @ x).reshape(slope.shape)
    grad = slope + change
    rise, farthest = (H.B[:, -1] @ x).to(torch.float64) / 2, float(shifted.abs().max())
    value = eps * (dual(pairs, state.phi, state.psi) + rise)
    return OneShot(
        value=value.to(X.dtype),
        grad=grad,
        known=known,
        change=H.change,
        error=float(state.error),
        value_error=eps * (float(rise.abs()) * min(farthest, 1.0) / 2 + left),
        second=farthest * float(torch.linalg.vector_norm(change) / torch.linalg.vector_norm(grad)),
        f=pairs.source.whole(state.phi - space.r_inv * Px, eps),
        g=pairs.target.whole(state.psi + shifted, eps),
        dphi=dphi,
        dpsi=dpsi,
        modes=space.slow_modes(MODES),
    )
