import copy

import pytest
import torch
from torch import nn
from training import data, flat, last, network, training

from ot_newton.adam import Adam
from ot_newton.autograd import ot_loss
from ot_newton.certificate import Verdict
from ot_newton.closure_loss import ClosureLoss
from ot_newton.minimize import METHODS, minimize
from ot_newton.newton_cg import NewtonCG
from ot_newton.optim import SecondOrder
from ot_newton.saddle_switch import SaddleSwitch
from ot_newton.status import Status


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_steps_are_those_of_minimize(method):
    net, w0 = network(), None
    optimizer, closure = SecondOrder(net.parameters(), method=method), training(net)
    w0, losses, points = flat(net), [], []
    for _ in range(6):
        losses.append(float(optimizer.step(closure)))
        points.append(flat(net))

    other = network()

    def fun(w):
        X, Y = data()
        parts = w.split([p.numel() for p in other.parameters()])
        named = {name: part.view(p.shape) for (name, p), part in zip(other.named_parameters(), parts, strict=True)}
        loss = ((torch.func.functional_call(other, named, X) - Y) ** 2).mean()
        return loss + 1e-3 * sum((p**2).sum() for p in named.values())

    result = minimize(fun, w0, method=method, options={"maxiter": 6})
    assert losses == pytest.approx(result.history.fun.tolist()[:6], rel=1e-9)
    torch.testing.assert_close(points[-1], result.x, rtol=1e-7, atol=1e-9)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("method", [*sorted(set(METHODS) - {"adam", "adam-newton"}), SaddleSwitch(Adam(lr=0.1))])
@pytest.mark.parametrize(("dtype", "gtol"), [(torch.float64, None), (torch.float32, 1e-4)])
def test_training_ends_at_a_certified_minimiser(method, dtype, gtol):
    net = network(dtype=dtype)
    optimizer, closure = SecondOrder(net.parameters(), method=method, gtol=gtol), training(net, dtype, 1e-2)
    for _ in range(300):
        loss = optimizer.step(closure)
        if last(optimizer).status is Status.CONVERGED:
            break
    report = last(optimizer)
    assert report.status is Status.CONVERGED
    assert loss.dtype == dtype
    assert loss.shape == ()
    assert float(loss) == report.fun
    assert report.certificate is not None
    assert report.certificate.verdict is Verdict.NONNEGATIVE
    assert report.lambda_min == report.certificate.lambda_min
    leaf = flat(net).requires_grad_()

    def fun(w):
        parts = w.split([p.numel() for p in net.parameters()])
        named = {name: part.view(p.shape) for (name, p), part in zip(net.named_parameters(), parts, strict=True)}
        X, Y = data(dtype)
        loss = ((torch.func.functional_call(net, named, X) - Y) ** 2).mean()
        return loss + 1e-2 * (w**2).sum()

    exact = torch.linalg.eigvalsh(torch.autograd.functional.hessian(fun, leaf))
    assert abs(report.lambda_min - exact[0]) < (1e-10 if dtype == torch.float64 else 1e-4) * exact[-1]
    before = flat(net)
    optimizer.step(closure)
    assert last(optimizer).status is Status.CONVERGED
    assert not last(optimizer).accepted
    assert last(optimizer).nhev == 0  # the evidence is kept while nothing moves
    assert torch.equal(flat(net), before)


def saddle(x: torch.Tensor):
    return lambda: x[0] ** 2 - x[1] ** 2 + x[1] ** 4


@pytest.mark.parametrize("start", [(0.0, 0.0), (1.0, 0.0)])
@pytest.mark.parametrize("method", sorted(set(METHODS) - {"adam"}))
def test_saddles_are_left(start, method):
    x = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    optimizer = SecondOrder([x], method=method)
    for _ in range(400):
        optimizer.step(saddle(x))
        if last(optimizer).status is Status.CONVERGED:
            break
    assert last(optimizer).status is Status.CONVERGED
    assert last(optimizer).lambda_min > 0
    assert abs(abs(float(x.detach()[1])) - 0.5**0.5) < 1e-6


def test_a_method_that_cannot_leave_a_saddle_names_it():
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = SecondOrder([x], method="adam")
    optimizer.step(saddle(x))
    assert last(optimizer).status is Status.SADDLE
    assert last(optimizer).lambda_min == pytest.approx(-2)
    assert torch.equal(x.detach(), torch.zeros(2).double())


