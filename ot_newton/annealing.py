"""Sinkhorn at a falling temperature: each level starts from the potentials of the last, in the units of the cost.

Far clusters and small temperatures need potentials of many eps, and a sweep moves them by about one. From the squared
diameter down a level has few eps to go, `f ← f_{t/ρ}` being right to about t (Kosowsky & Yuille 1994, Neural Networks
7:477). Whether that pays can be seen from one sweep at the final temperature: clouds that match have a small error.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ot_newton.pairs import Pairs
from ot_newton.potentials import Potentials, Watch
from ot_newton.status import Status
from ot_newton.two_level import two_level

RATIO = 0.25
LOOSE = 0.05
LEVEL_ERROR = 0.01
SAMPLED = 16
LOST = 1e3  # eps; a sweep moves a potential by about one
# (eps relative to the mean cost, error of the first sweep): below the one and above the other annealing pays.
PAYS = ((1e-2, 0.6), (1e-3, 0.1))


def is_lost(pairs: Pairs, phi: Tensor, psi: Tensor) -> bool:
    """Whether the potentials contradict each other, at a few rows that are looked at, so far that sweeps take ages."""
    x, y = pairs.source, pairs.target
    rows = x.weights.nonzero()[:, 0]
    rows = rows[:: max(1, len(rows) // SAMPLED)]
    scores = (x.query[rows] @ y.key.T).to(torch.float64) + psi + y.log_weights
    gap = phi[rows] + torch.logsumexp(scores, 1)
    return bool((gap - gap.mean()).square().mean().sqrt() > LOST)


@dataclass(frozen=True, eq=False)
class Start:
    """Where a solver starts: psi (m,), a guess of phi (n,) and slow modes (m, k), where known."""

    phi: Tensor | None
    psi: Tensor
    modes: Tensor | None = None
    done: Potentials | None = None  # the state that already has the tolerance, where one sweep did it


def annealed(pairs: Pairs, start: Start, ratio: float | None, watch: Watch, *, sweeps_only: bool = False) -> Start:
    """A start at the temperature of `pairs` from a high one, by levels whose temperatures fall by `ratio`.

    1 is no annealing, and None decides by one sweep. A level is done at a marginal error of 0.01 (or the tolerance, if
    that is larger) by two-level sweeps, or after one sweep if `sweeps_only`.
    """
    x, y = pairs.source, pairs.target
    if ratio is None:
        mean = float(pairs.dual_of_norms)
        floors = [error for share, error in PAYS if mean * share > 1 and watch.tol < LOOSE]
        ratio = 1.0
        if floors and watch.left() > 4:
            phi = pairs.row(start.psi)
            state = Potentials.after_sweep(pairs, phi, start.psi, pairs.col(phi), start.modes)
            if float(state.error) <= min(floors):
                done = state if watch.check(state) is Status.CONVERGED else None
                return Start(phi, state.ahead, start.modes, done)
            ratio = RATIO
    temperature = 4 * pairs.eps * max(float(side.norm.max()) for side in (x, y))
    level = float("inf") if sweeps_only else max(watch.tol, LEVEL_ERROR)
    if ratio < 1 and temperature > pairs.eps:  # potentials without norms are proportional to 1/temperature
        start = Start(start.phi, start.psi * (pairs.eps / temperature), start.modes)
    while ratio < 1 and temperature > pairs.eps and watch.left() > 4:
        hot = pairs.at(temperature)
        cooler = max(temperature * ratio, pairs.eps)
        state, _ = two_level(hot, start.psi, Watch(hot, level, watch.limit - 2), modes=start.modes, guess=start.phi)
        start = Start(state.phi * (temperature / cooler), state.ahead * (temperature / cooler), state.modes)
        temperature = cooler
    if ratio < 1 and temperature > pairs.eps:
        start = Start(start.phi, start.psi * (temperature / pairs.eps), start.modes)
    return start
