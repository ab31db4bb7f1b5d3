from math import inf

import pytest
import torch

from ot_newton.capped_cg import capped_cg
from ot_newton.operators import DiagonalOperator, MatrixOperator
from ot_newton.problems.toys import Quadratic
from ot_newton.status import Status

TINY = 1e-12


def symmetric(spectrum, seed):
    A = Quadratic(spectrum, seed=seed).A
    return MatrixOperator((A + A.T) / 2)


def test_solves_positive_definite_systems():
    A = symmetric(torch.logspace(-2, 2, 20), 0)
    g = torch.linspace(-1, 1, 20, dtype=torch.float64)
    found = capped_cg(A, g, rtol=1e-10, damping=TINY)
    assert found.status is Status.CONVERGED
    torch.testing.assert_close(found.vector, torch.linalg.solve(A.matrix, -g), rtol=1e-6, atol=1e-8)
    assert found.slope == pytest.approx(float(g @ found.vector))
    assert found.curvature == pytest.approx(float(found.vector @ (A.matrix @ found.vector)))
    assert 90 < found.norm <= 100.0001


@pytest.mark.parametrize("distinct", [1, 2, 5])
def test_takes_one_product_for_each_distinct_eigenvalue(distinct):
    d = (1.0 + torch.arange(30, dtype=torch.float64) % distinct).contiguous()
    A = DiagonalOperator(d)
    found = capped_cg(A, torch.ones(30, dtype=torch.float64), rtol=1e-12, damping=TINY)
    assert found.status is Status.CONVERGED
    assert found.n_matvec == A.n_matvec == distinct


def test_residual_is_what_was_asked_for():
    A = symmetric(torch.logspace(-3, 0, 50), 1)
    g = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for rtol in (0.5, 0.1, 1e-3):
        d = capped_cg(A, g, rtol=rtol, damping=TINY).vector
        assert float((A.matrix @ d + g).norm() / g.norm()) <= rtol * 1.01


def test_negative_curvature_is_found_on_every_random_indefinite_matrix():
    rng = torch.Generator().manual_seed(0)
    for seed in range(60):
        n = 3 + seed % 20
        spectrum = torch.rand(n, generator=rng, dtype=torch.float64) + 0.1
        spectrum[0] = -0.3 * float(torch.rand(1, generator=rng)) - 0.05
        A = symmetric(spectrum, seed)
        g = torch.randn(n, generator=rng, dtype=torch.float64)
        found = capped_cg(A, g, rtol=1e-10, damping=1e-6)
        d = found.vector
        assert found.status is Status.NEGATIVE_CURVATURE
        assert float(d @ (A.matrix @ d)) <= -1e-6 * float(d @ d) * 0.99 * found.norm
        assert float(g @ d) == pytest.approx(found.slope)
        assert found.slope <= 0
        assert found.n_matvec <= 2 * n + 2


def test_zero_gradient_and_zero_matrix():
    zero = torch.zeros(4, dtype=torch.float64)
    found = capped_cg(DiagonalOperator(zero), zero, rtol=0.1, damping=TINY)
    assert (found.status, found.n_matvec) == (Status.CONVERGED, 0)
    assert torch.equal(found.vector, zero)
    found = capped_cg(DiagonalOperator(zero), zero + 1, rtol=0.1, damping=TINY)
    assert (found.status, found.curvature) == (Status.NEGATIVE_CURVATURE, 0.0)
    assert torch.equal(found.vector, -(zero + 1))


@pytest.mark.parametrize("radius", [1e-3, 0.1, 1.0, inf])
def test_radius(radius):
    A = symmetric(torch.logspace(-2, 1, 12), 5)
    g = torch.ones(12, dtype=torch.float64)
    found, free = (capped_cg(A, g, rtol=1e-8, damping=TINY, radius=r) for r in (radius, inf))
    if radius < float(free.vector.norm()):
        assert found.status is Status.BOUNDARY
        assert float(found.vector.norm()) == pytest.approx(radius, rel=1e-12)
        assert found.slope + 0.5 * found.curvature < 0
    else:
        assert torch.equal(found.vector, free.vector)


def test_slow_convergence_is_read_as_negative_curvature():
    # the start hardly sees the negative eigenvector: neither iterates nor directions show it before the residual does
    spectrum = torch.cat(
        [torch.linspace(0.3, 1.0, 400, dtype=torch.float64), torch.tensor([-0.3], dtype=torch.float64)]
    )
    A = DiagonalOperator(spectrum)
    g = torch.ones(401, dtype=torch.float64)
    g[-1] = 1e-9
    found = capped_cg(A, g, rtol=1e-14, damping=0.1, maxiter=2000)
    d = found.vector
    assert found.status is Status.NEGATIVE_CURVATURE
    assert float(d @ (A @ d)) <= -0.09 * float(d @ d)
    assert found.curvature == pytest.approx(float(d @ (A @ d)))


def test_limits_and_nan():
    A = symmetric(torch.logspace(-4, 0, 40), 2)
    g = torch.ones(40, dtype=torch.float64)
    found = capped_cg(A, g, rtol=1e-12, damping=TINY, maxiter=3)
    assert (found.status, found.n_matvec) == (Status.MAX_ITER, 3)
    assert found.slope < 0
    broken = capped_cg(DiagonalOperator(torch.full((3,), float("nan"))), torch.ones(3), rtol=0.1, damping=TINY)
    assert (broken.status, broken.n_matvec) == (Status.NONFINITE, 1)
    assert bool(torch.isfinite(broken.vector).all())


@pytest.mark.parametrize("c", [2.0**-40, 2.0**40])
def test_scale_of_the_function_does_not_matter(c):
    A = symmetric([-0.2, 0.5, 1.0, 3.0], 7)
    g = torch.ones(4, dtype=torch.float64)
    one = capped_cg(A, g, rtol=1e-3, damping=1e-6)
    many = capped_cg(MatrixOperator(c * A.matrix), c * g, rtol=1e-3, damping=1e-6)
    assert one.status is many.status
    ratio = many.vector.norm() / one.vector.norm()  # a CG direction has the gradient's units, a solution has none
    torch.testing.assert_close(many.vector, ratio * one.vector, rtol=1e-12, atol=0)
