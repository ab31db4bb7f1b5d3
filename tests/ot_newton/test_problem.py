import numpy as np
import pytest
import torch

from ot_newton.counting import CountedProblem
from ot_newton.pairs import Passes
from ot_newton.problem import FunctionProblem, as_point
from ot_newton.problems.toys import Rosenbrock


def rosenbrock(x):
    x = x.reshape(-1)
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


@pytest.mark.parametrize("vectorize", [False, True])
def test_automatic_differentiation_agrees_with_the_closed_form(vectorize):
    w = torch.linspace(-1, 2, 6, dtype=torch.float64)
    toy, problem = Rosenbrock(w), FunctionProblem(rosenbrock, w.reshape(2, 3), vectorize=vectorize)
    assert problem.shape == (2, 3)
    for got, expected in zip(problem.value_and_grad(w), toy.value_and_grad(w), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=0)
    H = problem.hessian(w)
    torch.testing.assert_close(H.to_dense(), toy.hessian(w).to_dense(), rtol=1e-13, atol=1e-13)
    assert H.n_matvec == 6
    assert H.matmat(torch.zeros(6, 0, dtype=torch.float64)).shape == (6, 0)


def test_the_point_is_not_touched_and_nothing_carries_a_graph():
    w = torch.ones(2, dtype=torch.float64)
    problem = FunctionProblem(rosenbrock, w)
    f, g = problem.value_and_grad(w)
    Hv = problem.hessian(w).matvec(torch.ones_like(w))
    assert not any(t.requires_grad for t in (w, f, g, Hv, problem.value(w)))
    assert w.grad is None
    assert torch.equal(w, torch.ones(2, dtype=torch.float64))


def test_gradients_work_under_no_grad():
    problem = FunctionProblem(rosenbrock, [0.5, 0.5])
    w = problem.start(torch.Generator())
    with torch.no_grad():
        assert float(problem.value_and_grad(w)[1].norm()) > 0
        assert float(problem.hessian(w).to_dense().norm()) > 0


@pytest.mark.parametrize("vectorize", [False, True])
def test_linear_and_constant_functions_have_zero_hessians(vectorize):
    a = torch.tensor([1.0, -2.0], dtype=torch.float64)
    for fun, gradient in ((lambda x: a @ x, a), (lambda x: torch.tensor(3.0, dtype=x.dtype), 0 * a)):
        problem = FunctionProblem(fun, [1.0, 1.0], vectorize=vectorize)
        w = problem.start(torch.Generator())
        assert torch.equal(problem.value_and_grad(w)[1], gradient)
        assert torch.equal(problem.hessian(w).to_dense(), torch.zeros(2, 2, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept(dtype):
    problem = FunctionProblem(rosenbrock, torch.zeros(3, dtype=dtype))
    w = problem.start(torch.Generator())
    f, g = problem.value_and_grad(w)
    assert {w.dtype, f.dtype, g.dtype, problem.hessian(w).to_dense().dtype} == {dtype}


def test_lists_of_floats_are_float64_and_arrays_keep_their_dtype():
    assert as_point([1.0, 2.0]).dtype == torch.float64
    assert as_point(np.ones(2, dtype=np.float32)).dtype == torch.float32


@pytest.mark.parametrize(
    ("x0", "error", "match"),
    [
        ([1, 2], TypeError, "expected x0 of a real floating dtype, got torch.int64"),
        (torch.ones(2, dtype=torch.complex64), TypeError, "real floating"),
        ([], ValueError, "at least one entry"),
        ([1.0, float("nan")], ValueError, "finite"),
    ],
)
def test_bad_starting_points(x0, error, match):
    with pytest.raises(error, match=match):
        FunctionProblem(rosenbrock, x0)


def test_bad_functions():
    with pytest.raises(TypeError, match="expected fun to be callable, got int"):
        FunctionProblem(3, [1.0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="expected fun to return a tensor, got float"):
        FunctionProblem(lambda x: 1.0, [1.0]).value(torch.ones(1, dtype=torch.float64))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"expected fun to return a tensor of shape \(\), got \(2,\)"):
        FunctionProblem(lambda x: x, [1.0, 2.0]).value(torch.ones(2, dtype=torch.float64))


def test_bad_points():
    problem = FunctionProblem(rosenbrock, [1.0, 2.0])
    with pytest.raises(TypeError, match=r"expected w as a tensor of torch\.float64, got torch\.float32"):
        problem.value(torch.ones(2))
    with pytest.raises(TypeError, match="got list"):
        problem.value([1.0, 2.0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"expected w of shape \(2,\), got \(3,\)"):
        problem.hessian(torch.ones(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="expected w on cpu, got meta"):
        problem.value(torch.ones(2, dtype=torch.float64, device="meta"))


def test_counting():
    counted = CountedProblem(Rosenbrock())
    w = counted.start(torch.Generator())
    counted.value(w)
    counted.value_and_grad(w)
    counted.hessian(w).to_dense()
    counted.hessian(w).matvec(w)
    assert (counted.nfev, counted.njev, counted.nhev, counted.n_passes) == (1, 1, 3, 0)
    matrices = CountedProblem(Rosenbrock(matrix=True))
    matrices.hessian(w).to_dense()
    matrices.hessian(w)
    assert matrices.nhev == 2


def test_counting_sees_the_passes_and_errors_of_the_problem():
    inner = Rosenbrock()
    inner.passes, inner.value_error, inner.hessian_error = Passes(3, 4, 9), 0.5, 0.25
    counted = CountedProblem(inner)
    inner.passes += Passes(applications=4, columns=8)
    assert counted.passes == Passes(0, 4, 8)
    assert (counted.n_passes, counted.value_error, counted.hessian_error) == (4, 0.5, 0.25)
