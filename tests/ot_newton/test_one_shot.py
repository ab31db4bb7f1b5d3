import pytest
import torch
from referee import Referee

from ot_newton.linear_model import linear_model_grad, linear_model_hessian
from ot_newton.one_shot import one_shot
from ot_newton.pairs import Pairs
from ot_newton.sinkhorn import solve

EPS = 0.5


def model(n=90, m=70, p=3, q=2, seed=0):
    """Sources X, targets Y, weights and a map W."""
    rng = torch.Generator().manual_seed(seed)
    X, Y = (torch.randn(k, d, generator=rng, dtype=torch.float64) for k, d in ((n, p), (m, q)))
    a, b = (0.5 + torch.rand(k, generator=rng, dtype=torch.float64) for k in (n, m))
    W = torch.randn(p, q, generator=rng, dtype=torch.float64) / p**0.5
    return X, Y, a / a.sum(), b / b.sum(), W


def exact(X, Y, a, b, W, scale=1.0):
    plan = solve(X @ W, Y, EPS, a=a, b=b, scale=scale, tol=1e-12)
    return plan, linear_model_grad(plan, X), linear_model_hessian(plan, X, rtol=1e-10).matrix


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_at_converged_potentials_it_is_exact(scale):
    X, Y, a, b, W = model()
    plan, grad, H = exact(X, Y, a, b, W, scale)
    shot = one_shot(Pairs.of(X @ W, Y, a, b, EPS, scale), X, plan.g, rtol=1e-10, max_iter=40)
    referee = Referee(X @ W, Y, EPS, a=a, b=b, scale=scale)
    assert abs(float(shot.value) - float(referee.value)) < 1e-10
    torch.testing.assert_close(shot.grad, X.T @ referee.grad_x, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(shot.grad, grad, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(shot.matrix, H, rtol=1e-7, atol=1e-9)


def test_value_and_gradient_are_right_to_second_order_in_the_error():
    X, Y, a, b, W = model()
    plan, grad, _ = exact(X, Y, a, b, W)
    bump = torch.randn(len(Y), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for t in (1e-1, 1e-2):
        shot = one_shot(Pairs.of(X @ W, Y, a, b, EPS), X, plan.g + EPS * t * bump, coarse=1.0, rtol=1e-8, max_iter=40)
        found.append((shot.error, abs(float(shot.value - plan.value())), float((shot.grad - grad).norm())))
    (error, value, slope), (less_error, less_value, less_slope) = found
    assert error > 0.02
    assert less_error < 0.2 * error
    assert value < error**2
    assert slope < 10 * error**2
    assert less_value < 0.03 * value
    assert less_slope < 0.03 * slope


def test_the_unfinished_hessian_lies_below():
    X, Y, a, b, W = model(200, 180)
    plan, _, H = exact(X, Y, a, b, W)
    for steps in (1, 2, 3):
        shot = one_shot(Pairs.of(X @ W, Y, a, b, EPS), X, plan.g, rtol=1e-30, max_iter=steps)
        assert float(torch.linalg.eigvalsh(H - shot.matrix)[0]) > -1e-9


def test_the_response_predicts_the_next_potentials():
    X, Y, a, b, W = model()
    plan = solve(X @ W, Y, EPS, a=a, b=b, tol=1e-12)
    shot = one_shot(Pairs.of(X @ W, Y, a, b, EPS), X, plan.g, rtol=1e-8, max_iter=40)
    step = 1e-3 * torch.randn(W.numel(), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    there = solve(X @ (W + step.view_as(W)), Y, EPS, a=a, b=b, tol=1e-12)
    for predicted, stale, true, weights in (
        (shot.g + EPS * shot.dpsi @ step, plan.g, there.g, b),
        (shot.f + EPS * shot.dphi @ step, plan.f, there.f, a),
    ):
        far, near = ((v - true) - weights @ (v - true) for v in (stale, predicted))
        assert float(near.norm()) < 0.02 * float(far.norm())


def test_poor_potentials_are_improved_first():
    X, Y, a, b, W = model()
    shot = one_shot(Pairs.of(X @ W, Y, a, b, EPS), X, torch.zeros(len(Y), dtype=torch.float64), coarse=1e-3)
    assert shot.error <= 1e-3
    assert float(shot.value) == pytest.approx(float(exact(X, Y, a, b, W)[0].value()), abs=1e-5)


def test_where_the_second_order_matters_the_gradient_is_asked_again(monkeypatch):
    """The gradient is then right to the second order of a smaller error, at passes that other points do not take."""
    X, Y, a, b, W = model()
    plan, grad, _ = exact(X, Y, a, b, W)
    bump = torch.randn(len(Y), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for far in (1.0, float("inf")):
        monkeypatch.setattr("ot_newton.one_shot.FAR", far)
        pairs = Pairs.of(X @ W, Y, a, b, EPS)
        shot = one_shot(pairs, X, plan.g + EPS * bump, coarse=10.0)
        found.append((shot.second, shot.error, float((shot.grad - grad).norm() / grad.norm()), pairs.passes.total))
    (second, error, off, passes), (far_second, far_error, far_off, fewer_passes) = found
    assert far_second > 1 > second
    assert error < 0.3 * far_error
    assert off < 0.02
    assert off < 0.3 * far_off
    assert passes > fewer_passes


def test_a_gradient_that_vanishes_is_not_asked_again():
    """By symmetry it is 0 to rounding, and so is what the marginals change in it."""
    X = torch.tensor([[1.0], [-1.0], [2.0], [-2.0]]).double()
    weights = torch.full((4,), 0.25).double()
    pairs = Pairs.of(0 * X, X, weights, weights, EPS)
    shot = one_shot(pairs, X, torch.zeros(4).double(), coarse=0.1)
    assert float(shot.grad.norm()) < 1e-14
    assert pairs.passes.total < 30


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_error_of_the_value_is_foretold(spread, seed, monkeypatch):
    monkeypatch.setattr("ot_newton.one_shot.FAR", float("inf"))
    X, Y, a, b, W = model(seed=seed)
    plan = solve(X @ W, Y, EPS, a=a, b=b, tol=1e-12)
    bump = torch.randn(len(Y), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    shot = one_shot(Pairs.of(X @ W, Y, a, b, EPS), X, plan.g + EPS * spread * bump, coarse=10.0)
    off = abs(float(shot.value - plan.value()))
    assert off > 1e-9
    assert off <= shot.value_error


def test_a_complete_space_says_so():
    X, Y, a, b, W = model(12, 9)
    shot = one_shot(Pairs.of(X @ W, Y, a, b, EPS), X, torch.zeros(9, dtype=torch.float64))
    assert shot.change < 1e-8
