"""What the driver demands before it says success, and what it says otherwise."""

import pytest
import scipy.optimize
import torch

from ot_newton.adam import Adam
from ot_newton.minimize import METHODS, minimize
from ot_newton.newton_cg import NewtonCG
from ot_newton.operators import MatrixOperator
from ot_newton.problem import FunctionProblem
from ot_newton.problems import toys
from ot_newton.saddle_switch import SaddleSwitch
from ot_newton.status import Status

METHOD = {name: cls() for name, cls in METHODS.items()}
METHOD |= {"adam": Adam(lr=0.05), "adam-newton": SaddleSwitch(Adam(lr=0.05), check_every=3)}
every_method = pytest.mark.parametrize("method", METHOD.values(), ids=METHOD)
second_order = pytest.mark.parametrize(
    "method",
    [method for name, method in METHOD.items() if name != "adam"],
    ids=[name for name in METHOD if name != "adam"],
)


def saddle(x):
    return x[0] ** 2 - x[1] ** 2 + x[1] ** 4


@pytest.mark.parametrize("x0", [[0.0, 0.0], [1.0, 0.0]], ids=["saddle", "stable manifold"])
@pytest.mark.parametrize("matrix", [False, True])
@second_order
def test_saddles_are_left(method, matrix, x0):
    result = minimize(toys.StrictSaddle(x0, matrix=matrix), method=method, options={"maxiter": 2000})
    assert result.success
    assert result.lambda_min == pytest.approx(4.0, rel=1e-6) or result.lambda_min == pytest.approx(2.0, rel=1e-6)
    torch.testing.assert_close(result.x.abs(), torch.tensor([0.0, 0.5**0.5], dtype=torch.float64), atol=1e-7, rtol=0)
    if isinstance(method, NewtonCG | SaddleSwitch):  # the others meet a saddle in the course of a step
        assert {"escape", "curvature"} & set(result.history.phase)


@pytest.mark.parametrize("x0", [[0.0, 0.0], [1.0, 0.0]], ids=["saddle", "stable manifold"])
def test_a_first_order_method_says_saddle_and_never_success(x0):
    result = minimize(saddle, x0, method=Adam(lr=0.05))
    assert result.status is Status.SADDLE
    assert not result.success
    assert result.certificate is not None
    assert result.lambda_min == pytest.approx(-2.0)
    assert abs(float(result.certificate.vector[1])) == pytest.approx(1.0)
    assert Status.SADDLE.advice in result.message


@every_method
def test_maximum_is_no_success(method):
    result = minimize(lambda x: -(x**2).sum() + (x**4).sum(), [0.0, 0.0, 0.0], method=method, options={"maxiter": 2000})
    if isinstance(method, Adam):
        assert result.status is Status.SADDLE
    else:
        assert result.success
        torch.testing.assert_close(result.x.abs(), torch.full_like(result.x, 0.5**0.5), atol=1e-6, rtol=0)


def test_rounding_floor_is_stalled_with_evidence():
    slopes = torch.linspace(2.0, 3.0, 20, dtype=torch.float64)
    result = minimize(lambda x: 1e3 + (x.exp() - slopes * x).sum(), torch.zeros_like(slopes), options={"gtol": 0.0})
    assert result.status is Status.STALLED
    assert result.lambda_min == pytest.approx(2.0)
    assert 0 < float(result.jac.norm()) < 1e-13


@second_order
def test_the_floor_of_the_dtype_is_named(method):
    """A minimiser lies between float32 numbers, and f′ changes by 1e-4 from one to the next."""
    stiff, pull = torch.tensor([[900.0, 300.0], [300.0, 500.0]]), torch.tensor([1234.567, 678.9])

    class Stiff(FunctionProblem):
        def hessian(self, w, rtol=None):
            return MatrixOperator(super().hessian(w, rtol).to_dense(), symmetric=True)

    problem = Stiff(lambda x: 0.5 * x @ stiff @ x - pull @ x + (x**4).sum(), torch.tensor([3.0, -2.0]))
    result = minimize(problem, method=method, options={"gtol": 0.0, "gtol_abs": 1e-30})
    floor = torch.finfo(torch.float32).eps * float(torch.linalg.vector_norm(stiff @ result.x.abs()))
    assert result.status is Status.STALLED
    assert 0 < float(result.jac.norm()) < 1.1 * floor
    assert "at the floor of float32" in result.message


def test_degenerate_stationary_point_is_named():
    result = minimize(toys.MonkeySaddle())
    assert result.success
    assert result.lambda_min == 0
    assert "degenerate saddle cannot be excluded" in result.message


