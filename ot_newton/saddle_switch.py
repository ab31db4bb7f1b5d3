"""First order until the Hessian is convex enough, then second order, with the right to go back.

The smallest eigenvalue is watched while the first method runs, and what counts is its bracket: the second one takes
over where even the lower end is above −enter ‖H‖, and hands back where the upper end is below −leave ‖H‖ or where its
steps keep being rejected. A bracket that decides nothing is tightened, twice at most, else nothing changes. Two
thresholds and a least stay keep the two from alternating at the border; a saddle where the first method has come to
rest is left along its eigenvector.
"""

from dataclasses import dataclass, field, fields, replace
from math import inf, sqrt
from statistics import median
from typing import Any

import torch

from ot_newton.adam import Adam
from ot_newton.certificate import Certificate, Verdict, smallest_eigenvalue
from ot_newton.escape import Escape, leave_saddle
from ot_newton.method import Method, State
from ot_newton.newton_cg import NewtonCG
from ot_newton.problem import Problem
from ot_newton.status import Status

ROUGH = 0.1  # relative accuracy of the Hessian of a first look
PATIENCE = 3  # intervals between two looks after which a λ_min that seems negative is made sure of
RECENT = 20  # steps of the first method whose median sizes the second method's first step


@dataclass(frozen=True)
class SwitchState(State):
    """Memory of the switch.

    Attributes:
        inner: state of the method that runs now.
        finishing: whether that is the second one.
        stay: steps since the last change of method or escape; infinite before the first.
        since_look: steps since λ_min was last computed, infinite before that.
        n_switches: times the second method has taken over.
        n_refused: trial points that it has had rejected in a row of steps that each met at least one.
        reference: largest gradient norm seen.
        recent: lengths of the last steps of the first method.
        last_escape: where the last escape from a saddle began and ended.
    """

    inner: State | None = None
    finishing: bool = False
    stay: float = inf
    since_look: float = inf
    n_switches: int = 0
    n_refused: int = 0
    reference: float = 0.0
    recent: tuple[float, ...] = ()
    last_escape: Escape | None = None


