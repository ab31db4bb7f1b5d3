"""The driver: arguments, limits, callback, history, and what a result holds."""

import gc
import time

import numpy as np
import pandas as pd
import pytest
import torch

from ot_newton.adam import Adam
from ot_newton.minimize import METHODS, minimize
from ot_newton.newton_cg import NewtonCG
from ot_newton.pairs import Passes
from ot_newton.problem import FunctionProblem, Problem
from ot_newton.problems import toys
from ot_newton.result import HISTORY
from ot_newton.saddle_switch import SaddleSwitch
from ot_newton.status import Status

METHOD = {name: cls() for name, cls in METHODS.items()}
METHOD |= {"adam": Adam(lr=0.05), "adam-newton": SaddleSwitch(Adam(lr=0.05), check_every=3)}
every_method = pytest.mark.parametrize("method", METHOD.values(), ids=METHOD)


def saddle(x):
    return x[0] ** 2 - x[1] ** 2 + x[1] ** 4


@every_method
def test_maxiter_zero_is_a_valid_result(method):
    problem = toys.Rosenbrock()
    result = minimize(problem, method=method, options={"maxiter": 0})
    f, g = problem.value_and_grad(problem.start(torch.Generator()))
    assert result.status is Status.MAX_ITER
    assert (result.nit, result.fun, len(result.history)) == (0, float(f), 1)
    assert torch.equal(result.jac, g)
    assert np.isnan(result.lambda_min)
    assert result.certificate is None
    assert "curvature not tested" in result.message
    assert "status: max_iter" in repr(result)


@every_method
def test_maxiter_one_and_minus_one(method):
    result = minimize(toys.Rosenbrock(), method=method, options={"maxiter": 1})
    assert (result.status, result.nit) == (Status.MAX_ITER, 1)
    with pytest.raises(ValueError, match="expected maxiter as an integer ≥ 0, got -1"):
        minimize(toys.Rosenbrock(), method=method, options={"maxiter": -1})


def test_maxiter_zero_at_a_minimiser_is_a_success():
    assert minimize(toys.Rosenbrock([1.0, 1.0]), options={"maxiter": 0}).status is Status.CONVERGED


@pytest.mark.parametrize("maxiter", [0, 1, 3, 7, 1000])
@every_method
def test_value_and_gradient_belong_to_the_point(method, maxiter):
    problem = FunctionProblem(saddle, [0.7, 0.1])
    result = minimize(problem, method=method, options={"maxiter": maxiter})
    f, g = problem.value_and_grad(result.x)
    assert result.fun == float(f)
    assert torch.equal(result.jac, g)
    assert result.history.grad_norm.iloc[-1] == pytest.approx(float(g.norm()), rel=1e-12)


@every_method
def test_the_shape_of_the_start_is_kept(method):
    target = torch.arange(25, dtype=torch.float64).reshape(5, 5) / 25
    seen = []

    def callback(*, intermediate_result):
        seen.append((intermediate_result.x.shape, intermediate_result.jac.shape))

    def fun(x):
        assert x.shape == (5, 5)
        return ((x - target) ** 2).sum()

    result = minimize(fun, torch.zeros(5, 5, dtype=torch.float64), method=method, callback=callback)
    assert result.success
    assert result.x.shape == result.jac.shape == (5, 5)
    assert set(seen) == {(torch.Size([5, 5]), torch.Size([5, 5]))}
    torch.testing.assert_close(result.x, target, atol=1e-6, rtol=0)


def test_scalars_and_single_entries():
    assert minimize(lambda x: (x - 2) ** 2, 0.0).x.shape == ()
    assert minimize(lambda x: (x[0] - 2) ** 2, [0.0]).x.tolist() == pytest.approx([2.0])


@every_method
def test_a_problem_may_be_started_elsewhere_in_its_own_shape(method):
    problem = FunctionProblem(lambda x: ((x - 1) ** 2).sum(), [[0.0, 0.0]])
    assert minimize(problem, torch.full((2,), 0.5, dtype=torch.float64), method=method).x.shape == (2,)
    assert minimize(problem, [[0.5, 0.5]], method=method).x.shape == (1, 2)


@every_method
def test_callback_stops_by_exception_or_by_true(method):
    for how in ("exception", "true"):
        rows = []

        def callback(intermediate_result, rows=rows, how=how):
            rows.append((intermediate_result.nit, len(intermediate_result.history), intermediate_result.status))
            if intermediate_result.nit == 3:
                if how == "exception":
                    raise StopIteration
                return True
            return None

        result = minimize(toys.Rosenbrock(), method=method, callback=callback)
        assert result.status is Status.STOPPED
        assert Status.STOPPED.advice in result.message
        assert rows == [(1, 2, None), (2, 3, None), (3, 4, None)]
        assert result.nit == 3


def test_errors_in_the_callback_are_the_callers():
    def callback(intermediate_result):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        minimize(saddle, [1.0, 1.0], callback=callback)


def test_options_are_not_modified_and_not_inherited():
    options = {"maxiter": 2, "gtol": 1e-3}
    for method in METHODS:
        assert minimize(toys.Rosenbrock(), method=method, options=options).nit == 2
        assert options == {"maxiter": 2, "gtol": 1e-3}
    assert minimize(toys.Rosenbrock()).nit > 2


