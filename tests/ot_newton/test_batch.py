import doctest
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from referee import pts, relative, wts

import ot_newton.batch
from ot_newton.autograd import ot_loss
from ot_newton.batch import PlanBatch, solve_batch
from ot_newton.divergence import sinkhorn_divergence
from ot_newton.sinkhorn import ConvergenceWarning, solve
from ot_newton.status import Status
from ot_newton.unbalanced import solve_unbalanced, unbalanced_ot_loss

SIZE, N, M, EPS = 3, 7, 5, 0.8
X = torch.stack([pts(N, 2, k) for k in range(SIZE)])
Y = torch.stack([pts(M, 2, k + 0.5) for k in range(SIZE)])
A, B = torch.stack([wts(N, k) for k in range(SIZE)]), wts(M, 2)
EXACT = {"tol": 1e-13}
LOSSES = {
    "balanced": ot_loss,
    "unbalanced": partial(unbalanced_ot_loss, reach=1.5),
    "semi-unbalanced": partial(unbalanced_ot_loss, reach=(None, 1.5)),
    "divergence": sinkhorn_divergence,
    "unbalanced divergence": partial(sinkhorn_divergence, reach=1.5),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("backend", ["blocked", "dense"])
def test_equal_to_a_loop(dtype, backend):
    temperatures = [0.8, 2.0, 0.5]
    options = {"cost": "cosine", "scale": 0.5, "backend": backend}
    x, y, a, b = X.to(dtype), Y.to(dtype), A.to(dtype), B.to(dtype)
    plans = solve_batch(x, y, temperatures, a=a, b=b, **options)
    loop = [solve(x[k], y[k], eps, a=a[k], b=b, **options) for k, eps in enumerate(temperatures)]
    assert len(plans) == SIZE
    for k, plan in enumerate(loop):
        assert torch.equal(plans.value()[k], plan.value())
        assert torch.equal(plans.grad()[k], plan.grad())
        assert torch.equal(plans.grad_y()[k], plan.grad_y())
        assert torch.equal(plans.barycenters()[k], plan.barycenters())
        assert torch.equal(plans.f[k], plan.f)
        assert torch.equal(plans.g[k], plan.g)
        assert plans[k].eps == temperatures[k]
        assert plans.error[k] == plan.error
    assert plans.status == [plan.status for plan in loop]
    assert plans.n_passes == sum(plan.n_passes for plan in loop)
    assert plans.value().dtype == dtype
    assert plans.value().shape == (SIZE,)
    assert isinstance(plans[1:], PlanBatch)
    assert [plan.shape for plan in plans[1:]] == [(N, M)] * 2
    assert repr(plans).startswith("PlanBatch(3 of 7×5, 3 converged, passes=")


def test_a_batch_of_one_keeps_its_dimension():
    assert solve_batch(X[:1], Y[:1], EPS).value().shape == (1,)
    assert ot_loss(X[:1], Y[:1], EPS).shape == (1,)
    assert torch.equal(ot_loss(X.numpy()[:1], Y.numpy()[:1], EPS), solve_batch(X[:1], Y[:1], EPS).value())


def test_a_hard_item_is_named_and_changes_no_other():
    hard = X.clone()
    hard[1] = 30 * X[1]
    with pytest.warns(ConvergenceWarning, match=r"1 of 3 items \(1\) did not converge; .* \(pass_limit\)") as caught:
        plans = solve_batch(hard, Y, 2.0, method="alternating", max_iter=100)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert plans.status == [Status.CONVERGED, Status.PASS_LIMIT, Status.CONVERGED]
    assert not plans.converged
    easy = solve_batch(X[[0, 2]], Y[[0, 2]], 2.0, method="alternating", max_iter=100)
    assert torch.equal(plans.grad()[[0, 2]], easy.grad())
    with pytest.warns(ConvergenceWarning, match="1 of 3 items") as caught:
        ot_loss(hard, Y, 2.0, method="alternating", max_iter=100)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        with pytest.raises(ConvergenceWarning):
            solve_batch(hard, Y, 2.0, method="alternating", max_iter=100)


@pytest.mark.parametrize("cost", ["sqeuclidean", "cosine"])
@pytest.mark.parametrize("kind", LOSSES)
def test_the_loss_of_a_batch_has_two_derivatives_an_item(kind, cost):
    ot_loss = LOSSES[kind]
    x, y, a = X.clone().requires_grad_(), Y.clone().requires_grad_(), A.clone().requires_grad_()
    loss = ot_loss(x, y, EPS, a=a, b=B, cost=cost, **EXACT)
    upstream, U, V = (
        torch.tensor([1.0, -2.0, 0.5]).double(),
        pts(SIZE * N, 2, 5).view_as(X),
        pts(SIZE * M, 2, 6).view_as(Y),
    )
    grads = torch.autograd.grad(loss, (x, y, a), upstream, create_graph=True)
    second = torch.autograd.grad((grads[0] * U).sum() + (grads[1] * V).sum(), (x, y))
    for k in range(SIZE):
        xk, yk, ak = (t[k].detach().clone().requires_grad_() for t in (x, y, a))
        one = ot_loss(xk, yk, EPS, a=ak, b=B, cost=cost, **EXACT)
        alone = torch.autograd.grad(one, (xk, yk, ak), upstream[k], create_graph=True)
        assert torch.equal(loss[k], one)
        for got, want in zip(grads, alone, strict=True):
            assert torch.equal(got[k], want)
        twice = torch.autograd.grad((alone[0] * U[k]).sum() + (alone[1] * V[k]).sum(), (xk, yk))
        for got, want in zip(second, twice, strict=True):
            assert relative(got[k], want) < 1e-14


def test_gradcheck_with_shared_points_and_weights():
    def loss(x, y, logits):
        points, b = y.expand(2, -1, -1), torch.softmax(logits, 0)
        return ot_loss(x, points, EPS, b=b, hvp_rtol=1e-12, **EXACT)

    inputs = (
        X[:2, :3].clone().requires_grad_(),
        Y[0, :2].clone().requires_grad_(),
        torch.zeros(2).double().requires_grad_(),
    )
    assert torch.autograd.gradcheck(loss, inputs, eps=1e-5, atol=1e-7)
    assert torch.autograd.gradgradcheck(
        lambda x, y: loss(x, y, inputs[2].detach()), inputs[:2], eps=1e-5, atol=1e-6, nondet_tol=1e-12
    )


def test_warm_start():
    cold = solve_batch(X, Y, EPS)
    warm = solve_batch(X, Y, EPS, init=cold)
    assert warm.n_passes < cold.n_passes
    assert solve_batch(X, Y, EPS, init=[None, cold[1], (cold[2].f, cold[2].g)]).n_passes < cold.n_passes
    assert relative(ot_loss(X, Y, EPS, init=cold), cold.value()) < 1e-6


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"x": X[0]},
            ValueError,
            r"expected shapes \(B, n, d\) and \(B, m, d\) with B ≥ 1, got \(7, 2\)",
        ),
        ({"y": Y[0]}, ValueError, r"got \(3, 7, 2\) and \(5, 2\); share points by y.expand\(B, -1, -1\)"),
        ({"x": X[:2]}, ValueError, r"got \(2, 7, 2\) and \(3, 5, 2\)"),
        ({"x": X[:0], "y": Y[:0]}, ValueError, r"with B ≥ 1, got \(0, 7, 2\)"),
        ({"x": X[..., :1]}, ValueError, r"item 0: x and y: expected points of one dimension d"),
        ({"x": X.int()}, TypeError, r"x: expected floating-point numbers, got torch.int32"),
        ({"x": X.index_fill(0, torch.tensor(2), float("nan"))}, ValueError, r"item 2: x: expected finite coordinates"),
        ({"a": A[:2]}, ValueError, r"a: expected shape \(n,\) or \(3, n\), got \(2, 7\)"),
        ({"a": A[:, :6]}, ValueError, r"item 0: a: expected shape \(7,\)"),
        (
            {"a": A * torch.tensor([[1.0], [1], [2]])},
            ValueError,
            r"item 2: a and b: expected total mass 1 each",
        ),
        ({"b": wts(4)}, ValueError, r"item 0: b: expected shape \(5,\)"),
        ({"eps": [0.5, 0.5]}, ValueError, r"eps: expected one number or 3, one an item, got 2"),
        ({"eps": [0.5, 0.0, 1.0]}, ValueError, r"eps\[1\]: expected a finite number above 0"),
        ({"eps": "small"}, TypeError, r"eps: expected a number above 0"),
        ({"init": [None]}, ValueError, r"init: expected 3 plans or pairs \(f, g\), one an item"),
        ({"init": X}, ValueError, r"init: expected 3 plans .* got Tensor"),
        ({"method": "lbfgs"}, ValueError, r"method: expected one of auto"),
    ],
)
@pytest.mark.parametrize("call", [solve_batch, ot_loss])
def test_bad_batches(call, change, error, message):
    arguments = {"x": X, "y": Y, "eps": EPS, "a": A, "b": B} | change
    with pytest.raises(error, match=message):
        call(**arguments)


