import pytest
import torch
from referee import Referee, plan_matrix, pts, relative, row_potential, wts

from ot_newton.labels import Labels
from ot_newton.pairs import Pairs, Passes
from ot_newton.potentials import dual, in_gauge

EPS = 0.7


@pytest.fixture(params=[(1.0, "dense"), (0.5, "blocked")], ids=["s=1,dense", "s=½,blocked"])
def case(request):
    """Pairs, their referee and a pair of arbitrary potentials as `Pairs` keeps them."""
    scale, backend = request.param
    x, y, a, b = pts(9, 3), pts(7, 3, 1), wts(9), wts(7, 2)
    f, g = torch.sin(torch.arange(9.0).double()), torch.cos(torch.arange(7.0).double())
    pairs = Pairs.of(x, y, a, b, EPS, scale, backend)
    dense = Referee(x, y, EPS, a=a, b=b, scale=scale, at=(f, g))
    return pairs, dense, pairs.source.reduced(f, EPS), pairs.target.reduced(g, EPS)


def test_potentials_without_norms(case):
    pairs, dense, phi, psi = case
    assert relative(pairs.source.whole(phi, EPS), dense.f) < 1e-14
    assert relative(pairs.target.whole(psi, EPS), dense.g) < 1e-14
    f, g = (torch.randn(2, n, generator=torch.Generator().manual_seed(1)).double() for n in (9, 7))
    norms = (dense.a @ pairs.source.norm + dense.b @ pairs.target.norm) * EPS
    assert EPS * float(pairs.dual_of_norms) == pytest.approx(float(norms))
    values = [
        EPS * float(dual(pairs, pairs.source.reduced(u, EPS), pairs.target.reduced(v, EPS)))
        for u, v in zip(f, g, strict=True)
    ]
    assert values == pytest.approx([float(dense.a @ u + dense.b @ v) for u, v in zip(f, g, strict=True)])


