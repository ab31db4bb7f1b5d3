"""One driver for every method of descent: loop, limits, callback, history, and the second-order test before success.

A small gradient alone proves nothing: every saddle has one. Where the gradient is within tolerance the smallest
eigenvalue of the Hessian is asked for, and only a minimiser in the second order is called a success.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from math import inf, isfinite, isnan, nan
from typing import Any

import torch

from ot_newton.adam import Adam
from ot_newton.certificate import SEED, Certificate, Verdict, smallest_eigenvalue
from ot_newton.counting import CountedProblem
from ot_newton.escape import leave_saddle
from ot_newton.method import Escaping, Method, State
from ot_newton.newton_cg import NewtonCG
from ot_newton.problem import FunctionProblem, Problem, as_point
from ot_newton.result import OptimizeResult
from ot_newton.saddle_switch import SaddleSwitch
from ot_newton.status import Status

METHODS: dict[str, type] = {"adam": Adam, "newton-cg": NewtonCG, "adam-newton": SaddleSwitch}
Objective = Problem | Callable[[torch.Tensor], torch.Tensor]
Callback = Callable[..., Any]


@dataclass(frozen=True)
class Options:
    """When the driver stops, and what it demands before it says success.

    Args:
        maxiter: steps; 0 evaluates the start and stops.
        gtol: the gradient's norm relative to the largest one seen; 1e-8 or 64 machine epsilons, the larger, if None.
        gtol_abs: the gradient's norm; whichever of the two is met first counts.
        time_limit: seconds, looked at after each step.
        max_passes: passes over the n×m pairs, looked at after each step.
        curvature_rtol: success promises λ_min ≥ −curvature_rtol ‖H‖.
        confidence: probability of that promise where the Hessian is too large to diagonalise.
        seed: of the random starts in the eigenvalue test, and of the starting point if the problem draws it.

    Raises:
        ValueError: a value outside its range.
    """

    maxiter: int = 1000
    gtol: float | None = None
    gtol_abs: float = 0.0
    time_limit: float = inf
    max_passes: float = inf
    curvature_rtol: float = 1e-3
    confidence: float = 0.99
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.maxiter, int) or self.maxiter < 0:
            raise ValueError(f"expected maxiter as an integer ≥ 0, got {self.maxiter}")
        for name in ("gtol", "gtol_abs", "time_limit", "max_passes"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"expected {name} ≥ 0, got {value}")
        for name in ("curvature_rtol", "confidence"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"expected 0 < {name} < 1, got {getattr(self, name)}")


def minimize(
    problem: Objective,
    x0: Any = None,
    *,
    method: str | Method[Any] = "newton-cg",
    callback: Callback | None = None,
    options: Mapping[str, Any] | None = None,
) -> OptimizeResult:
    """Minimise a smooth function, and say what kind of point the run ended at.

    Args:
        problem: a `Problem`, or a torch function of a tensor of the shape of `x0` that returns a tensor of shape ().
        x0: starting point, of any shape, which `x` and `jac` keep; for a `Problem` it may be left out.
        method: "newton-cg", "adam", "adam-newton", or a method with its hyperparameters, `NewtonCG(radius=1.0)`.
        callback: called after every step as `callback(intermediate_result=OptimizeResult)`; raising StopIteration, or
            returning True, stops the run.
        options: fields of `Options`; with a method given by name its hyperparameters too.

    Returns:
        An `OptimizeResult`. `success` is True only where the gradient is within tolerance and the Hessian has no
        negative eigenvalue (to `curvature_rtol`). A method that can, leaves a saddle and goes on; otherwise the status
        is SADDLE.

    Raises:
        TypeError, ValueError: an argument is not what is expected, an option is unknown or out of range.

    Example:

        >>> result = minimize(lambda x: x[0] ** 2 - x[1] ** 2 + x[1] ** 4, [0.0, 0.0])
        >>> result.success, round(result.lambda_min, 3)
        (True, 2.0)
    """
    chosen, settings = _configure(method, options)
    if isinstance(problem, Problem):
        start = problem.start(torch.Generator().manual_seed(settings.seed)) if x0 is None else as_point(x0)
    elif callable(problem):
        if x0 is None:
            raise ValueError("expected x0 with a function, got None")
        start = as_point(x0)
        problem = FunctionProblem(problem, start)
    else:
        raise TypeError(f"expected a Problem or a function, got {type(problem).__name__}")
    if start.numel() != problem.size:
        raise ValueError(f"expected x0 with {problem.size} entries, got shape {tuple(start.shape)}")
    if callback is not None and not callable(callback):
        raise TypeError(f"expected callback to be callable, got {type(callback).__name__}")
    w = problem.check(start.reshape(-1)).clone()
    return _Run(CountedProblem(problem), chosen, settings, tuple(start.shape), w).to_the_end(callback)


def _configure(method: str | Method[Any], options: Mapping[str, Any] | None) -> tuple[Method[Any], Options]:
    """Sort the options between the driver and a method given by name; neither argument is modified."""
    given = dict(options or {})
    names = [f.name for f in fields(Options)]
    own: list[str] = []
    if isinstance(method, str):
        if method not in METHODS:
            raise ValueError(f"expected method as one of {', '.join(METHODS)}, got {method!r}")
        own = [f.name for f in fields(METHODS[method])]
    elif isinstance(method, type) or not (hasattr(method, "init") and hasattr(method, "step")):
        raise TypeError(f"expected method as a name or an object with init and step, got {method!r}")
    unknown = [name for name in given if name not in names + own]
    if unknown:
        raise ValueError(f"expected options among {', '.join(names + own)}, got {', '.join(map(repr, unknown))}")
    settings = Options(**{name: value for name, value in given.items() if name in names})
    if isinstance(method, str):
        return METHODS[method](**{name: value for name, value in given.items() if name in own}), settings
    return method, settings


@dataclass
class _Run:
    """One minimisation. All that changes is here, so that a run could be stored between any two steps."""

    problem: CountedProblem
    method: Method[Any]
    options: Options
    shape: tuple[int, ...]
    w: torch.Tensor
    reference: float = 0.0
    seconds: float = 0.0
    certificate: Certificate | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)

    def to_the_end(self, callback: Callback | None) -> OptimizeResult:
        """Step until there is a status."""
        began = time.perf_counter() - self.seconds
        state: State = self.method.init(self.problem, self.w)
        self._record(state, began)
        while True:
            status, facts = self._judge(state)
            if status is not None:
                return self._result(state, status, facts)
            state = self._advance(state)
            self._record(state, began)
            if callback is not None and self._stopped(callback, state):
                return self._result(state, Status.STOPPED)

    def _advance(self, state: State) -> State:
        """A step of the method, or its escape where a negative eigenvalue is known."""
        if self.certificate is not None and isinstance(self.method, Escaping):
            w, state = self.method.escape_saddle(self.problem, self.w, state, self.certificate, self._least_fall)
        else:
            w, state = self.method.step(self.problem, self.w, state)
        if state.accepted:
            self.w, self.certificate = w, None
        return state

    def _judge(self, state: State) -> tuple[Status | None, str]:
        """The status if the run is over, and what else there is to say; (None, "") if it goes on."""
        if state.status is Status.NONFINITE or not (isfinite(state.fun) and isfinite(state.grad_norm)):
            return Status.NONFINITE, ""
        stationary = state.grad_norm <= max(self.options.gtol_abs, self._gtol * self.reference)
        over = self._limit()
        if not stationary and state.status is not Status.STALLED and self.certificate is None:
            return state.status or over, ""

        evidence = self.certificate = self.certificate or self._certify()
        if isnan(evidence.lambda_min):
            return Status.NONFINITE, "The Hessian is not finite."
        rest = Status.CONVERGED if stationary else Status.STALLED
        if evidence.verdict is Verdict.NONNEGATIVE:
            singular = evidence.lambda_min <= evidence.noise
            return rest, "The Hessian is singular here: a degenerate saddle cannot be excluded." if singular else ""
        if evidence.verdict is Verdict.UNDECIDED:
            return Status.UNDECIDED, ""
        if self._escapable(state, evidence):
            if over is None and isinstance(self.method, Escaping):
                return None, ""
            return Status.SADDLE, ""
        if evidence.relative >= -self.options.curvature_rtol:
            return rest, "f does not fall along the eigenvector by more than its noise."
        return Status.LINE_SEARCH_FAILED, "The negative eigenvalue is inconsistent with f, which rises both ways."

    def _escapable(self, state: State, evidence: Certificate) -> bool:
        """Whether f falls along the eigenvector, or has not been tried yet by a method that will try it."""
        if isinstance(self.method, Escaping):
            return state.status is not Status.LINE_SEARCH_FAILED
        found = leave_saddle(self.problem, self.w, state.fun, state.grad, evidence, least_fall=self._least_fall)
        return found is not None

    @property
    def _least_fall(self) -> float:
        """Leaving a saddle must gain more than the rounding of the largest value seen."""
        return 16 * torch.finfo(self.problem.dtype).eps * max(abs(row["fun"]) for row in self.rows)

    @property
    def _gtol(self) -> float:
        given = self.options.gtol
        return max(1e-8, 64 * torch.finfo(self.problem.dtype).eps) if given is None else given

    def _limit(self) -> Status | None:
        last = self.rows[-1]
        if last["step"] >= self.options.maxiter:
            return Status.MAX_ITER
        if last["n_passes"] >= self.options.max_passes:
            return Status.PASS_LIMIT
        return Status.TIME_LIMIT if last["seconds"] >= self.options.time_limit else None

    def _certify(self) -> Certificate:
        rtol = self.options.curvature_rtol
        H = self.problem.hessian(self.w, rtol / 3)
        rng = torch.Generator().manual_seed(SEED + self.options.seed * 0x10_0000 + len(self.rows))
        error, confidence = self.problem.hessian_error, self.options.confidence
        evidence = smallest_eigenvalue(H, rtol=rtol, error=error, confidence=confidence, rng=rng)
        spent = {"nhev": self.problem.nhev, "n_passes": self.problem.n_passes}
        self.rows[-1] |= {"lambda_min": evidence.lambda_min, **spent}
        return evidence

    def _record(self, state: State, began: float) -> None:
        """Add a row for the point reached; λ_min was computed where the step began and belongs one row higher."""
        self.reference = max(self.reference, state.grad_norm)
        self.seconds = time.perf_counter() - began
        lambda_min = nan
        if self.rows and not isnan(state.lambda_min):
            self.rows[-1]["lambda_min"] = state.lambda_min
        if self.rows and not state.accepted:
            lambda_min = self.rows[-1]["lambda_min"]
        self.rows.append(
            {
                "step": len(self.rows),
                "phase": state.phase,
                "fun": state.fun,
                "grad_norm": state.grad_norm,
                "lambda_min": lambda_min,
                "step_norm": state.step_norm,
                "accepted": state.accepted,
                "nhev": self.problem.nhev,
                "n_passes": self.problem.n_passes,
                "seconds": self.seconds,
            }
        )

    def _stopped(self, callback: Callback, state: State) -> bool:
        try:
            return callback(intermediate_result=self._result(state, None)) is True
        except StopIteration:
            return True

    def _result(self, state: State, status: Status | None, facts: str = "") -> OptimizeResult:
        problem, lambda_min = self.problem, self.rows[-1]["lambda_min"]
        return OptimizeResult(
            x=self.w.reshape(self.shape).clone(),
            fun=state.fun,
            jac=state.grad.reshape(self.shape).clone(),
            status=status,
            message="" if status is None else self._message(state, status, facts),
            nit=len(self.rows) - 1,
            nfev=problem.nfev,
            njev=problem.njev,
            nhev=problem.nhev,
            n_passes=problem.n_passes,
            lambda_min=lambda_min,
            certificate=self.certificate,
            rows=self.rows,
        )

    def _message(self, state: State, status: Status, facts: str) -> str:
        found = f"f = {state.fun:.6g}, gradient norm {state.grad_norm:.2e} (largest seen {self.reference:.2e})"
        evidence = self.certificate
        if evidence is None:
            found += ", curvature not tested."
        elif evidence.confidence == 1.0:
            found += f", λ_min = {evidence.lambda_min:.3e}."
        else:
            found += (
                f", {evidence.lower:.3e} ≤ λ_min ≤ {evidence.lambda_min:.3e} with {evidence.confidence:.0%} confidence."
            )
        return " ".join(part for part in (status.advice, facts, found) if part)
