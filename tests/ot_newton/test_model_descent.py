"""What the methods that descend along local models have in common."""

from dataclasses import replace

import pytest
import torch
from coordinates import Rotated, Stretched

from ot_newton.certificate import smallest_eigenvalue
from ot_newton.cubic import Cubic
from ot_newton.minimize import minimize
from ot_newton.operators import FunctionOperator, MatrixOperator
from ot_newton.problem import FunctionProblem
from ot_newton.problems import toys
from ot_newton.problems.shuffled_regression import ShuffledRegression
from ot_newton.saddle_free import SaddleFree
from ot_newton.status import Status
from ot_newton.trust_region import TrustNCG, TrustRegion

METHODS = {"trust-ncg": TrustNCG, "trust-krylov": TrustRegion, "arc": Cubic, "saddle-free": SaddleFree}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
both_hessians = pytest.mark.parametrize("matrix", [False, True], ids=["products", "matrix"])
TOYS = [
    toys.Rosenbrock,
    toys.LogBarrier,
    toys.QuarticBowl,
    toys.StrictSaddle,
    toys.SaddleChain,
    toys.Valley,
]


def points(problem, method, steps=1000, **options):
    """The points of a run (steps + 1, size)."""
    visited = [problem.start(torch.Generator())]
    minimize(
        problem,
        method=method,
        options={"maxiter": steps, **options},
        callback=lambda intermediate_result: visited.append(intermediate_result.x),
    )
    return torch.stack(visited)


@both_hessians
@pytest.mark.parametrize("toy", TOYS, ids=lambda t: t.__name__)
@every_method
def test_ends_at_a_certified_minimiser(method, toy, matrix):
    problem = toy(matrix=matrix)
    result = minimize(problem, method=method())
    assert result.success, result.message
    assert result.fun - problem.minimum < (1e-8 if toy is toys.QuarticBowl else 1e-12)
    assert result.nit < 60


@both_hessians
@pytest.mark.parametrize("c", [2.0**-27, 2.0**27, 1e-8, 1e8])
@every_method
def test_scaling_the_function_changes_nothing(method, c, matrix):
    for toy in (toys.Rosenbrock, toys.StrictSaddle, toys.SaddleChain):
        one, many = (points(toy(matrix=matrix, scale=s), method(), steps=8) for s in (1.0, c))
        torch.testing.assert_close(one, many, rtol=0, atol=1e-8)


@both_hessians
@pytest.mark.parametrize("c", [1e-6, 1e6])
@every_method
def test_scaling_the_coordinates_scales_the_path(method, c, matrix):
    problem = toys.Rosenbrock([-1.2, 1.0, 0.5, 2.0], matrix=matrix)
    one, many = points(problem, method(), steps=8), points(Stretched(problem, c), method(), steps=8)
    torch.testing.assert_close(one, many / c, rtol=0, atol=1e-6)


@both_hessians
@every_method
def test_rotating_the_coordinates_rotates_the_path(method, matrix):
    Q, _ = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    for problem in (
        toys.Rosenbrock([-1.2, 1.0, 0.5, 2.0], matrix=matrix),
        toys.SaddleChain(4, x0=[0.1, 0.2, -0.3, 0.1], matrix=matrix),
    ):
        one, rotated = points(problem, method(), steps=8), points(Rotated(problem, Q), method(), steps=8)
        torch.testing.assert_close(one @ Q.T, rotated, rtol=0, atol=1e-7)


@both_hessians
@every_method
def test_f_falls_from_random_points_and_the_minimum_is_second_order(method, matrix):
    rng = torch.Generator().manual_seed(3)
    for _ in range(6):
        problem = toys.SaddleChain(6, x0=0.5 * torch.randn(6, generator=rng), matrix=matrix)
        result = minimize(problem, method=method())
        assert result.success
        assert (torch.diff(torch.tensor(result.history.fun.to_numpy())) <= 1e-15).all()
        assert result.lambda_min > 0


@both_hessians
@pytest.mark.parametrize("radius", [None, 100.0, 1e-3])
@every_method
def test_a_trial_that_is_not_a_number_is_rejected_and_the_step_shortened(method, radius, matrix):
    result = minimize(toys.LogBarrier([2.5, 3.0], matrix=matrix), method=method(radius=radius))
    assert result.success
    torch.testing.assert_close(result.x, torch.ones_like(result.x), atol=1e-7, rtol=0)
    assert result.nit < 20


@every_method
def test_a_rejected_trial_costs_one_value_and_nothing_else(method):
    calls = []

    class Watched(toys.LogBarrier):
        def value(self, w):
            calls.append("f")
            return super().value(w)

        def value_and_grad(self, w, rtol=None):
            calls.append("g")
            return self._value(w), self._grad(w)

        def hessian(self, w, rtol=None):
            H = super().hessian(w)

            def product(V):
                calls.append("Hv")
                return H @ V

            calls.append("H")
            return FunctionOperator(H.shape, matmat=product, dtype=H.dtype, symmetric=True)

    problem = Watched([2.5])
    w = problem.start(torch.Generator())
    state = method().init(problem, w)
    calls.clear()
    moved, after = method().step(problem, w, state)
    assert after.n_rejected >= 1
    assert calls == ["H", "Hv", *["f"] * (after.n_rejected + 1), "g"]
    assert not torch.equal(moved, w)


