"""Newton's method on the semi-dual: the last digits of the potentials in a handful of steps.

The concave semi-dual `F(psi) = a·row(psi) + b·psi` has gradient `b - c` and Hessian `-(D_c - Pᵀ D_r⁻¹ P)`, the operator
that also answers moves of the points. Each step is solved by block Krylov with the slow modes in the block, to a
tolerance that shrinks with the error (Dembo, Eisenstat & Steihaug 1982, SIAM J. Numer. Anal. 19:400), and is accepted
only where F does not fall; otherwise a plain sweep takes its place.
"""

import torch
from torch import Tensor

from ot_newton.pairs import Pairs
from ot_newton.potentials import Potentials, Watch, dual
from ot_newton.schur import BLOCK, SchurSpace, start_block
from ot_newton.status import Status

LONGEST = 30.0
HALVINGS = 6
OVERHEAD = HALVINGS + 5  # passes of a step besides the growth of its space


def _direction(pairs: Pairs, state: Potentials, tol: float, budget: int) -> tuple[Tensor, Tensor]:
    """Newton displacement of psi (m,) and the slow modes found on the way (m, k)."""
    space = SchurSpace(pairs, state.phi, state.psi, state.r, state.c)
    rhs = space.project((space.root_inv * (pairs.target.weights - state.c))[:, None])
    space.expand(start_block(space, rhs, state.modes))
    size, best = torch.linalg.vector_norm(rhs), float("inf")
    for _ in range(min(40, budget // 2)):
        y, R = space.solve(rhs)
        left = float(torch.linalg.vector_norm(R) / size)
        if left <= tol or (left > 0.99 * best and left < 1e-3) or space.grow() == 0:
            break
        best = min(best, left)
    y, _ = space.solve(rhs)
    return (space.root_inv[:, None] * (space.Q @ y))[:, 0], space.slow_modes(BLOCK - 1)


def _line_search(pairs: Pairs, state: Potentials, d: Tensor) -> tuple[Tensor, Tensor] | None:
    """(phi, psi) along d where the dual does not fall, or None."""
    here = dual(pairs, state.phi, state.psi)
    noise = 8 * torch.finfo(d.dtype).eps * here.abs()
    slope = ((pairs.target.weights - state.c) @ d).to(torch.float64)
    t = min(1.0, LONGEST / max(float(d.abs().max()), 1e-300))
    for _ in range(HALVINGS):
        psi = state.psi + t * d
        phi = pairs.row(psi, state.phi)
        if bool(dual(pairs, phi, psi) >= here + 1e-4 * t * slope - noise):
            return phi, psi
        t /= 2
    return None


def dual_newton(pairs: Pairs, state: Potentials, watch: Watch) -> tuple[Potentials, Status]:
    """Iterate from a state until `watch` says stop. Meant for errors of a few per mille and below."""
    best = state
    while True:
        status = watch.check(state)
        if status is not None:
            return (state if state.error <= best.error else best), status
        error = float(state.error)
        modes, trial = state.modes, None
        if watch.left() >= OVERHEAD:
            forcing = min(0.1, max(error, 0.3 * watch.tol / error))
            d, modes = _direction(pairs, state, forcing, watch.left() - OVERHEAD)
            trial = _line_search(pairs, state, d)
        phi, psi = trial if trial is not None else (pairs.row(state.ahead, state.phi), state.ahead)
        after = Potentials.after_sweep(pairs, phi, psi, pairs.col(phi, psi), modes)
        if trial is not None and bool(after.error > state.error):
            phi, psi = pairs.row(state.ahead, state.phi), state.ahead
            after = Potentials.after_sweep(pairs, phi, psi, pairs.col(phi, psi), modes)
        state = after
        best = state if bool(state.error <= best.error) else best
