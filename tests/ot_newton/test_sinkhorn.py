import math
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from referee import Referee, cost_matrix, pts, relative, wts
from scipy.optimize import linprog

from ot_newton.sinkhorn import METHODS, ConvergenceWarning, solve
from ot_newton.status import Status
from ot_newton.unbalanced import solve_unbalanced

EVERY_METHOD = pytest.mark.parametrize("method", METHODS)
DTYPES = [torch.float64, torch.float32]
limited = pytest.mark.filterwarnings("ignore::ot_newton.sinkhorn.ConvergenceWarning")


@EVERY_METHOD
@pytest.mark.parametrize(("n", "m", "d", "scale"), [(12, 9, 1, 1.0), (8, 15, 3, 0.5), (10, 10, 7, 1.0)])
def test_against_the_referee(method, n, m, d, scale):
    x, y, a, b = pts(n, d), pts(m, d, 1), wts(n), wts(m, 2)
    plan = solve(x, y, 1.5, a=a, b=b, scale=scale, tol=1e-12, method=method, backend="dense" if d == 3 else "blocked")
    dense = Referee(x, y, 1.5, a=a, b=b, scale=scale)
    assert plan.converged
    assert plan.error <= 1e-12
    assert relative(plan.value(), dense.value) < 1e-10
    assert relative(plan.grad(), dense.grad_x) < 1e-8
    assert relative(plan.grad_y(), dense.grad_y) < 1e-8
    assert relative(plan.f - plan.f[0], dense.f - dense.f[0]) < 1e-8
    assert relative(plan.to_dense(), dense.P) < 1e-8


def test_cosine_cost():
    x, y = pts(11, 3), pts(8, 3, 1)
    plan, dense = solve(x, y, 0.3, cost="cosine", scale=2.0, tol=1e-12), Referee(x, y, 0.3, cost="cosine", scale=2.0)
    assert relative(plan.value(), dense.value) < 1e-10
    assert relative(plan.grad(), dense.grad_x) < 1e-8
    assert relative(plan.grad_y(), dense.grad_y) < 1e-8
    assert relative(solve(3 * x, 0.1 * y, 0.3, cost="cosine", scale=2.0, tol=1e-12).value(), dense.value) < 1e-10


def test_small_eps_is_the_linear_programme():
    x, y, a, b = pts(8, 2), pts(6, 2, 1), wts(8), wts(6, 2)
    C = cost_matrix(x, y)
    rows, columns = np.kron(np.eye(8), np.ones(6)), np.kron(np.ones(8), np.eye(6))
    exact = linprog(C.reshape(-1).numpy(), A_eq=np.vstack([rows, columns]), b_eq=np.concatenate([a.numpy(), b.numpy()]))
    eps = 1e-3
    plan = solve(x, y, eps, a=a, b=b)
    # <P, C> lies above the optimum, and eps KL between 0 and eps min(H(a), H(b)).
    assert plan.converged
    assert exact.fun - 1e-5 < float((plan.to_dense() * C).sum()) < exact.fun + eps * math.log(8)
    assert 0 < float(plan.value()) - exact.fun < eps * math.log(6)


@pytest.mark.parametrize("eps", [2e-3, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9])
@pytest.mark.parametrize("dtype", DTYPES)
@limited
def test_tiny_eps(eps, dtype):
    x = (torch.arange(8).double() / 7)[:, None]
    plan = solve(x.to(dtype), (x + 0.3).to(dtype), eps)
    real = Referee(plan.x, plan.y, eps, at=(plan.f.double(), plan.g.double()))
    assert plan.value().isfinite()
    assert plan.grad().isfinite().all()
    if dtype == torch.float64:
        assert plan.converged
        assert real.error < 1e-5
    if plan.converged:
        assert abs(float(plan.value()) - 0.09 - eps * math.log(8)) < 2e-6 + 2e-3 * eps
        assert relative(plan.grad(), torch.full((8, 1), -0.6 / 8).double()) < 1e-3
        assert real.error < 1e-3
    else:
        assert plan.status in (Status.STALLED, Status.NONFINITE)