def test_schedulers_are_harmless():
    runs = []
    for scheduled in (False, True):
        net = network()
        optimizer, closure = SecondOrder(net.parameters()), training(net)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4) if scheduled else None
        for _ in range(8):
            optimizer.step(closure)
            if scheduler is not None:
                scheduler.step()
        runs.append(flat(net))
    assert torch.equal(*runs)


def test_adam_follows_the_scheduler_down_to_zero():
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    optimizer = SecondOrder([x], lr=0.1, method="adam")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [1.0, 0.5, 0.0][step])
    moves = []
    for _ in range(3):
        before = x.detach().clone()
        optimizer.step(lambda: (x**2).sum())
        moves.append(float((x - before).detach().norm()))
        if len(moves) < 3:
            scheduler.step()
    assert moves[0] == pytest.approx(0.1 * 3**0.5)
    assert moves[1] == pytest.approx(0.05 * 3**0.5, rel=0.05)
    assert moves[2] == 0
    assert optimizer.method.lr == 0.1


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_loss_that_is_nan_changes_nothing(method):
    net = network()
    optimizer, closure = SecondOrder(net.parameters(), method=method), training(net)

    def broken():
        return closure() * torch.nan

    before = flat(net)
    assert optimizer.step(broken).isnan()
    assert last(optimizer).status is Status.NONFINITE
    assert not last(optimizer).accepted
    assert torch.equal(flat(net), before)
    optimizer.step(closure)
    after, state = flat(net), copy.deepcopy(optimizer.state_dict())
    assert not torch.equal(after, before)
    assert optimizer.step(broken).isnan()
    assert torch.equal(flat(net), after)
    assert repr(optimizer.state_dict()) == repr(state)
    optimizer.step(closure)
    assert last(optimizer).status is not Status.NONFINITE


def test_nan_away_from_the_parameters_does_not_stop_it():
    x = torch.tensor(2.5, dtype=torch.float64, requires_grad=True)  # x − log x is NaN for x < 0
    optimizer = SecondOrder([x], method=NewtonCG(radius=100.0))
    for _ in range(30):
        optimizer.step(lambda: x - x.log())
    assert float(x.detach()) == pytest.approx(1)
    assert last(optimizer).status is Status.CONVERGED


def test_batch_normalisation_trains():
    net = network(middle=nn.BatchNorm1d(4))
    optimizer, closure = SecondOrder(net.parameters()), training(net)
    losses = [float(optimizer.step(closure)) for _ in range(10)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_an_ot_loss_trains():
    X = torch.randn(30, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    net = nn.Linear(2, 2).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, 0.2], [-0.1, 0.8]]))
        net.bias.zero_()
    optimizer = SecondOrder(net.parameters())
    for _ in range(15):
        optimizer.step(lambda: ot_loss(net(X), 2 * X + 1, eps=0.5, tol=1e-10))
        if last(optimizer).status is Status.CONVERGED:
            break
    assert last(optimizer).status is Status.CONVERGED
    assert last(optimizer).lambda_min > 0
    torch.testing.assert_close(net(X).mean(0), (2 * X + 1).mean(0))


def test_groups_frozen_parameters_and_names():
    net = network()
    optimizer = SecondOrder([{"params": net[0].named_parameters()}, {"params": net[2].named_parameters()}])
    net[0].weight.requires_grad_(False)
    held = net[0].weight.detach().clone()
    closure = training(net)
    first = float(optimizer.step(closure))
    assert float(optimizer.step(closure)) < first
    assert torch.equal(net[0].weight, held)
    net[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match="expected 9 trainable entries as in the step before, got 21"):
        optimizer.step(closure)
    with pytest.raises(TypeError, match=r"expected one dtype, torch\.float64, got torch\.float32 for late"):
        optimizer.add_param_group({"params": [("late", nn.Parameter(torch.ones(2)))]})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("vectorize", [False, True])
