"""Unbalanced transport against dense float64 fixed points, finite differences, and scipy on the primal problem."""

import math
import warnings

import pytest
import scipy.optimize
import torch
from referee import cost_matrix, pts, relative, wts

from ot_newton import relaxed_solver
from ot_newton.autograd import ot_loss
from ot_newton.divergence import solve_divergence
from ot_newton.operator_checks import check_operator
from ot_newton.sinkhorn import ConvergenceWarning, solve
from ot_newton.unbalanced import solve_unbalanced, unbalanced_ot_loss

N, M, EPS = 9, 7, 0.8
X, Y, A, B = pts(N, 2), pts(M, 2, 1), 2 * wts(N), 0.7 * wts(M, 2)
REACHES = [1.0, 3.0, (2.0, None), (None, 0.7), (0.5, 3.0)]


def kl(p, q):
    held = p > 0
    return (p[held] * (p[held] / q[held]).log()).sum() - p.sum() + q.sum()


def prices(reach):
    pair = reach if isinstance(reach, tuple) else (reach, reach)
    return [None if r is None else r**2 for r in pair]


def primal(P, C, a, b, eps, reach):
    """The objective from its definition."""
    value = (P * C).sum() + eps * kl(P, a[:, None] * b)
    for rho, marginal, weights in zip(prices(reach), (P.sum(1), P.sum(0)), (a, b), strict=True):
        value = value + (0 if rho is None else rho * kl(marginal, weights))
    return value


def dense(x, y, a, b, eps, reach, *, cost="sqeuclidean", scale=1.0, sweeps=250):
    """The objective at the plan of the damped fixed point, recorded by torch."""
    C, f, g = cost_matrix(x, y, cost, scale), torch.zeros_like(a), torch.zeros_like(b)
    first, second = (1.0 if rho is None else rho / (rho + eps) for rho in prices(reach))
    for _ in range(sweeps):
        f = -first * eps * torch.logsumexp((g - C) / eps + b.log(), 1)
        g = -second * eps * torch.logsumexp((f[:, None] - C) / eps + a.log()[:, None], 0)
    return primal(a[:, None] * b * torch.exp((f[:, None] + g - C) / eps), C, a, b, eps, reach)