def test_norms_cost_no_digits():
    """In 300 dimensions the norms are hundreds of eps, and what is left of the potentials is a fifth of that."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.rand(40, 300, generator=rng), torch.rand(30, 300, generator=rng)
    pairs = Pairs.of(x, y, wts(40).float(), wts(30, 2).float(), 0.1)
    wide = Pairs.of(x.double(), y.double(), pairs.source.weights.double(), pairs.target.weights.double(), 0.1)
    _, start = in_gauge(wide, None, wide.target.reduced(torch.zeros(30).double(), 0.1))
    _, psi = in_gauge(wide, None, wide.col(wide.row(start)))
    phi, rounded, norm = wide.row(psi), pairs.row(psi.float()), float(wide.source.norm.min())
    assert float(phi.abs().max()) < 0.5 * norm
    assert float((rounded - phi).abs().max()) < torch.finfo(torch.float32).eps * norm


def test_half_steps(case):
    pairs, dense, phi, psi = case
    want_phi = pairs.source.reduced(row_potential(dense.C, dense.b, dense.g, EPS), EPS)
    want_psi = pairs.target.reduced(row_potential(dense.C.T, dense.a, dense.f, EPS), EPS)
    assert relative(pairs.row(psi), want_phi) < 1e-13
    assert relative(pairs.row(psi, want_phi + 1), want_phi) < 1e-13
    assert relative(pairs.col(phi), want_psi) < 1e-13
    assert relative(pairs.swapped().row(phi, want_psi), want_psi) < 1e-13


def test_half_steps_with_columns(case):
    pairs, dense, phi, psi = case
    V, U = pts(7, 4, 3), pts(9, 2, 4)
    new_phi, mean = pairs.row_with(psi, V, phi)
    P = plan_matrix(dense.C, dense.a, dense.b, pairs.source.whole(new_phi, EPS), dense.g, EPS)
    assert relative(P.sum(1), dense.a) < 1e-13
    assert relative(mean, (P @ V) / dense.a[:, None]) < 1e-13
    new_psi, mean = pairs.col_with(phi, U)
    P = plan_matrix(dense.C, dense.a, dense.b, dense.f, pairs.target.whole(new_psi, EPS), EPS)
    assert relative(P.sum(0), dense.b) < 1e-13
    assert relative(mean, (P.T @ U) / dense.b[:, None]) < 1e-13


def test_applications(case):
    pairs, dense, phi, psi = case
    V, U, A, B = pts(7, 4, 3), pts(9, 2, 4), pts(9, 5, 5), pts(7, 5, 6)
    assert relative(pairs.apply(phi, psi, V), dense.P @ V) < 1e-13
    assert relative(pairs.adjoint(phi, psi, U), dense.P.T @ U) < 1e-13
    assert relative(pairs.hadamard(phi, psi, A, B, V), (dense.P * (A @ B.T)) @ V) < 1e-13


def test_temperature_and_sides_share_the_count(case):
    pairs, dense, phi, _ = case
    hot = pairs.at(2.0)
    phi_hot = hot.row(hot.target.reduced(dense.g, 2.0))
    assert relative(hot.source.whole(phi_hot, 2.0), row_potential(dense.C, dense.b, dense.g, 2.0)) < 1e-13
    assert (pairs.shape, pairs.swapped().shape) == ((9, 7), (7, 9))
    pairs.swapped().row(phi)
    assert (pairs.passes.half_steps, pairs.passes.total) == (2, 2)


@pytest.mark.parametrize(("columns", "passes"), [(1, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_a_pass_carries_64_columns(columns, passes):
    count = Passes.application(columns)
    assert (count.applications, count.columns, count.half_steps, count.total) == (passes, columns, 0, passes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_are_kept_near_the_origin(dtype):
    shift = torch.tensor([1e4, -2e4, 5e3])
    near, far = (
        Pairs.of((pts(9, 3) + s).to(dtype), (pts(7, 3, 1) + s).to(dtype), wts(9).to(dtype), wts(7).to(dtype), EPS)
        for s in (0 * shift, shift)
    )
    unit = 2e4 * torch.finfo(dtype).eps
    for a, b in ((near.source, far.source), (near.target, far.target)):
        assert (a.points - b.points).abs().max() < unit
        assert a.points.dtype == dtype
    total = near.source.weights @ near.source.points + near.target.weights @ near.target.points
    assert total.abs().max() < 10 * torch.finfo(dtype).eps


def test_zero_weights():
    b = torch.tensor([0.0, 0.5, 0.5]).double()
    x, y = pts(4, 2), pts(3, 2, 1)
    pairs, without = (Pairs.of(x, t, wts(4), w, EPS) for t, w in ((y, b), (y[1:], b[1:])))
    zero = pairs.target.reduced(torch.zeros(3).double(), EPS)
    # Centroids agree, since weight 0 does not count.
    assert relative(pairs.row(zero), without.row(zero[1:])) < 1e-14
    phi = torch.zeros(4).double()
    assert relative(pairs.apply(phi, zero, y), without.apply(phi, zero[1:], y[1:])) < 1e-14


def test_averages_are_normalised(case):
    pairs, dense, phi, psi = case
    V, U = pts(7, 4, 3), pts(9, 2, 4)
    assert relative(pairs.row_means(psi, V, phi), (dense.P @ V) / dense.P.sum(1, keepdim=True)) < 1e-13
    assert relative(pairs.col_means(phi, U, psi), (dense.P.T @ U) / dense.P.sum(0)[:, None]) < 1e-13
    A, B = pts(9, 2, 5), pts(7, 2, 6)
    want = ((dense.P * (A @ B.T)) @ V) / dense.P.sum(1, keepdim=True)
    assert relative(pairs.hadamard_means(psi, A, B, V, phi), want) < 1e-13
    assert pairs.passes == Passes(0, 3, 4 + 2 + 4)


def test_what_a_half_step_changes(case):
    pairs, _, phi, psi = case
    potential, change = pairs.row_change(psi, phi)
    assert relative(potential, pairs.row(psi)) < 1e-13
    assert relative(change, phi - potential) < 1e-13
    potential, change = pairs.col_change(phi, psi)
    assert relative(change, psi - potential) < 1e-13


@pytest.mark.parametrize("backend", ["dense", "blocked"])
def test_classes_cost_what_the_table_says(backend):
    x, y, a, b = pts(9, 3), pts(7, 3, 1), wts(9), wts(7, 2)
    rng = torch.Generator().manual_seed(0)
    labels = Labels(
        torch.randint(4, (9,), generator=rng), torch.randint(2, (7,), generator=rng), 3 * pts(4, 2, 5).double()
    )
    C = torch.cdist(x, y) ** 2 + labels.cost[labels.source][:, labels.target]
    g = torch.cos(torch.arange(7.0).double())
    pairs = Pairs.of(x, y, a, b, EPS, backend=backend, labels=labels)
    psi = pairs.target.reduced(g, EPS)
    phi = pairs.row(psi)
    f = pairs.source.whole(phi, EPS)
    assert relative(f, row_potential(C, b, g, EPS)) < 1e-13
    assert relative(pairs.target.whole(pairs.col(phi), EPS), row_potential(C.T, a, f, EPS)) < 1e-13
    P = plan_matrix(C, a, b, f, g, EPS)
    assert relative(pairs.swapped().apply(psi, phi, x), P.T @ x) < 1e-13
    hot = pairs.at(2 * EPS)
    f = hot.source.whole(hot.row(hot.target.reduced(g, 2 * EPS)), 2 * EPS)
    assert relative(f, row_potential(C, b, g, 2 * EPS)) < 1e-13