def test_hessian_products_after_the_parameters_have_moved(vectorize):
    net = network()
    loss = ClosureLoss(list(net.parameters()), training(net), vectorize=vectorize)
    w = loss.read()
    H = loss.hessian(w)
    V = torch.sin(torch.arange(w.numel() * 3.0)).double().reshape(-1, 3)
    before = H @ V
    value = loss.value(w + 1)
    loss.hessian(w + 0.5).matvec(w)
    assert torch.equal(H @ V, before)
    assert torch.equal(loss.value(w + 1), value)
    step = 1e-6 * V[:, 0]
    difference = (loss.value_and_grad(w + step)[1] - loss.value_and_grad(w - step)[1]) / 2e-6
    torch.testing.assert_close(before[:, 0], difference, rtol=1e-5, atol=1e-7)
    assert H.matmat(V[:, :0]).shape == (w.numel(), 0)


def test_parameters_without_effect_have_no_curvature():
    x, y = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    loss = ClosureLoss([x, y], lambda: (x**2).sum())
    w = loss.read()
    assert loss.value_and_grad(w)[1].tolist() == [2, 2, 0, 0]
    assert loss.hessian(w).to_dense().diag().tolist() == [2, 2, 0, 0]
    linear = ClosureLoss([x], lambda: 3 * x.sum())
    assert torch.equal(linear.hessian(linear.read()).to_dense(), torch.zeros(2, 2).double())


X1 = torch.ones(2, requires_grad=True)


@pytest.mark.parametrize(
    ("closure", "error", "message"),
    [
        (None, TypeError, "step: expected a closure that returns the loss, got NoneType"),
        (lambda: None, TypeError, "closure: expected it to return the loss as a tensor, got NoneType"),
        (lambda: X1, ValueError, r"closure: expected one real number, got shape \(2,\)"),
        (lambda: X1.sum().detach(), ValueError, "got one without a graph; return the loss itself"),
        (lambda: (f := (X1**2).sum(), f.backward())[0], ValueError, r"leave loss\.backward\(\) out"),
    ],
)
def test_bad_closures(closure, error, message):
    optimizer = SecondOrder([X1])
    with pytest.raises(error, match=message):
        optimizer.step(closure)
    X1.grad = None
    assert torch.equal(X1.detach(), torch.ones(2))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"params": [torch.ones(2).half()]}, TypeError, "float16 for parameter 0 of group 0"),
        ({"params": [torch.ones(2, dtype=torch.complex64)]}, TypeError, "complex64 for parameter 0 of group 0"),
        ({"params": [torch.ones(2), torch.ones(2).double()]}, TypeError, "float64 for parameter 1 of group 0"),
        ({"params": [("w", torch.ones(2)), ("b", torch.ones(2).double())]}, TypeError, "got torch.float64 for b"),
        ({"params": [{"params": [torch.ones(1)]}, {"params": [torch.ones(1).to("meta")]}]}, ValueError,
         "expected one device, cpu, got meta for parameter 0 of group 1"),
        ({"method": "lbfgs"}, ValueError, "expected method as one of .*newton-cg.*, got 'lbfgs'"),
        ({"method": NewtonCG}, TypeError, "expected method as a name or an object with init and step"),
        ({"momentum": 0.9}, ValueError, "expected hyperparameters among radius, .*, got 'momentum'"),
        ({"method": NewtonCG(), "radius": 1.0}, ValueError, "in the method itself, got radius"),
        ({"lr": 0.1}, ValueError, "lr: expected none with NewtonCG, which finds its own lengths, got 0.1"),
        ({"lr": 0.0, "method": "adam"}, ValueError, "expected lr > 0, got 0.0"),
        ({"gtol": -1.0}, ValueError, "expected gtol ≥ 0"),
        ({"confidence": 1.0}, ValueError, "expected 0 < confidence < 1"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        SecondOrder(**({"params": [torch.ones(2)]} | arguments))


def test_nothing_to_train():
    with pytest.raises(ValueError, match="expected at least one parameter with requires_grad, got none"):
        SecondOrder([torch.ones(2)]).step(lambda: torch.ones(()))


def test_one_rate_for_all_groups():
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    optimizer = SecondOrder([{"params": [x], "lr": 0.1}, {"params": [y], "lr": 0.2}], method="adam")
    with pytest.raises(ValueError, match=r"lr: expected one for all groups, got 0\.1, 0\.2"):
        optimizer.step(lambda: (x**2).sum() + (y**2).sum())