def leaves(*tensors):
    return [t.clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("swap", [False, True])
def test_value_gradients_and_hessian(reach, swap):
    if swap:
        x, y, a, b = Y, X, B, A
    else:
        x, y, a, b = X, Y, A, B
    ours, theirs = leaves(x, y, a, b), leaves(x, y, a, b)
    loss = unbalanced_ot_loss(*ours[:2], EPS, reach, a=ours[2], b=ours[3], tol=1e-13)
    want = dense(*theirs, EPS, reach)
    assert loss.shape == ()
    assert relative(loss.detach(), want.detach()) < 1e-12
    slopes = torch.autograd.grad(want, theirs, create_graph=True)
    for got, slope in zip(torch.autograd.grad(loss, ours), slopes, strict=True):
        assert relative(got, slope.detach()) < 1e-10
    U, V = pts(len(x), 2, 5), pts(len(y), 2, 6)
    wanted = torch.autograd.grad((slopes[0] * U).sum() + (slopes[1] * V).sum(), theirs[:2])
    ours = leaves(x, y)
    loss = unbalanced_ot_loss(*ours, EPS, reach, a=a, b=b, tol=1e-13)
    gx, gy = torch.autograd.grad(loss, ours, create_graph=True)
    for got, product in zip(torch.autograd.grad((gx * U).sum() + (gy * V).sum(), ours), wanted, strict=True):
        assert relative(got, product) < 1e-8


@pytest.mark.parametrize("cost", ["sqeuclidean", "cosine"])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("shape", [(9, 7), (5, 8)])
def test_the_operator_is_the_hessian(cost, scale, shape):
    n, m = shape
    x, y, a, b, reach = pts(n, 2), pts(m, 2, 1), 3 * wts(n), wts(m, 2), (1.0, 1.5)
    kind = {"cost": cost, "scale": scale}
    v = pts(n, 2, 5)
    _, want = torch.autograd.functional.hvp(lambda x: dense(x, y, a, b, EPS, reach, sweeps=100, **kind), x, v)
    plan = solve_unbalanced(x, y, EPS, reach, a=a, b=b, tol=1e-13, **kind)
    H = plan.hessian(rtol=1e-11)
    assert relative(H @ v.reshape(-1), want.reshape(-1)) < 1e-8
    check_operator(H, rtol=1e-9)
    slow = plan.hessian(rtol=1e-11, method="cg")
    assert relative(slow.to_dense(), H.to_dense()) < 1e-8
    assert H.last_response is not None
    assert H.last_response.status.success


@pytest.mark.parametrize("d", [1, 9, 12])
def test_the_product_in_other_dimensions(d):
    x, y = leaves(0.3 * pts(6, d), 0.3 * pts(5, d, 1))
    g = torch.autograd.grad(unbalanced_ot_loss(x, y, 0.7, 1.2, tol=1e-13), (x, y), create_graph=True)
    U, V = pts(6, d, 5), pts(5, d, 6)
    got = torch.autograd.grad((g[0] * U).sum() + (g[1] * V).sum(), (x, y))
    a, b = torch.full((6,), 1 / 6, dtype=X.dtype), torch.full((5,), 1 / 5, dtype=X.dtype)
    _, want = torch.autograd.functional.hvp(lambda x, y: dense(x, y, a, b, 0.7, 1.2, sweeps=150), (x, y), (U, V))
    for ours, theirs in zip(got, want, strict=True):
        assert relative(ours, theirs) < 1e-8


def test_gradcheck():
    def loss(x, y):
        return unbalanced_ot_loss(x, y, EPS, (1.0, None), a=2 * wts(4), b=wts(3), tol=1e-13, hvp_rtol=1e-12)

    def in_weights(a, b):
        return unbalanced_ot_loss(X, Y, EPS, 1.5, a=a, b=b, tol=1e-13)

    assert torch.autograd.gradcheck(loss, leaves(X[:4], Y[:3]), eps=1e-5, atol=1e-7, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, leaves(X[:4], Y[:3]), eps=1e-5, atol=1e-6, fast_mode=True)
    assert torch.autograd.gradcheck(in_weights, leaves(A, B), eps=1e-5, atol=1e-7, fast_mode=True)


@pytest.mark.parametrize("reach", [0.8, (0.8, 1.5)])
def test_scipy_finds_the_same_minimum_over_plans(reach):
    x, y, a, b = X[:3], Y[:2], 1.5 * wts(3), wts(2)
    C = cost_matrix(x, y)

    def fun(z):
        log_plan = torch.tensor(z, requires_grad=True)
        value = primal(log_plan.exp().reshape(3, 2), C, a, b, EPS, reach)
        return float(value.detach()), torch.autograd.grad(value, log_plan)[0].numpy()

    found = scipy.optimize.minimize(fun, [-1.0] * 6, jac=True, method="BFGS", options={"gtol": 1e-10})
    plan = solve_unbalanced(x, y, EPS, reach, a=a, b=b, tol=1e-12)
    assert -1e-12 < found.fun - float(plan.value()) < 1e-8
    assert relative(plan.to_dense(), torch.tensor(found.x).exp().reshape(3, 2)) < 1e-4
    assert abs(float(primal(plan.to_dense(), C, a, b, EPS, reach)) - float(plan.value())) < 1e-10


def test_one_point_each_has_a_closed_form():
    # p minimises p c + eps KL(p|ab) + ρ KL(p|a) + ρ KL(p|b): p^(eps + 2ρ) = (ab)^(eps + ρ) exp(-c)
    x, y, a, b, eps, rho = torch.zeros(1, 1).double(), torch.full((1, 1), 3.0).double(), 2.0, 5.0, 0.5, 4.0
    masses = {"a": torch.tensor([a]).double(), "b": torch.tensor([b]).double()}
    plan = solve_unbalanced(x, y, eps, math.sqrt(rho), tol=1e-14, **masses)
    want = math.exp(((eps + rho) * math.log(a * b) - 9.0) / (eps + 2 * rho))
    assert abs(float(plan.mass) / want - 1) < 1e-12


@pytest.mark.parametrize("shape", [(9, 7), (7, 9)])
def test_the_error_is_recomputable(shape):
    n, m = shape
    a, b = 2 * wts(n), 0.7 * wts(m, 2)
    for tol in (1e-2, 1e-4, 1e-8):
        plan = solve_unbalanced(pts(n, 2), pts(m, 2, 1), EPS, (2.0, 3.0), a=a, b=b, tol=tol)
        P = a[:, None] * b * torch.exp((plan.f[:, None] + plan.g - cost_matrix(pts(n, 2), pts(m, 2, 1))) / EPS)
        residual = (P.sum(1) - a * (-plan.f / 4).exp()).abs().sum() + (P.sum(0) - b * (-plan.g / 9).exp()).abs().sum()
        assert plan.converged
        assert float(residual / P.sum()) <= 1.01 * tol
        assert abs(float(residual / P.sum()) - plan.error) < 0.02 * plan.error + 1e-14
        assert relative(plan.row_sums, P.sum(1)) < 1e-12
        assert relative(plan.to_dense(), P) < 1e-12


def test_a_far_reach_is_balanced_transport():
    a, b = A / A.sum(), B / B.sum()
    balanced = solve(X, Y, EPS, a=a, b=b, tol=1e-12)
    previous = math.inf
    for reach in (1e1, 1e2, 1e3, 1e4):
        plan = solve_unbalanced(X, Y, EPS, reach, a=a, b=b, tol=1e-12)
        gap = abs(float(plan.value() - balanced.value()))
        assert gap < 2e-2 * previous
        previous = gap
        assert plan.n_passes < 150
    assert relative(plan.grad(), balanced.grad()) < 1e-6
    v = pts(N, 2, 5).reshape(-1)
    assert relative(plan.hessian() @ v, balanced.hessian() @ v) < 1e-6
    one_sided = solve_unbalanced(X, Y, EPS, (None, 1e4), a=a, b=b, tol=1e-12)
    assert relative(one_sided.value(), ot_loss(X, Y, EPS, a=a, b=b)) < 1e-6


@pytest.mark.parametrize("reach", [0.1, 1.0, 100.0, 1e4, (None, 1.0)])
@pytest.mark.parametrize(
    ("dtype", "eps"), [(torch.float64, 1.0), (torch.float64, 1e-2), (torch.float32, 1.0), (torch.float32, 0.1)]
)
def test_every_regime_converges_in_few_passes(dtype, reach, eps):
    x, y = pts(60, 2).to(dtype), (0.7 * pts(40, 2, 1) + 0.3).to(dtype)
    plan = solve_unbalanced(x, y, eps, reach)
    assert plan.converged
    assert plan.n_passes < 400
    want = solve_unbalanced(x.double(), y.double(), eps, reach, tol=1e-11)
    assert relative(plan.value(), want.value()) < 1e-4
    assert (plan.grad() - want.grad()).abs().max() < 1e-5
    assert plan.f.dtype == plan.value().dtype == plan.grad().dtype == dtype


def test_low_temperature():
    x, y = pts(60, 2), 0.7 * pts(40, 2, 1) + 0.3
    for reach in (0.1, 1.0, 1e3):
        plan = solve_unbalanced(x, y, 1e-4, reach)
        assert plan.converged
        P, C = plan.to_dense(), cost_matrix(x, y)
        # A lower bound by the dual, an upper bound by the plan that it makes
        assert abs(float(primal(P, C, plan.a, plan.b, 1e-4, reach) - plan.value())) < 1e-5


@pytest.mark.parametrize("mass", [1e-6, 1.0, 1e6])
def test_far_from_the_origin_and_of_any_mass(mass):
    a, b = mass * A, mass * B
    near = solve_unbalanced(X, Y, EPS, 2.0, a=a, b=b, tol=1e-12)
    far = solve_unbalanced(X + 1e6, Y + 1e6, EPS, 2.0, a=a, b=b, tol=1e-12)
    assert relative(far.value(), near.value()) < 1e-8
    assert relative(far.grad(), near.grad()) < 1e-8
    single = solve_unbalanced((X + 1e3).float(), (Y + 1e3).float(), EPS, 2.0, a=a.float(), b=b.float())
    assert single.converged
    assert relative(single.value(), near.value()) < 1e-5


def test_zero_weights_are_as_if_the_points_were_not_there():
    a, b = A.clone(), B.clone()
    a[[0, 4]], b[3] = 0, 0
    rows, columns = a > 0, b > 0
    whole = solve_unbalanced(X, Y, EPS, 1.5, a=a, b=b, tol=1e-12)
    part = solve_unbalanced(X[rows], Y[columns], EPS, 1.5, a=a[rows], b=b[columns], tol=1e-12)
    assert relative(whole.value(), part.value()) < 1e-12
    assert relative(whole.grad()[rows], part.grad()) < 1e-10
    assert not whole.grad()[~rows].any()
    v = pts(N, 2, 5)
    Hv = (whole.hessian() @ v.reshape(-1)).reshape(N, 2)
    assert relative(Hv[rows], (part.hessian() @ v[rows].reshape(-1)).reshape(-1, 2)) < 1e-8
    assert not Hv[~rows].any()
    assert whole.grad_a().isfinite().all()
    weights = a.clone().requires_grad_()
    (slope,) = torch.autograd.grad(unbalanced_ot_loss(X, Y, EPS, 1.5, a=weights, b=b, tol=1e-12), weights)
    step = torch.zeros_like(a)
    step[0] = 1e-6
    rise = solve_unbalanced(X, Y, EPS, 1.5, a=a + step, b=b, tol=1e-13).value() - whole.value()
    assert abs(float(rise / 1e-6 - slope[0])) < 1e-4


def test_all_mass_may_be_destroyed():
    plan = solve_unbalanced(X, Y + 1e3, EPS, 1.0, a=A, b=B)
    assert plan.converged
    assert float(plan.mass) == 0
    assert relative(plan.value(), A.sum() + B.sum() + EPS * A.sum() * B.sum()) < 1e-12
    assert not (plan.hessian() @ torch.ones(2 * N).double()).any()


@pytest.mark.parametrize("backend", ["dense", "blocked"])
def test_backends_agree(backend):
    want = solve_unbalanced(X, Y, EPS, 1.0, a=A, b=B, tol=1e-12)
    plan = solve_unbalanced(X, Y, EPS, 1.0, a=A, b=B, tol=1e-12, backend=backend)
    assert plan.backend == backend
    assert relative(plan.value(), want.value()) < 1e-12


def test_a_start_near_the_solution_saves_passes():
    cold = solve_unbalanced(X, Y, EPS, 5.0, a=A, b=B)
    warm = solve_unbalanced(X + 1e-4, Y, EPS, 5.0, a=A, b=B, init=cold)
    assert warm.converged
    assert warm.n_passes < cold.n_passes
    assert solve_unbalanced(X + 1e-4, Y, EPS, 5.0, a=A, b=B, init=(cold.f, cold.g)).n_passes == warm.n_passes
    for start, message in (
        (cold, r"init: expected a potential g of shape \(3,\), got \(7,\)"),
        ((cold.f * torch.nan, cold.g[:3]), "init: expected a finite potential f"),
    ):
        with pytest.raises(ValueError, match=message):
            solve_unbalanced(X, Y[:3], EPS, 5.0, init=start)


def test_says_where_it_did_not_converge():
    with pytest.warns(ConvergenceWarning, match="pass_limit") as caught:
        plan = solve_unbalanced(pts(40, 2), pts(30, 2, 1), 0.05, 5.0, max_iter=3)
    assert (len(caught), caught[0].filename) == (1, __file__)
    assert not plan.converged
    assert plan.error > 1e-6
    with pytest.warns(ConvergenceWarning, match="pass_limit") as caught:
        unbalanced_ot_loss(pts(40, 2), pts(30, 2, 1), 0.05, 5.0, max_iter=3)
    assert (len(caught), caught[0].filename) == (1, __file__)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"reach": None}, ValueError, "reach: expected a number above 0 on one side at least"),
        ({"reach": 0.0}, ValueError, "reach: expected a finite number above 0"),
        ({"reach": "1"}, TypeError, "reach: expected a number above 0"),
        ({"reach": (1.0, 2.0, 3.0)}, ValueError, "reach: expected a number above 0 or a pair of them, got 3 values"),
        ({"reach": 1e-200}, ValueError, "reach²"),
        ({"eps": -1.0}, ValueError, "eps: expected a finite number above 0"),
        ({"a": torch.zeros(N).double()}, ValueError, "a: expected a finite total mass above 0, got 0"),
        ({"b": -B}, ValueError, "b: expected"),
        ({"a": A[:3]}, ValueError, "a: expected shape"),
        ({"b": torch.ones(M, dtype=torch.int64)}, TypeError, "b: expected floating-point numbers, .*; convert with"),
        ({"x": 1e200 * X}, ValueError, "x: expected points whose cost over eps is finite, got an overflow"),
        ({"y": Y + 1e160 * X[:1]}, ValueError, "expected points whose cost over eps is finite, got an overflow"),
        ({"eps": 1e-320}, ValueError, "expected points whose cost over eps is finite, got an overflow"),
        ({"tol": -1.0}, ValueError, "tol: expected"),
        ({"reach": 1e200}, ValueError, "reach²: expected a finite number above 0, got inf"),
        ({"eps": 1e-320}, ValueError, "x: expected points whose cost over eps is finite, got an overflow"),
        ({"tol": "1"}, TypeError, "tol: expected a number ≥ 0, got '1'"),
        ({"tol": True}, TypeError, "tol: expected a number ≥ 0, got True"),
        ({"max_iter": 0}, ValueError, "max_iter: expected"),
        ({"max_iter": True}, ValueError, "max_iter: expected"),
        ({"cost": "manhattan"}, ValueError, "cost: expected"),
        ({"y": Y.float()}, TypeError, "expected one dtype"),
    ],
)
def test_refuses(change, error, message):
    with pytest.raises(error, match=message):
        solve_unbalanced(**{"x": X, "y": Y, "eps": EPS, "reach": 1.0, "a": A, "b": B, **change})


