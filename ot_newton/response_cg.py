"""The response system by conjugate gradients: less memory than block Krylov, and more passes."""

import torch
from torch import Tensor

from ot_newton.schur import SchurSpace, relative
from ot_newton.status import Status


def conjugate_gradients(space: SchurSpace, B: Tensor, rtol: float, max_iter: int) -> tuple[Tensor, Tensor, Status]:
    """Conjugate gradients on every column by itself; the columns share the passes. All of `max_iter` if rtol is 0."""
    x, R, size = torch.zeros_like(B), B.clone(), torch.linalg.vector_norm(B, dim=0)
    # Below rounding of the right-hand side a column is done: going on would divide what has underflowed.
    floor = torch.finfo(B.dtype).eps * size
    D, rr = R.clone(), (R * R).sum(0)
    zero = torch.zeros_like(rr)
    for _ in range(max_iter):
        length = torch.linalg.vector_norm(R, dim=0)
        if rtol > 0 and bool((length <= torch.maximum(rtol * size, floor)).all()):
            break
        SD, _ = space.product(D)
        curvature = (D * SD).sum(0)
        active = (length > floor) & (curvature > 0)
        alpha = torch.where(active, rr / torch.where(active, curvature, zero + 1), zero)
        x, R = x + alpha * D, R - alpha * SD
        rr_new = (R * R).sum(0)
        D = R + torch.where(active, rr_new / torch.where(active, rr, zero + 1), zero) * D
        rr = rr_new
    residual = relative(R, B)
    worst = float(residual.max())
    if worst <= rtol:
        return x, residual, Status.CONVERGED
    return x, residual, Status.STALLED if bool((residual * size <= floor).all()) else Status.MAX_ITER