UNBALANCED = [kind for kind in LOSSES if "unbalanced" in kind]


@pytest.mark.parametrize("kind", UNBALANCED)
def test_masses_and_temperatures_of_their_own(kind):
    loss, temperatures = LOSSES[kind], [0.8, 2.0, 0.5]
    a, b = A * torch.tensor([[2.0], [1], [0.5]]), 3 * B
    values = loss(X, Y, temperatures, a=a, b=b)
    assert values.shape == (SIZE,)
    for k, eps in enumerate(temperatures):
        assert torch.equal(values[k], loss(X[k], Y[k], eps, a=a[k], b=b))


@pytest.mark.parametrize("kind", LOSSES)
def test_a_shared_weight_gets_the_sum_of_its_gradients(kind):
    b = B.clone().requires_grad_()
    (grad,) = torch.autograd.grad(LOSSES[kind](X, Y, EPS, b=b, **EXACT).sum(), b)
    alone = [torch.autograd.grad(LOSSES[kind](X[k], Y[k], EPS, b=b, **EXACT), b)[0] for k in range(SIZE)]
    assert relative(grad, sum(alone)) < 1e-14


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_names_the_items_that_did_not_converge(kind):
    with pytest.warns(ConvergenceWarning, match=r"1 of 3 items \(1\) did not converge; .*pass_limit") as caught:
        values = LOSSES[kind](X, Y, [50.0, 0.01, 50.0], max_iter=8)
    assert (len(caught), caught[0].filename) == (1, __file__)
    assert torch.equal(values[[0, 2]], LOSSES[kind](X[[0, 2]], Y[[0, 2]], 50.0, max_iter=8))


