"""Steihaug's step for min gᵀs + ½ sᵀHs, ‖s‖ ≤ Δ: conjugate gradients until they converge, leave the ball, or meet
curvature that is not positive; the last two end on the boundary.

The path of CG does not depend on Δ. Its products with H are kept, so that another radius repeats none of them.
Reference: Steihaug, The conjugate gradient method and trust regions in large scale optimization, SIAM J. Numer. Anal.
20 (1983).
"""

from dataclasses import dataclass
from math import frexp, isfinite, nan
from typing import Any

import torch
from torch import Tensor

from ot_newton.conjugate_gradient import KrylovRun, Map, conjugate_gradient, dot
from ot_newton.gltr import check_system
from ot_newton.operators import LinearOperator, aslinearoperator
from ot_newton.status import Status


@dataclass(frozen=True)
class SteihaugStep:
    """A step s (n,) inside the ball, with its evidence.

    Attributes:
        step: s; zero if H or g is not finite.
        decrease: −(gᵀs + ½ sᵀHs).
        status: CONVERGED inside the ball; BOUNDARY; NEGATIVE_CURVATURE, on the boundary too; MAX_ITER, inside it;
            NONFINITE.
        lambda_bound: Rayleigh quotient of the direction of nonpositive curvature, NaN if none was met.
        scale: largest ‖Hp‖/‖p‖ met, an estimate of ‖H‖ from below.
    """

    step: Tensor
    decrease: float
    status: Status
    lambda_bound: float
    scale: float


class SteihaugPath:
    """The path of CG for one H (n, n) and g (n,); `within` cuts it at any radius.

    Args:
        A: symmetric operator or matrix.
        g: gradient.
        rtol: relative residual at which CG has converged.
        maxiter: products with H; 2n + 10 by default.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit, or an operator known to be unsymmetric.

    >>> path = SteihaugPath(torch.diag(torch.tensor([1.0, 100.0])), torch.ones(2))
    >>> path.within(0.1).status.value, path.within(10.0).status.value
    ('boundary', 'converged')
    """

    def __init__(self, A: Any, g: Tensor, *, rtol: float = 1e-6, maxiter: int | None = None) -> None:
        self.H: LinearOperator = aslinearoperator(A)
        check_system(self.H, g, rtol, maxiter)
        self.g, self.eps = g.detach(), torch.finfo(g.dtype).eps
        self.rtol, self.maxiter = max(rtol, self.eps), 2 * len(g) + 10 if maxiter is None else maxiter
        self.norm = float(torch.linalg.vector_norm(self.g, dtype=torch.float64))
        self._products: list[Tensor] = []

    def within(self, radius: float | None) -> SteihaugStep:
        """The step for this radius; None lets CG run until it converges or meets nonpositive curvature, from where it
        does not go on.

        Raises:
            ValueError: the radius is not positive.
        """
        if radius is not None and not radius > 0:
            raise ValueError(f"expected radius > 0, got {radius}")
        if not self.norm or not isfinite(self.norm):
            status = Status.NONFINITE if self.norm else Status.CONVERGED
            return SteihaugStep(torch.zeros_like(self.g), 0.0, status, nan, 0.0)
        unit = 2.0 ** frexp(self.norm)[1]  # keeps the squares of float32 in range
        run = conjugate_gradient(
            self._replay(),
            -self.g / unit,
            target=self.rtol * self.norm / unit,
            maxiter=self.maxiter,
            precondition=None,
            radius=None if radius is None or not isfinite(radius) else radius / unit,
            eps=self.eps,
            callback=None,
        )
        return self._step(run, unit)

    def _replay(self) -> Map:
        """p ↦ H p, which CG asks for in the same order every time."""
        asked = 0

        def product(p: Tensor) -> Tensor:
            nonlocal asked
            if asked == len(self._products):
                self._products.append(self.H.matvec(p).detach())
            asked += 1
            return self._products[asked - 1]

        return product

    def _step(self, run: KrylovRun, unit: float) -> SteihaugStep:
        status = run.status
        bound = nan if run.npc_curvature is None else run.npc_curvature
        if status is Status.NONFINITE:
            return SteihaugStep(torch.zeros_like(self.g), 0.0, status, nan, run.anorm)
        g = self.g / unit
        fall = 0.5 * float(dot(run.x, run.residual) - dot(run.x, g))  # H x = −g − r
        return SteihaugStep(unit * run.x, unit * unit * fall, status, bound, run.anorm)
