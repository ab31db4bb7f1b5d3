import pytest
import torch
from referee import Referee, plan_matrix, pts, relative, row_potential, wts

from ot_newton.labels import Labels
from ot_newton.pairs import Pairs, Passes

EPS = 0.7


@pytest.fixture(params=[(1.0, "dense"), (0.5, "blocked")], ids=["s=1,dense", "s=½,blocked"])
def case(request):
    """Pairs, their referee and a pair of arbitrary potentials in units of eps."""
    scale, backend = request.param
    x, y, a, b = pts(9, 3), pts(7, 3, 1), wts(9), wts(7, 2)
    phi, psi = torch.sin(torch.arange(9.0).double()), torch.cos(torch.arange(7.0).double())
    P = Referee(x, y, EPS, a=a, b=b, scale=scale, at=(EPS * phi, EPS * psi))
    return Pairs.of(x, y, a, b, EPS, scale, backend), P, phi, psi


def test_half_steps(case):
    pairs, dense, phi, psi = case
    want_phi = row_potential(dense.C, dense.b, EPS * psi, EPS) / EPS
    want_psi = row_potential(dense.C.T, dense.a, EPS * phi, EPS) / EPS
    assert relative(pairs.row(psi), want_phi) < 1e-13
    assert relative(pairs.row(psi, want_phi + 1), want_phi) < 1e-13
    assert relative(pairs.col(phi), want_psi) < 1e-13
    assert relative(pairs.swapped().row(phi, want_psi), want_psi) < 1e-13


def test_half_steps_with_columns(case):
    pairs, dense, phi, psi = case
    V, U = pts(7, 4, 3), pts(9, 2, 4)
    new_phi, mean = pairs.row_with(psi, V, phi)
    P = plan_matrix(dense.C, dense.a, dense.b, EPS * new_phi, EPS * psi, EPS)
    assert relative(P.sum(1), dense.a) < 1e-13
    assert relative(mean, (P @ V) / dense.a[:, None]) < 1e-13
    new_psi, mean = pairs.col_with(phi, U)
    P = plan_matrix(dense.C, dense.a, dense.b, EPS * phi, EPS * new_psi, EPS)
    assert relative(P.sum(0), dense.b) < 1e-13
    assert relative(mean, (P.T @ U) / dense.b[:, None]) < 1e-13


def test_applications(case):
    pairs, dense, phi, psi = case
    V, U, A, B = pts(7, 4, 3), pts(9, 2, 4), pts(9, 5, 5), pts(7, 5, 6)
    assert relative(pairs.apply(phi, psi, V), dense.P @ V) < 1e-13
    assert relative(pairs.adjoint(phi, psi, U), dense.P.T @ U) < 1e-13
    assert relative(pairs.hadamard(phi, psi, A, B, V), (dense.P * (A @ B.T)) @ V) < 1e-13


def test_temperature_and_sides_share_the_count(case):
    pairs, dense, phi, psi = case
    hot = pairs.at(2.0)
    assert relative(hot.row(psi), row_potential(dense.C, dense.b, 2 * psi, 2.0) / 2) < 1e-13
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
    zero = torch.zeros(3).double()
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
    psi = torch.cos(torch.arange(7.0).double())
    pairs = Pairs.of(x, y, a, b, EPS, backend=backend, labels=labels)
    phi = pairs.row(psi)
    assert relative(phi, row_potential(C, b, EPS * psi, EPS) / EPS) < 1e-13
    assert relative(pairs.col(phi), row_potential(C.T, a, EPS * phi, EPS) / EPS) < 1e-13
    P = plan_matrix(C, a, b, EPS * phi, EPS * psi, EPS)
    assert relative(pairs.swapped().apply(psi, phi, x), P.T @ x) < 1e-13
    assert relative(pairs.at(2 * EPS).row(psi), row_potential(C, b, 2 * EPS * psi, 2 * EPS) / (2 * EPS)) < 1e-13
