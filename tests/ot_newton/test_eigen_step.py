from math import inf

import pytest
import torch

from ot_newton.eigen_step import eigen_step

EIGENVALUES = torch.tensor([-2.0, 1e-3, 0.5, 30.0], dtype=torch.float64)
GRADIENT = torch.tensor([0.3, 1.0, -2.0, 5.0], dtype=torch.float64)


def test_is_newton_where_the_hessian_is_positive_definite():
    values = EIGENVALUES.abs()
    step, promised = eigen_step(values, GRADIENT, floor=1e-9)
    torch.testing.assert_close(step, -GRADIENT / values, rtol=1e-14, atol=0)
    assert promised == pytest.approx(0.5 * float(GRADIENT @ (GRADIENT / values)))


def test_floor_and_absolute_value():
    step, _ = eigen_step(EIGENVALUES, GRADIENT, floor=0.1)
    torch.testing.assert_close(step, -GRADIENT / torch.tensor([2.0, 0.1, 0.5, 30.0], dtype=torch.float64))


@pytest.mark.parametrize("radius", [1e-6, 1e-2, 1.0, 50.0, 1e6])
def test_minimises_the_positive_model_in_the_ball(radius):
    step, promised = eigen_step(EIGENVALUES, GRADIENT, floor=1e-9, radius=radius)
    assert float(step.norm()) <= radius * (1 + 1e-9)
    if radius < 1000:
        assert float(step.norm()) == pytest.approx(radius, rel=1e-9)
    rng = torch.Generator().manual_seed(0)
    others = torch.randn(2000, 4, generator=rng, dtype=torch.float64)
    others *= radius * torch.rand(2000, 1, generator=rng, dtype=torch.float64) / others.norm(dim=1, keepdim=True)
    model = others @ GRADIENT + 0.5 * (others**2 * EIGENVALUES.abs()).sum(1)
    assert float(model.min()) >= -promised - 1e-12 * abs(promised)


def test_singular_hessian():
    values = torch.tensor([0.0, 1.0], dtype=torch.float64)
    step, _ = eigen_step(values, torch.tensor([2.0, 0.0], dtype=torch.float64), floor=0.0, radius=3.0)
    torch.testing.assert_close(step, torch.tensor([-3.0, 0.0], dtype=torch.float64))
    step, _ = eigen_step(values, torch.tensor([0.0, 2.0], dtype=torch.float64), floor=0.0, radius=inf)
    assert step.tolist() == [0.0, -2.0]
    with pytest.raises(ValueError, match="positive floor or a finite radius"):
        eigen_step(values, torch.tensor([1.0, 0.0], dtype=torch.float64), floor=0.0, radius=inf)


def test_zeros_give_a_zero_step():
    zero = torch.zeros(3, dtype=torch.float64)
    for radius in (1.0, inf):
        step, promised = eigen_step(zero, zero, floor=0.0, radius=radius)
        assert torch.equal(step, zero)
        assert promised == 0
