import pytest
import torch
from referee import Referee, cost_matrix, pts, relative, unrolled, wts

from ot_newton.autograd import ot_loss
from ot_newton.sinkhorn import ConvergenceWarning, solve

N, M, EPS = 9, 7, 0.8
X, Y, A, B = pts(N, 2), pts(M, 2, 1), wts(N), wts(M, 2)
EXACT = {"eps": EPS, "tol": 1e-13}


@pytest.mark.parametrize("cost", ["sqeuclidean", "cosine"])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_value_gradient_and_hessian(cost, scale):
    dense = Referee(X, Y, EPS, a=A, b=B, cost=cost, scale=scale)
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    loss = ot_loss(x, y, a=A, b=B, cost=cost, scale=scale, **EXACT)
    assert loss.shape == ()
    assert relative(loss.detach(), dense.value) < 1e-10
    gx, gy = torch.autograd.grad(loss, (x, y), create_graph=True)
    assert relative(gx.detach(), dense.grad_x) < 1e-8
    assert relative(gy.detach(), dense.grad_y) < 1e-8
    U, V = pts(N, 2, 5), pts(M, 2, 6)
    hx, hy = torch.autograd.grad((gx * U).sum() + (gy * V).sum(), (x, y))
    want = dense.hessian @ torch.cat([U.reshape(-1), V.reshape(-1)])
    assert relative(hx.reshape(-1), want[: 2 * N]) < 1e-7
    assert relative(hy.reshape(-1), want[2 * N :]) < 1e-7


def test_functional_hvp_and_hessian_agree_with_torch_through_the_sweeps():
    def ours(x):
        return ot_loss(x, Y, a=A, b=B, **EXACT)

    def recorded(x):
        return unrolled(x, Y, EPS, a=A, b=B)

    v = pts(N, 2, 5)
    value, Hv = torch.autograd.functional.hvp(ours, X, v)
    want_value, want = torch.autograd.functional.hvp(recorded, X, v)
    assert relative(value, want_value) < 1e-10
    assert relative(Hv, want) < 1e-7
    assert relative(torch.autograd.functional.vhp(ours, X, v)[1], want) < 1e-7
    H = torch.autograd.functional.hessian(ours, X).reshape(2 * N, 2 * N)
    assert relative(H @ v.reshape(-1), want.reshape(-1)) < 1e-7
    assert relative((solve(X, Y, a=A, b=B, **EXACT).hessian() @ v.reshape(-1)).reshape(N, 2), want) < 1e-7


def test_gradcheck():
    def loss(x, y):
        return ot_loss(x, y, a=wts(4), b=wts(3), hvp_rtol=1e-12, **EXACT)

    x, y = X[:4].clone().requires_grad_(), Y[:3].clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, (x, y), eps=1e-5, atol=1e-7)
    assert torch.autograd.gradgradcheck(loss, (x, y), eps=1e-5, atol=1e-6)


def test_a_model_in_between():
    weight = torch.tensor([[1.0, 0.3], [-0.2, 0.8]]).double().requires_grad_()

    def through(loss):
        (g,) = torch.autograd.grad(loss(torch.tanh(X @ weight)), weight, create_graph=True)
        return torch.autograd.grad((g * weight.detach()).sum(), weight)[0]

    ours = through(lambda z: 3 * ot_loss(z, Y, a=A, b=B, **EXACT) ** 2)
    want = through(lambda z: 3 * unrolled(z, Y, EPS, a=A, b=B) ** 2)
    assert relative(ours, want) < 1e-7


def test_third_derivatives_are_not_pretended():
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(ot_loss(x, Y, eps=EPS), x, create_graph=True)
    (h,) = torch.autograd.grad((g * g.detach()).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="third derivatives are not offered"):
        torch.autograd.grad(h.sum(), x)
    (h,) = torch.autograd.grad(g.square().sum(), x, create_graph=True)  # depends on x in two ways, one of them missing
    with pytest.raises(RuntimeError, match="third derivatives are not offered"):
        torch.autograd.grad(h.sum(), x)


def test_weights_that_require_gradients_leave_the_hessian_of_the_points():
    x, a = X.clone().requires_grad_(), A.clone().requires_grad_()
    gx, ga = torch.autograd.grad(ot_loss(x, Y, a=a, b=B, **EXACT), (x, a), create_graph=True)
    v = pts(N, 2, 5)
    (hx,) = torch.autograd.grad((gx * v).sum(), x, retain_graph=True)
    assert relative(hx.reshape(-1), Referee(X, Y, EPS, a=A, b=B).hessian_x @ v.reshape(-1)) < 1e-7
    for output, wanted in ((gx, a), (ga, x), (ga, a), (gx.sum() + ga.sum(), x)):
        with pytest.raises(RuntimeError, match="second derivatives with respect to the weights are not offered"):
            torch.autograd.grad(output.sum(), wanted, retain_graph=True)


def test_eps_is_not_differentiable_and_says_so():
    with pytest.raises(TypeError, match=r"eps: expected a number, got a tensor that requires gradients; pass eps"):
        ot_loss(X, Y, torch.tensor(0.5, requires_grad=True))