def test_second_derivatives_in_the_weights_are_refused():
    a = A.clone().requires_grad_()
    (g,) = torch.autograd.grad(unbalanced_ot_loss(X, Y, EPS, 1.0, a=a), a, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives with respect to the weights are not offered"):
        torch.autograd.grad(g.square().sum(), a)


def test_leaves_its_inputs_alone():
    inputs = [t.clone() for t in (X, Y, A, B)]
    before = [(t.clone(), t._version) for t in inputs]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = solve_unbalanced(*inputs[:2], EPS, 1.0, a=inputs[2], b=inputs[3])
    assert all(torch.equal(t, old) and t._version == version for t, (old, version) in zip(inputs, before, strict=True))
    assert "mass=" in repr(plan)


@pytest.mark.gpu
@pytest.mark.parametrize("reach", [0.5, 5.0, (None, 1.0)])
def test_on_a_gpu(reach):
    x, y = (pts(500, 3).float().cuda(), pts(400, 3, 1).float().cuda())
    plan, want = solve_unbalanced(x, y, 0.2, reach), solve_unbalanced(x.double().cpu(), y.double().cpu(), 0.2, reach)
    assert plan.backend == "triton"
    assert plan.converged
    assert relative(plan.value().cpu(), want.value()) < 1e-4
    assert relative(plan.grad().cpu(), want.grad()) < 1e-3
    v = pts(500, 3, 5).reshape(-1)
    assert relative((plan.hessian() @ v.float().cuda()).cpu(), want.hessian() @ v) < 2e-3


@pytest.mark.parametrize("call", [solve_unbalanced, solve_divergence])
def test_the_relaxed_sweeps_multiply_in_full_precision(call, monkeypatch):
    matmul, seen = torch.backends.cuda.matmul, []

    def direction(*args):
        seen.append(torch.get_float32_matmul_precision() if legacy else matmul.fp32_precision)
        return found(*args)

    legacy, found = not hasattr(matmul, "fp32_precision"), relaxed_solver._direction
    monkeypatch.setattr(relaxed_solver, "_direction", direction)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        call(3 * X, 3 * Y, 0.02, reach=20.0, a=A, b=B)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen
    assert set(seen) == {"highest" if legacy else "ieee"}
