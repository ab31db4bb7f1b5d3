"""`solve`: from two weighted point clouds to an entropic transport plan.

Methods, all on the dual `max_{f,g} <a, f> + <b, g>` of `min_P <C, P> + eps KL(P | a⊗b)`:

    "alternating"  f ← row(g), g ← col(f)                      (Sinkhorn 1967)
    "symmetric"    f ← (f + row(g))/2, g ← (g + col(f))/2      (averaged, keeps f and g on a par)
    "two-level"    alternating sweeps that correct their slow modes, with Anderson extrapolation
    "newton"       Newton on the semi-dual by block Krylov, from a few two-level sweeps
    "auto"         two-level to a small error, then Newton
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ot_newton.alternating import alternating, symmetric
from ot_newton.annealing import Start, annealed, is_lost
from ot_newton.cost import Cost, make_cost
from ot_newton.dual_newton import dual_newton
from ot_newton.kernels.precision import full_precision
from ot_newton.labels import Labels
from ot_newton.pairs import Pairs
from ot_newton.plan import Plan
from ot_newton.potentials import Handover, Potentials, Watch, in_gauge
from ot_newton.status import Status
from ot_newton.two_level import two_level
from ot_newton.validate import (
    check_choice,
    check_integer,
    check_measures,
    check_nonnegative,
    check_pairs,
    check_positive,
    check_ratio,
)

NEWTON_BELOW = 3e-3
PRECISIONS = ("fp32", "tf32", "bf16")

Initial = Plan | tuple[Tensor, Tensor] | None


class ConvergenceWarning(UserWarning):
    """A solve ended before its tolerance; the result says so too, in its status."""


def solve(
    x: Any,
    y: Any,
    eps: float,
    *,
    a: Any = None,
    b: Any = None,
    cost: str = "sqeuclidean",
    scale: float = 1.0,
    tol: float | None = None,
    method: str = "auto",
    max_iter: int = 5000,
    anneal: float | None = None,
    init: Initial = None,
    labels: Any = None,
    precision: str = "fp32",
    backend: str = "auto",
) -> Plan:
    """Solve `min_P <C, P> + eps KL(P | a⊗b)` over plans with marginals a and b; never forms P.

    Args:
        x, y: points (n, d) and (m, d), float32 or float64 (the dtype of everything returned); float16 and bfloat16
            points are computed with in float32.
        eps: temperature in the units of the cost. See `Plan` for what it means for the answer.
        a, b: weights (n,) and (m,) with sum 1, zeros allowed; uniform where None.
        cost: "sqeuclidean", `C = scale·|x - y|²`, or "cosine", `C = scale·(1 - cos(x, y))`.
        tol: bound of the L1 marginal error `|P1 - a|₁ + |Pᵀ1 - b|₁`; by default 1e-6 in float64 and 1e-5 in float32.
        method: "auto", "alternating", "symmetric", "two-level" or "newton".
        max_iter: sweeps of two passes that may be spent; every method is charged in this unit.
        anneal: ratio in (0, 1) by which the temperature falls from the squared diameter to eps, with one sweep at each
            level or, where the method is an accelerated one, as many as bring the error to 0.01; 1 for none. By default
            it is used without `init` where eps is small beside the mean cost and the first sweep leaves a large error.
        init: a plan, or its potentials (f, g), to start from. "auto" starts from nothing where they contradict each
            other by a thousand eps.
        labels: `(l_x, l_y, W)`, classes of the points, integers (n,) and (m,), and a cost between two classes that is
            added to C; see `labels`.
        precision: of the scores on a GPU in float32: "fp32", or "tf32" and "bf16", faster from about 64 dimensions on
            and good to three digits, for early iterations.
        backend: "auto", "dense", "blocked" or "triton", which needs float32 on a CUDA device.

    Returns:
        A `Plan` with the evidence: `error`, `status`, `n_iter`, `n_passes`.

    Raises:
        TypeError, ValueError: for inputs that are not what is said above, before any work.
        RuntimeError: "triton" is asked for where it cannot run.

    Warns:
        ConvergenceWarning: once, where the tolerance was not reached; the message says why and what to try.

    >>> x, y = torch.tensor([[0.0], [1.0], [3.0]]).double(), torch.tensor([[0.5], [2.0]]).double()
    >>> plan = solve(x, y, eps=1.0, b=torch.tensor([0.6, 0.4]).double(), a=torch.tensor([0.5, 0.25, 0.25]).double())
    >>> plan.converged, round(float(plan.value()), 6)
    (True, 1.024833)
    """
    x, y, a, b = check_measures(x, y, a, b)
    x, y, a, b = (t.detach() for t in (x, y, a, b))
    eps = check_positive(eps, "eps")
    kind = make_cost(cost, check_positive(scale, "scale"))
    max_iter = check_integer(max_iter, "max_iter")
    tol = None if tol is None else check_nonnegative(tol, "tol")
    anneal = None if anneal is None else check_ratio(anneal, "anneal")
    check_choice(method, "method", METHODS)
    check_choice(precision, "precision", PRECISIONS)
    classes = Labels.checked(labels, x, y)
    plan = solve_checked(
        x, y, a, b, eps, kind, tol, method, max_iter, anneal, init, backend, labels=classes, precision=precision,
        refuse=True,
    )  # fmt: skip
    if not plan.converged:
        message = (
            f"marginal error {plan.error:.1e} after {plan.n_passes} passes ({plan.status.value}). {plan.status.advice}"
        )
        warnings.warn(message, ConvergenceWarning, stacklevel=2)
    return plan


@full_precision
def solve_checked(
    x: Tensor, y: Tensor, a: Tensor, b: Tensor, eps: float, cost: Cost, tol: float | None = None, method: str = "auto",
    max_iter: int = 5000, anneal: float | None = None, init: Initial = None, backend: str = "auto",
    modes: Tensor | None = None, labels: Labels | None = None, precision: str = "fp32", refuse: bool = False,
) -> Plan:  # fmt: skip
    """`solve` on checked inputs, without the warning; `modes` are slow modes of a neighbouring plan.

    A cost over eps that overflows raises ValueError where `refuse`, else the plan's status tells of it.
    """
    tx, ty = cost.embed(x), cost.embed(y)
    for name, points in (("x", tx), ("y", ty)):
        if not bool(torch.isfinite(points).all()):
            raise ValueError(f"{name}: expected points whose cost is finite, got a zero vector or an overflow")
    pairs = Pairs.of(tx, ty, a, b, eps, cost.scale, backend, labels, precision)
    if refuse:
        check_pairs(pairs)
    tol = tol if tol is not None else (1e-6 if x.dtype == torch.float64 else 1e-5)
    # The semi-dual lives on the smaller side.
    swap = len(x) < len(y)
    side = pairs.swapped() if swap else pairs
    phi, psi, known = initial_potentials(init, pairs, swap)
    if phi is not None and method == "auto" and is_lost(side, phi, psi):
        init, (phi, psi, _) = None, initial_potentials(None, pairs, swap)
    phi, psi = in_gauge(side, phi, psi)
    modes = known if modes is None or len(modes) != len(psi) else modes
    watch = Watch(side, tol, 2 * max_iter)
    start = Start(phi, psi, modes)
    if init is None:
        plain = method in ("alternating", "symmetric")
        start = annealed(side, start, anneal, watch, sweeps_only=plain)
    if start.done is None:
        state, status = METHODS[method](side, start.phi, start.psi, start.modes, watch)
    else:
        state, status = start.done, Status.CONVERGED
    phi, psi, r, c = state.phi, state.psi, state.r, state.c
    if swap:
        phi, psi, r, c = psi, phi, c, r
    total, error = pairs.passes.total, float(state.error)
    if status is Status.STALLED:
        error = max(error, watch.resolution(state))
    return Plan(
        x=x, y=y, a=a, b=b, phi=phi, psi=psi, eps=eps, row_sums=r, col_sums=c, error=error, status=status,
        n_iter=(total + 1) // 2, passes=pairs.passes, cost=cost, pairs=pairs, modes=state.modes,
    )  # fmt: skip


def initial_potentials(init: Initial, pairs: Pairs, swap: bool) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """(phi, psi, modes) on the side the solver works on; phi is only a guess and may be missing."""
    n, m = pairs.shape
    if init is None:
        side = pairs.source if swap else pairs.target
        return None, side.reduced(torch.zeros_like(side.weights), pairs.eps), None
    given = (init.f, init.g) if isinstance(init, Plan) else init
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise TypeError(f"init: expected a plan or its potentials (f, g), got {type(init).__name__}")
    modes = init.modes if isinstance(init, Plan) else None
    potentials = []
    for name, potential, size, side in (("f", given[0], n, pairs.source), ("g", given[1], m, pairs.target)):
        if not isinstance(potential, Tensor):
            raise TypeError(
                f"init: expected a plan or its potentials (f, g), got {type(potential).__name__} for {name}"
            )
        if tuple(potential.shape) != (size,):
            raise ValueError(f"init: expected a potential {name} of shape ({size},), got {tuple(potential.shape)}")
        potentials.append(side.reduced(potential.detach().to(side.points), pairs.eps))
        if not bool(torch.isfinite(potentials[-1]).all()):
            raise ValueError(f"init: expected a finite potential {name}, over eps too")
    phi, psi = reversed(potentials) if swap else potentials
    return phi, psi, modes if modes is not None and len(modes) == len(psi) else None


def _two_level(
    pairs: Pairs, phi: Tensor | None, psi: Tensor, modes: Tensor | None, watch: Watch
) -> tuple[Potentials, Status]:
    return two_level(pairs, psi, watch, modes=modes, guess=phi)


def _newton(
    pairs: Pairs, phi: Tensor | None, psi: Tensor, modes: Tensor | None, watch: Watch, below: float = 0.3
) -> tuple[Potentials, Status]:
    first = Handover(pairs, watch.tol, watch.limit, below=below)
    state, status = two_level(pairs, psi, first, modes=modes, guess=phi)
    if not status.success or float(state.error) <= watch.tol:
        return state, status
    return dual_newton(pairs, state, watch)


def _auto(
    pairs: Pairs, phi: Tensor | None, psi: Tensor, modes: Tensor | None, watch: Watch
) -> tuple[Potentials, Status]:
    return _newton(pairs, phi, psi, modes, watch, below=NEWTON_BELOW)


Solver = Callable[[Pairs, Tensor | None, Tensor, Tensor | None, Watch], tuple[Potentials, Status]]
METHODS: dict[str, Solver] = {
    "auto": _auto,
    "alternating": alternating,
    "symmetric": symmetric,
    "two-level": _two_level,
    "newton": _newton,
}
