from math import inf

import pytest
import scipy.optimize
import torch

from ot_newton.krylov_model import local_model
from ot_newton.minimize import METHODS, minimize
from ot_newton.operators import FunctionOperator, MatrixOperator
from ot_newton.problem import FunctionProblem
from ot_newton.problems import toys
from ot_newton.region import DescentState
from ot_newton.secular import ball_minimiser
from ot_newton.steihaug import SteihaugPath
from ot_newton.trust_region import EigenBall, PathBall, TrustNCG, TrustRegion


def by_products(H):
    return FunctionOperator(tuple(H.shape), matmat=lambda V: H @ V, dtype=H.dtype, symmetric=True)


def balls(H, g, *, radius=inf, eta=1e-8):
    """The two kinds of region around one model, at the point (1, …, 1)."""
    state = DescentState(0.0, g, float(g.norm()), eta=eta, radius=radius)
    w = torch.ones_like(g)
    yield EigenBall(local_model(by_products(H), g), w, state, ball_minimiser, False)
    yield EigenBall(local_model(MatrixOperator(H), g), w, state, ball_minimiser, False)
    yield PathBall(SteihaugPath(by_products(H), g, rtol=eta), w, state)


def indefinite(seed, n=10):
    rng = torch.Generator().manual_seed(seed)
    A = torch.randn(n, n, generator=rng, dtype=torch.float64)
    return A + A.T, torch.randn(n, generator=rng, dtype=torch.float64)


def test_names():
    assert METHODS["trust-krylov"]() == TrustRegion(solver="krylov")
    assert METHODS["trust-ncg"]().solver == "cg"
    with pytest.raises(ValueError, match="expected solver as one of krylov, cg, got 'lu'"):
        TrustRegion(solver="lu")
    result = minimize(toys.Rosenbrock(), method="trust-krylov", options={"radius": 0.1, "hard_case": True})
    assert result.success


@pytest.mark.parametrize("radius", [1e-3, 1.0, 30.0, inf])
@pytest.mark.parametrize("seed", range(6))
def test_steps_descend_along_negative_curvature_and_stay_in_the_ball(seed, radius):
    H, g = indefinite(seed)
    for ball in balls(H, g, radius=radius):
        trial = ball.trial(ball.size)
        s = trial.step
        assert ball.finite
        assert trial.held
        assert trial.length == pytest.approx(float(s.norm()))
        assert trial.length <= radius * (1 + 1e-10)
        assert trial.length == pytest.approx(radius) or radius == inf
        assert float(g @ s) < 0
        assert trial.promised == pytest.approx(-float(g @ s + 0.5 * s @ (H @ s)), rel=1e-8)
        assert trial.promised > 0
        if radius == 30:
            assert float(s @ (H @ s)) < 0


@pytest.mark.parametrize("seed", range(4))
def test_an_infinite_radius_becomes_the_scale_of_the_model(seed):
    H, g = indefinite(seed)
    values, Q = torch.linalg.eigh(H)
    natural = float((Q.T @ g / values).norm())
    for c in (1e-6, 1.0, 1e6):
        eigen, exact, _ = balls(c * H, c * g)
        assert exact.trial(inf).length == pytest.approx(natural)
        assert eigen.trial(inf).length == pytest.approx(natural, rel=1e-4)


def test_a_definite_model_is_not_held_back():
    H, g = indefinite(0)
    H = H @ H + torch.eye(10)
    for ball in balls(H, g):
        trial = ball.trial(ball.size)
        assert not trial.held
        torch.testing.assert_close(trial.step, -torch.linalg.solve(H, g), rtol=1e-6, atol=1e-9)


