from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

from ot_newton.certificate import Verdict, smallest_eigenvalue, spectrum
from ot_newton.operators import DiagonalOperator, FunctionOperator, MatrixOperator
from ot_newton.problems.toys import Quadratic


def hidden(matrix):
    """The matrix as an operator that is only known by products."""
    n = len(matrix)
    return FunctionOperator((n, n), matmat=lambda V: matrix @ V, dtype=matrix.dtype, symmetric=True)


@pytest.mark.parametrize("n", [1, 2, 50, 400])
@pytest.mark.parametrize("lowest", [-0.5, -0.01, 0.02, 0.4])
def test_verdict_and_bounds_against_a_dense_solver(n, lowest):
    d = torch.linspace(0.5, 1.0, n, dtype=torch.float64)
    d[0] = lowest
    A = Quadratic(d, seed=n).A
    A = (A + A.T) / 2
    exact = torch.linalg.eigvalsh(A)
    for H in (MatrixOperator(A), hidden(A)):
        c = smallest_eigenvalue(H)
        assert c.verdict is (Verdict.NEGATIVE if lowest < 0 else Verdict.NONNEGATIVE)
        assert c.lower - 1e-12 <= float(exact[0]) <= c.lambda_min + 1e-12
        assert c.lower <= c.lambda_min <= c.upper
        assert c.lambda_min == pytest.approx(float(exact[0]), abs=0.1 * abs(lowest) + 1e-3)
        assert float(c.vector @ (A @ c.vector)) == pytest.approx(c.lambda_min, abs=1e-12)
        assert float(c.vector.norm()) == pytest.approx(1.0)
        assert c.n_matvec == (0 if isinstance(H, MatrixOperator) else H.n_matvec)


def test_the_lower_bound_holds_over_random_starts():
    d = torch.rand(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for lowest in (-0.02, 0.0, 1e-3, 0.05):
        d[7] = lowest
        for seed in range(6):
            c = smallest_eigenvalue(DiagonalOperator(d), rng=torch.Generator().manual_seed(seed))
            assert c.lower <= float(d.min()) + 1e-13
            assert float(d.min()) <= c.lambda_min + 1e-13
            assert c.verdict is (Verdict.NEGATIVE if lowest < 0 else Verdict.NONNEGATIVE)


def test_saddles_aligned_with_an_axis_are_found_without_a_seed():
    for axis in range(0, 300, 13):
        d = torch.ones(300, dtype=torch.float64)
        d[axis] = -0.01
        c = smallest_eigenvalue(DiagonalOperator(d))
        assert c.verdict is Verdict.NEGATIVE
        assert abs(float(c.vector[axis])) > 0.99


@pytest.mark.parametrize("c", [1e-14, 1e14])
@pytest.mark.parametrize("n", [20, 300])
def test_scale_equivariance(n, c):
    d = torch.linspace(-0.1, 1.0, n, dtype=torch.float64)
    one, many = (smallest_eigenvalue(DiagonalOperator(s * d)) for s in (1.0, c))
    assert one.verdict is many.verdict is Verdict.NEGATIVE
    assert many.lambda_min == pytest.approx(c * one.lambda_min, rel=1e-9)
    assert many.relative == pytest.approx(one.relative, rel=1e-9)


def test_small_budgets_leave_it_undecided():
    d = torch.linspace(1e-4, 1.0, 2000, dtype=torch.float64)
    c = smallest_eigenvalue(DiagonalOperator(d), maxiter=16)
    assert c.verdict is Verdict.UNDECIDED
    assert c.n_matvec <= 17
    assert c.lower < -1e-3


def test_negative_values_within_the_operators_error_prove_nothing():
    d = torch.tensor([-1e-3, 1.0], dtype=torch.float64)
    assert smallest_eigenvalue(DiagonalOperator(d)).verdict is Verdict.NEGATIVE
    assert smallest_eigenvalue(DiagonalOperator(d), error=2e-3).verdict is Verdict.UNDECIDED
    assert smallest_eigenvalue(DiagonalOperator(d), rtol=4e-3, error=2e-3).verdict is Verdict.NONNEGATIVE
    assert smallest_eigenvalue(DiagonalOperator(-d), error=2e-3).verdict is Verdict.NEGATIVE


@pytest.mark.parametrize("n", [1, 300])
def test_zero_and_nan(n):
    zero = smallest_eigenvalue(DiagonalOperator(torch.zeros(n)))
    assert (zero.verdict, zero.lambda_min, zero.relative) == (Verdict.NONNEGATIVE, 0.0, 0.0)
    nan = smallest_eigenvalue(DiagonalOperator(torch.full((n,), float("nan"))))
    assert nan.verdict is Verdict.UNDECIDED
    assert nan.lambda_min != nan.lambda_min


def test_float32_is_kept():
    for n in (10, 300):
        c = smallest_eigenvalue(DiagonalOperator(torch.linspace(-1, 2, n)))
        assert c.vector.dtype == torch.float32
        assert c.lambda_min == pytest.approx(-1.0, rel=0.02)


def test_spectrum_is_that_of_the_symmetric_part():
    values, vectors = spectrum(MatrixOperator(torch.tensor([[1.0, 2.0], [2.0, 1.0]])))
    assert values.tolist() == pytest.approx([-1.0, 3.0])
    assert vectors.dtype == torch.float64


@pytest.mark.parametrize("kind", [torch.tensor, np.array, scipy.sparse.csr_array])
def test_matrices_of_all_kinds(kind):
    c = smallest_eigenvalue(kind(np.diag([2.0, -0.5, 1.0])))
    assert c.lambda_min == pytest.approx(-0.5)
    assert c.verdict is Verdict.NEGATIVE
    assert c.vector.abs().tolist() == pytest.approx([0.0, 1.0, 0.0])


def test_bad_arguments():
    with pytest.raises(ValueError, match="square"):
        smallest_eigenvalue(MatrixOperator(torch.zeros(2, 3)))
    for what in ([[1.0]], None, "H", 2.0):
        with pytest.raises(TypeError, match="expected a LinearOperator, a matrix or a scipy operator, got"):
            smallest_eigenvalue(what)
    wrong: list[dict[str, Any]] = [{"rtol": 0.0}, {"confidence": 1.0}, {"error": -1.0}, {"maxiter": 1}]
    for arguments in wrong:
        with pytest.raises(ValueError, match="expected 0 < rtol < 1"):
            smallest_eigenvalue(DiagonalOperator(torch.ones(2)), **arguments)
