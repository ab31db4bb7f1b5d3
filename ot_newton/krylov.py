"""Linear systems with a symmetric operator: `cg` and `minres`, with the evidence a Newton method needs.

Both solve A d = r from zero, x ← x + d, and look at the true residual again where rounding makes the recurred one
doubtful: the gap between them is about eps ‖A‖ max‖x‖.
Reference: Greenbaum, Estimating the attainable accuracy of recursively computed residual methods, SIAM J. Matrix Anal.
Appl. 18 (1997).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ot_newton.conjugate_gradient import KrylovRun, conjugate_gradient
from ot_newton.minimal_residual import minimal_residual
from ot_newton.operators import LinearOperator, aslinearoperator, require_like, require_symmetric
from ot_newton.status import Status

Callback = Callable[[Tensor], object]


@dataclass(frozen=True)
class LinearSolution:
    """A solution x (n,) of A x = b with its evidence; unpacks to `(x, info)` as scipy's solvers do.

    `residual_norm` is ‖b − A x‖, by recurrence unless rounding made a true product necessary. `n_iter` counts
    iterations, `n_matvec` all products with A (they differ by the residual of a given x0 and by such checks).
    `npc_direction` d is a direction with dᵀAd ≤ 0 up to rounding, if one was met, and `npc_curvature` its dᵀAd / dᵀd.
    """

    x: Tensor
    status: Status
    residual_norm: float
    n_iter: int
    n_matvec: int
    npc_direction: Tensor | None = None
    npc_curvature: float | None = None

    @property
    def success(self) -> bool:
        """Whether the tolerance was reached."""
        return self.status.success

    @property
    def info(self) -> int:
        """0 after success, else the number of iterations (at least 1)."""
        return 0 if self.success else max(self.n_iter, 1)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.x, self.info))


def cg(
    A: Any,
    b: Tensor,
    x0: Tensor | None = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
    radius: float | None = None,
    callback: Callback | None = None,
) -> LinearSolution:
    """Solve A x = b by conjugate gradients until ‖b − A x‖ ≤ max(rtol ‖b‖, atol).

    A: symmetric operator or matrix (n, n). b, x0: (n,). M: symmetric positive definite, close to A⁻¹. maxiter: 10 n by
    default. callback(x) is called after each iteration. The result has b's dtype.

    Where A is not positive definite the run ends with `Status.NEGATIVE_CURVATURE` and a direction d of nonpositive
    curvature (dᵀAd ≤ eps ‖A‖ ‖d‖²) with bᵀd ≥ 0; x is the last iterate, which minimises ½ xᵀAx − bᵀx over the
    directions before it. With a `radius` this is Steihaug's method: x stays within ‖x‖ ≤ radius in the norm of M⁻¹, a
    run that would leave ends on the boundary with `Status.BOUNDARY`, and after nonpositive curvature x lies on the
    boundary too; the residual is then always the recurred one.

    Raises `ValueError` for shapes, dtypes or devices that do not fit, for an operator known to be unsymmetric, an M
    that is not positive definite, or a radius together with x0.

    >>> x, info = cg(torch.diag(torch.tensor([1.0, 2.0])), torch.tensor([1.0, 4.0]))
    >>> x, info
    (tensor([1., 2.]), 0)
    >>> saddle = cg(torch.diag(torch.tensor([1.0, -2.0])), torch.ones(2))
    >>> saddle.status.value, bool(saddle.npc_curvature < 0)
    ('negative_curvature', True)
    """
    if radius is not None and not radius > 0:
        raise ValueError(f"expected a positive radius, got {radius}")
    if radius is not None and x0 is not None:
        raise ValueError("expected no x0 with a radius: the trust region is centred at zero")
    run = partial(conjugate_gradient, radius=radius)
    return _solve(run, A, b, x0, rtol, atol, maxiter, M, callback, length=radius)


def minres(
    A: Any,
    b: Tensor,
    x0: Tensor | None = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
    stop_on_npc: bool = False,
    callback: Callback | None = None,
) -> LinearSolution:
    """Solve A x = b by MINRES until ‖b − A x‖ ≤ max(rtol ‖b‖, atol), for A definite, indefinite or singular.

    Arguments and errors as in `cg`. A system that is singular and inconsistent ends with `Status.INCONSISTENT` and a
    bounded least-squares solution. The first residual of nonpositive curvature is kept as `npc_direction`;
    `stop_on_npc=True` stops there with `Status.NEGATIVE_CURVATURE`, as Newton-MR does.

    >>> x, info = minres(torch.diag(torch.tensor([1.0, -2.0])), torch.tensor([1.0, 4.0]))
    >>> x.round(decimals=4), info
    (tensor([ 1., -2.]), 0)
    >>> minres(torch.diag(torch.tensor([1.0, 0.0])), torch.ones(2)).status.value
    'inconsistent'
    """
    return _solve(partial(minimal_residual, stop_on_npc=stop_on_npc), A, b, x0, rtol, atol, maxiter, M, callback)


def _solve(
    run: Callable[..., KrylovRun],
    A: Any,
    b: Tensor,
    x0: Tensor | None,
    rtol: float,
    atol: float,
    maxiter: int | None,
    M: Any,
    callback: Callback | None,
    length: float | None = None,
) -> LinearSolution:
    """Check the arguments, then solve for corrections from zero until the true residual is known to be small."""
    A = aslinearoperator(A)
    precondition = _check(A, b, x0, rtol, atol, maxiter, M)
    n, eps, before = A.shape[0], torch.finfo(A.dtype).eps, A.n_matvec
    left = 10 * n if maxiter is None else maxiter

    def apply(v: Tensor) -> Tensor:
        return A.matvec(v).detach()

    b = b.detach()
    x = torch.zeros_like(b) if x0 is None else x0.detach().clone()
    r = b if x0 is None else b - apply(x)
    target, r_norm, n_iter = max(rtol * norm(b), atol), norm(r), 0
    npc, npc_curvature = None, None

    def finish(status: Status) -> LinearSolution:
        return LinearSolution(x, status, r_norm, n_iter, A.n_matvec - before, npc, npc_curvature)

    while True:
        if not math.isfinite(r_norm):
            return finish(Status.NONFINITE)
        if r_norm <= target:
            return finish(Status.CONVERGED)
        scale, base = 2.0 ** math.frexp(r_norm)[1], x
        # A recurred residual that has lost all its digits says no more: go no further without a true one.
        options: dict[str, Any] = {"target": max(target / scale, eps), "maxiter": left - n_iter, "eps": eps}
        if length is not None:
            run = partial(run, radius=length / scale)
        progress = None if callback is None else partial(_report, callback, base, scale)
        found = run(apply, r / scale, precondition=precondition, callback=progress, **options)
        x, n_iter, previous, r_norm = base + scale * found.x, n_iter + found.n_iter, r_norm, scale * found.residual_norm
        npc, npc_curvature = found.npc_direction, found.npc_curvature
        attainable = eps * found.anorm * max(scale * found.x_norm, norm(x))
        trusted = r_norm <= target and (length is not None or attainable <= 0.1 * target)
        if found.status is not Status.CONVERGED or trusted:
            return finish(found.status)
        r = b - apply(x)
        r_norm = norm(r)
        if target < r_norm and not r_norm <= 0.5 * previous:
            return finish(Status.STALLED)


def _check(
    A: LinearOperator, b: Any, x0: Any, rtol: float, atol: float, maxiter: int | None, M: Any
) -> Callable[[Tensor], Tensor] | None:
    require_symmetric(A)
    for name, vector in (("b", b),) if x0 is None else (("b", b), ("x0", x0)):
        require_like(vector, A, name)
        if vector.shape != (A.shape[0],):
            raise ValueError(f"expected {name} of shape {(A.shape[0],)}, got {tuple(vector.shape)}")
    if not (rtol >= 0 and atol >= 0):
        raise ValueError(f"expected rtol ≥ 0 and atol ≥ 0, got {rtol} and {atol}")
    if maxiter is not None and maxiter < 0:
        raise ValueError(f"expected maxiter ≥ 0, got {maxiter}")
    if M is None:
        return None
    M = aslinearoperator(M)
    require_symmetric(M)
    require_like(M, A, "M")
    if M.shape != A.shape:
        raise ValueError(f"expected M of shape {A.shape}, got {M.shape}")
    return lambda v: M.matvec(v).detach()


def _report(callback: Callback, base: Tensor, scale: float, d: Tensor) -> None:
    callback(base + scale * d)


def norm(v: Tensor) -> float:
    """‖v‖ in float64, free of overflow and underflow."""
    largest = float(v.abs().amax()) if v.numel() else 0.0
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    return largest * float(torch.linalg.vector_norm(v.double() / largest))
