import pytest
import torch
from modules import EPS, Dense, linear, make, mlp
from referee import pts, relative, wts
from torch import nn

from ot_newton.problems.module import ModuleProblem


def test_frozen_parameters_and_buffers_are_held_and_nothing_is_written():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double().eval()
    net[0].weight.requires_grad_(False)
    held = {name: value.clone() for name, value in net.state_dict().items()}
    problem = make(net)
    w = problem.start(torch.Generator())
    assert problem.size == 4 + 4 + 4 + 8 + 2
    assert torch.equal(w, nn.utils.parameters_to_vector([p for p in net.parameters() if p.requires_grad]).detach())
    before = problem.value_and_grad(w + 0.1)[0]
    problem.hessian(w + 0.1)
    assert all(torch.equal(value, held[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    with torch.no_grad():
        net[0].weight.zero_()
        net[1].running_mean.add_(5)
    assert torch.equal(make(net).start(torch.Generator()), w)
    problem.value(w)  # forget the point
    assert relative(problem.value_and_grad(w + 0.1)[0], before) < 1e-12


def test_tied_parameters_count_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
            self.second.weight = self.first.weight

        def forward(self, X):
            return self.second(torch.tanh(self.first(X)))[:, :2]

    problem = make(Tied())
    w = problem.start(torch.Generator())
    assert problem.size == 9 + 3 + 3
    dense = Dense(problem, w)
    assert relative(problem.value_and_grad(w)[1], dense.grad) < 1e-8
    assert relative(problem.hessian(w).to_dense(), dense.hessian) < 1e-8


def test_integer_inputs():
    net = nn.Embedding(4, 2).double()
    problem = ModuleProblem(net, torch.tensor([0, 1, 2, 3, 1, 0]), pts(5, 2), EPS)
    w = problem.start(torch.Generator())
    assert relative(problem.hessian(w).to_dense(), Dense(problem, w).hessian) < 1e-8


def test_points_that_overflow_are_nan_not_an_error():
    for size in (2, 300):
        problem = make(lambda w, X: X[:, :2] * torch.exp(w).mean(), theta0=torch.zeros(size).double())
        w = torch.full((size,), 1e4, dtype=torch.float64)
        value, grad = problem.value_and_grad(w)
        assert value.isnan()
        assert grad.isnan().all()
        assert problem.value(w).isnan()
        assert problem.hessian(w).matvec(w).isnan().all()
        assert problem.value(torch.zeros_like(w)).isfinite()
    cosine = make(lambda w, X: X[:, :2] * w, theta0=[1.0], cost="cosine")
    assert cosine.value(torch.zeros(1).double()).isnan()


class NoFunc(torch.autograd.Function):
    """A square that `torch.func` cannot differentiate, for lack of setup_context."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, *grads):
        (x,) = ctx.saved_tensors
        return 2 * x * grads[0]


def test_a_model_beyond_torch_func():
    problem = make(lambda w, X: NoFunc.apply(linear(3, 2)(w, X)), theta0=torch.ones(6).double(), vectorize=False)
    w = problem.start(torch.Generator())
    assert relative(problem.hessian(w).to_dense(), Dense(problem, w).hessian) < 1e-8
    problem = make(lambda w, X: NoFunc.apply(linear(3, 2)(w, X)), theta0=torch.ones(6).double())
    with pytest.raises(RuntimeError, match="setup_context") as caught:
        problem.value_and_grad(w)
    assert "vectorize=False may work" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "random",
    [
        nn.Sequential(nn.Linear(3, 2), nn.Dropout(1e-6)),
        nn.Sequential(nn.Linear(3, 2), nn.RReLU()),
    ],
)
def test_random_models_are_refused_and_leave_the_random_state_alone(random):
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"got one that draws random numbers; call model\.eval\(\)"):
        make(random.double())
    assert torch.equal(torch.get_rng_state(), before)
    assert make(random.eval()).size == 8


def test_batch_normalisation_in_training_mode_is_refused():
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
    with pytest.raises(ValueError, match=r"got a change of 1\.running_mean, 1\.running_var, 1\.num_batches_tracked"):
        make(net)
    assert (net[1].running_mean == 0).all()


def mixed():
    net = mlp(3, 4, 2)
    net[2].float()
    return net


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": 3}, TypeError, "model: expected an nn.Module or a function, got int"),
        ({"model": linear(3, 2)}, ValueError, "theta0: expected a starting point with a function, got None"),
        ({"theta0": [1.0]}, ValueError, "theta0: expected None with a module"),
        ({"model": nn.Tanh()}, ValueError, "model: expected at least one parameter with requires_grad, got none"),
        ({"model": mixed()}, TypeError, r"torch.float64 for 0.weight and torch.float32 for 2.weight"),
        ({"model": mlp(3, 2).half()}, TypeError, "model: expected parameters in torch.float32 or torch.float64"),
        ({"model": mlp(3, 2).float()}, TypeError, "X: expected torch.float32 like the parameters, got torch.float64"),
        ({"model": mlp(3, 3)}, ValueError, r"model: expected points of shape \(n, 2\) in .*, got \(6, 3\)"),
        ({"model": lambda w, X: 1.0, "theta0": [1.0]}, TypeError, r"expected a tensor of points \(n, d\), got float"),
        ({"model": lambda w, X: X[:, :2] / 0, "theta0": [1.0]}, ValueError, "model: expected finite points"),
        ({"X": [[1.0]]}, TypeError, "X: expected a tensor or None, got list"),
        ({"Y": pts(5, 2).int()}, TypeError, "Y: expected floating-point numbers, got torch.int32"),
        ({"Y": pts(5, 2).float()}, TypeError, "Y: expected torch.float64 like the parameters, got torch.float32"),
        ({"X": pts(6, 3).to("meta")}, ValueError, "X: expected device cpu like the parameters, got meta"),
        ({"eps": 0.0}, ValueError, "eps: expected a finite number above 0"),
        ({"scale": -1.0}, ValueError, "scale: expected a finite number above 0"),
        ({"cost": "manhattan"}, ValueError, "cost: expected one of sqeuclidean, cosine, got 'manhattan'"),
        ({"a": wts(4)}, ValueError, r"a: expected shape \(6,\)"),
        ({"chunk": 0}, ValueError, "chunk: expected an integer ≥ 1, got 0"),
        ({"backend": "keops"}, ValueError, "backend: expected one of"),
    ],
)
def test_bad_problems(change, error, message):
    with pytest.raises(error, match=message):
        ModuleProblem(**({"model": mlp(3, 2), "X": pts(6, 3), "Y": pts(5, 2), "eps": 0.5} | change))


@pytest.mark.parametrize("w", [torch.zeros(5).double(), torch.zeros(26), [0.0] * 26])
def test_bad_parameters(w):
    for use in (make().value, make().value_and_grad, make().hessian, make().image):
        with pytest.raises((ValueError, TypeError), match="expected w"):
            use(w)


def test_parameters_of_a_function_have_no_names():
    problem = make(linear(3, 2), theta0=torch.zeros(6).double())
    with pytest.raises(ValueError, match="expected a problem made of a module"):
        problem.parameters(problem.start(torch.Generator()))
