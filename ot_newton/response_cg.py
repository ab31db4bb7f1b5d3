"""The response system by conjugate gradients: less memory than block Krylov, and more passes."""

import torch
from torch import Tensor

from ot_newton.schur import SchurSpace
from ot_newton.status import Status


def conjugate_gradients(space: SchurSpace, B: Tensor, rtol: float, max_iter: int) -> tuple[Tensor, Tensor, Status]:
    """Conjugate gradients on every column by itself; the columns share the passes. All of `max_iter` if rtol is 0.

    A column rests once it is done. On a GPU iterations over few pairs are looked at in groups.
    """
    size = torch.linalg.vector_norm(B, dim=0)
    # Below rounding of the right-hand side a column is done: going on would divide what has underflowed.
    floor = torch.finfo(B.dtype).eps
    goal = max(rtol, floor) ** 2
    R = torch.where(size == 0, 0, B / size)
    x, D = torch.zeros_like(R), R.clone()
    rr = (R * R).sum(0)
    zero = torch.zeros_like(rr)

    def step() -> None:
        SD, _ = space.product(D)
        curvature = (D * SD).sum(0)
        active = (rr > goal) & (curvature > 0)
        alpha = torch.where(active, rr / curvature, zero)
        x.addcmul_(alpha, D)
        R.addcmul_(alpha, SD, value=-1)
        rr_new = (R * R).sum(0)
        torch.addcmul(R, torch.where(active, rr_new / rr, zero), D, out=D)
        rr.copy_(rr_new)

    iterate = space.pairs.repeated(step)
    for done in range(max_iter):
        if rtol > 0 and done % space.pairs.look_every == 0 and bool((rr <= goal).all()):
            break
        iterate()
    residual = torch.linalg.vector_norm(R, dim=0)
    worst = float(residual.max())
    if worst <= rtol:
        return x * size, residual, Status.CONVERGED
    return x * size, residual, Status.STALLED if worst <= floor else Status.MAX_ITER