def test_methods_by_name_take_their_hyperparameters_from_the_options():
    by_name = minimize(toys.Rosenbrock(), method="adam", options={"lr": 0.05, "maxiter": 5})
    by_object = minimize(toys.Rosenbrock(), method=Adam(lr=0.05), options={"maxiter": 5})
    assert torch.equal(by_name.x, by_object.x)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"expected options among maxiter, gtol.*lr, betas.*got 'learning_rate'"):
        minimize(saddle, [0.0, 0.0], method="adam", options={"learning_rate": 1.0})
    with pytest.raises(ValueError, match="got 'lr'"):
        minimize(saddle, [0.0, 0.0], method=Adam(), options={"lr": 1.0})
    with pytest.raises(ValueError, match=f"expected method as one of {', '.join(METHODS)}, got 'bfgs'"):
        minimize(saddle, [0.0, 0.0], method="bfgs")
    with pytest.raises(TypeError, match="expected method as a name or an object with init and step"):
        minimize(saddle, [0.0, 0.0], method=NewtonCG)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="expected a Problem or a function, got int"):
        minimize(3, [0.0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="expected x0 with a function"):
        minimize(saddle)
    with pytest.raises(ValueError, match="expected x0 with 2 entries"):
        minimize(toys.Rosenbrock(), [1.0, 2.0, 3.0])
    with pytest.raises(TypeError, match=r"expected w as a tensor of torch\.float64"):
        minimize(toys.Rosenbrock(), torch.zeros(2))
    with pytest.raises(TypeError, match="expected callback to be callable"):
        minimize(saddle, [0.0, 0.0], callback=3)  # pyright: ignore[reportArgumentType]
    for name, value in {"gtol": -1.0, "gtol_abs": float("nan"), "time_limit": -1, "curvature_rtol": 0.0}.items():
        with pytest.raises(ValueError, match=name):
            minimize(saddle, [0.0, 0.0], options={name: value})
    with pytest.raises(ValueError, match="maxiter"):
        minimize(saddle, [0.0, 0.0], options={"maxiter": 1.5})


def test_the_caller_keeps_the_start():
    x0 = torch.tensor([1.0, 1.0], dtype=torch.float64)
    minimize(saddle, x0)
    assert x0.tolist() == [1.0, 1.0]
    assert not x0.requires_grad


@every_method
def test_history(method):
    result = minimize(toys.StrictSaddle([1.0, 0.3]), method=method)
    h = result.history
    assert result.success
    assert list(h.columns) == list(HISTORY)
    assert dict(h.dtypes.astype(str)) == HISTORY
    assert list(h.step) == list(range(result.nit + 1))
    assert h.phase[0] == "start"
    assert h.fun.iloc[-1] == result.fun
    assert h.lambda_min.iloc[-1] == result.lambda_min
    assert h.nhev.iloc[-1] == result.nhev
    assert h.seconds.is_monotonic_increasing
    assert h.step_norm[0] == 0
    assert (h.step_norm[1:] > 0).all()


def test_eigenvalues_in_the_history_belong_to_their_rows():
    problem, points = toys.Rosenbrock(matrix=True), []
    result = minimize(problem, callback=lambda intermediate_result: points.append(intermediate_result.x))
    points.insert(0, problem.start(torch.Generator()))
    for w, lowest in zip(points, result.history.lambda_min, strict=True):
        assert lowest == pytest.approx(float(torch.linalg.eigvalsh(problem.hessian(w).to_dense())[0]), rel=1e-9)


def test_time_and_pass_limits():
    class Slow(toys.Rosenbrock):
        def value_and_grad(self, w, rtol=None):
            self.passes += Passes(half_steps=10)
            time.sleep(0.01)
            return super().value_and_grad(w, rtol)

    result = minimize(Slow(), method="adam", options={"max_passes": 50})
    assert (result.status, result.n_passes, result.nit) == (Status.PASS_LIMIT, 50, 4)
    result = minimize(Slow(), method="adam", options={"time_limit": 0.05})
    assert result.status is Status.TIME_LIMIT
    assert result.nit < 20


def test_tolerances_are_relative_and_absolute():
    problem = toys.Quadratic([1.0, 100.0], seed=0)
    start = float(problem.value_and_grad(problem.start(torch.Generator()))[1].norm())
    for options, limit in (({"gtol": 1e-2}, 1e-2 * start), ({"gtol": 0.0, "gtol_abs": 0.5}, 0.5)):
        h = minimize(problem, method=Adam(lr=0.01), options=options).history
        assert h.grad_norm.iloc[-1] <= limit < h.grad_norm.iloc[-2]


@every_method
def test_nothing_leaks(method):
    def fun(x):  # Newton's steps shrink by a third each, so that all 200 are taken
        return (x**4).sum() + (x[1:] - x[:-1]).pow(4).sum()

    counts = {}

    def callback(intermediate_result):
        if intermediate_result.nit in (10, 50, 100, 200):
            gc.collect()
            counts[intermediate_result.nit] = sum(type(o) is torch.Tensor for o in gc.get_objects())

    x0 = torch.linspace(-1.0, 2.0, 30, dtype=torch.float64)
    minimize(fun, x0, method=method, callback=callback, options={"maxiter": 200, "gtol": 0.0})
    assert list(counts) == [10, 50, 100, 200]
    assert max(counts.values()) <= counts[10] + 5


def test_result_prints_and_history_is_a_frame():
    result = minimize(saddle, [1.0, 1.0])
    assert isinstance(result.history, pd.DataFrame)
    assert "success: True" in repr(result)
    assert "λ_min" in result.message


def test_starting_points_drawn_by_a_problem_follow_the_seed():
    class Drawn(toys.Quadratic):
        def start(self, rng):
            return torch.randn(self.size, generator=rng, dtype=self.dtype)

    def start(seed):
        return minimize(Drawn([1.0, 2.0]), options={"maxiter": 0, "seed": seed}).x

    assert torch.equal(start(1), start(1))
    assert not torch.equal(start(1), start(2))
    state = torch.get_rng_state()
    minimize(Drawn([1.0, -2.0]), options={"maxiter": 3})
    assert torch.equal(state, torch.get_rng_state())


def test_problem_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Problem()  # pyright: ignore[reportAbstractUsage]
