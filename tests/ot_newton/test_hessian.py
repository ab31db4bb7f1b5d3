import pytest
import torch
from referee import Referee, pts, relative, unrolled, wts
from scipy.sparse.linalg import eigsh as scipy_eigsh

from ot_newton.hessian import PlanHessian, joint_product, row_moments
from ot_newton.lanczos import eigsh
from ot_newton.response import respond
from ot_newton.sinkhorn import ConvergenceWarning, solve
from ot_newton.status import Status

EPS = 0.9


def make(n: int, m: int, d: int, *, scale=1.0, eps=EPS, cost="sqeuclidean", dtype=torch.float64, **options):
    """A plan for non-uniform weights, and the referee that converged by itself."""
    x, y, a, b = (t.to(dtype) for t in (pts(n, d), pts(m, d, 1), wts(n), wts(m, 2)))
    tol = 1e-13 if dtype == torch.float64 else 2e-6
    plan = solve(x, y, eps, a=a, b=b, cost=cost, scale=scale, tol=tol, **options)
    return plan, Referee(x, y, eps, a=a, b=b, cost=cost, scale=scale)


@pytest.mark.parametrize("d", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("method", ["block", "cg"])
def test_against_the_referee(d, scale, method):
    plan, dense = make(*((8, 11) if d % 2 else (11, 8)), d, scale=scale)
    H = plan.hessian(method=method)
    v = torch.sin(torch.arange(H.shape[0]).double())
    assert relative(H @ v, dense.hessian_x @ v) < 1e-7
    assert relative(H.to_dense(), dense.hessian_x) < 1e-7
    assert H.last_response is not None
    assert H.last_response.status is Status.CONVERGED
    assert float(H.last_response.residual.max()) <= H.rtol
    assert H.symmetric


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_cosine_cost(scale):
    plan, dense = make(9, 7, 3, scale=scale, eps=0.2, cost="cosine")
    assert relative(plan.hessian().to_dense(), dense.hessian_x) < 1e-7


@pytest.mark.parametrize("cost", ["sqeuclidean", "cosine"])
def test_finite_differences_of_the_gradient(cost):
    plan, _ = make(9, 12, 2, cost=cost)
    A, h = pts(9, 2, 5), 1e-5
    up, down = (
        solve(plan.x + sign * h * A, plan.y, EPS, a=plan.a, b=plan.b, cost=cost, tol=1e-13).grad() for sign in (1, -1)
    )
    assert relative((plan.hessian() @ A.reshape(-1)).reshape(9, 2), (up - down) / (2 * h)) < 1e-7


def test_double_backward_through_recorded_sweeps():
    plan, _ = make(7, 9, 2, scale=0.5)
    A = pts(7, 2, 5)

    def loss(x):
        return unrolled(x, plan.y, EPS, a=plan.a, b=plan.b, scale=0.5)

    _, want = torch.autograd.functional.hvp(loss, plan.x, A)
    assert relative((plan.hessian() @ A.reshape(-1)).reshape(7, 2), want) < 1e-7


@pytest.mark.parametrize(
    ("scale", "value", "grad", "hessian"),
    [
        (
            1.0,
            1.02483342,
            [-0.57265656, -0.12915734, 0.50181390],
            [
                [0.84807806, 0.15046962, 0.00145232],
                [0.15046962, 0.34559217, 0.00393820],
                [0.00145232, 0.0039382, 0.49460948],
            ],
        ),
        (
            0.5,
            0.67216691,
            [-0.34880162, -0.02678229, 0.27558391],
            [
                [0.42652291, 0.05813742, 0.01533967],
                [0.05813742, 0.17570716, 0.01615542],
                [0.01533967, 0.01615542, 0.21850491],
            ],
        ),
    ],
)
def test_published_numbers(scale, value, grad, hessian):
    x, y = torch.tensor([[0.0], [1], [3]]).double(), torch.tensor([[0.5], [2]]).double()
    a, b = torch.tensor([0.5, 0.25, 0.25]).double(), torch.tensor([0.6, 0.4], dtype=torch.float64)
    dense, plan = Referee(x, y, 1.0, a=a, b=b, scale=scale), solve(x, y, 1.0, a=a, b=b, scale=scale, tol=1e-12)
    H = plan.hessian().to_dense()
    for got_value, got_grad, got_hessian in (
        (dense.value, dense.grad_x, dense.hessian_x),
        (plan.value(), plan.grad(), H),
    ):
        assert abs(float(got_value) - value) < 1e-8
        assert (got_grad[:, 0] - torch.tensor(grad).double()).abs().max() < 2e-8
        assert (got_hessian - torch.tensor(hessian).double()).abs().max() < 2e-8
    assert relative(H.sum(1), 2 * scale * a) < 1e-12


@pytest.mark.filterwarnings("ignore::ot_newton.sinkhorn.ConvergenceWarning")
def test_stopped_early_it_belongs_to_the_marginals_it_has():
    x, y = pts(8, 2), pts(9, 2, 1)
    for method in ("alternating", "symmetric"):
        plan = solve(x, y, EPS, a=wts(8), method=method, max_iter=2)
        dense = Referee(x, y, EPS, a=wts(8), at=(plan.f, plan.g))
        assert plan.error > 1e-2
        assert relative(plan.hessian().to_dense(), dense.hessian_x) < 1e-9


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize(("n", "m", "d"), [(1, 1, 2), (1, 50, 3), (50, 1, 3), (500, 300, 3), (300, 700, 20)])
def test_moving_everything_along(n, m, d, scale):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(k, d, generator=generator, dtype=torch.float64) for k in (n, m))
    plan = solve(x, y, 2.0 * d, a=wts(n), b=wts(m, 2), scale=scale, tol=1e-11)
    v = torch.linspace(-1, 2, d, dtype=torch.float64)
    moved = plan.hessian() @ v.repeat(n)
    assert relative(moved.reshape(n, d), 2 * scale * plan.a[:, None] * v) < 1e-9


