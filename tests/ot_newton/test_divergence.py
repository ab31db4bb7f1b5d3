"""The debiased divergence against dense float64 referees, finite differences and its own theory."""

import pytest
import torch
from referee import Referee, cost_matrix, pts, relative, wts

from ot_newton.divergence import sinkhorn_divergence, solve_divergence
from ot_newton.operator_checks import check_operator
from ot_newton.sinkhorn import ConvergenceWarning

N, M, EPS = 9, 7, 0.8
X, Y, A, B = pts(N, 2), pts(M, 2, 1), wts(N), wts(M, 2)


def joint(x, a, **options):
    """Value, gradient and Hessian of ½ OT(x, x): both arguments move together."""
    dense = Referee(x, x, EPS, a=a, b=a, **options)
    H, k = dense.hessian, x.numel()
    return dense.value / 2, (dense.grad_x + dense.grad_y) / 2, (H[:k, :k] + H[:k, k:] + H[k:, :k] + H[k:, k:]) / 2


def dense_divergence(x, y, a, b, eps, reach, sweeps=250):
    """S from damped fixed points recorded by torch, by its formula in the potentials (Séjourné et al. 2019)."""
    rho = reach**2

    def potentials(x, y, a, b):
        C, f, g = cost_matrix(x, y), torch.zeros_like(a), torch.zeros_like(b)
        for _ in range(sweeps):
            f = -rho / (rho + eps) * eps * torch.logsumexp((g - C) / eps + b.log(), 1)
            g = -rho / (rho + eps) * eps * torch.logsumexp((f[:, None] - C) / eps + a.log()[:, None], 0)
        return f, g

    (f, g), (p, _), (q, _) = potentials(x, y, a, b), potentials(x, x, a, a), potentials(y, y, b, b)
    return (rho + eps / 2) * (a @ ((-p / rho).exp() - (-f / rho).exp()) + b @ ((-q / rho).exp() - (-g / rho).exp()))


