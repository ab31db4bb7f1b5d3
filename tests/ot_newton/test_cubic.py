from math import inf

import pytest
import torch

from ot_newton.cubic import Cubic, CubicRegion
from ot_newton.krylov_model import local_model
from ot_newton.minimize import METHODS, minimize
from ot_newton.operators import FunctionOperator, MatrixOperator
from ot_newton.problems import toys
from ot_newton.region import DescentState, Trial


def region(H, g, *, matrix=True, sigma=0.0, radius=inf):
    A = FunctionOperator(tuple(H.shape), matmat=lambda V: H @ V, dtype=H.dtype, symmetric=True)
    state = DescentState(0.0, g, float(g.norm()), eta=1e-10, radius=radius, sigma=sigma)
    return CubicRegion(local_model(MatrixOperator(H) if matrix else A, g), torch.ones_like(g), state, False)


def system(seed, definite=False, n=8):
    rng = torch.Generator().manual_seed(seed)
    A = torch.randn(n, n, generator=rng, dtype=torch.float64)
    H = A @ A.T + torch.eye(n) if definite else A + A.T
    return H, torch.randn(n, generator=rng, dtype=torch.float64)


def test_name():
    assert METHODS["arc"] is Cubic


@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("sigma", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("seed", range(5))
def test_the_step_minimises_the_cubic(seed, sigma, matrix):
    H, g = system(seed)
    trial = region(H, g, matrix=matrix).trial(sigma)
    s = trial.step
    mu = sigma * float(s.norm())
    torch.testing.assert_close(H @ s + mu * s, -g, rtol=0, atol=1e-7 * float(g.norm()))
    assert mu >= -float(torch.linalg.eigvalsh(H)[0]) * (1 - 1e-9)
    assert trial.multiplier == pytest.approx(mu)
    assert trial.promised >= sigma / 3 * trial.length**3 * (1 - 1e-9)

    def cubic(t):
        return float(g @ t + 0.5 * t @ (H @ t) + sigma / 3 * t.norm() ** 3)

    rng = torch.Generator().manual_seed(9)
    for _ in range(20):
        other = s + 0.3 * trial.length * torch.randn(len(g), generator=rng, dtype=torch.float64)
        assert cubic(other) >= cubic(s)


def test_without_a_weight_a_definite_model_gives_newtons_step():
    H, g = system(0, definite=True)
    for matrix in (False, True):
        trial = region(H, g, matrix=matrix).trial(0.0)
        assert not trial.held
        torch.testing.assert_close(trial.step, -torch.linalg.solve(H, g), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("radius", [0.1, inf])
def test_without_a_weight_an_indefinite_model_finds_its_own(radius):
    H, g = system(1)
    around = region(H, g, radius=radius)
    trial = around.trial(0.0)
    assert trial.held
    assert trial.length == pytest.approx(0.1) or radius == inf
    again = around.trial(trial.multiplier / trial.length)
    torch.testing.assert_close(again.step, trial.step, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_a_rejection_shortens_the_step_as_asked(seed):
    H, g = system(seed)
    around = region(H, g)
    trial = around.trial(0.1)
    for part in (0.1, 0.5):
        sigma = around.shorter(0.1, trial, part * trial.length)
        assert sigma >= 0.2
        assert around.trial(sigma).length <= part * trial.length * (1 + 1e-8)
    assert around.trial(around.longer(0.1, trial)).length > trial.length


def test_the_weight_follows_the_error_of_the_model():
    H, g = system(2)
    around, state = region(H, g), DescentState(0.0, g, 1.0, radius=3.0, sigma=2.0)
    trial = Trial(g, 2.0, promised=8.0, held=True, multiplier=4.0)  # σ = 2; 3 |8 − fall| / 8

    def after(fall, ratio, tried=False):
        return around.remember(state, 2.0, trial, fall, ratio, tried)

    assert after(7.0, 0.9).sigma == pytest.approx(0.375)
    assert after(8.0, 1.0).sigma == pytest.approx(0.2)
    assert after(9.0, 1.1).sigma == pytest.approx(0.375)
    assert after(7.0, 0.9, tried=True).sigma == 2.0
    assert after(4.0, 0.5).sigma == 2.0
    assert after(-8.0, 0.2).sigma == pytest.approx(6.0)
    assert after(0.0, 0.2).sigma == pytest.approx(4.0)
    assert after(-800.0, 0.2).sigma == pytest.approx(20.0)
    assert after(7.0, 0.9).radius == inf


def test_a_quadratic_needs_no_weight():
    problem, method = toys.Quadratic([1.0, 2.0, 5.0], seed=0), Cubic(eta_max=1e-8, eta_min=1e-8)
    w = problem.start(torch.Generator())
    w, state = method.step(problem, w, method.init(problem, w))
    assert state.sigma == 0
    assert float(w.norm()) < 1e-7


@pytest.mark.parametrize("hard_case", [False, True])
def test_the_hard_case_leaves_a_stable_manifold_at_once(hard_case):
    problem, method = toys.StrictSaddle([1.0, 0.0]), Cubic(hard_case=hard_case)
    w = problem.start(torch.Generator())
    moved, _ = method.step(problem, w, method.init(problem, w))
    assert (float(moved[1]) != 0) == hard_case
    assert minimize(problem, method=method).success


@pytest.mark.parametrize("value", ["yes", None, 2, 0.5])
def test_bad_hyperparameters(value):
    with pytest.raises(ValueError, match="expected hard_case as True or False, got"):
        Cubic(hard_case=value)
    with pytest.raises(ValueError, match="expected radius > 0"):
        Cubic(radius=-1.0)
