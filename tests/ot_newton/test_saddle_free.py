from math import inf

import pytest
import torch

from ot_newton.eigen_step import eigen_step
from ot_newton.krylov_model import local_model
from ot_newton.minimize import METHODS, minimize
from ot_newton.operators import FunctionOperator, MatrixOperator
from ot_newton.problems import toys
from ot_newton.region import DescentState
from ot_newton.saddle_free import SaddleFree, absolute_minimiser
from ot_newton.trust_region import EigenBall


def system(seed, n=8):
    rng = torch.Generator().manual_seed(seed)
    A = torch.randn(n, n, generator=rng, dtype=torch.float64)
    return A + A.T, torch.randn(n, generator=rng, dtype=torch.float64)


def ball(H, g, *, matrix, eta=1e-12, radius=inf):
    A = FunctionOperator(tuple(H.shape), matmat=lambda V: H @ V, dtype=H.dtype, symmetric=True)
    state = DescentState(0.0, g, float(g.norm()), eta=eta, radius=radius)
    return EigenBall(local_model(MatrixOperator(H) if matrix else A, g), 0 * g, state, absolute_minimiser, False)


def test_name():
    assert METHODS["saddle-free"] is SaddleFree


@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_free_step_is_that_of_the_absolute_hessian(seed, matrix):
    H, g = system(seed)
    values, Q = torch.linalg.eigh(H)
    trial = ball(H, g, matrix=matrix).trial(inf)
    torch.testing.assert_close(trial.step, -Q @ ((Q.T @ g) / values.abs()), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("radius", [0.01, 0.5, 5.0, 100.0])
@pytest.mark.parametrize("seed", range(6))
def test_in_a_ball_the_positive_part_is_newtons_and_the_negative_part_goes_to_the_edge(seed, radius):
    H, g = system(seed)
    values, Q = torch.linalg.eigh(H)
    c = Q.T @ g
    y, held = absolute_minimiser(values, c, radius)
    inner, _ = eigen_step(values, c, floor=0.0, radius=radius)
    assert float(y.norm()) == pytest.approx(radius)
    assert held == 1.0
    torch.testing.assert_close(y[values > 0], inner[values > 0])
    assert (y[values < 0].abs() >= inner[values < 0].abs() * (1 - 1e-12)).all()
    assert (y * c <= 0).all()
    fall = -float(c @ y + 0.5 * y @ (values * y))
    assert fall >= -float(c @ inner + 0.5 * inner @ (values * inner)) > 0


def test_where_there_is_no_negative_curvature_it_is_a_trust_region():
    H, g = system(0)
    H = H @ H + torch.eye(8)
    values, Q = torch.linalg.eigh(H)
    for radius in (1e-3, 0.1, 1e3):
        y, held = absolute_minimiser(values, Q.T @ g, radius)
        expected, _ = eigen_step(values, Q.T @ g, floor=0.0, radius=radius)
        torch.testing.assert_close(y, expected)
        assert held == float(radius < 1e3)


@pytest.mark.parametrize("matrix", [False, True])
def test_it_moves_away_from_a_saddle_that_attracts_newton(matrix):
    problem, method = toys.StrictSaddle([0.5, 0.01], matrix=matrix), SaddleFree()
    w = problem.start(torch.Generator())
    moved, state = method.step(problem, w, method.init(problem, w))
    assert state.accepted
    assert float(moved[1]) > 0.015
    result = minimize(problem, method=method)
    assert result.success
    assert result.nit < 15
    assert float(result.x[1]) == pytest.approx(0.5**0.5)


def test_nothing_to_do():
    zero = torch.zeros(3).double()
    for values in (zero, torch.ones(3).double(), -torch.ones(3).double()):
        y, held = absolute_minimiser(values, zero, 1.0)
        assert torch.equal(y, zero)
        assert held == 0.0


def test_the_krylov_space_need_not_be_whole():
    problem = toys.SaddleChain(60, x0=0.3 * torch.sin(torch.arange(60).double()))
    result = minimize(problem, method=SaddleFree(max_krylov=8))
    assert result.success
    assert (result.history.nhev.diff().iloc[1:-1] <= 8).all()
