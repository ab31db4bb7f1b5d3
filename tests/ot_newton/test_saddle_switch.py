from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from ot_newton.adam import Adam
from ot_newton.certificate import Verdict
from ot_newton.galerkin import BracketedMatrix
from ot_newton.minimize import minimize
from ot_newton.newton_cg import NewtonCG
from ot_newton.problems import toys
from ot_newton.saddle_switch import ROUGH, SaddleSwitch
from ot_newton.status import Status

SLOW = Adam(lr=0.02)


def verdict(switch, problem, w, state=None):
    """What a look at w says, which is something."""
    look = switch._look(problem, w, state or switch.init(problem, w))
    assert look is not None
    return look.verdict


def phases(result):
    return list(result.history.phase[1:])


@pytest.mark.parametrize("matrix", [False, True])
def test_adam_through_the_saddle_then_newton(matrix):
    problem = toys.StrictSaddle([1.0, 1e-3], matrix=matrix)
    result = minimize(problem, method=SaddleSwitch(SLOW))
    h = result.history
    assert result.success
    assert result.fun == pytest.approx(problem.minimum, rel=1e-13)
    order = phases(result)
    switch = order.index("newton")
    assert set(order[:switch]) == {"adam"}
    assert set(order[switch:]) == {"newton"}
    assert len(order) - switch <= 6
    assert h.lambda_min[0] < 0
    # the row before the first Newton step is the point where the Hessian had become convex enough
    assert h.lambda_min[switch] >= -1e-3 * 24 or not matrix


def test_looks_are_as_rare_as_asked():
    class Recorder(toys.StrictSaddle):
        looks = 0

        def hessian(self, w, rtol=None):
            self.looks += rtol == ROUGH
            return super().hessian(w, rtol)

    for every in (1, 7):
        problem = Recorder([1.0, 0.0])
        result = minimize(
            problem, method=SaddleSwitch(SLOW, check_every=every, stationary=1e-30), options={"maxiter": 21}
        )
        assert phases(result) == ["adam"] * 21
        assert problem.looks == 21 // every
        known = result.history.lambda_min.notna()
        assert list(result.history.step[known]) == list(range(0, 21, every))


def test_a_rough_look_is_repeated_only_where_it_decides_nothing():
    class Inexact(toys.StrictSaddle):
        asked: ClassVar[list] = []

        def hessian(self, w, rtol=None):
            self.asked.append(rtol)
            self.hessian_error = rtol
            return super().hessian(w, rtol)

    switch = SaddleSwitch()
    for x, times in (([0.0, 0.0], 1), ([0.0, 0.41], 2)):  # curvatures (2, -2) and (2, 0.02)
        Inexact.asked.clear()
        problem, w = Inexact(x), torch.tensor(x, dtype=torch.float64)
        seen = verdict(switch, problem, w)
        assert tuple(Inexact.asked) == switch._accuracies[:times]
        assert seen is (Verdict.NEGATIVE if times == 1 else Verdict.NONNEGATIVE)


class AtHand(toys.StrictSaddle):
    """Has a Hessian with its bracket at hand wherever it is, and counts the times that a better one is asked for."""

    def __init__(self, x0, width):
        super().__init__(x0, matrix=True)
        self.width, self.asked = width, 0

    def hessian_at_hand(self, w):
        H = super().hessian(w).to_dense()
        reach = self.width * torch.eye(len(H), dtype=H.dtype)
        return BracketedMatrix(H, H - reach, H + reach)

    def hessian(self, w, rtol=None):
        self.asked += 1
        return super().hessian(w, rtol)


@pytest.mark.parametrize(("x", "expected"), [([0.0, 0.0], Verdict.NEGATIVE), ([0.0, 0.6], Verdict.NONNEGATIVE)])
def test_a_hessian_at_hand_that_decides_is_enough(x, expected):
    problem, w = AtHand(x, 0.1), torch.tensor(x, dtype=torch.float64)
    assert verdict(SaddleSwitch(), problem, w) is expected
    assert problem.asked == 0