@pytest.mark.parametrize("shape", [(60, 40), (40, 60)])
def test_symmetric(shape):
    plan, _ = make(*shape, 2, eps=0.3)
    H = plan.hessian(rtol=1e-14)
    u, v = pts(2 * shape[0], 2).unbind(1)
    assert abs(u @ (H @ v) - v @ (H @ u)) < 1e-12 * u.norm() * v.norm() * H.to_dense().abs().max()
    M = H.to_dense()
    assert relative(M, M.T) < 1e-12


@pytest.mark.parametrize("factor", [1e-6, 1e6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scaling_the_direction(factor, dtype):
    plan, _ = make(30, 20, 3, dtype=dtype)
    v = torch.sin(torch.arange(90)).to(dtype)
    H = plan.hessian()
    plain, scaled = H @ v, H @ (factor * v)
    assert relative(scaled / factor, plain.double()) < (1e-9 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("eps", [EPS, 0.1])
def test_single_precision(eps):
    x, y, a, b = (t.float() for t in (pts(30, 3), pts(20, 3, 1), wts(30), wts(20, 2)))
    plan = solve(x, y, eps, a=a, b=b)
    dense = Referee(plan.x, plan.y, eps, a=plan.a, b=plan.b)
    v = torch.sin(torch.arange(90)).float()
    Hv = plan.hessian() @ v
    assert Hv.dtype == torch.float32
    assert relative(plan.value(), dense.value) < 1e-4
    assert relative(plan.grad(), dense.grad_x) < 1e-3
    assert relative(Hv, dense.hessian_x @ v.double()) < 2e-3


def test_far_from_the_origin():
    plan, dense = make(20, 15, 3)
    far = solve(plan.x + 1e4, plan.y - 1e4 + 2e4, EPS, a=plan.a, b=plan.b, tol=1e-12)
    assert relative(far.hessian().to_dense(), dense.hessian_x) < 1e-7


def test_many_dimensions_stream_the_hadamard_term(monkeypatch):
    plan, dense = make(7, 9, 4)
    moments = row_moments(plan)
    y = plan.pairs.target.points
    assert relative(moments, torch.einsum("ij,jd,je->ide", dense.P, y, y)) < 1e-10
    monkeypatch.setattr("ot_newton.hessian.MOMENT_DIMENSIONS", 3)
    assert relative(plan.hessian().to_dense(), dense.hessian_x) < 1e-7


def test_zero_weights():
    a = torch.cat([torch.zeros(3).double(), wts(6)])
    x, y = pts(9, 2), pts(7, 2, 1)
    for n_first in (True, False):
        pad = y if n_first else y.repeat(2, 1)  # the smaller side is either one
        H = solve(x, pad, EPS, a=a, tol=1e-12).hessian().to_dense()
        part = solve(x[3:], pad, EPS, a=a[3:], tol=1e-12).hessian().to_dense()
        assert relative(H[6:, 6:], part) < 1e-9
        assert (H[:6] == 0).all()
        assert (H[:, :6] == 0).all()


def test_columns_share_their_passes():
    plan, _ = make(40, 30, 2)
    H = plan.hessian()
    H @ torch.ones(80).double()
    before = H.plan.pairs.passes.total
    one = H @ torch.sin(torch.arange(80.0)).double()
    single = H.plan.pairs.passes.total - before
    before = H.plan.pairs.passes.total
    ten = H @ pts(80, 10)
    assert H.plan.pairs.passes.total - before <= single + 2
    assert one.shape == (80,)
    assert relative(ten[:, 3], H @ pts(80, 10)[:, 3]) < 1e-7
    assert H.n_matvec == 13


def test_eigenvalues():
    plan, dense = make(30, 20, 2, eps=0.3)
    H = plan.hessian()
    want = torch.linalg.eigvalsh(dense.hessian_x)
    low, _ = eigsh(H, k=2, which="SA")
    assert relative(low, want[:2]) < 1e-6
    assert float(low[0]) < 0  # transport is not convex in the points
    high = scipy_eigsh(H.to_scipy(), k=2, which="LA", return_eigenvectors=False)
    assert relative(torch.as_tensor(high).sort().values, want[-2:]) < 1e-6


def test_damping_is_inexact():
    plan, dense = make(9, 8, 2)
    damped = plan.hessian(damping=0.1).to_dense()
    assert 1e-3 < relative(damped, dense.hessian_x) < 1


@pytest.mark.parametrize("shape", [(8, 6), (6, 8)])
def test_both_clouds_move(shape):
    n, m = shape
    plan, dense = make(n, m, 3, scale=0.5)
    A, B = pts(n, 3, 5), pts(m, 3, 6)
    for first, second in ((A, B), (A, None), (None, B)):
        moves = 0 * A if first is None else first, 0 * B if second is None else second
        want = dense.hessian @ torch.cat([move.reshape(-1) for move in moves])
        hx, hy = joint_product(plan, first, second)
        assert relative(hx.reshape(-1), want[: 3 * n]) < 1e-7
        assert relative(hy.reshape(-1), want[3 * n :]) < 1e-7
    v = torch.tensor([1.0, -2.0, 0.5]).double()
    hx, hy = joint_product(plan, v.expand(n, -1), v.expand(m, -1))
    assert max(hx.abs().max(), hy.abs().max()) < 1e-10


@pytest.mark.parametrize(("d", "fewest"), [(1, 4), (5, 4), (6, 6), (8, 6), (9, 6), (22, 6)])
def test_passes_of_a_product_of_both(d, fewest, monkeypatch):
    plan, _ = make(12, 9, d, eps=2.0 * d)
    plan.grad(), plan.grad_y()
    responses = []

    def spy(*arguments, **options):
        responses.append(respond(*arguments, **options))
        return responses[-1]

    monkeypatch.setattr("ot_newton.hessian.respond", spy)
    before = plan.pairs.passes.total
    joint_product(plan, pts(12, d, 5), pts(9, d, 6))
    assert plan.pairs.passes.total - before - responses[0].n_passes == fewest


def test_an_unfinished_product_of_both_says_so():
    plan, _ = make(60, 50, 2, eps=0.3)
    A = pts(60, 2, 5)
    with pytest.warns(ConvergenceWarning, match=r"response of the potentials: .* residual .* \(max_iter\)") as caught:
        joint_product(plan, A, None, method="cg", max_iter=1)
    assert (len(caught), caught[0].filename) == (1, __file__)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "lu"}, "method: expected 'block' or 'cg', got 'lu'"),
        ({"damping": -1.0}, "damping: expected a finite number ≥ 0, got -1.0"),
        ({"rtol": 0.0}, "rtol: expected a finite number above 0, got 0.0"),
        ({"max_iter": 0}, "max_iter: expected an integer ≥ 1, got 0"),
    ],
)
def test_bad_options(options, message):
    plan, _ = make(4, 3, 1)
    with pytest.raises(ValueError, match=message):
        PlanHessian(plan, **options)


def test_what_is_no_plan():
    with pytest.raises(TypeError, match=r"plan: expected a Plan, got Tensor; solve\(x, y, eps\) returns one"):
        PlanHessian(pts(4, 2))


def test_an_unfinished_response_is_on_record():
    plan, _ = make(60, 50, 2, eps=0.3)
    H = plan.hessian(method="cg", max_iter=1)
    H @ torch.ones(120).double().cumsum(0)
    assert H.last_response is not None
    assert H.last_response.status is Status.MAX_ITER