def test_the_radius_follows_the_models():
    H, g = indefinite(1)
    (ball, *_) = balls(H, g)
    state = DescentState(0.0, g, 1.0, radius=2.0)
    held, free = ball.trial(2.0), ball.trial(2.0)
    free = type(free)(free.step, 0.5, free.promised, held=False)
    assert ball.remember(state, 2.0, held, 1.0, 0.9, False).radius == pytest.approx(6.0)
    assert ball.remember(state, 2.0, held, 1.0, 0.9, True).radius == pytest.approx(2.0)
    assert ball.remember(state, 2.0, held, 1.0, 0.5, False).radius == pytest.approx(2.0)
    assert ball.remember(state, 2.0, held, 1.0, 0.2, False).radius == pytest.approx(1.0)
    assert ball.remember(state, 2.0, free, 1.0, 0.9, False).radius == 2.0
    assert ball.remember(state, inf, free, 1.0, 0.9, False).radius == inf
    assert ball.remember(state, 2.0, free, 1.0, 0.1, False).radius == 0.25


@pytest.mark.parametrize("solver", ["krylov", "cg"])
def test_the_first_trial_is_no_longer_than_the_radius_and_three_times_as_long_if_that_was_excellent(solver):
    lengths = []

    class Watched(toys.Rosenbrock):
        def value(self, w):
            lengths.append(float(torch.dist(w, self._start)))
            return super().value(w)

    problem, method = Watched(), TrustRegion(radius=1e-2, solver=solver)
    w = problem.start(torch.Generator())
    state = method.init(problem, w)
    lengths.clear()
    method.step(problem, w, state)
    assert lengths[:3] == pytest.approx([0.01, 0.03, 0.09])


@pytest.mark.parametrize("hard_case", [False, True])
def test_the_hard_case_leaves_a_stable_manifold_at_once(hard_case):
    problem = toys.StrictSaddle([1.0, 0.0])
    w = problem.start(torch.Generator())
    method = TrustRegion(hard_case=hard_case)
    moved, _ = method.step(problem, w, method.init(problem, w))
    assert (float(moved[1]) != 0) == hard_case
    assert minimize(problem, method=method).success


def test_a_matrix_is_solved_exactly_whatever_the_solver():
    problem = toys.SaddleChain(5, x0=[0.1, -0.2, 0.3, 0.05, 0.4], matrix=True)
    ends = [minimize(problem, method=method, options={"maxiter": 4}).x for method in (TrustRegion(), TrustNCG())]
    assert torch.equal(*ends)


@pytest.mark.parametrize("solver", ["krylov", "cg"])
def test_rejections_cost_no_products(solver):
    h = minimize(toys.Rosenbrock(), method=TrustRegion(solver=solver)).history
    assert (h.nhev.diff().iloc[1:-1] <= 2).all()  # n = 2 products build any model


@pytest.mark.parametrize("method", ["trust-ncg", "trust-krylov", "arc", "saddle-free"])
def test_end_points_and_products_against_scipy(method):
    cases = [
        (lambda x: (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum(), [-1.2, 1.0]),
        (lambda x: (x[0] ** 2 + x[1] - 11) ** 2 + (x[0] + x[1] ** 2 - 7) ** 2, [1.0, 1.0]),
        (lambda x: ((x - torch.arange(5)) ** 4).sum() + x @ x, [3.0, -1.0, 2.0, 0.5, 1.0]),
    ]
    ours, theirs = 0, []
    for fun, x0 in cases:
        start = torch.tensor(x0, dtype=torch.float64)
        problem = FunctionProblem(fun, start)
        result = minimize(problem, method=method)
        assert result.success
        ours += result.nhev
        counts = []
        for name in ("trust-ncg", "trust-krylov", "newton-cg"):
            calls = []

            def product(x, v, problem=problem, calls=calls):
                calls.append(1)
                return (problem.hessian(torch.tensor(x)) @ torch.tensor(v).reshape(-1)).numpy()

            found = scipy.optimize.minimize(
                lambda x, problem=problem: float(problem.value(torch.tensor(x))),
                start.numpy(),
                jac=lambda x, problem=problem: problem.value_and_grad(torch.tensor(x))[1].numpy(),
                hessp=product,
                method=name,
                options={"xtol" if name == "newton-cg" else "gtol": 1e-8},
            )
            assert result.fun <= found.fun + 1e-8
            counts.append(len(calls))
        theirs.append(counts)
    assert ours <= 1.2 * torch.tensor(theirs).sum(0).min()
