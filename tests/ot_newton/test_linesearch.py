import pytest
import torch

from ot_newton.certificate import smallest_eigenvalue
from ot_newton.escape import leave_saddle
from ot_newton.linesearch import first_length, ray_search, value_noise
from ot_newton.problems import toys


def quartic(t):
    return -(t**2) + t**4


@pytest.mark.parametrize("length", [1e-9, 1e-4, 0.1, 0.6, 5.0, 1e4])
def test_finds_the_valley_from_any_first_length(length):
    t, f = ray_search(quartic, 0.0, 0.0, -2.0, length=length, noise=1e-17) or (0.0, 0.0)
    assert f == quartic(t)
    assert 0.35 < t < 1.0
    assert f <= -0.1


def test_backs_off_from_values_that_are_not_finite():
    found = ray_search(lambda t: quartic(t) if t < 0.3 else float("nan"), 0.0, 0.0, -2.0, length=8.0, noise=0.0)
    assert found is not None
    assert 0.1 < found[0] < 0.3
    found = ray_search(lambda t: quartic(t) if t < 0.3 else -float("inf"), 0.0, 0.0, -2.0, length=0.01, noise=0.0)
    assert found is not None
    assert found[0] < 0.3


def test_a_fall_within_the_noise_does_not_count():
    assert ray_search(lambda t: -1e-3, 0.0, -1.0, 0.0, length=1.0, noise=1e-3) is None
    assert ray_search(quartic, 0.0, 0.0, -2.0, length=0.1, noise=0.0, least_fall=1.0) is None
    assert ray_search(quartic, 0.0, 0.0, -2.0, length=0.1, noise=0.0, least_fall=0.1) is not None


def test_a_function_that_rises_or_stays_gives_none():
    assert ray_search(lambda t: t * t, 0.0, 0.0, -2.0, length=1.0, noise=0.0) is None
    assert ray_search(lambda t: 0.0, 0.0, 0.0, -2.0, length=1.0, noise=0.0) is None
    assert ray_search(lambda t: 0.0, 0.0, 0.0, 0.0, length=1.0, noise=0.0) is None


def test_longest_and_the_number_of_trials_are_kept():
    calls = []

    def value(t):
        calls.append(t)
        return -t

    assert ray_search(value, 0.0, -1.0, 0.0, length=1.0, noise=0.0, longest=10.0) == (8.0, -8.0)
    calls.clear()
    ray_search(value, 0.0, -1.0, 0.0, length=1.0, noise=0.0, max_trials=5)
    assert calls == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_noise_and_first_length_scale():
    problem = toys.Rosenbrock()
    assert value_noise(problem, 1e8, -1.0) == pytest.approx(1e8 * value_noise(problem, 1.0))
    problem.value_error = 3.0
    assert value_noise(problem, 0.0) == 3.0
    assert first_length(torch.full((4,), 50.0)) == pytest.approx(100 * first_length(torch.zeros(4)))


@pytest.mark.parametrize("b", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_leaves_a_saddle_and_goes_elsewhere_the_second_time(b, scale):
    problem = toys.StrictSaddle([0.0, 0.0], b=b, scale=scale)
    w = problem.start(torch.Generator())
    f, g = problem.value_and_grad(w)
    curvature = smallest_eigenvalue(problem.hessian(w))
    first = leave_saddle(problem, w, float(f), g, curvature)
    assert first is not None
    assert float(problem.value(first.point)) < 0.3 * problem.minimum
    assert first.length == pytest.approx(float(first.point.norm()))
    second = leave_saddle(problem, w, float(f), g, curvature, first)
    assert second is not None
    assert float(first.point[1] * second.point[1]) < 0
    assert abs(second.length - first.length) > 0.1 * first.length
    assert float(problem.value(second.point)) < 0


def test_the_gradient_says_which_way_is_down():
    problem = toys.StrictSaddle([0.0, 0.0])
    for y in (1e-3, -1e-3):
        w = torch.tensor([0.0, y], dtype=torch.float64)
        f, g = problem.value_and_grad(w)
        found = leave_saddle(problem, w, float(f), g, smallest_eigenvalue(problem.hessian(w)))
        assert found is not None
        assert float(found.point[1]) * y > 0


def test_no_way_down_is_none():
    problem = toys.Quadratic([1.0, 2.0], x0=[0.0, 0.0])
    w = problem.start(torch.Generator())
    f, g = problem.value_and_grad(w)
    wrong = smallest_eigenvalue(-1.0 * problem.hessian(w))
    assert leave_saddle(problem, w, float(f), g, wrong) is None