def test_an_estimate_that_is_negative_can_wait():
    w, switch = torch.tensor([0.3, 0.0], dtype=torch.float64), SaddleSwitch(check_every=10)
    problem = AtHand(w.tolist(), 5.0)  # curvatures (2, -2), known to 5
    state = replace(switch.init(problem, w), since_look=10)
    assert switch._look(problem, w, state) is None
    assert problem.asked == 0
    for waited in (replace(state, since_look=30), replace(state, reference=1e6)):  # long enough; at rest
        problem.asked = 0
        assert verdict(switch, problem, w, waited) is Verdict.NEGATIVE
        assert problem.asked > 0
    problem = AtHand([0.3, 0.6], 5.0)  # curvatures (2, 2.32)
    w = torch.tensor([0.3, 0.6], dtype=torch.float64)
    assert verdict(switch, problem, w, state) is Verdict.NONNEGATIVE
    assert problem.asked > 0


def test_a_bracket_that_stays_open_changes_nothing():
    class Vague(toys.StrictSaddle):
        def hessian(self, w, rtol=None):
            self.hessian_error = 2.0
            return super().hessian(w, rtol)

    result = minimize(Vague([1.0, 0.9]), method=SaddleSwitch(SLOW, check_every=2), options={"maxiter": 30})
    assert set(phases(result)) == {"adam"}


def test_a_saddle_where_adam_rests_is_left_along_the_eigenvector():
    result = minimize(
        toys.StrictSaddle([1.0, 0.0]), method=SaddleSwitch(SLOW, stationary=0.05), options={"maxiter": 400}
    )
    assert result.success
    order = phases(result)
    assert order.count("escape") == 1
    assert order.index("escape") < order.index("newton")
    at = order.index("escape")
    h = result.history
    assert h.grad_norm[at] <= 0.05 * h.grad_norm[0]
    assert h.fun[at + 1] < h.fun[at]
    assert h.lambda_min[at] == pytest.approx(-2.0)


def test_dwell_keeps_the_methods_from_alternating():
    problem = toys.MonkeySaddle([0.3, 0.4])
    for dwell in (2, 6):
        order = phases(minimize(problem, method=SaddleSwitch(Adam(lr=0.05), check_every=1, dwell=dwell)))
        runs = [len(run) for run in "".join(p[0] for p in order).replace("an", "a n").replace("na", "n a").split()]
        assert all(run >= dwell for run in runs[1:-1])


class Border(toys.StrictSaddle):
    """Reports a Hessian that turns indefinite after some calls, as if the run had met a new saddle."""

    def __init__(self, bent, **options):
        super().__init__([0.3, 0.9], matrix=True, **options)
        self.bent, self.calls = bent, 0

    def hessian(self, w, rtol=None):
        self.calls += 1
        H = super().hessian(w, rtol)
        if self.calls in self.bent:
            return type(H)(H.matrix - 5.0 * torch.eye(2, dtype=self.dtype) * H.matrix.abs().max(), symmetric=True)
        return H


def test_goes_back_where_the_curvature_turns_negative():
    method = SaddleSwitch(SLOW, check_every=2, dwell=1)
    result = minimize(Border(bent={3}), method=method, options={"gtol": 1e-12, "maxiter": 200})
    order = phases(result)
    first = order.index("newton") if "newton" in order else 0
    assert "adam" in order[first:]
    assert result.success


def test_the_last_visit_stays():
    method = SaddleSwitch(SLOW, check_every=2, dwell=1, max_switches=1)
    result = minimize(Border(bent={3}), method=method, options={"gtol": 1e-12, "maxiter": 200})
    order = phases(result)
    assert "adam" not in order[order.index("newton") :]


