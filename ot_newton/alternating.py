"""The classical iterations on the dual, one half-step of each side in turn or both at once and averaged.

    alternating:  f ← row(g),            g ← col(f)              (Sinkhorn 1967, Amer. Math. Monthly 74:402)
    symmetric:    f ← (f + row(g))/2,    g ← (g + col(f))/2      (Feydy et al. 2019, AISTATS, with f and g on a par)

A sweep changes its state in place, so that a GPU can repeat it by one launch; see `graphs`.
"""

import torch
from torch import Tensor

from ot_newton.pairs import Pairs
from ot_newton.potentials import Potentials, Watch
from ot_newton.status import Status


def alternating(
    pairs: Pairs, phi: Tensor | None, psi: Tensor, modes: Tensor | None, watch: Watch
) -> tuple[Potentials, Status]:
    """Sweep from psi (m,) until `watch` says stop; phi (n,) is a guess of `row(psi)` if there is one."""
    psi, phi = psi.clone(), pairs.row(psi, phi)
    ahead = pairs.col(phi, psi)

    def sweep() -> None:
        psi.copy_(ahead)
        phi.copy_(pairs.row(psi, phi))
        ahead.copy_(pairs.col(phi, psi))

    repeat = pairs.repeated(sweep)
    while True:
        state = Potentials.after_sweep(pairs, phi, psi, ahead, modes)
        status = watch.check(state)
        if status is not None:
            return state, status
        for _ in range(min(pairs.look_every, max(1, watch.left() // 2))):
            repeat()


def symmetric(
    pairs: Pairs, phi: Tensor | None, psi: Tensor, modes: Tensor | None, watch: Watch
) -> tuple[Potentials, Status]:
    """Averaged sweeps from psi (m,) until `watch` says stop; phi (n,) is a guess of `row(psi)` if there is one."""
    a, b = pairs.source.weights, pairs.target.weights
    psi, phi = psi.clone(), pairs.row(psi, phi)
    ahead, columns = pairs.col_change(phi, psi)
    rows = torch.zeros_like(phi)

    def sweep() -> None:
        # What the marginals are off by belongs to the potentials before the step, which are halfway to the next ones.
        phi.sub_(rows, alpha=0.5)
        psi.sub_(columns, alpha=0.5)
        lost = pairs.row_change(psi, phi)[1]
        next_psi, gap = pairs.col_change(phi, psi)
        rows.copy_(lost)
        columns.copy_(gap)
        ahead.copy_(next_psi)

    repeat = pairs.repeated(sweep)
    while True:
        lost, gap = (torch.where(w > 0, t, torch.zeros_like(w)) for w, t in ((a, rows), (b, columns)))
        error = _l1(a * torch.expm1(lost)) + _l1(b * torch.expm1(gap))
        state = Potentials(phi, psi, a * torch.exp(lost), b * torch.exp(gap), error, ahead, modes)
        status = watch.check(state)
        if status is not None:
            return state, status
        for _ in range(min(pairs.look_every, max(1, watch.left() // 2))):
            repeat()


def _l1(t: Tensor) -> Tensor:
    return t.abs().sum(dtype=torch.float64)
