"""One minimisation from its start, or from a checkpoint, to a status: what `minimize` does once its arguments are read.

A small gradient alone proves nothing: every saddle has one. Where the gradient is within tolerance the smallest
eigenvalue of the Hessian is asked for, and only a minimiser in the second order is called a success.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, is_dataclass
from math import inf, isfinite, isnan, nan
from pathlib import Path
from typing import Any

import torch

from ot_newton.certificate import SEED, Certificate, Verdict, smallest_eigenvalue
from ot_newton.checkpoint import Checkpoint, Resumable
from ot_newton.counting import CountedProblem
from ot_newton.escape import leave_saddle
from ot_newton.method import Escaping, Method, State
from ot_newton.pairs import Passes
from ot_newton.result import OptimizeResult
from ot_newton.status import Status

Callback = Callable[..., Any]
COUNTS = ("nfev", "njev", "nhev")
STORED = ("start", "w", "reference", "seconds", "certificate", "rows")
LIMITS = (Status.MAX_ITER, Status.PASS_LIMIT, Status.TIME_LIMIT)
CURVATURE = ("lambda_min", "lambda_lower", "lambda_upper")
SAME_VALUE = 1e-3  # relative difference of two values of f at one point, computed to other accuracies


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
        checkpoint_every: steps between two checkpoints, if there is a file for them.

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
    checkpoint_every: int = 10

    def __post_init__(self) -> None:
        if not isinstance(self.maxiter, int) or self.maxiter < 0:
            raise ValueError(f"expected maxiter as an integer ≥ 0, got {self.maxiter}")
        if not isinstance(self.checkpoint_every, int) or self.checkpoint_every < 1:
            raise ValueError(f"expected checkpoint_every as an integer ≥ 1, got {self.checkpoint_every}")
        for name in ("gtol", "gtol_abs", "time_limit", "max_passes"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"expected {name} ≥ 0, got {value}")
        for name in ("curvature_rtol", "confidence"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"expected 0 < {name} < 1, got {getattr(self, name)}")


@dataclass
class Run:
    """One minimisation. All that changes is here and in the method's state, so that it can be stored between two steps.

    Args:
        problem, method, options: what is minimised, how, and until when.
        shape: of the point as the caller sees it.
        start: the starting point (size,).
    """

    problem: CountedProblem
    method: Method[Any]
    options: Options
    shape: tuple[int, ...]
    start: torch.Tensor
    w: torch.Tensor = field(init=False)
    reference: float = 0.0
    seconds: float = 0.0
    certificate: Certificate | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    counts_before: dict[str, Any] = field(default_factory=dict)

    def to_the_end(self, callback: Callback | None = None, path: Path | None = None) -> OptimizeResult:
        """Step until there is a status; begin where the checkpoint at `path` ends, if there is one."""
        file = None if path is None else Checkpoint(path, self._owner, self.problem.device)
        stored = None if file is None else file.read()
        if stored is None:
            began = time.perf_counter()
            self.w = self.start
            state: State = self.method.init(self.problem, self.w)
            self._record(state, began)
            self._store(file, state)
        else:
            state = self._restore(stored, path)
            began = time.perf_counter() - self.seconds
        while True:
            status, facts = self._judge(state)
            if status is not None:
                if status in LIMITS:  # a later run may have others
                    self._store(file, state)
                return self._result(state, status, facts)
            state = self._advance(state)
            self._record(state, began)
            if self.rows[-1]["step"] % self.options.checkpoint_every == 0:
                self._store(file, state)
            if callback is not None and self._stopped(callback, state):
                self._store(file, state)
                return self._result(state, Status.STOPPED)

    def _advance(self, state: State) -> State:
        """A step of the method, or its escape where a negative eigenvalue is known."""
        if self.certificate is not None and isinstance(self.method, Escaping):
            w, state = self.method.escape_saddle(self.problem, self.w, state, self.certificate, self._least_fall)
        else:
            w, state = self.method.step(self.problem, self.w, state)
        self._note(state)
        if state.accepted:
            self.w, self.certificate = w, None
        return state

    def _judge(self, state: State) -> tuple[Status | None, str]:
        """The status if the run is over, and what else there is to say; (None, "") if it goes on."""
        if state.status is Status.NONFINITE or not (isfinite(state.fun) and isfinite(state.grad_norm)):
            return Status.NONFINITE, ""
        stationary = state.grad_norm <= max(self.options.gtol_abs, self._gtol * self.reference)
        rounded = state.grad_norm <= state.grad_floor
        over = self._limit()
        if not (stationary or rounded) and state.status is not Status.STALLED and self.certificate is None:
            return state.status or over, ""

        evidence = self.certificate = self.certificate or self._certify()
        if isnan(evidence.lambda_min):
            return Status.NONFINITE, "The Hessian is not finite."
        rest = Status.CONVERGED if stationary else Status.STALLED
        if evidence.verdict is Verdict.NONNEGATIVE:
            if evidence.lambda_min <= evidence.noise:
                return rest, "The Hessian is singular here: a degenerate saddle cannot be excluded."
            return rest, self._floor(state) if rounded and not stationary else ""
        if evidence.verdict is Verdict.UNDECIDED:
            return Status.UNDECIDED, ""
        if self._escapable(state, evidence):
            if over is None and isinstance(self.method, Escaping):
                return None, ""
            return Status.SADDLE, ""
        if evidence.relative >= -self.options.curvature_rtol:
            return rest, "f does not fall along the eigenvector by more than its noise."
        return Status.LINE_SEARCH_FAILED, "The negative eigenvalue is inconsistent with f, which rises both ways."

    def _floor(self, state: State) -> str:
        dtype = str(self.problem.dtype).removeprefix("torch.")
        return (
            f"The gradient, {state.grad_norm:.1e}, is at the floor of {dtype}: rounding the point changes it by "
            f"{state.grad_floor:.1e}."
        )

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
        self.rows[-1] |= _curvature(evidence) | self._spent
        return evidence

    @property
    def _counts(self) -> dict[str, Any]:
        """What has been asked of the problem, before a checkpoint and since."""
        before = self.counts_before
        counts = {name: before.get(name, 0) + getattr(self.problem, name) for name in COUNTS}
        return counts | {"passes": before.get("passes", Passes()) + self.problem.passes}

    @property
    def _spent(self) -> dict[str, int]:
        """What a row says of it."""
        counts = self._counts
        passes = counts["passes"]
        return {"nhev": counts["nhev"], "n_passes": passes.total, **asdict(passes)}

    def _record(self, state: State, began: float) -> None:
        """Add a row for the point reached, with λ_min where the gradient brought a Hessian along."""
        self.reference = max(self.reference, state.grad_norm)
        self.seconds = time.perf_counter() - began
        curvature = dict.fromkeys(CURVATURE, nan) | self._at_hand()
        if self.rows and not state.accepted:
            curvature = {name: self.rows[-1][name] for name in CURVATURE}
        self.rows.append(
            {
                "step": len(self.rows),
                "phase": state.phase,
                "fun": state.fun,
                "grad_norm": state.grad_norm,
                **curvature,
                "step_norm": state.step_norm,
                "accepted": state.accepted,
                **self._spent,
                "seconds": self.seconds,
            }
        )

    def _note(self, state: State) -> None:
        """Complete the last row: λ_min was computed where the step began."""
        if not isnan(state.lambda_min):
            self.rows[-1]["lambda_min"] = state.lambda_min
        self.rows[-1] |= self._at_hand()

    def _at_hand(self) -> dict[str, float]:
        """λ_min and its bracket at the present point, where they cost no pass."""
        H = self.problem.hessian_at_hand(self.w)
        if H is None:
            return {}
        evidence = smallest_eigenvalue(H, rtol=self.options.curvature_rtol, error=self.problem.hessian_error)
        return _curvature(evidence)

    def _stopped(self, callback: Callback, state: State) -> bool:
        try:
            return callback(intermediate_result=self._result(state, None)) is True
        except StopIteration:
            return True

    def _result(self, state: State, status: Status | None, facts: str = "") -> OptimizeResult:
        return OptimizeResult(
            x=self.w.reshape(self.shape).clone(),
            fun=state.fun,
            jac=state.grad.reshape(self.shape).clone(),
            status=status,
            message="" if status is None else self._message(state, status, facts),
            nit=len(self.rows) - 1,
            **self._counts,
            lambda_min=self.rows[-1]["lambda_min"],
            certificate=self.certificate,
            rows=self.rows,
        )

    def _message(self, state: State, status: Status, facts: str) -> str:
        found = f"f = {state.fun:.6g}, gradient norm {state.grad_norm:.2e} (largest seen {self.reference:.2e})"
        evidence = self.certificate
        if evidence is None:
            found += ", curvature not tested."
        elif evidence.confidence == 1.0:
            found += f", λ_min = {evidence.lambda_min:.3e} in [{evidence.lower:.3e}, {evidence.upper:.3e}]."
        else:
            found += f", {evidence.lower:.3e} ≤ λ_min ≤ {evidence.upper:.3e} with {evidence.confidence:.0%} confidence."
        return " ".join(part for part in (status.advice, facts, found) if part)

    @property
    def _owner(self) -> dict[str, Any]:
        """What a checkpoint must agree with; the limits of a run are no part of it."""
        problem, options = self.problem, self.options
        method = repr(self.method) if is_dataclass(self.method) else type(self.method).__qualname__
        return {
            "problem": type(problem.inner).__qualname__,
            "shape": self.shape,
            "dtype": str(problem.dtype),
            "device": problem.device.type,
            "method": method,
            **{name: getattr(options, name) for name in ("gtol", "gtol_abs", "curvature_rtol", "confidence", "seed")},
        }

    def _store(self, file: Checkpoint | None, state: State) -> None:
        if file is None:
            return
        inner = self.problem.inner
        content = {name: getattr(self, name) for name in STORED}
        kept = dict(inner.state()) if isinstance(inner, Resumable) else None
        file.write(content | {"counts": self._counts, "state": state, "kept": kept, "error": inner.value_error})

    def _restore(self, stored: dict[str, Any], path: Path | None) -> State:
        """Continue from what `_store` wrote; a checkpoint of another start or function is refused."""
        if not torch.equal(stored["start"], self.start):
            raise ValueError(f"expected the checkpoint of a run from this x0, got one from another x0: {path}")
        inner, state = self.problem.inner, stored["state"]
        fun = float(inner.value(stored["w"]))
        largest = max(abs(row["fun"]) for row in stored["rows"])
        allowed = SAME_VALUE * largest + 10 * (stored["error"] + inner.value_error)
        if abs(fun - state.fun) > allowed:
            there = f"f = {fun:.9g} at its point, got {state.fun:.9g}"
            raise ValueError(f"expected the checkpoint of this function, {there}: {path}")
        if isinstance(inner, Resumable):
            inner.restore(stored["kept"])
        for name in STORED:
            setattr(self, name, stored[name])
        self.counts_before = stored["counts"]
        self.problem = CountedProblem(inner)  # which does not count what this took
        return state


def _curvature(evidence: Certificate) -> dict[str, float]:
    return dict(zip(CURVATURE, (evidence.lambda_min, evidence.lower, evidence.upper), strict=True))