@pytest.mark.parametrize("hvp_rtol", [0.0, -1.0, float("nan")])
def test_a_bad_tolerance_is_named_before_any_work(hvp_rtol):
    with pytest.raises(ValueError, match="hvp_rtol: expected a finite number above 0"):
        ot_loss(X, Y, EPS, hvp_rtol=hvp_rtol)


@pytest.mark.parametrize(("scale", "want"), [(1.0, [0, -0.65464521, 0.02505527]), (0.5, [0, -0.37751959, 0.45629662])])
def test_the_gradient_in_the_weights_is_a_potential(scale, want):
    x, y = torch.tensor([[0.0], [1], [3]]).double(), torch.tensor([[0.5], [2]]).double()
    a, b = torch.tensor([0.5, 0.25, 0.25]).double().requires_grad_(), torch.tensor([0.6, 0.4], dtype=torch.float64)
    loss = ot_loss(x, y, 1.0, a=a, b=b, scale=scale, tol=1e-13)
    (grad,) = torch.autograd.grad(loss, a)
    assert (grad - grad[0] - torch.tensor(want, dtype=torch.float64)).abs().max() < 1e-8
    assert abs(grad @ a.detach()) < 1e-12


def test_weights_by_softmax_against_finite_differences():
    def loss(logits, other):
        return ot_loss(X, Y, a=torch.softmax(logits, 0), b=torch.softmax(other, 0), **EXACT)

    logits, other = A.log().requires_grad_(), B.log().requires_grad_()
    assert torch.autograd.gradcheck(loss, (logits, other), eps=1e-5, atol=1e-7)
    want = unrolled(X, Y, EPS, a=torch.softmax(logits, 0), b=torch.softmax(other, 0))
    got = torch.autograd.grad(loss(logits, other), (logits, other))
    for ours, theirs in zip(got, torch.autograd.grad(want, (logits, other)), strict=True):
        assert relative(ours, theirs) < 1e-8


def test_second_derivatives_in_the_weights_are_refused():
    logits = A.log().requires_grad_()
    (g,) = torch.autograd.grad(ot_loss(X, Y, EPS, a=torch.softmax(logits, 0)), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives with respect to the weights are not offered"):
        torch.autograd.grad(g.square().sum(), logits)


def test_zero_weights_have_finite_gradients():
    corners = torch.tensor([[0.0, 0], [1, 0], [0, 1], [1, 1]]).double().requires_grad_()
    a = torch.tensor([0.0, 1, 0, 0]).double().requires_grad_()
    b = torch.tensor([1.0, 0, 0, 0]).double()
    gx, ga = torch.autograd.grad(ot_loss(corners, corners.detach(), 0.5, a=a, b=b), (corners, a))
    assert relative(gx, torch.tensor([[0, 0], [2, 0], [0, 0], [0, 0]]).double()) < 1e-12
    assert ga.isfinite().all()


def test_no_graph_without_a_need():
    assert not ot_loss(X, Y, EPS).requires_grad
    x = X.clone().requires_grad_()
    with torch.no_grad():
        assert not ot_loss(x, Y, EPS).requires_grad
    loss = ot_loss(x, Y, EPS)
    assert loss.requires_grad
    assert not torch.autograd.grad(loss, x)[0].requires_grad


def test_upstream_gradients_of_every_stride():
    x = X.clone().requires_grad_()
    (plain,) = torch.autograd.grad(ot_loss(x, Y, EPS), x)
    ot_loss(x, Y, EPS).expand(3).sum().backward()
    assert relative(x.grad, 3 * plain) < 1e-14
    wide = torch.zeros(2, N).double()
    wide.requires_grad_()
    loss = ot_loss(wide.T + X, Y, EPS)
    assert relative(torch.autograd.grad(loss, wide)[0].T, plain) < 1e-14


def test_one_cloud_used_twice():
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(ot_loss(x, x, **EXACT), x)
    dense = Referee(X, X, EPS)
    assert (grad - dense.grad_x - dense.grad_y).abs().max() < 1e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_dtypes_come_back(dtype):
    x = X.to(dtype, copy=True).requires_grad_()
    loss = ot_loss(x, Y.to(dtype), EPS, a=A.to(dtype) if dtype != torch.float16 else None)
    (grad,) = torch.autograd.grad(loss, x)
    assert grad.dtype == dtype
    assert loss.dtype == (torch.float32 if dtype == torch.float16 else dtype)


def test_memory_of_the_graph_is_that_of_the_points():
    x = torch.randn(400, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    saved = []

    def pack(tensor):
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = ot_loss(x, pts(300, 2).float(), 1.0)
        torch.autograd.grad(loss, x, create_graph=True)
    assert max(saved) <= 2 * 400


def test_warns_as_solve_does():
    with pytest.warns(ConvergenceWarning, match="pass_limit") as caught:
        ot_loss(pts(40, 2), pts(30, 2, 1), 0.05, max_iter=3)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_the_cost_of_the_plan_is_what_is_paid():
    plan = solve(X, Y, a=A, b=B, **EXACT)
    assert torch.equal(ot_loss(X, Y, a=A, b=B, **EXACT), plan.value())
    P = plan.to_dense()
    held = (P * (P / (A[:, None] * B)).log()).sum()
    assert relative(plan.value(), (P * cost_matrix(X, Y)).sum() + EPS * held) < 1e-10
