import pytest
import torch

from ot_newton.minimize import minimize
from ot_newton.newton_cg import NewtonCG
from ot_newton.problem import FunctionProblem, Problem
from ot_newton.problems import toys
from ot_newton.status import Status

CONVEX = [toys.Rosenbrock, toys.LogBarrier, toys.QuarticBowl]


def points(problem, method=None, steps=1000, **options):
    """The points of a run (steps + 1, size)."""
    visited = [problem.start(torch.Generator())]
    minimize(
        problem,
        method=method or NewtonCG(),
        options={"maxiter": steps, **options},
        callback=lambda intermediate_result: visited.append(intermediate_result.x),
    )
    return torch.stack(visited)


class Rotated(Problem):
    """f(Qᵀw): the same function in other coordinates."""

    def __init__(self, inner, Q):
        self.inner, self.Q = inner, Q
        self.size, self.dtype, self.device = inner.size, inner.dtype, inner.device

    def start(self, rng):
        return self.Q @ self.inner.start(rng)

    def value(self, w):
        return self.inner.value(self.Q.T @ w)

    def value_and_grad(self, w, rtol=None):
        f, g = self.inner.value_and_grad(self.Q.T @ w)
        return f, self.Q @ g

    def hessian(self, w, rtol=None):
        H = self.inner.hessian(self.Q.T @ w)
        if self.inner.matrix:
            return type(H)(self.Q @ H.matrix @ self.Q.T, symmetric=True)
        from ot_newton.operators import FunctionOperator

        return FunctionOperator(H.shape, matmat=lambda V: self.Q @ (H @ (self.Q.T @ V)), dtype=H.dtype, symmetric=True)


@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("toy", [*CONVEX, toys.StrictSaddle, toys.SaddleChain, toys.Valley], ids=lambda t: t.__name__)
def test_ends_at_a_certified_minimiser(toy, matrix):
    problem = toy(matrix=matrix)
    result = minimize(problem)
    assert result.success
    # flat minima are where the gradient says little about f
    assert result.fun - problem.minimum < (1e-8 if toy is toys.QuarticBowl else 1e-13)
    assert result.nit < 40


@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("c", [2.0**-27, 2.0**27, 1e-8, 1e8])
def test_scaling_the_function_changes_nothing(c, matrix):
    for toy in (toys.Rosenbrock, toys.StrictSaddle, toys.SaddleChain):
        one, many = (points(toy(matrix=matrix, scale=s), steps=8) for s in (1.0, c))
        torch.testing.assert_close(one, many, rtol=0, atol=0 if c in (2.0**-27, 2.0**27) else 1e-9)


@pytest.mark.parametrize("matrix", [False, True])
def test_rotating_the_coordinates_rotates_the_path(matrix):
    Q, _ = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    for problem in (
        toys.Rosenbrock([-1.2, 1.0, 0.5, 2.0], matrix=matrix),
        toys.SaddleChain(4, x0=[0.1, 0.2, -0.3, 0.1], matrix=matrix),
    ):
        one, rotated = points(problem, steps=10), points(Rotated(problem, Q), steps=10)
        torch.testing.assert_close(one @ Q.T, rotated, rtol=0, atol=1e-9)


def test_shifting_the_value_changes_the_path_by_rounding_only():
    problem = toys.Rosenbrock()
    shifted = FunctionProblem(lambda x: problem._value(x) + 1e4, [-1.2, 1.0])
    one, other = points(problem, steps=10), points(shifted, steps=10)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize("distinct", [1, 3])
def test_exact_counts_of_hessian_products(distinct):
    # CG ends after one product for each distinct eigenvalue; the certificate takes `size` more
    problem = toys.Quadratic([float(1 + i % distinct) for i in range(12)], seed=0)
    method = NewtonCG(eta_max=1e-9, eta_min=1e-9)
    result = minimize(problem, method=method)
    assert result.success
    assert (result.nit, result.nhev) == (1, distinct + 12)
    assert (result.nfev, result.njev) == (1, 2)
    assert list(result.history.nhev) == [0, distinct + 12]


def test_one_exact_step_on_a_quadratic_matrix():
    problem = toys.Quadratic(torch.logspace(-4, 4, 20), seed=1, matrix=True, centre=torch.linspace(-1, 1, 20).tolist())
    result = minimize(problem)
    assert result.success
    assert (result.nit, result.nhev) == (1, 2)
    torch.testing.assert_close(result.x, problem.centre, atol=1e-6, rtol=0)


def test_convergence_is_quadratic_with_a_matrix_and_superlinear_without():
    for matrix, bound in ((True, 5), (False, 9)):
        problem = toys.SaddleChain(6, x0=[0.8, 1.1, 0.9, 1.2, 1.0, 0.7], matrix=matrix)
        h = minimize(problem, options={"gtol": 1e-13}).history.grad_norm.to_numpy()
        assert len(h) - 1 <= bound
        assert h[-1] / h[-2] < 1e-4


def test_requests_follow_the_forcing_term():
    asked = []

    class Recorder(toys.Rosenbrock):
        def hessian(self, w, rtol=None):
            asked.append(rtol)
            return super().hessian(w, rtol)

    minimize(Recorder(), method=NewtonCG(hessian_rtol=1e-2), options={"gtol": 1e-13})
    newton = asked[:-1]
    assert newton[0] == 1e-2
    assert all(1e-7 <= rtol <= 1e-2 for rtol in newton)
    assert min(newton) < 1e-4


