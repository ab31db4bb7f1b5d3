"""What runs on a CPU runs on a GPU, in both precisions, with the same answers."""

import pytest
import torch
from referee import Referee, relative

from ot_newton import NewtonCG, SaddleSwitch, minimize, smallest_eigenvalue, solve
from ot_newton.problems.shuffled_regression import ShuffledRegression
from ot_newton.sinkhorn import METHODS

pytestmark = pytest.mark.gpu
EPS = 0.5
TOL = {torch.float64: 1e-7, torch.float32: 3e-4}


def clouds(dtype: torch.dtype, n: int = 200, m: int = 150, d: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    x, y = (torch.randn(size, d, generator=rng, dtype=torch.float64) for size in (n, m))
    return x.to("cuda", dtype), y.to("cuda", dtype)


@pytest.mark.parametrize("dtype", TOL)
@pytest.mark.parametrize("method", METHODS)
def test_solve(method, dtype):
    x, y = clouds(dtype)
    plan = solve(x, y, EPS, method=method, tol=1e-9 if dtype == torch.float64 else 1e-5)
    dense = Referee(x.double().cpu(), y.double().cpu(), EPS)
    assert plan.converged
    assert plan.f.device.type == "cuda"
    assert plan.f.dtype == dtype
    assert plan.backend == ("triton" if dtype == torch.float32 else "blocked")
    want = 2 * (dense.r[:, None] * dense.x - dense.P @ dense.y)
    assert relative(plan.grad().double().cpu(), want) < 100 * plan.error + 200 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", TOL)
@pytest.mark.parametrize("method", ["block", "cg"])
def test_hessian(method, dtype):
    x, y = clouds(dtype)
    plan = solve(x, y, EPS, tol=1e-9 if dtype == torch.float64 else 1e-6)
    V = torch.randn(x.numel(), 4, dtype=dtype, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    H = plan.hessian(method=method)
    want = plan_on_cpu(x, y).hessian() @ V.double().cpu()
    before = plan.pairs.passes.total
    got = H @ V
    assert plan.pairs.passes.total > before
    assert relative(got.double().cpu(), want) < TOL[dtype]


def plan_on_cpu(x: torch.Tensor, y: torch.Tensor):
    return solve(x.double().cpu(), y.double().cpu(), EPS, tol=1e-11)


@pytest.mark.parametrize("dtype", TOL)
@pytest.mark.parametrize("method", [NewtonCG(), SaddleSwitch()], ids=["newton-cg", "adam-newton"])
def test_minimise(method, dtype):
    rng = torch.Generator().manual_seed(0)
    X = torch.randn(200, 3, generator=rng, dtype=torch.float64)
    W = torch.eye(3, dtype=torch.float64) + 0.2 * torch.randn(3, 3, generator=rng, dtype=torch.float64)
    Y = (X @ W)[torch.randperm(200, generator=rng)] + 0.3 * torch.randn(200, 3, generator=rng, dtype=torch.float64)
    problem = ShuffledRegression(X.to("cuda", dtype), Y.to("cuda", dtype), eps=EPS)
    start = problem.start(torch.Generator().manual_seed(1), "monge")
    gtol = 1e-7 if dtype == torch.float64 else 1e-3
    result = minimize(problem, start, method=method, options={"gtol": gtol, "maxiter": 500})
    assert result.success, result.message
    reference = ShuffledRegression(X, Y, eps=EPS)
    at = result.x.reshape(-1).double().cpu()
    exact = smallest_eigenvalue(reference.hessian(at)).lambda_min
    assert abs(result.lambda_min - exact) < 2e-2 * abs(exact)
    assert abs(result.fun - float(reference.value(at))) < 10 * TOL[dtype]