def leaves(*tensors):
    return [t.clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("cost", ["sqeuclidean", "cosine"])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_value_gradients_and_hessian(cost, scale):
    options = {"cost": cost, "scale": scale}
    dense, (vx, gx, hx), (vy, gy, hy) = Referee(X, Y, EPS, a=A, b=B, **options), joint(X, A, **options), joint(
        Y, B, **options
    )  # fmt: skip
    x, y = leaves(X, Y)
    loss = sinkhorn_divergence(x, y, EPS, a=A, b=B, tol=1e-13, hvp_rtol=1e-12, **options)
    assert loss.shape == ()
    assert relative(loss.detach(), dense.value - vx - vy) < 1e-10
    got = torch.autograd.grad(loss, (x, y), create_graph=True)
    assert relative(got[0].detach(), dense.grad_x - gx) < 1e-8
    assert relative(got[1].detach(), dense.grad_y - gy) < 1e-8
    U, V = pts(N, 2, 5), pts(M, 2, 6)
    products = torch.autograd.grad((got[0] * U).sum() + (got[1] * V).sum(), (x, y))
    want = dense.hessian @ torch.cat([U.reshape(-1), V.reshape(-1)])
    assert relative(products[0].reshape(-1), want[: 2 * N] - hx @ U.reshape(-1)) < 1e-7
    assert relative(products[1].reshape(-1), want[2 * N :] - hy @ V.reshape(-1)) < 1e-7

    solved = solve_divergence(X, Y, EPS, a=A, b=B, tol=1e-13, **options)
    assert relative(solved.grad(), dense.grad_x - gx) < 1e-8
    assert relative(solved.grad_y(), dense.grad_y - gy) < 1e-8
    H = solved.hessian(rtol=1e-12)
    assert H.last_residual is None
    assert relative(H.to_dense(), dense.hessian_x - hx) < 1e-7
    assert H.last_residual < 1e-11
    check_operator(H, rtol=1e-9)


@pytest.mark.parametrize("reach", [1.0, 2.5])
def test_with_marginals_at_a_price(reach):
    a, b = 2 * A, 0.7 * B
    ours, theirs = leaves(X, Y, a, b), leaves(X, Y, a, b)
    loss = sinkhorn_divergence(*ours[:2], EPS, a=ours[2], b=ours[3], reach=reach, tol=1e-13)
    want = dense_divergence(*theirs, EPS, reach)
    assert relative(loss.detach(), want.detach()) < 1e-10
    slopes = torch.autograd.grad(want, theirs, create_graph=True)
    for got, slope in zip(torch.autograd.grad(loss, ours), slopes, strict=True):
        assert relative(got, slope.detach()) < 1e-8
    U, V = pts(N, 2, 5), pts(M, 2, 6)
    wanted = torch.autograd.grad((slopes[0] * U).sum() + (slopes[1] * V).sum(), theirs[:2], retain_graph=True)
    ours = leaves(X, Y)
    loss = sinkhorn_divergence(*ours, EPS, a=a, b=b, reach=reach, tol=1e-13, hvp_rtol=1e-12)
    gx, gy = torch.autograd.grad(loss, ours, create_graph=True)
    for got, product in zip(torch.autograd.grad((gx * U).sum() + (gy * V).sum(), ours), wanted, strict=True):
        assert relative(got, product) < 1e-7
    H = solve_divergence(X, Y, EPS, a=a, b=b, reach=reach, tol=1e-13).hessian(rtol=1e-12)
    check_operator(H, rtol=1e-9)
    (column,) = torch.autograd.grad((slopes[0] * U).sum(), theirs[0])
    assert relative(H @ U.reshape(-1), column.reshape(-1)) < 1e-7


@pytest.mark.parametrize("reach", [None, 1.5])
@pytest.mark.parametrize("d", [1, 3, 9])
def test_gradcheck(reach, d):
    def loss(x, y):
        options = {"a": wts(4), "b": wts(3), "reach": reach}
        return sinkhorn_divergence(x, y, 1.0, tol=1e-13, hvp_rtol=1e-12, **options)

    inputs = leaves(0.5 * pts(4, d), 0.5 * pts(3, d, 1))
    assert torch.autograd.gradcheck(loss, inputs, eps=1e-5, atol=1e-7, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, inputs, eps=1e-5, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("reach", [None, 1.5])
def test_weights_by_finite_differences(reach):
    def loss(first, second):
        a, b = (torch.softmax(t, 0) if reach is None else t.exp() for t in (first, second))
        return sinkhorn_divergence(X, Y, EPS, a=a, b=b, reach=reach, tol=1e-13)

    assert torch.autograd.gradcheck(loss, leaves(A.log(), B.log()), eps=1e-5, atol=1e-7, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("reach", [None, 0.5, 5.0])
@pytest.mark.parametrize("eps", [10.0, 0.3, 0.02])
def test_zero_at_itself_and_never_negative(dtype, reach, eps):
    x, y = pts(40, 2).to(dtype), pts(30, 2, 1).to(dtype)
    floor = (1e-7 if dtype == torch.float64 else 1e-6) * float(cost_matrix(x, x).max())
    options = {"reach": reach, "tol": None if eps > 0.1 or dtype == torch.float64 else 1e-3}
    shuffle = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    a = wts(40).to(dtype)
    for z, w in ((x, a), (x[shuffle], a[shuffle])):
        assert abs(float(sinkhorn_divergence(x, z, eps, a=a, b=w, **options))) < floor
    for step in (1e-5, 1e-3, 1e-1):
        assert float(sinkhorn_divergence(x, x + step * pts(40, 2, 7).to(dtype), eps, a=a, b=a, **options)) > -floor
    apart = sinkhorn_divergence(x, y, eps, **options)
    assert apart.dtype == dtype
    assert float(apart) > 100 * floor
    assert relative(sinkhorn_divergence(y, x, eps, **options), apart.double()) < 1e-4
    close = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(sinkhorn_divergence(close, x, eps, a=a, b=a, **options), close)
    assert slope.abs().max() < (1e-5 if dtype == torch.float64 else 1e-3)


@pytest.mark.filterwarnings("ignore::ot_newton.sinkhorn.ConvergenceWarning")  # small eps in float32
@pytest.mark.parametrize(("dtype", "floor"), [(torch.float64, 1e-7), (torch.float32, 1e-6)])
@pytest.mark.parametrize("reach", [None, 0.5, 5.0])
def test_never_negative_beyond_what_is_promised(dtype, floor, reach):
    """Measures that are the same or nearly so, written down in several ways."""
    rng = torch.Generator().manual_seed(0)
    checked = 0
    for eps in (1e-4, 1e-2, 1.0, 1e3):
        for n, d in ((1, 2), (2, 10), (20, 10), (30, 1)):
            x = torch.randn(n, d, generator=rng, dtype=torch.float64)
            x, a, order = x[torch.randint(n, (n,), generator=rng)], wts(n), torch.randperm(n, generator=rng)
            near = x + 1e-6 * torch.randn(n, d, generator=rng, dtype=torch.float64)
            for y, b in ((x, a), (x[order], a[order]), (torch.cat([x, x]), torch.cat([a, a]) / 2), (near, a)):
                args = [t.to(dtype) for t in (x, y, a, b)]
                solved = solve_divergence(*args[:2], eps, a=args[2], b=args[3], reach=reach, max_iter=100)
                if solved.converged:
                    checked += 1
                    assert abs(float(solved.exact_value())) < floor * (float(cost_matrix(x, x).max()) + eps)
    assert checked >= 48


def test_a_small_shift_of_small_clouds():
    x = 0.01 * pts(50, 160)
    y = x + 0.001 * pts(50, 160, 3)
    solved = solve_divergence(x, y, 0.0025, scale=0.5)
    assert solved.converged
    assert abs(float(solved.value()) - 1.60741e-4) < 1e-9
    assert abs(float(solved.plan.value()) - 9.930468e-3) < 1e-8
    assert abs(float(sinkhorn_divergence(x.float(), y.float(), 0.0025, scale=0.5)) - 1.60741e-4) < 2e-6
    for own in (x, x.float()):
        assert abs(float(sinkhorn_divergence(own, own, 0.0025, scale=0.5))) < 1e-7
    assert float(solve_divergence(x, x, 0.0025, scale=0.5).plan.value()) > 1e-3  # the bias of plain OT(x, x)


@pytest.mark.parametrize("eps", [1e2, 1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("reach", [None, 1.0, 0.01])
def test_the_self_terms_converge_fast_at_every_temperature(eps, reach):
    solved = solve_divergence(pts(60, 2), pts(50, 2, 1), eps, reach=reach, tol=1e-9)
    assert solved.converged
    assert solved.self_x.n_passes < 60
    v = pts(60, 2, 5).reshape(-1)
    solved.hessian().own.matvec(v)
    P = solved.self_x.rows.apply(torch.eye(60, dtype=v.dtype))
    assert (P - P.T).abs().max() <= 1e-9 * P.max()
    assert relative(P.sum(1), solved.self_x.row_sums) < 1e-9


def test_a_translation_costs_its_length():
    shift = torch.tensor([0.5, -1.0]).double()
    loss = sinkhorn_divergence(X, X + shift, EPS, a=A, b=A, tol=1e-12)
    assert abs(float(loss) - float(shift @ shift)) < 1e-10


def test_one_point_and_one_place():
    here = torch.zeros(1, 2).double()
    there = torch.tensor([[3.0, 4.0]]).double()
    assert abs(float(sinkhorn_divergence(here, there, 0.1)) - 25) < 1e-12
    assert float(sinkhorn_divergence(here, here, 0.1)) == 0
    same = here.expand(5, 2)
    assert abs(float(sinkhorn_divergence(same, same, 0.1, reach=1.0))) < 1e-14


def test_zero_weights():
    a = A.clone()
    a[[1, 5]] = 0
    a = a / a.sum()
    held = a > 0
    for reach in (None, 1.5):
        x = X.clone().requires_grad_()
        loss = sinkhorn_divergence(x, Y, EPS, a=a, reach=reach, tol=1e-12)
        assert relative(loss.detach(), sinkhorn_divergence(X[held], Y, EPS, a=a[held], reach=reach, tol=1e-12)) < 1e-10
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        (h,) = torch.autograd.grad((g * pts(N, 2, 5)).sum(), x)
        assert h.isfinite().all()
        assert not g[~held].any()
        assert not h[~held].any()


def test_says_where_it_did_not_converge():
    with pytest.warns(ConvergenceWarning) as caught:
        solved = solve_divergence(pts(40, 2), pts(30, 2, 1), 0.05, max_iter=3)
    assert {w.filename for w in caught} == {__file__}
    assert len(caught) == 3
    assert not solved.converged
    assert solved.error > 1e-6
    assert "pass_limit" in repr(solved)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"reach": (1.0, 2.0)}, TypeError, "reach: expected a number above 0, got tuple"),
        ({"reach": 0}, ValueError, "reach: expected a finite number above 0"),
        ({"a": 2 * A}, ValueError, "expected total mass 1 each"),
        ({"x": X[:, :1]}, ValueError, "x and y: expected points of one dimension"),
        ({"eps": 0.0}, ValueError, "eps: expected"),
        ({"tol": "1"}, TypeError, "tol: expected a number ≥ 0, got '1'"),
        ({"max_iter": 2.5}, ValueError, "max_iter: expected an integer ≥ 1, got 2.5"),
    ],
)
def test_refuses(change, error, message):
    with pytest.raises(error, match=message):
        sinkhorn_divergence(**{"x": X, "y": Y, "eps": EPS, "a": A, "b": B, **change})


def test_what_is_not_offered_raises():
    x, logits = leaves(X, A.log())
    (g,) = torch.autograd.grad(sinkhorn_divergence(x, Y, EPS), x, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="third derivatives are not offered"):
        torch.autograd.grad(h.sum(), x)
    (g,) = torch.autograd.grad(sinkhorn_divergence(X, Y, EPS, a=torch.softmax(logits, 0)), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives with respect to the weights are not offered"):
        torch.autograd.grad(g.square().sum(), logits)
    assert not sinkhorn_divergence(X, Y, EPS).requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("reach", [None, 1.0])
def test_on_a_gpu(reach):
    x, y = pts(500, 3), pts(400, 3, 1)
    ours = solve_divergence(x.float().cuda(), y.float().cuda(), 0.2, reach=reach)
    want = solve_divergence(x, y, 0.2, reach=reach)
    assert ours.converged
    assert relative(ours.value().cpu(), want.value()) < 1e-4
    assert relative(ours.grad().cpu(), want.grad()) < 1e-3
    v = pts(500, 3, 5).reshape(-1)
    assert relative((ours.hessian() @ v.float().cuda()).cpu(), want.hessian() @ v) < 2e-3
    own = x.float().cuda()
    assert abs(float(sinkhorn_divergence(own, own, 0.2, reach=reach))) < 1e-6 * float(cost_matrix(x, x).max())