def test_a_start_an_item():
    near = solve_unbalanced(X[1], Y[1], EPS, 1.5, tol=1e-12)
    cold = LOSSES["unbalanced"](X, Y, EPS)
    for start in (near, (near.f, near.g)):
        assert relative(LOSSES["unbalanced"](X, Y, EPS, init=[None, start, None]), cold) < 1e-6


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": X[0]}, ValueError, r"expected shapes \(B, n, d\) and \(B, m, d\) with B ≥ 1, got \(7, 2\)"),
        ({"x": X[:2]}, ValueError, r"got \(2, 7, 2\) and \(3, 5, 2\)"),
        ({"x": X[..., None]}, ValueError, r"got \(3, 7, 2, 1\)"),
        ({"x": X[..., :1]}, ValueError, r"item 0: x and y: expected points of one dimension d"),
        ({"x": X.int()}, TypeError, r"x: expected floating-point numbers, got torch.int32"),
        ({"x": X.index_fill(0, torch.tensor(2), float("nan"))}, ValueError, r"item 2: x: expected finite coordinates"),
        ({"a": A[:2]}, ValueError, r"a: expected shape \(n,\) or \(3, n\), got \(2, 7\)"),
        ({"a": A * torch.tensor([[1.0], [1], [-2]])}, ValueError, r"item 2: a: expected finite weights ≥ 0"),
        ({"b": wts(4)}, ValueError, r"item 0: b: expected shape \(5,\)"),
        ({"eps": [0.5, 0.5]}, ValueError, r"eps: expected one number or 3, one an item, got 2"),
        ({"eps": [0.5, 0.0, 1.0]}, ValueError, r"eps\[1\]: expected a finite number above 0"),
        ({"init": [None]}, ValueError, r"init: expected 3 plans or pairs \(f, g\), one an item"),
        ({"hvp_rtol": 0.0}, ValueError, r"hvp_rtol: expected a finite number above 0"),
        ({"cost": "l1"}, ValueError, r"cost: expected one of"),
    ],
)
@pytest.mark.parametrize("kind", LOSSES)
def test_bad_batches_for_a_loss(kind, change, error, message):
    with pytest.raises(error, match=message):
        LOSSES[kind](**({"x": X, "y": Y, "eps": EPS, "a": A, "b": B} | change))


def test_temperatures_of_all_kinds():
    want = solve_batch(X, Y, [0.5, 0.5, 0.5]).value()
    for eps in (0.5, np.float32(0.5), torch.tensor(0.5), torch.full((3,), 0.5), np.full(3, 0.5), (0.5,) * 3):
        assert torch.equal(solve_batch(X, Y, eps).value(), want)


def test_the_examples_run():
    assert doctest.testmod(ot_newton.batch, extraglobs={"torch": torch}).failed == 0
    assert doctest.testmod(ot_newton.autograd, extraglobs={"torch": torch}).failed == 0


@pytest.mark.gpu
def test_on_a_gpu():
    x, y = X.float().cuda(), Y.float().cuda()
    plans = solve_batch(x, y, EPS, a=A.float().cuda())
    assert {plan.backend for plan in plans} == {"triton"}
    assert relative(plans.value().cpu(), solve_batch(X, Y, EPS, a=A).value()) < 1e-4
    assert ot_loss(x, y, EPS).device == x.device
