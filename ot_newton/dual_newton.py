"""Newton's method on the semi-dual: the last digits of the potentials in a handful of steps.

The concave semi-dual `F(psi) = a·row(psi) + b·psi` has gradient `b - c` and Hessian `-(D_c - Pᵀ D_r⁻¹ P)`, the operator
that also answers moves of the points. Each step is solved by block Krylov with the slow modes in the block, to a
tolerance that shrinks with the error (Dembo, Eisenstat & Steihaug 1982, SIAM J. Numer. Anal. 19:400), and is accepted
only where F rises and the marginal error does not double; otherwise two-level sweeps take its place. They also follow a
step for as long as they gain more than the next one would.
"""

import torch
from torch import Tensor

from ot_newton.pairs import Pairs
from ot_newton.potentials import Potentials, Watch, centred, dual
from ot_newton.response import grow
from ot_newton.schur import BLOCK, SchurSpace, start_block
from ot_newton.status import Status
from ot_newton.two_level import CLIP, capped, orthonormal_under, ritz_steps, two_level

LONGEST, SHORT = 30.0, 0.1  # displacements in eps
OVERHEAD = 9  # passes of a step besides the growth of its space
RETREAT = 60  # passes of two-level sweeps where a step has failed


def _direction(pairs: Pairs, state: Potentials, tol: float, budget: int) -> tuple[Tensor, Tensor, Tensor]:
    """Newton displacement of psi (m,), a bolder one, and the slow modes found on the way (m, k).

    The residual stays put for many steps where there are many slow modes, and only then falls: that is no reason to
    stop. Rounding is one, and shows: a Galerkin residual is orthogonal to the space but for the modes it hides.
    Each slow mode is held by itself, lest one that is almost cut off shorten the step of all the others.
    """
    space = SchurSpace(pairs, state.phi, state.psi, state.r, state.c)
    rhs = space.project((space.root_inv * (pairs.target.weights - state.c))[:, None])
    space.expand(start_block(space, rhs, state.modes))
    goal, rounding = tol * torch.linalg.vector_norm(rhs), 8 * torch.finfo(rhs.dtype).eps
    for _ in range(min(40, budget // 2)):
        y, R = space.solve(rhs)
        left = torch.linalg.vector_norm(R - space.Q @ (space.Q.T @ R))
        if bool(left <= torch.maximum(goal, rounding * torch.linalg.vector_norm(y))) or grow(space) == 0:
            break
    y, _ = space.solve(rhs)
    E = space.slowest(BLOCK - 1)
    d, V = space.displacements(y)[:, 0], space.displacements(E)
    share = (E.T @ y[:, 0].to(torch.float64)).to(V.dtype)
    held = capped(V, share, CLIP)
    d = d + V @ (held - share)
    return d, d + V @ _stretch(V, held), V


def _stretch(V: Tensor, share: Tensor) -> Tensor:
    """What to add to the Newton shares (k,) of the modes V (m, k) to balance the flows across each.

    Two clusters that exchange flows p and q balance where `p e^-t = q e^t`. The slope is q - p and the curvature p + q,
    so that Newton moves t by `tanh t` of what it should: never more than 1 at a time.
    """
    reach = (V.amax(0) - V.amin(0)) * share.abs()
    inside = reach.clamp(1e-3, 1 - 1e-6)
    return torch.where(inside == reach, share * (torch.atanh(inside) / inside - 1), torch.zeros_like(share))


def _stepped(pairs: Pairs, state: Potentials, d: Tensor, bold: Tensor, V: Tensor) -> tuple[Potentials, Tensor] | None:
    """The state after the first good step of several, and the image of V under a sweep there; or None.

    A step has to raise the dual half as much as Newton's would if the dual were quadratic. A full one may double the
    error on its way, unless it is so short that it tells of modes out of reach; a part of one has to lower it.
    """
    here = dual(pairs, state.phi, state.psi)
    noise = 8 * torch.finfo(d.dtype).eps * here.abs()
    slope = ((pairs.target.weights - state.c) @ d).to(torch.float64)
    longest = float(d.abs().max())
    t = min(1.0, LONGEST / max(longest, 1e-300))
    whole = 0.99 if t < 1 else 2.0 if longest > SHORT else 0.9
    trials = [(bold, 0.5 * slope, whole)] if t == 1 else []
    trials += [(t * d, 0.25 * t * slope - noise, whole), (t / 4 * d, 0.06 * t * slope - noise, 0.99)]
    for step, rise, growth in trials:
        psi = state.psi + step
        phi, U = pairs.row_with(psi, V, state.phi)
        if bool(dual(pairs, phi, psi) >= here + rise):
            ahead, JV = pairs.col_with(phi, U, psi)
            after = Potentials.after_sweep(pairs, phi, psi, ahead, V)
            if bool(after.error <= growth * state.error):
                return after, JV
    return None


def _polished(pairs: Pairs, state: Potentials, V: Tensor, JV: Tensor, watch: Watch) -> Potentials:
    """Two-level sweeps with the modes that a Newton step has found, for as long as each halves the error.

    What a Newton step leaves is mostly the curvature of few slow modes: a coupling that is e times too strong takes as
    many steps as there are factors e, be it Newton's or these, and these cost two passes.
    """
    while float(state.error) > watch.tol and watch.left() > 1:
        c = state.c
        V, JV = centred(V, c), centred(JV, c)
        step = centred(state.ahead - state.psi, c)
        modes, share = ritz_steps(V, JV, step, c)
        psi = state.psi + step + modes @ capped(modes, share, CLIP)
        V = orthonormal_under(JV, c)
        phi, U = pairs.row_with(psi, V, state.phi)
        ahead, JV = pairs.col_with(phi, U, psi)
        after = Potentials.after_sweep(pairs, phi, psi, ahead, V)
        if not bool(after.error < 0.5 * state.error):
            return after if bool(after.error < state.error) else state
        state = after
    return state


def dual_newton(pairs: Pairs, state: Potentials, watch: Watch) -> tuple[Potentials, Status]:
    """Iterate from a state until `watch` says stop. Meant for errors of a few per mille and below."""
    best = state
    while True:
        status = watch.check(state)
        if status is not None:
            return (state if status.success or state.error <= best.error else best), status
        error, V, found = float(state.error), state.modes, None
        if watch.left() >= OVERHEAD:
            forcing = min(0.1, max(error**0.5, 0.3 * watch.tol / error))
            d, bold, V = _direction(pairs, state, forcing, watch.left() - OVERHEAD)
            found = _stepped(pairs, state, d, bold, V)
        if V is not None and found is not None:
            state = _polished(pairs, found[0], V, found[1], watch)
        else:
            nearer = Watch(pairs, max(watch.tol, 0.1 * error), min(watch.limit, pairs.passes.total + RETREAT))
            V = state.psi.new_empty(len(state.psi), 0) if error < 16 * watch.resolution(state) else V
            state, _ = two_level(pairs, state.ahead, nearer, modes=V, guess=state.phi, latest=True)
        best = state if bool(state.error <= best.error) else best
