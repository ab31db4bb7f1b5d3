import pytest
import torch

from ot_newton.krylov import cg
from ot_newton.operators import FunctionOperator, MatrixOperator
from ot_newton.status import Status
from ot_newton.steihaug import SteihaugPath


def random_system(seed, n=12, *, definite=False, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)
    A = torch.randn(n, n, generator=rng, dtype=torch.float64)
    H = A @ A.T + torch.eye(n) if definite else A + A.T
    return H.to(dtype), torch.randn(n, generator=rng, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("definite", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_equals_conjugate_gradients_with_a_radius(seed, definite):
    H, g = random_system(seed, definite=definite)
    path = SteihaugPath(H, g, rtol=1e-10)
    for radius in (10.0, 1e-3, 0.1, 0.5, 1e3):
        found, expected = path.within(radius), cg(H, -g, rtol=1e-10, radius=radius)
        assert found.status is expected.status
        torch.testing.assert_close(found.step, expected.x, rtol=1e-9, atol=1e-12)
        s = found.step
        assert float(s.norm()) <= radius * (1 + 1e-12)
        assert found.decrease == pytest.approx(-float(g @ s + 0.5 * s @ (H @ s)), rel=1e-9)
        assert found.decrease > 0
        assert float(g @ s) < 0
        if found.status is Status.NEGATIVE_CURVATURE:
            assert found.lambda_bound <= 0


@pytest.mark.parametrize("seed", range(10))
def test_at_least_the_cauchy_decrease_and_at_most_the_global_one(seed):
    H, g = random_system(seed)
    values, Q = torch.linalg.eigh(H)
    from ot_newton.secular import ball_minimiser, decrease

    for radius in (0.01, 1.0, 10.0):
        fall = SteihaugPath(H, g).within(radius).decrease
        norm, bent = float(g.norm()), float(g @ (H @ g))
        t = radius / norm if bent <= 0 else min(radius / norm, norm**2 / bent)
        cauchy = t * norm**2 - 0.5 * t * t * bent
        c = Q.T @ g
        best = decrease(values, c, ball_minimiser(values, c, radius)[0])
        assert cauchy * (1 - 1e-10) <= fall <= best * (1 + 1e-10)
        assert fall >= 0.5 * best or float(values[0]) < 0


def test_another_radius_repeats_no_product():
    H, g = random_system(3, definite=True)
    A = MatrixOperator(H)
    path = SteihaugPath(A, g, rtol=1e-12)
    path.within(None)
    spent = A.n_matvec
    assert spent >= 5
    for radius in (1.0, 0.3, 1e-3, 0.01, 50.0):
        path.within(radius)
    assert A.n_matvec == spent


def test_a_path_that_was_cut_goes_on_where_it_ended():
    H, g = random_system(4, definite=True)
    A = MatrixOperator(H)
    path = SteihaugPath(A, g, rtol=1e-12)
    length, counts = float(torch.linalg.solve(H, g).norm()), []
    for radius in (1e-3 * length, 0.8 * length, 1e3):
        path.within(radius)
        counts.append(A.n_matvec)
    assert counts[0] < counts[1] < counts[2]
    whole = MatrixOperator(H)
    SteihaugPath(whole, g, rtol=1e-12).within(1e3)
    assert counts[2] == whole.n_matvec


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("c", [1e-25, 1e-8, 1e8, 1e20])
def test_scale(c, dtype):
    H, g = random_system(5, dtype=dtype)
    one, many = SteihaugPath(H, g).within(0.7), SteihaugPath(c * H, c * g).within(0.7)
    assert one.step.dtype == many.step.dtype == dtype
    torch.testing.assert_close(one.step, many.step)


def test_no_gradient_gives_no_step():
    for H in (torch.zeros(3, 3), torch.eye(3), -torch.eye(3)):
        found = SteihaugPath(H, torch.zeros(3)).within(1.0)
        assert torch.equal(found.step, torch.zeros(3))
        assert (found.decrease, found.status) == (0.0, Status.CONVERGED)


def test_nan_ends_it():
    calls = 0

    def product(v):
        nonlocal calls
        calls += 1
        return v * torch.nan

    H = FunctionOperator((4, 4), matvec=product, dtype=torch.float64, symmetric=True)
    found = SteihaugPath(H, torch.ones(4, dtype=torch.float64)).within(1.0)
    assert found.status is Status.NONFINITE
    assert calls == 1
    found = SteihaugPath(torch.eye(2), torch.tensor([1.0, torch.nan])).within(1.0)
    assert found.status is Status.NONFINITE
    assert torch.equal(found.step, torch.zeros(2))


def test_bad_arguments():
    path = SteihaugPath(torch.eye(2), torch.ones(2))
    with pytest.raises(ValueError, match="expected radius > 0"):
        path.within(0.0)
    with pytest.raises(ValueError, match="expected g of shape"):
        SteihaugPath(torch.eye(2), torch.ones(3))
    with pytest.raises(ValueError, match="expected rtol > 0"):
        SteihaugPath(torch.eye(2), torch.ones(2), rtol=0.0)
    with pytest.raises(ValueError, match="expected maxiter ≥ 1"):
        SteihaugPath(torch.eye(2), torch.ones(2), maxiter=0)
    with pytest.raises(ValueError, match="symmetric"):
        SteihaugPath(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.ones(2))