def test_a_step_into_nan_is_shortened():
    for matrix in (False, True):
        problem = toys.LogBarrier([2.5, 3.0], matrix=matrix)
        for radius in (None, 100.0, 1e-3):
            result = minimize(problem, method=NewtonCG(radius=radius))
            assert result.success
            torch.testing.assert_close(result.x, torch.ones_like(result.x), atol=1e-7, rtol=0)
            assert result.nit < (12 if radius != 1e-3 else 20)


@pytest.mark.parametrize("matrix", [False, True])
def test_radius_bounds_the_first_step(matrix):
    problem = toys.Quadratic([1.0, 4.0], x0=[100.0, 100.0], matrix=matrix)
    h = minimize(problem, method=NewtonCG(radius=0.5)).history
    assert h.step_norm[1] == pytest.approx(0.5)
    assert h.step_norm[2] == pytest.approx(1.5)
    assert h.fun.is_monotonic_decreasing


@pytest.mark.parametrize("matrix", [False, True])
def test_negative_curvature_lowers_the_function_from_random_points(matrix):
    rng = torch.Generator().manual_seed(3)
    for _ in range(20):
        problem = toys.SaddleChain(6, x0=0.5 * torch.randn(6, generator=rng), matrix=matrix)
        result = minimize(problem)
        assert result.success
        h = result.history
        assert (torch.diff(torch.tensor(h.fun.to_numpy())) <= 1e-15).all()
        assert result.lambda_min > 0


def test_maximum_away_from_stationarity_uses_the_lowest_eigenvector():
    problem = toys.SaddleChain(5, x0=[1e-6] * 5, matrix=True)
    h = minimize(problem).history
    assert h.phase[1] == "curvature"
    assert h.nhev.iloc[-1] < 12


def test_noisy_values_do_not_stop_it_early():
    class Noisy(toys.Rosenbrock):
        """The value is right to 1e-5 and says so; the gradient is exact."""

        value_error = 1e-5

        def value(self, w):
            return super().value(w) + 1e-5 * torch.sin(1e9 * w.sum())

    result = minimize(Noisy())
    assert result.success
    torch.testing.assert_close(result.x, torch.ones_like(result.x), atol=1e-6, rtol=0)


def test_inexact_hessians_still_converge():
    class Inexact(toys.SaddleChain):
        hessian_error = 1e-3

        def hessian(self, w, rtol=None):
            H = super().hessian(w)
            rng = torch.Generator().manual_seed(0)
            E = torch.randn(self.size, self.size, generator=rng, dtype=self.dtype)
            E = (E + E.T) / torch.linalg.matrix_norm(E + E.T, 2)
            return type(H)(H.matrix + 2e-3 * E, symmetric=True)

    result = minimize(Inexact(5, x0=[0.1, 0.2, 0.1, 0.0, 0.3], matrix=True))
    assert result.success
    assert result.nit < 20


def test_float32():
    for matrix in (False, True):
        problem = toys.Rosenbrock(matrix=matrix, dtype=torch.float32)
        result = minimize(problem)
        assert result.success
        assert result.x.dtype == result.jac.dtype == torch.float32
        torch.testing.assert_close(result.x, torch.ones_like(result.x), atol=1e-2, rtol=0)


def test_second_escape_from_one_saddle_differs():
    problem, method = toys.StrictSaddle([0.0, 0.0], b=1e-3), NewtonCG()
    from ot_newton.certificate import smallest_eigenvalue

    w = problem.start(torch.Generator())
    state = method.init(problem, w)
    curvature = smallest_eigenvalue(problem.hessian(w))
    first, after = method.escape_saddle(problem, w, state, curvature)
    assert (after.phase, after.accepted, after.status) == ("escape", True, None)
    back = method.init(problem, w)
    from dataclasses import replace

    second, again = method.escape_saddle(problem, w, replace(back, last_escape=after.last_escape), curvature)
    assert again.accepted
    assert float(torch.dist(first, second)) > 0.1 * after.step_norm
    assert max(float(problem.value(first)), float(problem.value(second))) < 0


def test_zero_step_at_a_flat_point():
    problem = toys.Quadratic([0.0, 0.0], x0=[1.0, 2.0])
    for matrix in (False, True):
        problem.matrix = matrix
        method = NewtonCG()
        w = problem.start(torch.Generator())
        moved, state = method.step(problem, w, method.init(problem, w))
        assert torch.equal(moved, w)
        assert state.status is Status.STALLED
        assert minimize(problem).status is Status.CONVERGED


@pytest.mark.parametrize(
    "wrong",
    [{"radius": 0.0}, {"eta_min": 0.0}, {"eta_max": 1.0}, {"eta_min": 0.6}, {"hessian_rtol": 0.0}, {"max_cg": 0}],
)
def test_bad_hyperparameters(wrong):
    with pytest.raises(ValueError, match="expected"):
        NewtonCG(**wrong)


def test_limit_on_cg():
    problem = toys.Quadratic(torch.logspace(-3, 0, 40), seed=0)
    h = minimize(problem, method=NewtonCG(max_cg=3), options={"maxiter": 10}).history
    assert (h.nhev.diff().iloc[1:] <= 3).all()
    assert h.fun.is_monotonic_decreasing
