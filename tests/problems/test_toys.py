import pytest
import torch

from ot_newton.operators import MatrixOperator
from ot_newton.problems import toys

TOYS = [
    toys.Quadratic([-3.0, 0.5, 2.0, 10.0], seed=3, centre=[1.0, -1.0, 0.5, 2.0]),
    toys.StrictSaddle(b=0.3),
    toys.SaddleChain(4, coupling=0.7),
    toys.MonkeySaddle(),
    toys.Rosenbrock([-1.2, 1.0, 0.3, 0.4]),
    toys.QuarticBowl([1.0, -2.0, 0.5]),
    toys.LogBarrier([2.5, 0.3]),
    toys.Valley(),
]
IDS = [type(toy).__name__ for toy in TOYS]


@pytest.mark.parametrize("toy", TOYS, ids=IDS)
def test_gradient_and_hessian_are_those_of_autograd(toy):
    rng = torch.Generator().manual_seed(1)
    for _ in range(5):
        w = (toy.start(rng) + 0.2 * torch.rand(toy.size, generator=rng, dtype=torch.float64)).requires_grad_()
        (g,) = torch.autograd.grad(toy._value(w), w)
        H = torch.autograd.functional.hessian(toy._value, w.detach())
        f, gradient = toy.value_and_grad(w.detach())
        torch.testing.assert_close(gradient, g, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(toy.hessian(w.detach()).to_dense(), H, rtol=1e-12, atol=1e-12)
        assert float(f) == float(toy.value(w.detach()))


@pytest.mark.parametrize("toy", [toy for toy in TOYS if toy.minimisers is not None], ids=lambda toy: type(toy).__name__)
def test_minimisers_are_global_minimisers(toy):
    rng = torch.Generator().manual_seed(2)
    for w in toy.minimisers:
        f, g = toy.value_and_grad(w)
        assert float(f) == pytest.approx(toy.minimum, abs=1e-14)
        assert float(g.norm()) < 1e-14
        assert float(torch.linalg.eigvalsh(toy.hessian(w).to_dense())[0]) > -1e-14
        near = w + 0.3 * torch.rand(100, toy.size, generator=rng, dtype=torch.float64)
        assert all(float(toy.value(v)) >= toy.minimum - 1e-14 for v in near)


def test_quadratic_has_the_prescribed_spectrum():
    spectrum = torch.tensor([-2.0, 1e-3, 1.0, 1e3], dtype=torch.float64)
    toy = toys.Quadratic(spectrum, seed=0)
    torch.testing.assert_close(torch.linalg.eigvalsh(toy.A), spectrum, rtol=1e-10, atol=1e-10)
    assert toy.minimisers is None
    assert toy.minimum is None


def test_scale_multiplies_everything():
    one, many = toys.Rosenbrock(), toys.Rosenbrock(scale=8.0)
    w = one.start(torch.Generator())
    for a, b in zip(one.value_and_grad(w), many.value_and_grad(w), strict=True):
        assert torch.equal(8 * a, b)
    assert torch.equal(8 * one.hessian(w).to_dense(), many.hessian(w).to_dense())


def test_matrix_option_sets_the_kind_of_operator_and_dtype_is_kept():
    toy = toys.StrictSaddle(matrix=True, dtype=torch.float32)
    w = toy.start(torch.Generator())
    assert isinstance(toy.hessian(w), MatrixOperator)
    assert not isinstance(toys.StrictSaddle().hessian(w.double()), MatrixOperator)
    f, g = toy.value_and_grad(w)
    assert (f.dtype, g.dtype, toy.hessian(w).dtype) == (torch.float32,) * 3


def test_bad_arguments():
    with pytest.raises(ValueError, match="expected x0 with 2 entries, got 3"):
        toys.StrictSaddle([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="expected scale > 0"):
        toys.Rosenbrock(scale=0.0)
    with pytest.raises(ValueError, match="at least 2 entries"):
        toys.Rosenbrock([1.0])
    with pytest.raises(ValueError, match="expected b > 0"):
        toys.StrictSaddle(b=-1.0)
    with pytest.raises(ValueError, match="expected x0 with 3 entries"):
        toys.Quadratic([1.0, 2.0, 3.0], x0=[1.0])
    with pytest.raises(ValueError, match="size ≥ 1"):
        toys.SaddleChain(0)
    with pytest.raises(ValueError, match=r"expected w of shape \(2,\)"):
        toys.StrictSaddle().value(torch.zeros(3, dtype=torch.float64))
