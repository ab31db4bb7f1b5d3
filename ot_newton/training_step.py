"""One step of a method on a loss that may be another function at the next step, and the second-order test at rest.

What `run` does for one function until it ends: value and gradient are evaluated anew where a step begins, and where the
gradient is within tolerance the smallest eigenvalue of the Hessian decides between staying and leaving.
"""

from dataclasses import dataclass, fields, replace
from math import isfinite, isnan
from typing import Any

import torch
from torch import Tensor

from ot_newton.certificate import SEED, Certificate, Verdict, smallest_eigenvalue
from ot_newton.counting import CountedProblem
from ot_newton.escape import leave_saddle
from ot_newton.method import Escaping, Method, State, evaluate
from ot_newton.run import Options
from ot_newton.status import Status


@dataclass(frozen=True)
class StepReport:
    """What a step of `SecondOrder` did, with the evidence.

    Attributes:
        fun, grad_norm: loss and gradient norm where the step began.
        phase: what the step was, as in the history of `minimize`.
        accepted: whether the parameters moved.
        step_norm: how far.
        status: None while the method goes on. CONVERGED, a minimiser in the second order, and the other words of
            `Status` say why the parameters did not move; `status.advice` says what to try.
        lambda_min: smallest eigenvalue of the Hessian where the step began, NaN where it was not computed.
        certificate: the evidence for it, where the gradient is within tolerance.
        nfev, njev, nhev: values, gradients and Hessian products of this step.
    """

    fun: float
    grad_norm: float
    phase: str
    accepted: bool
    step_norm: float
    status: Status | None
    lambda_min: float
    certificate: Certificate | None
    nfev: int
    njev: int
    nhev: int


@dataclass(frozen=True)
class Memory:
    """What goes from step to step.

    Attributes:
        state: of the method.
        reference, largest: gradient norm and |f|, the largest seen.
        steps: how many there were.
        certificate: the evidence for λ_min where the parameters are now, if it was computed.
    """

    state: State
    reference: float
    largest: float
    steps: int
    certificate: Certificate | None


def training_step(
    method: Method[Any], options: Options, problem: CountedProblem, w: Tensor, old: Memory | None
) -> tuple[Tensor, Memory | None, StepReport]:
    """The parameters after a step from w (size,), an escape, or nothing; what to remember; and a report.

    `old` is what the last step remembered. It is handed back where the loss is not finite at w.
    """
    if old is None:
        old = Memory(method.init(problem, w), 0.0, 0.0, 0, None)
        state, certificate, fresh = old.state, None, True
    else:
        (state, changed), fresh = _evaluated(problem, w, old.state), False
        certificate = None if changed else old.certificate
    fun, grad_norm = state.fun, state.grad_norm

    def report(after: State, status: Status | None) -> StepReport:
        lambda_min = after.lambda_min if certificate is None else certificate.lambda_min
        return StepReport(
            fun, grad_norm, after.phase, after.accepted, after.step_norm, status, lambda_min, certificate,
            problem.nfev, problem.njev, problem.nhev,
        )  # fmt: skip

    if not (isfinite(fun) and isfinite(grad_norm)):
        stay = replace(state, accepted=False, step_norm=0.0)
        return w, None if fresh else old, report(stay, Status.NONFINITE)
    reference, largest = max(old.reference, grad_norm), max(old.largest, abs(fun))
    rounding = torch.finfo(w.dtype).eps
    gtol = max(1e-8, 64 * rounding) if options.gtol is None else options.gtol
    stationary = grad_norm <= max(options.gtol_abs, gtol * reference)
    if not stationary and state.status is not Status.STALLED:
        moved, after = method.step(problem, w, state)
        status = after.status
    else:
        certificate = certificate or _certify(problem, w, options, old.steps)
        rest = Status.CONVERGED if stationary else Status.STALLED
        moved, after, status = _at_rest(method, problem, w, state, certificate, 16 * rounding * largest, rest)
    memory = Memory(after, reference, largest, old.steps + 1, None if after.accepted else certificate)
    return moved if after.accepted else w, memory, report(after, status)


def _certify(problem: CountedProblem, w: Tensor, options: Options, steps: int) -> Certificate:
    H, rtol = problem.hessian(w, options.curvature_rtol / 3), options.curvature_rtol
    rng = torch.Generator().manual_seed(SEED + options.seed * 0x10_0000 + steps)
    return smallest_eigenvalue(H, rtol=rtol, error=problem.hessian_error, confidence=options.confidence, rng=rng)


def _evaluated(problem: CountedProblem, w: Tensor, state: State) -> tuple[State, bool]:
    """The state with the value and gradient that the closure has now, and whether they are others."""
    fun, grad, grad_norm = evaluate(problem, w)
    if fun == state.fun and torch.equal(grad, state.grad):
        return state, False
    return _renewed(state, {"fun": fun, "grad": grad, "grad_norm": grad_norm, "status": None}), True


def _renewed(state: State, values: dict[str, Any]) -> State:
    """The state, and the states inside it, with these values."""
    inner = {f.name: getattr(state, f.name) for f in fields(state)}
    inner = {name: _renewed(value, values) for name, value in inner.items() if isinstance(value, State)}
    return replace(state, **values, **inner)


def _at_rest(
    method: Method[Any], problem: CountedProblem, w: Tensor, state: State, evidence: Certificate, least_fall: float,
    rest: Status,
) -> tuple[Tensor, State, Status | None]:  # fmt: skip
    """What to do where the gradient vanishes: leave a saddle, or stay and say why."""
    stay = replace(state, accepted=False, step_norm=0.0)
    if isnan(evidence.lambda_min):
        return w, stay, Status.NONFINITE
    if evidence.verdict is Verdict.UNDECIDED:
        return w, stay, Status.UNDECIDED
    if evidence.verdict is Verdict.NONNEGATIVE:
        return w, stay, rest
    if isinstance(method, Escaping):
        if state.status is not Status.LINE_SEARCH_FAILED:
            moved, after = method.escape_saddle(problem, w, state, evidence, least_fall)
            if after.accepted:
                return moved, after, after.status
            stay = after
    elif leave_saddle(problem, w, state.fun, state.grad, evidence, least_fall=least_fall) is not None:
        return w, stay, Status.SADDLE
    noisy = evidence.relative >= -evidence.tolerance / evidence.scale
    return w, stay, rest if noisy else Status.LINE_SEARCH_FAILED