@every_method
def test_nothing_of_the_gradient_is_asked_at_points_that_are_rejected(method):
    """Rosenbrock's valley makes models fail; gradients are evaluated at the points of the path only."""
    asked = []

    class Watched(toys.Rosenbrock):
        def value_and_grad(self, w, rtol=None):
            asked.append(w.clone())
            return super().value_and_grad(w, rtol)

    visited = points(Watched(), method())
    assert len(asked) <= len(visited) + 1
    assert all(any(torch.equal(w, v) for v in visited) for w in asked[:-1])


@both_hessians
@every_method
def test_saddles_are_left_from_their_stable_manifolds(method, matrix):
    for start in ([1.0, 0.0], [0.0, 0.0], [1.0, 1e-12]):
        result = minimize(toys.StrictSaddle(start, matrix=matrix), method=method())
        assert result.success
        assert abs(float(result.x[1])) == pytest.approx(0.5**0.5, rel=1e-6)


@both_hessians
@every_method
def test_a_shallow_saddle_is_left_and_a_second_attempt_differs(method, matrix):
    problem = toys.StrictSaddle([0.0, 0.0], b=1e-3, matrix=matrix)
    assert minimize(problem, method=method(), options={"curvature_rtol": 1e-4}).success
    w = problem.start(torch.Generator())
    state = method().init(problem, w)
    curvature = smallest_eigenvalue(problem.hessian(w))
    first, after = method().escape_saddle(problem, w, state, curvature)
    assert (after.phase, after.accepted, after.status) == ("escape", True, None)
    back = replace(state, last_escape=after.last_escape)
    second, again = method().escape_saddle(problem, w, back, curvature)
    assert again.accepted
    assert float(torch.dist(first, second)) > 0.1 * after.step_norm
    assert max(float(problem.value(first)), float(problem.value(second))) < 0


@every_method
def test_no_way_down_is_reported(method):
    problem = toys.Quadratic([1.0, 1.0], x0=[0.0, 0.0])
    w = problem.start(torch.Generator())
    curvature = replace(smallest_eigenvalue(problem.hessian(w)), lambda_min=-1.0)
    state = method().init(problem, w)
    moved, after = method().escape_saddle(problem, w, state, curvature)
    assert torch.equal(moved, w)
    assert (after.status, after.accepted, after.phase) == (Status.LINE_SEARCH_FAILED, False, "escape")


@both_hessians
@every_method
def test_a_flat_point_and_a_slope_without_curvature(method, matrix):
    problem = toys.Quadratic([0.0, 0.0], x0=[1.0, 2.0], matrix=matrix)
    w = problem.start(torch.Generator())
    moved, state = method().step(problem, w, method().init(problem, w))
    assert torch.equal(moved, w)
    assert state.status is Status.STALLED
    assert minimize(problem, method=method()).status is Status.CONVERGED

    class Slope(toys.Quadratic):
        def _value(self, w):
            return w.sum()

        def _grad(self, w):
            return torch.ones_like(w)

    result = minimize(Slope([0.0, 0.0], matrix=matrix), method=method(), options={"maxiter": 30})
    assert result.status in (Status.MAX_ITER, Status.NONFINITE)
    assert result.fun < -1e3


@every_method
def test_a_hessian_that_is_not_finite_is_named(method):
    class Broken(toys.Rosenbrock):
        def hessian(self, w, rtol=None):
            H = torch.full((2, 2), torch.nan, dtype=self.dtype)
            if self.matrix:
                return MatrixOperator(H, symmetric=True)
            return FunctionOperator((2, 2), matmat=lambda V: H @ V, dtype=self.dtype, symmetric=True)

    for matrix in (False, True):
        result = minimize(Broken(matrix=matrix), method=method())
        assert (result.status, result.nit) == (Status.NONFINITE, 1)
    kink = FunctionProblem(lambda x: x[0] + x[1].abs() ** 1.5, [1.0, 0.0])
    assert minimize(kink, method=method(), options={"maxiter": 50}).success is False


@every_method
def test_a_kink_ends_without_success(method):
    result = minimize(lambda x: x.abs().sum() + 0.5 * x @ x, [1.0, -0.3], method=method(), options={"maxiter": 200})
    assert not result.success
    assert result.status in (Status.LINE_SEARCH_FAILED, Status.STALLED, Status.MAX_ITER)


@both_hessians
@every_method
def test_noisy_values_do_not_stop_it_early(method, matrix):
    class Noisy(toys.Rosenbrock):
        """The value is right to 1e-5 and says so; the gradient is exact."""

        value_error = 1e-5

        def value(self, w):
            return super().value(w) + 1e-5 * torch.sin(1e9 * w.sum())

    result = minimize(Noisy(matrix=matrix), method=method())
    assert result.success
    torch.testing.assert_close(result.x, torch.ones_like(result.x), atol=1e-6, rtol=0)