@EVERY_METHOD
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [10.0, 1.0, 0.1])
def test_one_hot_weights(method, dtype, eps):
    corners = torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]], dtype=dtype)
    a, b = torch.tensor([0, 1, 0, 0], dtype=dtype), torch.tensor([1, 0, 0, 0], dtype=dtype)
    plan = solve(corners, corners, eps, a=a, b=b, method=method)
    assert abs(float(plan.value()) - 1) < 1e-5
    want = torch.tensor([[0, 0], [2, 0], [0, 0], [0, 0]]).double()
    assert relative(plan.grad(), want) < 1e-5
    assert relative(plan.grad_y(), torch.tensor([[-2, 0], [0, 0], [0, 0], [0, 0]]).double()) < 1e-5
    assert plan.f.isfinite().all()
    assert plan.g.isfinite().all()
    assert plan.hessian().to_dense().isfinite().all()


@EVERY_METHOD
def test_zero_weights_are_as_absent(method):
    x, y, b = pts(7, 2), pts(9, 2, 1), wts(9)
    a = torch.cat([torch.zeros(2).double(), wts(5)])
    whole = solve(x, y, 2.0, a=a, b=b, method=method, tol=1e-11)
    part = solve(x[2:], y, 2.0, a=a[2:], b=b, method=method, tol=1e-11)
    assert relative(whole.value(), part.value().double()) < 1e-10
    assert relative(whole.grad()[2:], part.grad()) < 1e-8
    assert (whole.grad()[:2] == 0).all()
    back = solve(y, x, 2.0, a=b, b=a, method=method, tol=1e-11)
    assert relative(back.grad_y()[2:], part.grad()) < 1e-8


@limited
@EVERY_METHOD
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [1.0, 1e-3, 1e-6])
def test_no_spread_at_all(method, dtype, eps):
    for n, m, gap in ((1, 1, 0.0), (1, 1, 1.0), (5, 5, 0.0), (5, 3, 0.0), (1, 4, 0.5)):
        x, y = torch.zeros(n, 2, dtype=dtype), torch.full((m, 2), gap, dtype=dtype)
        plan = solve(x, y, eps, method=method)
        # Rounding of the exponents, of size gap²/eps, decides how exactly a row of the plan keeps its mass.
        digits = torch.finfo(dtype).eps * (1 + gap**2 / eps)
        assert abs(float(plan.value()) - 2 * gap**2) <= 8 * digits
        assert (plan.grad() + 2 * gap / n).abs().max() <= 8 * digits
        assert plan.converged or digits > 1e-5
        assert plan.hessian().to_dense().isfinite().all()
    plan = solve(x + 1e3, x + 1e3, eps, method=method)
    assert plan.converged
    assert abs(float(plan.value())) < 1e-6


def test_divergence_from_itself_and_a_neighbour():
    x = 0.01 * pts(50, 160)
    y = x + 0.001 * pts(50, 160, 3)
    xy, xx, yy = (solve(p, q, 0.0025, scale=0.5).value() for p, q in ((x, y), (x, x), (y, y)))
    assert relative(xy, torch.tensor(9.930468e-3).double()) < 1e-4
    assert abs(float(xy - (xx + yy) / 2) - 1.60741e-4) < 2e-6
    single = [solve(p.float(), q.float(), 0.0025, scale=0.5).value() for p, q in ((x, y), (x, x), (y, y))]
    assert abs(float(single[0] - (single[1] + single[2]) / 2) - 1.60741e-4) < 2e-6


@pytest.mark.parametrize(
    ("method", "dtype"), [*((method, torch.float64) for method in METHODS), ("auto", torch.float32)]
)
def test_published_value(method, dtype):
    plan = solve(pts(50, 4).to(dtype), pts(50, 4, 2).to(dtype), 1.0, method=method, tol=1e-5)
    assert plan.converged
    assert plan.error <= 1e-5
    assert abs(float(plan.value()) - 6.1407207) < 1e-4
    assert abs(float(plan.dual_value()) - 6.1407207) < (2e-7 if dtype == torch.float64 else 1e-5)
    assert plan.f.dtype == plan.g.dtype == plan.grad().dtype == plan.value().dtype == plan.row_sums.dtype == dtype
    assert plan.value().shape == ()


