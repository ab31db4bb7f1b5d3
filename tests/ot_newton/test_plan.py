import math

import pytest
import torch
from referee import Referee, pts, relative, unrolled, wts

from ot_newton.plan import Plan
from ot_newton.sinkhorn import ConvergenceWarning, solve
from ot_newton.status import Status

N, M, EPS = 12, 9, 0.8
A, B = wts(N), wts(M, 2)


def make(d: int = 3, scale: float = 1.0, **options) -> tuple[Plan, Referee]:
    """A plan and the referee at the same potentials."""
    plan = solve(pts(N, d), pts(M, d, 1), EPS, a=A, b=B, scale=scale, **options)
    cost = options.get("cost", "sqeuclidean")
    return plan, Referee(plan.x, plan.y, EPS, a=A, b=B, scale=scale, cost=cost, at=(plan.f, plan.g))


@pytest.fixture(params=["alternating", "symmetric", "two-level"])
def early(request) -> tuple[Plan, Referee]:
    """A plan stopped long before convergence, far from its marginals."""
    with pytest.warns(ConvergenceWarning):
        plan, dense = make(method=request.param, max_iter=2, scale=0.5)
    assert plan.error > 1e-2
    return plan, dense


def test_stopped_early_everything_belongs_to_the_marginals_it_has(early):
    plan, dense = early
    assert relative(plan.row_sums, dense.r) < 1e-13
    assert relative(plan.col_sums, dense.c) < 1e-13
    assert plan.error == pytest.approx(dense.error, rel=1e-12)
    assert relative(plan.to_dense(), dense.P) < 1e-13
    assert relative(plan.value(), dense.value) < 1e-13
    assert relative(plan.grad(), dense.grad_x) < 1e-12
    assert relative(plan.grad_y(), dense.grad_y) < 1e-12
    # At fixed marginals (r, c), the reference measure a⊗b adds only a constant; P/mass has mass one.
    mass = plan.row_sums.sum()
    r, c = dense.r / mass, dense.c / mass
    fixed = solve(plan.x, plan.y, EPS, a=r, b=c, scale=0.5, tol=1e-12)
    assert relative(mass * fixed.grad(), dense.grad_x) < 1e-9
    divergence = (r * (r / A).log()).sum() + (c * (c / B).log()).sum() + mass.log()
    assert relative(mass * (fixed.value() + EPS * divergence), dense.value) < 1e-10


def test_the_dual_value_is_a_bound_with_a_quadratic_error(early):
    plan, _ = early
    exact = Referee(plan.x, plan.y, EPS, a=A, b=B, scale=0.5).value
    gap = float(exact - plan.dual_value())
    assert 0 < gap < EPS * 5 * plan.error**2
    assert gap < abs(float(exact - plan.value()))


def test_applications():
    plan, dense = make()
    V, U = pts(M, 4), pts(N, 70)
    assert relative(plan.apply(V), dense.P @ V) < 1e-13
    assert relative(plan.adjoint(U), dense.P.T @ U) < 1e-13
    assert relative(plan.apply(V[:, 0]), dense.P @ V[:, 0]) < 1e-13
    assert plan.apply(V[:, 0]).shape == (N,)
    assert plan.apply(V.float()).dtype == torch.float64
    before = plan.pairs.passes.total
    plan.adjoint(U)
    assert plan.pairs.passes.total - before == 2  # 70 columns
    assert plan.shape == (N, M)


def test_moments_are_applied_once():
    plan, dense = make()
    before = plan.pairs.passes.total
    assert relative(plan.Py, dense.P @ plan.pairs.target.points) < 1e-12
    assert relative(plan.Ptx, dense.P.T @ plan.pairs.source.points) < 1e-12
    plan.grad(), plan.grad_y(), plan.Py
    assert plan.pairs.passes.total - before == 2


