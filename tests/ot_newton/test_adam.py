import pytest
import torch

from ot_newton.adam import Adam
from ot_newton.minimize import minimize
from ot_newton.problems import toys
from ot_newton.status import Status


def path(problem, method, steps=60):
    """The points of a run (steps + 1, size)."""
    points = [problem.start(torch.Generator())]
    minimize(
        problem,
        method=method,
        options={"maxiter": steps, "gtol": 0.0},
        callback=lambda intermediate_result: points.append(intermediate_result.x),
    )
    return torch.stack(points)


def test_against_torch_optim():
    problem = toys.Rosenbrock([-1.2, 1.0, 0.5, 0.5])
    w = torch.nn.Parameter(problem.start(torch.Generator()))
    optimizer = torch.optim.Adam([w], lr=0.03, betas=(0.8, 0.99), eps=0.0)
    points = [w.detach().clone()]
    for _ in range(60):
        w.grad = problem.value_and_grad(w.detach())[1]
        optimizer.step()
        points.append(w.detach().clone())
    ours = path(problem, Adam(lr=0.03, betas=(0.8, 0.99), eps=0.0))
    torch.testing.assert_close(ours, torch.stack(points), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("c", [2.0**-27, 2.0**27, 1e-8, 1e8])
def test_scaling_the_function_changes_nothing(c, dtype):
    start = [0.5, -0.3, 0.0, 1.5]
    one = path(toys.SaddleChain(4, x0=start, dtype=dtype), Adam(lr=0.02, eps=1e-3))
    many = path(toys.SaddleChain(4, x0=start, dtype=dtype, scale=c), Adam(lr=0.02, eps=1e-3))
    assert float((one - one[0]).abs().max()) > 0.3
    torch.testing.assert_close(one, many, rtol=0, atol=2e3 * torch.finfo(dtype).eps)


def test_eps_is_relative_to_the_first_gradient():
    # at a thousandfold eps a step is about a thousandth of lr g / rms(g)
    problem = toys.Quadratic([1.0, 2.0], x0=[1.0, 1.0])
    step = torch.diff(path(problem, Adam(lr=1.0, eps=1e3), steps=1), dim=0)[0]
    g = torch.tensor([1.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(step, -1e-3 * g / g.square().mean().sqrt(), rtol=2e-3, atol=0)


def test_coordinates_without_gradient_stay():
    for eps in (0.0, 1e-8):
        points = path(toys.Quadratic([1.0, 0.0], x0=[1.0, 3.0]), Adam(lr=0.1, eps=eps), steps=5)
        assert (points[:, 1] == 3.0).all()
        assert (torch.diff(points[:, 0]) < 0).all()


def test_a_zero_gradient_moves_nothing():
    problem = toys.StrictSaddle([0.0, 0.0])
    method = Adam()
    w = problem.start(torch.Generator())
    state = method.init(problem, w)
    for _ in range(3):
        w, state = method.step(problem, w, state)
    assert torch.equal(w, torch.zeros_like(w))


def test_one_gradient_a_step_at_the_accuracy_asked_for():
    asked = []

    class Recorder(toys.Rosenbrock):
        def value_and_grad(self, w, rtol=None):
            asked.append(rtol)
            return super().value_and_grad(w, rtol)

    result = minimize(Recorder(), method=Adam(rtol=0.05), options={"maxiter": 7})
    assert asked == [0.05] * 8
    assert (result.njev, result.nfev, result.nhev) == (8, 0, 0)


def test_a_state_can_be_continued_from():
    problem, method = toys.Rosenbrock(), Adam(lr=0.05)
    w = problem.start(torch.Generator())
    state = method.init(problem, w)
    for _ in range(5):
        w, state = method.step(problem, w, state)
    kept, ends = w.clone(), []
    for _ in range(2):
        v, s = w, state
        for _ in range(5):
            v, s = method.step(problem, v, s)
        ends.append(v)
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(w, kept)


def test_steps_into_nan_are_not_taken():
    result = minimize(toys.LogBarrier([1.5]), method=Adam(lr=10.0, betas=(0.0, 0.0)))
    assert result.status is Status.NONFINITE
    assert float(result.x[0]) > 0
    assert result.fun == float(toys.LogBarrier().value(result.x))
    assert not result.history.accepted.iloc[-1]


@pytest.mark.parametrize(
    "wrong", [{"lr": 0.0}, {"lr": float("nan")}, {"betas": (1.0, 0.9)}, {"betas": (0.9,)}, {"eps": -1.0}, {"rtol": 0.0}]
)
def test_bad_hyperparameters(wrong):
    with pytest.raises(ValueError, match="expected"):
        Adam(**wrong)