@EVERY_METHOD
def test_a_tolerance_above_every_error_stops_at_once(method):
    plan = solve(pts(20, 2), pts(15, 2, 1), 1.0, tol=1e300, method=method)
    assert plan.converged
    assert plan.n_iter <= 2


@limited
@EVERY_METHOD
@pytest.mark.parametrize("max_iter", [1, 2, 15])
@pytest.mark.parametrize("eps", [0.05, 1e-4])
def test_the_budget_is_kept(method, max_iter, eps):
    plan = solve(pts(40, 2), pts(30, 2, 1), eps, tol=0, method=method, max_iter=max_iter)
    assert plan.status is Status.PASS_LIMIT
    assert plan.n_iter <= max_iter
    if method == "alternating":
        assert plan.n_passes == 2 * max_iter
    r, c = plan.apply(torch.ones(30).double()), plan.adjoint(torch.ones(40).double())
    error = float((r - plan.a).abs().sum() + (c - plan.b).abs().sum())
    assert plan.error == pytest.approx(error, rel=1e-6)  # at the eps that was asked for


@EVERY_METHOD
def test_converged_can_be_recomputed(method):
    plan = solve(pts(30, 2), pts(40, 2, 1), 2.0, a=wts(30), tol=1e-8, method=method)
    dense = Referee(plan.x, plan.y, 2.0, a=plan.a, at=(plan.f, plan.g))
    assert plan.converged
    assert dense.error <= 1e-8
    assert plan.error == pytest.approx(dense.error, rel=1e-3)