def test_two_thresholds():
    # the lowest eigenvalue is −0.002 of the largest
    problem = toys.Quadratic([1.0, -0.002], x0=[0.5, 1e-6], matrix=True)
    inside = minimize(problem, method=SaddleSwitch(SLOW, enter=1e-3, check_every=1), options={"maxiter": 10})
    assert set(phases(inside)) == {"adam"}
    wider = minimize(problem, method=SaddleSwitch(SLOW, enter=3e-3, check_every=1), options={"maxiter": 10})
    assert phases(wider)[0] in ("newton", "curvature")


def test_first_step_of_the_second_method_is_of_the_size_of_adams():
    problem = toys.StrictSaddle([3.0, 1e-2])
    h = minimize(problem, method=SaddleSwitch(SLOW, check_every=3, radius_factor=2.0)).history
    at = int((h.phase == "newton").argmax())
    assert h.step_norm[at] <= 2.0 * h.step_norm[max(1, at - 20) : at].median() * (1 + 1e-6)


def test_rejected_steps_send_it_back():
    class Liar(toys.LogBarrier):
        """Newton steps of the wrong length: the Hessian is a hundredth of the true one."""

        def hessian(self, w, rtol=None):
            return 0.01 * super().hessian(w, rtol)

    result = minimize(Liar([1.5]), method=SaddleSwitch(Adam(lr=0.01), dwell=1), options={"maxiter": 60})
    order = phases(result)
    assert "newton" in order
    assert "adam" in order[order.index("newton") :]


@pytest.mark.parametrize("c", [2.0**-27, 2.0**27])
def test_scaling_the_function_changes_nothing(c):
    one, many = (minimize(toys.StrictSaddle([1.0, 0.0], scale=s), method=SaddleSwitch(Adam(lr=0.05))) for s in (1.0, c))
    assert phases(one) == phases(many)
    assert torch.equal(one.x, many.x)
    assert many.lambda_min == c * one.lambda_min


def test_methods_of_the_callers_own():
    class Steepest:
        """The least that the protocol asks for."""

        def init(self, problem, w):
            return Adam().init(problem, w)

        def step(self, problem, w, state):
            f, g = problem.value_and_grad(w - 0.1 * state.grad)
            moved = w - 0.1 * state.grad
            return moved, replace(
                state, fun=float(f), grad=g, grad_norm=float(g.norm()), phase="steepest", step_norm=1.0
            )

    result = minimize(
        toys.StrictSaddle([1.0, 0.1]), method=SaddleSwitch(escape=Steepest(), finish=Steepest(), check_every=4)
    )
    assert result.success
    assert set(phases(result)) == {"steepest"}


def test_an_escape_that_fails_is_reported():
    class WrongSign(toys.Quadratic):
        def hessian(self, w, rtol=None):
            return -1.0 * super().hessian(w, rtol)

    result = minimize(WrongSign([1.0, 2.0]), method=SaddleSwitch(Adam(lr=0.1)), options={"gtol": 1e-3})
    assert result.status is Status.LINE_SEARCH_FAILED


@pytest.mark.parametrize(
    "wrong",
    [
        {"check_every": 0},
        {"dwell": 0},
        {"max_switches": 0},
        {"max_rejected": 1.5},
        {"enter": 0.0},
        {"leave": 1e-4},
        {"stationary": 0.0},
        {"radius_factor": -1.0},
    ],
)
def test_bad_hyperparameters(wrong):
    with pytest.raises(ValueError, match="expected"):
        SaddleSwitch(**wrong)


@pytest.mark.parametrize("name", ["escape", "finish"])
@pytest.mark.parametrize("what", ["adam", None, Adam, 1])
def test_what_is_no_method(name, what):
    with pytest.raises(TypeError, match=f"expected {name} as a method with init and step, got"):
        SaddleSwitch(**{name: what})


def test_defaults_are_adam_and_newton():
    method = SaddleSwitch()
    assert isinstance(method.escape, Adam)
    assert isinstance(method.finish, NewtonCG)