@every_method
def test_curvature_that_contradicts_the_function_is_reported(method):
    class WrongSign(toys.Quadratic):
        def hessian(self, w, rtol=None):
            return -1.0 * super().hessian(w, rtol)

    result = minimize(WrongSign([1.0, 2.0], x0=[0.0, 0.0]), method=method)
    assert result.status is Status.LINE_SEARCH_FAILED
    assert "inconsistent with f" in result.message


def test_tiny_negative_curvature_at_a_minimum_is_no_saddle():
    result = minimize(toys.Valley(), method=Adam(lr=0.05))
    assert result.status is Status.CONVERGED
    assert result.fun < 1e-12


def test_large_problems_are_certified_with_a_stated_confidence():
    spectrum = torch.linspace(0.05, 1, 400)
    result = minimize(toys.Quadratic(spectrum, seed=0))
    assert result.success
    assert result.certificate is not None
    assert result.certificate.confidence == 0.99
    assert result.certificate.lower <= 0.05 <= result.certificate.lambda_min
    assert "with 99% confidence" in result.message


def test_large_saddles_are_left():
    torch.manual_seed(0)
    problem = toys.SaddleChain(300, coupling=0.05)
    assert minimize(problem, method="adam").status is Status.SADDLE
    result = minimize(problem)
    assert result.success
    assert result.lambda_min > 0


@every_method
def test_values_that_are_not_finite(method):
    result = minimize(lambda x: x.log().sum(), [-1.0], method=method)
    assert result.status is Status.NONFINITE
    # only the Hessian is not finite here, which a first-order step does not need
    result = minimize(lambda x: x[0] + x[1].abs() ** 1.5, [1.0, 0.0], method=method, options={"maxiter": 50})
    assert result.status is (Status.MAX_ITER if isinstance(method, Adam | SaddleSwitch) else Status.NONFINITE)
    assert result.nhev <= 50


@every_method
def test_hessian_products_that_are_nan(method):
    class Broken(toys.Quadratic):
        def hessian(self, w, rtol=None):
            return float("nan") * super().hessian(w, rtol)

    for x0 in ([1.0, 1.0], [0.0, 0.0]):
        result = minimize(Broken([1.0, 2.0], x0=x0), method=method, options={"maxiter": 2000})
        assert result.status is Status.NONFINITE
        assert bool(torch.isfinite(result.x).all())


@every_method
def test_unbounded_linear_function_is_no_success(method):
    a = torch.tensor([1.0, -2.0], dtype=torch.float64)
    for fun in (lambda x: a @ x, lambda x: a @ x + 0 * (x**2).sum()):
        result = minimize(fun, [0.0, 0.0], method=method, options={"maxiter": 20})
        assert not result.success
        assert result.fun < 0


def test_a_kink_fails_the_line_search():
    result = minimize(lambda x: x.abs().sum(), [1.0, 0.7])
    assert result.status in (Status.LINE_SEARCH_FAILED, Status.STALLED)
    assert result.fun < 1e-6
    assert not result.success


@pytest.mark.parametrize("size", [2, 10, 30])
def test_against_scipy_on_rosenbrock(size):
    problem = toys.Rosenbrock([-1.2, 1.0] * (size // 2))
    ours = minimize(problem)
    assert ours.success
    x0, start = problem.start(torch.Generator()).numpy(), ours.history.grad_norm[0]
    best = float("inf")
    for name in ("trust-ncg", "trust-krylov", "newton-cg"):
        products = 0

        def hessp(x, v):
            nonlocal products
            products += 1
            return (problem.hessian(torch.tensor(x)) @ torch.tensor(v)).numpy()

        theirs = scipy.optimize.minimize(
            lambda x: float(problem.value(torch.tensor(x))),
            x0,
            jac=lambda x: problem.value_and_grad(torch.tensor(x))[1].numpy(),
            hessp=hessp,
            method=name,
            options={"xtol": 1e-8} if name == "newton-cg" else {"gtol": 1e-8 * start},
        )
        assert ours.fun <= theirs.fun + 1e-10
        best = min(best, products)
    certificate = ours.certificate
    assert certificate is not None
    assert ours.nhev - certificate.n_matvec <= 1.2 * best


@pytest.mark.gpu
@pytest.mark.parametrize("matrix", [False, True])
@every_method
def test_on_a_gpu(method, matrix):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    for size in (5, 200):
        problem = toys.SaddleChain(size, x0=torch.linspace(0.3, 0.6, size), device="cuda", matrix=matrix)
        result = minimize(problem, method=method)
        assert result.success
        assert result.x.device == result.jac.device == problem.device
        assert result.certificate is not None
        assert result.certificate.vector.device == problem.device
