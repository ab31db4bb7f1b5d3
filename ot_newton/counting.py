"""A problem seen through a counter of values, gradients, Hessian products and passes."""

import torch

from ot_newton.operators import LinearOperator, MatrixOperator
from ot_newton.pairs import Passes
from ot_newton.problem import Problem


class CountedProblem(Problem):
    """A problem that counts what is asked of it."""

    def __init__(self, inner: Problem) -> None:
        self.inner = inner
        self.size, self.dtype, self.device = inner.size, inner.dtype, inner.device
        self.nfev = self.njev = 0
        self._nhev_before = 0
        self._operator: LinearOperator | None = None
        self._passes_before = inner.passes

    @property
    def nhev(self) -> int:
        """Products with the Hessians handed out so far; a matrix counts as one."""
        return self._nhev_before + (0 if self._operator is None else self._operator.n_matvec)

    # the problem's own counters and error estimates, seen through
    @property
    def passes(self) -> Passes:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.passes - self._passes_before

    @property
    def value_error(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.value_error

    @property
    def hessian_error(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.hessian_error

    def start(self, rng: torch.Generator) -> torch.Tensor:
        return self.inner.start(rng)

    def value(self, w: torch.Tensor) -> torch.Tensor:
        self.nfev += 1
        return self.inner.value(w)

    def value_and_grad(self, w: torch.Tensor, rtol: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        self.njev += 1
        return self.inner.value_and_grad(w, rtol)

    def hessian_at_hand(self, w: torch.Tensor) -> LinearOperator | None:
        return self.inner.hessian_at_hand(w)

    def hessian(self, w: torch.Tensor, rtol: float | None = None) -> LinearOperator:
        self._nhev_before = self.nhev
        H = self.inner.hessian(w, rtol)
        if isinstance(H, MatrixOperator):
            self._nhev_before, self._operator = self._nhev_before + 1, None
        else:
            self._nhev_before, self._operator = self._nhev_before - H.n_matvec, H
        return H