def test_barycenters():
    plan, dense = make()
    want = (dense.P @ dense.y) / dense.r[:, None]
    assert relative(plan.barycenters(), want) < 1e-12
    far = solve(plan.x.float() + 1e3, plan.y.float() + 1e3, EPS)
    near = solve(plan.x.float(), plan.y.float(), EPS)
    assert (far.barycenters() - 1e3 - near.barycenters()).abs().max() < 1e-3
    a = torch.cat([torch.zeros(1).double(), wts(N - 1)])
    massless = solve(plan.x, plan.y, EPS, a=a).barycenters()
    assert massless[0].isnan().all()
    assert massless[1:].isfinite().all()


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("cost", ["sqeuclidean", "cosine"])
def test_gradient_is_the_derivative_of_the_value(scale, cost):
    plan, _ = make(scale=scale, cost=cost, tol=1e-13)
    x, h = plan.x, 1e-5
    for i, k in ((0, 0), (3, 1), (11, 2)):
        step = torch.zeros_like(x)
        step[i, k] = h
        up, down = (
            solve(x + sign * step, plan.y, EPS, a=A, b=B, scale=scale, cost=cost, tol=1e-13).value() for sign in (1, -1)
        )
        assert abs(plan.grad()[i, k] - (up - down) / (2 * h)) < 1e-7 * plan.grad().abs().max()


def test_gradient_through_recorded_sweeps():
    plan, _ = make(tol=1e-13)
    x = plan.x.clone().requires_grad_()
    value = unrolled(x, plan.y, EPS, a=A, b=B)
    (grad,) = torch.autograd.grad(value, x)
    assert relative(plan.value(), value.detach()) < 1e-10
    assert relative(plan.grad(), grad) < 1e-8


@pytest.mark.filterwarnings("ignore::ot_newton.sinkhorn.ConvergenceWarning")
def test_gradient_far_from_convergence_is_that_of_the_plan_at_hand():
    x, y = pts(50, 2), pts(50, 2, 5) + 0.5
    plan = solve(x, y, 0.02, a=wts(50), b=wts(50, 1), method="alternating", max_iter=200)
    exact = Referee(x, y, 0.02, a=wts(50), b=wts(50, 1))
    here = Referee(x, y, 0.02, a=wts(50), b=wts(50, 1), at=(plan.f, plan.g))
    assert not plan.converged
    assert plan.error > 1e-3  # shown with the gradient
    assert relative(plan.grad(), exact.grad_x) > 0.1
    assert relative(plan.grad(), here.grad_x) < 1e-11


def test_rowsums_of_the_gradient_balance():
    plan, _ = make(tol=1e-12)
    assert (plan.grad().sum(0) + plan.grad_y().sum(0)).abs().max() < 1e-12


def test_bad_shapes():
    plan, _ = make()
    for V in (torch.zeros(N), torch.zeros(M, 2, 2), torch.zeros(()), [0.0] * M):
        with pytest.raises(ValueError, match=rf"V: expected shape \({M},\) or \({M}, k\), got"):
            plan.apply(V)
    with pytest.raises(ValueError, match=rf"U: expected shape \({N},\) or \({N}, k\), got \({M},\)"):
        plan.adjoint(torch.zeros(M))


def test_the_dense_plan_is_refused_above_a_size(monkeypatch):
    plan, _ = make()
    monkeypatch.setattr("ot_newton.plan.DENSE_LIMIT", N * M - 1)
    with pytest.raises(ValueError, match=rf"expected n·m ≤ {N * M - 1}, got {N}·{M}; use apply"):
        plan.to_dense()


def test_evidence_and_representation():
    plan, _ = make(backend="dense")
    assert plan.status is Status.CONVERGED
    assert plan.backend == "dense"
    assert plan.n_passes >= plan.n_iter > 0
    assert math.isfinite(plan.error)
    assert repr(plan).startswith(f"Plan({N}×{M}, eps=0.8, status=converged, error=")
    with pytest.raises(AttributeError):
        plan.eps = 1.0


def test_moved_potentials():
    plan, _ = make()
    plan.grad()
    shifted = plan.moved(torch.ones(N).double(), -torch.ones(M).double())
    assert relative(shifted.f, plan.f + EPS) < 1e-15
    assert relative(shifted.to_dense(), plan.to_dense()) < 1e-13
    modes = torch.ones(M, 2).double()
    assert plan.with_modes(modes).modes is modes
    assert plan.modes is not modes