def test_not_converged_warns_once_and_says_so():
    x, y = pts(50, 2), pts(50, 2, 5) + 0.5
    options = {"a": wts(50), "b": wts(50, 1), "max_iter": 10, "method": "alternating"}
    with pytest.warns(ConvergenceWarning, match=r"marginal error .* after 20 passes \(pass_limit\)") as caught:
        plan = solve(x, y, 0.02, **options)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert not plan.converged
    assert plan.error > 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        with pytest.raises(ConvergenceWarning):
            solve(x, y, 0.02, **options)
        assert solve(x, y, 0.5).converged


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_and_three_against_many(dtype):
    y = torch.randn(5000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    one = torch.tensor([[0.5, -0.5]], dtype=dtype)
    plan = solve(one, y, 0.1)
    want = ((y.double() - one.double()) ** 2).sum(1).mean()
    assert relative(plan.value(), want) < 1e-6
    assert relative(solve(y, one, 0.1).value(), want) < 1e-6
    three = pts(3, 2).to(dtype)
    plan = solve(three, y, 0.1)
    assert plan.converged
    r, c = plan.apply(torch.ones(5000, dtype=dtype)), plan.adjoint(torch.ones(3, dtype=dtype))
    assert float((r - plan.a).abs().sum() + (c - plan.b).abs().sum()) < 3 * plan.error + 1e-5


def test_duplicated_points_share_their_weight():
    x, y = pts(6, 2), pts(8, 2, 1)
    twice = solve(x.repeat(3, 1), y.repeat(2, 1), 0.4, tol=1e-11)
    once = solve(x, y, 0.4, tol=1e-11)
    assert relative(twice.value(), once.value().double()) < 1e-10
    assert relative(twice.grad(), once.grad().repeat(3, 1) / 3) < 1e-8


@EVERY_METHOD
def test_warm_start(method):
    x, y = pts(40, 2), pts(30, 2, 1)
    cold = solve(x, y, 2.0, method=method)
    assert solve(x, y, 2.0, init=cold, method=method).n_passes <= 3
    near = solve(x + 1e-3, y, 2.0, init=(cold.f, cold.g), method=method)
    assert near.converged
    assert near.n_passes < cold.n_passes
    assert solve(x[:5], y, 2.0, init=(torch.zeros(5), torch.zeros(30)), method=method).converged


def test_annealing_changes_the_road_and_not_the_goal():
    x, y = pts(30, 2), pts(30, 2, 1)
    plans = [solve(x, y, 0.05, anneal=ratio, tol=1e-10) for ratio in (None, 1.0, 0.5, 0.25)]
    for plan in plans[1:]:
        assert plan.converged
        assert relative(plan.value(), plans[0].value().double()) < 1e-9


@pytest.mark.parametrize("dtype", DTYPES)
def test_translation_scaling_and_exchange(dtype):
    x, y, tol = pts(30, 3), pts(20, 3, 1), 1e-11 if dtype == torch.float64 else 1e-5
    plan = solve(x.to(dtype), y.to(dtype), 0.8, tol=tol)
    size = {torch.float64: 1e-9, torch.float32: 1e-3}[dtype]
    far = solve((x + 1e4).to(dtype), (y + 1e4).to(dtype), 0.8, tol=tol)
    assert relative(far.grad(), plan.grad().double()) < size
    assert relative(far.value(), plan.value().double()) < size
    wide = solve((100 * x).to(dtype), (100 * y).to(dtype), 8000, tol=tol)
    assert relative(wide.value() / 1e4, plan.value().double()) < size
    scaled = solve(x.to(dtype), y.to(dtype), 0.4, scale=0.5, tol=tol)
    assert relative(2 * scaled.value(), plan.value().double()) < size
    back = solve(y.to(dtype), x.to(dtype), 0.8, tol=tol)
    assert relative(back.value(), plan.value().double()) < size
    assert relative(back.grad_y(), plan.grad().double()) < size


def overflows(kind: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Points and a temperature whose cost over eps leaves the range of the dtype."""
    x, y, largest = pts(6, 2).to(dtype), pts(5, 2, 1).to(dtype), torch.finfo(dtype).max
    one = torch.ones(1, 2, dtype=dtype)
    return {
        "wide x": (largest**0.75 * x, y, 1.0),
        "wide y": (x, largest**0.75 * y, 1.0),
        "cold": (x, y, 0.01 / largest),
        "cold and close": (one, one, 0.01 / largest),
        "cold and narrow": (1e-4 * x, 1e-4 * y, 1e-6 / largest),
    }[kind]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["wide x", "wide y", "cold", "cold and close", "cold and narrow"])
@pytest.mark.parametrize("method", ["auto", "alternating"])
def test_a_cost_over_eps_that_overflows_is_refused(method, kind, dtype):
    x, y, eps = overflows(kind, dtype)
    with pytest.raises(ValueError, match=r"[xy]: expected points whose cost over eps is finite, got an overflow"):
        solve(x, y, eps, method=method)


def test_labels_whose_cost_over_eps_overflows_are_refused():
    x, y, classes = pts(6, 2), pts(5, 2, 1), torch.zeros(6).long()
    with pytest.raises(ValueError, match="expected points whose cost over eps is finite, got an overflow"):
        solve(x, y, 0.1, labels=(classes, classes[:5], torch.full((1, 1), 1e308, dtype=torch.float64)))


@pytest.mark.parametrize("init", ["x", 3, [1, 2], (None, None), (torch.zeros(6),), torch.zeros(2, 6), 3 * (None,)])
@pytest.mark.parametrize("call", [solve, partial(solve_unbalanced, reach=1.0)])
def test_a_start_that_is_none(call, init):
    with pytest.raises(TypeError, match=r"init: expected a plan or its potentials \(f, g\), got"):
        call(pts(6, 2), pts(5, 2, 1), 1.0, init=init)


def test_a_start_out_of_range_over_eps():
    f, g = torch.full((6,), 1e300, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for x, y, eps in ((pts(6, 2), pts(5, 2, 1), 1e-9), (pts(6, 2).float(), pts(5, 2, 1).float(), 1.0)):
        with pytest.raises(ValueError, match="init: expected a finite potential f, over eps too"):
            solve(x, y, eps, init=(f, g))


def test_triton_is_refused_on_a_cpu():
    with pytest.raises(RuntimeError, match="backend 'triton': expected float32 on a CUDA device"):
        solve(pts(6, 2), pts(5, 2, 1), 1.0, backend="triton")