@both_hessians
@every_method
def test_inexact_hessians_still_converge(method, matrix):
    class Inexact(toys.SaddleChain):
        hessian_error = 1e-3

        def hessian(self, w, rtol=None):
            rng = torch.Generator().manual_seed(0)
            E = torch.randn(self.size, self.size, generator=rng, dtype=self.dtype)
            E = (E + E.T) / torch.linalg.matrix_norm(E + E.T, 2)
            H = self._hessian(w) + 2e-3 * E
            if self.matrix:
                return MatrixOperator(H, symmetric=True)
            return FunctionOperator(tuple(H.shape), matmat=lambda V: H @ V, dtype=self.dtype, symmetric=True)

    result = minimize(Inexact(5, x0=[0.1, 0.2, 0.1, 0.0, 0.3], matrix=matrix), method=method())
    assert result.success
    assert result.nit < 25


@both_hessians
@every_method
def test_float32(method, matrix):
    result = minimize(toys.Rosenbrock(matrix=matrix, dtype=torch.float32), method=method())
    assert result.success
    assert result.x.dtype == result.jac.dtype == torch.float32
    torch.testing.assert_close(result.x, torch.ones_like(result.x), atol=1e-2, rtol=0)


@pytest.mark.parametrize("distinct", [1, 3])
@every_method
def test_exact_counts_of_hessian_products(method, distinct):
    # one product for each distinct eigenvalue; the certificate takes `size` more
    problem = toys.Quadratic([float(1 + i % distinct) for i in range(12)], seed=0)
    result = minimize(problem, method=method(eta_max=1e-9, eta_min=1e-9))
    assert result.success
    assert (result.nit, result.nhev) == (1, distinct + 12)
    assert (result.nfev, result.njev) == (1, 2)


@every_method
def test_one_exact_step_on_a_quadratic_matrix(method):
    problem = toys.Quadratic(torch.logspace(-4, 4, 20), seed=1, matrix=True, centre=torch.linspace(-1, 1, 20).tolist())
    result = minimize(problem, method=method())
    assert result.success
    assert (result.nit, result.nhev) == (1, 2)
    torch.testing.assert_close(result.x, problem.centre, atol=1e-6, rtol=0)


@both_hessians
@every_method
def test_convergence_is_superlinear(method, matrix):
    problem = toys.SaddleChain(6, x0=[0.8, 1.1, 0.9, 1.2, 1.0, 0.7], matrix=matrix)
    h = minimize(problem, method=method(), options={"gtol": 1e-13}).history.grad_norm.to_numpy()
    assert len(h) - 1 <= (6 if matrix else 10)
    assert h[-1] / h[-2] < 1e-4


@every_method
def test_accuracy_asked_of_the_problem_follows_the_forcing_term(method):
    asked = []

    class Recorder(toys.Rosenbrock):
        def hessian(self, w, rtol=None):
            asked.append(rtol)
            return super().hessian(w, rtol)

    minimize(Recorder(), method=method(hessian_rtol=1e-2), options={"gtol": 1e-13})
    assert asked[0] == 1e-2
    assert all(1e-7 <= rtol <= 1e-2 for rtol in asked[:-1])
    assert min(asked[:-1]) < 1e-4


@every_method
def test_limit_on_products(method):
    problem = toys.Quadratic(torch.logspace(-3, 0, 40), seed=0)
    h = minimize(problem, method=method(max_krylov=3), options={"maxiter": 10}).history
    assert (h.nhev.diff().iloc[1:] <= 3).all()
    assert h.fun.is_monotonic_decreasing


@every_method
def test_the_callback_stops_it_and_options_are_not_modified(method):
    options = {"maxiter": 20}
    result = minimize(
        toys.Rosenbrock(),
        method=method(),
        options=options,
        callback=lambda intermediate_result: intermediate_result.nit == 2,
    )
    assert (result.status, result.nit) == (Status.STOPPED, 2)
    assert options == {"maxiter": 20}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_method
def test_shuffled_regression_from_a_random_start(method, dtype):
    rng = torch.Generator().manual_seed(0)
    X = torch.randn(40, 3, generator=rng, dtype=torch.float64)
    W = torch.tensor([[1.0, 0.5], [-0.3, 1.2], [0.4, -0.8]], dtype=torch.float64)
    Y = (X @ W)[torch.randperm(40, generator=rng)] + 0.05 * torch.randn(40, 2, generator=rng, dtype=torch.float64)
    problem = ShuffledRegression(X.to(dtype), Y.to(dtype), 0.3)
    start = problem.start(torch.Generator().manual_seed(1))
    result = minimize(problem, start, method=method(), options={"maxiter": 100})
    assert result.success, result.message
    assert result.certificate is not None
    assert result.certificate.verdict.value == "nonnegative"
    assert result.fun < float(problem.value(start))


@pytest.mark.parametrize(
    "wrong",
    [{"radius": 0.0}, {"eta_min": 0.0}, {"eta_max": 1.0}, {"eta_min": 0.6}, {"hessian_rtol": 0.0}, {"max_krylov": 0}],
)
@every_method
def test_bad_hyperparameters(method, wrong):
    with pytest.raises(ValueError, match="expected"):
        method(**wrong)
