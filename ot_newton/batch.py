"""`solve_batch`: B transport problems of one shape, solved one after another.

Each item is the problem that `solve` would have been given, with its own weights, temperature, stopping and status, so
a hard item costs the others nothing and changes no digit of theirs. Time is the sum over the items and memory that of
one item plus the answers: a batch is for convenience, and pays where one item keeps the device busy. The losses take
their batches through the same functions.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, overload

import torch
from torch import Tensor

from ot_newton.plan import Plan
from ot_newton.sinkhorn import ConvergenceWarning, Initial, solve
from ot_newton.status import Status
from ot_newton.validate import check_batch

Item = tuple[Tensor, Tensor, Tensor, Tensor, float]


class Solved(Protocol):
    """What a solver returns: how the solve ended, and the error left."""

    @property
    def status(self) -> Status: ...
    @property
    def converged(self) -> bool: ...
    @property
    def error(self) -> float: ...


S = TypeVar("S", bound=Solved)


@dataclass(frozen=True, eq=False, repr=False)
class PlanBatch(Sequence[Plan]):
    """The plans of a batch: a sequence of `Plan`, and what they have in common stacked along a first dimension B."""

    plans: tuple[Plan, ...]

    def __len__(self) -> int:
        return len(self.plans)

    @overload
    def __getitem__(self, index: int) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> "PlanBatch": ...
    def __getitem__(self, index: int | slice) -> "Plan | PlanBatch":
        return PlanBatch(self.plans[index]) if isinstance(index, slice) else self.plans[index]

    @property
    def status(self) -> list[Status]:
        """How each solve ended."""
        return [plan.status for plan in self.plans]

    @property
    def converged(self) -> bool:
        """Whether every item reached the tolerance."""
        return all(plan.converged for plan in self.plans)

    @property
    def error(self) -> Tensor:
        """L1 marginal errors, (B,), float64 on the CPU."""
        return torch.tensor([plan.error for plan in self.plans], dtype=torch.float64, device="cpu")

    @property
    def n_passes(self) -> int:
        """Passes over the n×m pairs, of all items together."""
        return sum(plan.n_passes for plan in self.plans)

    @property
    def f(self) -> Tensor:
        """Potentials of the sources, (B, n)."""
        return self._stack(lambda plan: plan.f)

    @property
    def g(self) -> Tensor:
        """Potentials of the targets, (B, m)."""
        return self._stack(lambda plan: plan.g)

    def value(self) -> Tensor:
        """Values, (B,)."""
        return self._stack(Plan.value)

    def grad(self) -> Tensor:
        """Gradients in x, (B, n, d)."""
        return self._stack(Plan.grad)

    def grad_y(self) -> Tensor:
        """Gradients in y, (B, m, d)."""
        return self._stack(Plan.grad_y)

    def barycenters(self) -> Tensor:
        """Where each source point is sent on average, (B, n, d)."""
        return self._stack(Plan.barycenters)

    def _stack(self, of: Callable[[Plan], Tensor]) -> Tensor:
        return torch.stack([of(plan) for plan in self.plans])

    def __repr__(self) -> str:
        n, m = self.plans[0].shape if self.plans else (0, 0)
        good = sum(plan.converged for plan in self.plans)
        return f"PlanBatch({len(self)} of {n}×{m}, {good} converged, passes={self.n_passes})"


def solve_batch(
    x: Any,
    y: Any,
    eps: Any,
    *,
    a: Any = None,
    b: Any = None,
    init: Sequence[Initial] | None = None,
    **options: Any,
) -> PlanBatch:
    """Solve the problems `(x[k], y[k])` for k < B; equal to a loop over `solve`, and as costly.

    Args:
        x, y: points (B, n, d) and (B, m, d).
        eps: one temperature, or B of them.
        a, b: weights (B, n) and (B, m), or (n,) and (m,) for all items; uniform where None.
        init: B starting points as in `solve`, a `PlanBatch` for example.
        options: as in `solve`.

    Raises TypeError and ValueError as `solve` does, before any work, naming the item. Warns `ConvergenceWarning` once,
    naming the items that did not reach the tolerance.

    >>> x = torch.rand(3, 10, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> plans = solve_batch(x, x.flip(1) + 1, eps=0.5)
    >>> plans.value().shape, plans.grad().shape, plans.converged, plans[0].shape
    (torch.Size([3]), torch.Size([3, 10, 2]), True, (10, 10))
    """
    items = check_batch(x, y, a, b, eps)
    return PlanBatch(solve_items(items, init, solver=solve, stacklevel=3, **options))


@contextmanager
def passed_on(stacklevel: int) -> Iterator[None]:
    """Warnings from within are given again by the function around, `stacklevel` counted from it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        yield
    for warning in caught:
        warnings.warn(warning.message, stacklevel=stacklevel + 2)


def solve_items(
    items: list[Item], init: Sequence[Initial] | None, *, solver: Callable[..., S], stacklevel: int, **options: Any
) -> tuple[S, ...]:
    """`solver` for each checked item, with one warning for all."""
    if init is not None:
        starts = isinstance(init, Sequence) and all(k is None or isinstance(k, Plan | tuple | list) for k in init)
        if not starts or len(init) != len(items):
            got = f"{len(init)} of other kinds or number" if isinstance(init, Sequence) else type(init).__name__
            raise ValueError(f"init: expected {len(items)} plans or pairs (f, g), one an item, got {got}")
    solved = []
    for k, (x, y, a, b, eps) in enumerate(items):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            solved.append(solver(x, y, eps, a=a, b=b, init=None if init is None else init[k], **options))
    missed = [k for k, one in enumerate(solved) if not one.converged]
    if missed:
        worst = max((solved[k] for k in missed), key=lambda one: one.error)
        shown = ", ".join(map(str, missed[:10])) + (", …" if len(missed) > 10 else "")
        warnings.warn(
            f"{len(missed)} of {len(solved)} items ({shown}) did not converge; the worst has an error of "
            f"{worst.error:.1e} ({worst.status.value}). {worst.status.advice}",
            ConvergenceWarning,
            stacklevel=stacklevel,
        )
    return tuple(solved)
