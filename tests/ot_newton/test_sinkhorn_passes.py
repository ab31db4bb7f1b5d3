import warnings

import pytest
import torch
from referee import Referee, cost_matrix, pts, wts

from ot_newton.problems.cytometry import cytometry_points
from ot_newton.sinkhorn import METHODS, ConvergenceWarning, solve
from ot_newton.status import Status

EVERY_METHOD = pytest.mark.parametrize("method", METHODS)
DTYPES = [torch.float64, torch.float32]
limited = pytest.mark.filterwarnings("ignore::ot_newton.sinkhorn.ConvergenceWarning")


@pytest.mark.parametrize("method", ["auto", "two-level"])
def test_hard_problem_takes_few_passes(method):
    x, y = pts(50, 2), pts(50, 2, 5) + 0.5
    plan = solve(x, y, 0.02, a=wts(50), b=wts(50, 1), method=method)
    assert plan.converged
    assert plan.n_passes < 300  # plain sweeps take fourteen thousand
    assert Referee(x, y, 0.02, a=plan.a, b=plan.b, at=(plan.f, plan.g)).error < 1.1e-6


def cloud(n: int, d: int, seed: int) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def far_clusters(distance: float, crossing: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two clusters of 40 points on each side, `crossing` of which have to go from one to the other."""
    x, y = cloud(80, 3, 0), cloud(80, 3, 1)
    x[40:] += distance
    y[40 - crossing :] += distance
    return x, y


@pytest.mark.parametrize("method", ["auto", "newton", "two-level"])
@pytest.mark.parametrize("crossing", [0, 1, 10])
@pytest.mark.parametrize("distance", [60.0, 1e3])
def test_clusters_far_apart(method, crossing, distance):
    x, y = far_clusters(distance, crossing)
    plan = solve(x, y, 1.0, tol=1e-7, method=method)
    assert plan.converged
    assert plan.n_passes < 250  # plain sweeps take as many as distance² over eps
    dense = Referee(x, y, 1.0, at=(plan.f, plan.g))
    assert dense.error < 1e-6
    P = plan.to_dense()
    assert float(P[40:, : 40 - crossing].sum()) < 1e-6
    assert float(P[:40, 40 - crossing :].sum()) == pytest.approx(crossing / 80, abs=1e-6)


def test_what_float32_cannot_resolve_is_said():
    x, y = far_clusters(1e3, 10)
    with pytest.warns(ConvergenceWarning, match="stalled"):
        plan = solve(x.float(), y.float(), 1.0)
    assert plan.status is Status.STALLED
    assert plan.error > 0.1  # exponents of 1e6 have no digits behind the point
    assert plan.n_passes < 300


@pytest.mark.parametrize("weight", [1 / 80, 1e-10])
def test_isolated_outliers(weight):
    x, y, a = cloud(80, 3, 0), cloud(80, 3, 1), torch.ones(80, dtype=torch.float64)
    x[0], x[1], y[5] = 50, -80, 100
    a[:2] *= 80 * weight
    a /= a.sum()
    plan = solve(x, y, 1.0, a=a, tol=1e-8)
    assert plan.converged
    assert plan.n_passes < 150
    assert Referee(x, y, 1.0, a=a, at=(plan.f, plan.g)).error < 1e-7


@pytest.mark.parametrize("share", [1.0, 0.1, 1e-2, 1e-3])
def test_down_to_a_thousandth_of_the_median_cost(share):
    x, y = cloud(80, 3, 0), cloud(70, 3, 1)
    eps = share * float(cost_matrix(x, y).median())
    plan = solve(x, y, eps, tol=1e-8)
    assert plan.converged
    assert plan.n_passes < 300
    assert Referee(x, y, eps, at=(plan.f, plan.g)).error < 1e-7


@pytest.mark.parametrize("tol", [1e-1, 1e-2, 1e-3, 1e-6])
@pytest.mark.parametrize(("n", "m"), [(1, 3), (2, 2), (3, 8), (60, 50)])
def test_never_many_more_passes_than_plain_sweeps(n, m, tol):
    for d in (1, 3):
        x, y = cloud(n, d, 0), cloud(m, d, 1)
        for share in (10.0, 1.0, 0.3, 0.1, 0.03):
            eps = share * float(cost_matrix(x, y).median())
            plan = solve(x, y, eps, tol=tol)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                sweeps = solve(x, y, eps, tol=tol, method="alternating", anneal=1.0, max_iter=200)
            assert plan.n_passes <= 1.1 * sweeps.n_passes


@pytest.mark.parametrize("eps", [0.5, 0.1])
def test_real_cells_take_few_passes(eps):
    x = cytometry_points(400, 0)
    y = x.flip(0) + 0.2 * cloud(400, 5, 1)  # the clouds match, which is where sweeps are slowest
    plan = solve(x, y, eps, tol=1e-8)
    assert plan.converged
    assert plan.n_passes < {0.5: 50, 0.1: 150}[eps]
    assert Referee(x, y, eps, at=(plan.f, plan.g)).error < 1.1e-8


@pytest.mark.parametrize("eps", [0.5, 0.1])
@limited
def test_the_float32_floor_is_noticed_soon(eps):
    x = cytometry_points(400, 0, dtype=torch.float32)
    y = x.flip(0) + 0.2 * cloud(400, 5, 1).float()
    floor = solve(x, y, eps, tol=0)
    assert floor.status is Status.STALLED
    assert Referee(x, y, eps, at=(floor.f, floor.g)).error < 2 * floor.error < 1e-3
    reached = solve(x, y, eps, tol=2 * floor.error)
    assert reached.converged
    assert floor.n_passes < reached.n_passes + 70