@dataclass(frozen=True)
class SaddleSwitch:
    """Adam through the saddles, Newton to the minimiser; a method made of two.

    Args:
        escape: the first method.
        finish: the second method. If its state has a `radius` the first step is kept within `radius_factor` times the
            median of the first method's recent steps.
        check_every: least number of steps of the first method between two looks at λ_min.
        enter: the second method takes over where the lower bound of λ_min is at least −enter ‖H‖.
        leave: it hands back where an upper bound of λ_min is below −leave ‖H‖; 4·enter if None.
        dwell: least number of steps before the next change of method.
        max_switches: how often the second method may take over; the last time it stays.
        max_rejected: it also hands back after so many rejected trial points in consecutive steps.
        stationary: the first method is at rest where the gradient is below this part of the largest one seen; if λ_min
            is negative there, the saddle is left along the eigenvector.
        radius_factor: see `finish`.

    Raises:
        TypeError: one of the two is no method.
        ValueError: a hyperparameter outside its range.

    Example:

        >>> from ot_newton.minimize import minimize
        >>> saddle = lambda x: x[0] ** 2 - x[1] ** 2 + x[1] ** 4
        >>> result = minimize(saddle, [1.0, 0.1], method=SaddleSwitch(Adam(lr=0.1)))
        >>> sorted(set(result.history.phase))
        ['adam', 'newton', 'start']
    """

    escape: Method[Any] = field(default_factory=Adam)
    finish: Method[Any] = field(default_factory=NewtonCG)
    check_every: int = 10
    enter: float = 1e-3
    leave: float | None = None
    dwell: int = 5
    max_switches: int = 5
    max_rejected: int = 3
    stationary: float = 1e-3
    radius_factor: float = 10.0

    def __post_init__(self) -> None:
        for name in ("escape", "finish"):
            method = getattr(self, name)
            if isinstance(method, type) or not (hasattr(method, "init") and hasattr(method, "step")):
                raise TypeError(f"expected {name} as a method with init and step, got {method!r}")
        for name in ("check_every", "dwell", "max_switches", "max_rejected"):
            if not (isinstance(getattr(self, name), int) and getattr(self, name) >= 1):
                raise ValueError(f"expected {name} as an integer ≥ 1, got {getattr(self, name)}")
        if not 0 < self.enter < 1:
            raise ValueError(f"expected 0 < enter < 1, got {self.enter}")
        if not self.enter <= self._leave < 1:
            raise ValueError(f"expected enter ≤ leave < 1, got enter={self.enter} and leave={self._leave}")
        for name in ("stationary", "radius_factor"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected {name} > 0, got {getattr(self, name)}")

    @property
    def _leave(self) -> float:
        return min(4 * self.enter, 0.5) if self.leave is None else self.leave

    def init(self, problem: Problem, w: torch.Tensor) -> SwitchState:
        """Start the first method."""
        inner = self.escape.init(problem, w)
        return _outer(SwitchState(inner.fun, inner.grad, inner.grad_norm), inner)

    def step(self, problem: Problem, w: torch.Tensor, state: SwitchState) -> tuple[torch.Tensor, SwitchState]:
        """A step of the method in charge, or an escape; before that the change of method, if it is due."""
        if state.finishing:
            return self._finish(problem, w, state)
        look = self._look(problem, w, state) if state.since_look >= self.check_every else None
        if look is not None:
            state = replace(state, since_look=0)
            if state.stay >= self.dwell:
                if look.lower >= -look.tolerance:
                    return self._finish(problem, w, self._take_over(problem, w, state))
                if look.verdict is Verdict.NEGATIVE and self._at_rest(state):
                    moved, after = self.escape_saddle(problem, w, state, look)
                    if after.accepted:
                        return moved, after
        w, inner = self.escape.step(problem, w, state.inner)
        if look is not None:
            inner = replace(inner, lambda_min=look.lambda_min, scale=look.scale)
        recent = (*state.recent, inner.step_norm)[-RECENT:]
        return w, _outer(replace(state, recent=recent, since_look=state.since_look + 1), inner)

    def escape_saddle(
        self, problem: Problem, w: torch.Tensor, state: SwitchState, curvature: Certificate, least_fall: float = 0.0
    ) -> tuple[torch.Tensor, SwitchState]:
        """Leave a stationary point along the eigenvector and start the first method afresh there."""
        found = leave_saddle(problem, w, state.fun, state.grad, curvature, state.last_escape, least_fall)
        if found is None:
            status = Status.LINE_SEARCH_FAILED
            return w, replace(state, phase="escape", step_norm=0.0, accepted=False, status=status)
        inner = self.escape.init(problem, found.point)
        seen = {"lambda_min": curvature.lambda_min, "scale": curvature.scale}
        inner = replace(inner, phase="escape", step_norm=found.length, **seen)
        state = replace(state, finishing=False, stay=-1, since_look=0, n_refused=0, last_escape=found)
        return found.point, _outer(state, inner)

    def _at_rest(self, state: SwitchState) -> bool:
        return state.grad_norm <= self.stationary * state.reference

    def _look(self, problem: Problem, w: torch.Tensor, state: SwitchState) -> Certificate | None:
        """λ_min by a Hessian that may have come with the gradient, and by tighter ones while undecided.

        None while that first one makes λ_min negative: what it costs to be sure is better spent where it is not, at the
        next step or, since such a Hessian lies below, after several times the usual interval.
        """
        known = problem.hessian_at_hand(w)
        if known is not None:
            seen = smallest_eigenvalue(known, rtol=self.enter, error=problem.hessian_error)
            if seen.verdict is not Verdict.UNDECIDED:
                return seen
            waiting = state.since_look < PATIENCE * self.check_every and not self._at_rest(state)
            if seen.lambda_min < -seen.tolerance and waiting:
                return None
        rough, *finer = self._accuracies
        H = problem.hessian(w, rough)
        seen = smallest_eigenvalue(H, rtol=self.enter, error=problem.hessian_error)
        for rtol in finer:
            if seen.verdict is not Verdict.UNDECIDED or problem.hessian_error <= finer[-1]:
                break
            H = problem.hessian(w, rtol)
            seen = smallest_eigenvalue(H, rtol=self.enter, error=problem.hessian_error)
        return seen

    @property
    def _accuracies(self) -> tuple[float, float, float]:
        """Of the Hessians of a look, relative: the last one resolves the threshold."""
        finest = min(self.enter / 3, ROUGH)
        return ROUGH, sqrt(ROUGH * finest), finest

    def _take_over(self, problem: Problem, w: torch.Tensor, state: SwitchState) -> SwitchState:
        """Start the second method, with a first step of the size that the first one has shown to be safe."""
        inner = self.finish.init(problem, w)
        if state.recent and any(f.name == "radius" for f in fields(inner)):
            inner = replace(inner, radius=self.radius_factor * median(state.recent))
        return replace(
            state, inner=inner, finishing=True, stay=0, n_switches=state.n_switches + 1, n_refused=0, recent=()
        )

    def _finish(self, problem: Problem, w: torch.Tensor, state: SwitchState) -> tuple[torch.Tensor, SwitchState]:
        """A step of the second method; go back to the first one if it was not the right time."""
        w, inner = self.finish.step(problem, w, state.inner)
        refused = state.n_refused + inner.n_rejected if inner.n_rejected else 0
        state = _outer(replace(state, n_refused=refused), inner)
        if state.n_switches >= self.max_switches:
            return w, state
        failed = inner.status is Status.LINE_SEARCH_FAILED
        bent = inner.lambda_bound < -self._leave * inner.scale
        if failed or (state.stay >= self.dwell and (bent or refused >= self.max_rejected)):
            back = replace(self.escape.init(problem, w), phase=inner.phase, **_evidence(inner))
            state = _outer(replace(state, finishing=False, stay=-1, since_look=0), back)
        return w, state


def _evidence(inner: State) -> dict[str, Any]:
    names = ("lambda_min", "scale", "lambda_bound", "step_norm", "accepted", "n_rejected")
    return {name: getattr(inner, name) for name in names}


def _outer(state: SwitchState, inner: State) -> SwitchState:
    """The switch's state around the state of the method in charge."""
    return replace(
        state,
        fun=inner.fun,
        grad=inner.grad,
        grad_norm=inner.grad_norm,
        grad_floor=inner.grad_floor,
        phase=inner.phase,
        status=inner.status,
        inner=inner,
        stay=state.stay + 1,
        reference=max(state.reference, inner.grad_norm),
        **_evidence(inner),
    )
