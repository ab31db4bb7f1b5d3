import math

import pytest
import torch
from referee import Referee, pts, relative, wts

from ot_newton import dual_newton as module
from ot_newton.dual_newton import dual_newton
from ot_newton.pairs import Pairs
from ot_newton.potentials import Potentials, Watch
from ot_newton.problems.cytometry import cytometry_points
from ot_newton.sinkhorn import solve
from ot_newton.status import Status
from ot_newton.two_level import CLIP


def start(pairs: Pairs, psi: torch.Tensor) -> Potentials:
    phi = pairs.row(psi)
    return Potentials.after_sweep(pairs, phi, psi, pairs.col(phi))


def whole(pairs: Pairs, state: Potentials) -> tuple[torch.Tensor, torch.Tensor]:
    """f and g."""
    return pairs.source.whole(state.phi, pairs.eps), pairs.target.whole(state.psi, pairs.eps)


def gap(pairs: Pairs, state: Potentials, dense: Referee) -> float:
    """The relative error of g, up to a constant."""
    _, g = whole(pairs, state)
    return relative(g - g[0], dense.g - dense.g[0])


def near(n=40, m=30, eps=0.2, off=1e-3):
    x, y, a, b = pts(n, 2), pts(m, 2, 1), wts(n), wts(m, 2)
    dense, pairs = Referee(x, y, eps, a=a, b=b), Pairs.of(x, y, a, b, eps)
    exact = solve(x, y, eps, a=a, b=b, tol=1e-13).psi
    return dense, pairs, start(pairs, exact + off * pts(m, 1, 5)[:, 0])


def test_newton_converges_quadratically():
    dense, pairs, state = near()
    errors = [float(state.error)]

    class Seeing(Watch):
        def check(self, state):
            errors.append(float(state.error))
            return super().check(state)

    end, status = dual_newton(pairs, state, Seeing(pairs, 1e-12, 1000))
    assert status is Status.CONVERGED
    assert len(errors) <= 5  # the start twice, and at most three steps
    assert gap(pairs, end, dense) < 1e-7


def test_direction_solves_the_newton_system():
    dense, pairs, state = near(off=0.1)
    d, _, modes = module._direction(pairs, state, 1e-12, 1000)
    P = Referee(dense.x, dense.y, dense.eps, a=dense.a, b=dense.b, at=whole(pairs, state)).P
    S = torch.diag(P.sum(0)) - P.T @ (P / P.sum(1)[:, None])
    want = torch.linalg.pinv(S, hermitian=True, rtol=1e-12) @ (dense.b - P.sum(0))
    assert relative(d - d.mean(), want - want.mean()) < 1e-7
    slowest = torch.linalg.vector_norm(S @ modes[:, 0]) / torch.linalg.vector_norm(modes[:, 0])
    assert float(slowest) < 0.1 * float(torch.linalg.matrix_norm(S, 2))


def test_a_mode_that_is_almost_cut_off_leaves_the_others_alone():
    x, y = pts(40, 2), pts(40, 2, 2)
    x[20:, 0] += 7.5
    y[20:, 0] += 7.5
    far = (torch.arange(40) >= 20).double()
    a = torch.full((40,), 1 / 40).double()
    b = a * (1 + 0.01 * (2 * far - 1))  # a hundredth of the mass has to cross
    pairs = Pairs.of(x, y, a, b, 0.5)
    state = start(pairs, solve(x, y, 0.5, tol=1e-12).psi + 0.1 * pts(40, 1, 5)[:, 0])
    d, _, modes = module._direction(pairs, state, 1e-12, 1000)
    P = Referee(x, y, 0.5, a=a, b=b, at=whole(pairs, state)).P
    want = torch.linalg.pinv(torch.diag(P.sum(0)) - P.T @ (P / P.sum(1)[:, None]), hermitian=True) @ (b - P.sum(0))
    assert want.max() - want.min() > 1e3
    assert d.max() - d.min() < 3 * CLIP
    beyond, mode = want - d - (want - d).mean(), modes[:, 0] - modes[:, 0].mean()
    assert relative(mode * ((mode @ beyond) / (mode @ mode)), beyond) < 1e-6


@pytest.mark.parametrize(("kind", "seed"), [("cells", 0), ("cells", 1), ("cloud", 2)])
def test_many_slow_modes_are_solved_for(kind, seed):
    """Points and noisy copies at a small eps: each hangs together with few others, and the block solve plateaus."""
    draw = torch.randn(2, 400, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = cytometry_points(400, seed) if kind == "cells" else draw[0]
    y = x + 0.2 * draw[1]
    plan = solve(x, y, 0.03, tol=1e-6, max_iter=150)
    assert plan.converged
    assert Referee(x, y, 0.03, at=(plan.f, plan.g)).error < 1.1e-6


def test_stretch_balances_two_clusters():
    """Two points on each side exchange p and q; the mode moves the second: p e^-t = q e^t."""
    p, q = 1e-3, 1e-6
    mode, share = torch.tensor([[0.0], [1.0]]).double(), torch.tensor([(p - q) / (p + q)]).double()
    assert float(share + module._stretch(mode, share)) == pytest.approx(0.5 * math.log(p / q), rel=1e-6)
    beyond = torch.tensor([1.5]).double()
    assert float(module._stretch(mode, beyond)) == 0


def test_over_coupled_clusters_take_few_steps():
    x, y = pts(40, 2), pts(40, 2, 2)
    x[20:, 0] += 8
    y[20:, 0] += 8
    exact = solve(x, y, 1.0, tol=1e-13)
    pairs = Pairs.of(x, y, exact.a, exact.b, 1.0)
    # A shift of one cluster by 8 eps: a Newton step moves it by one.
    tilted = exact.psi + 8 * (torch.arange(40) >= 20)
    state = start(pairs, tilted)
    _, status = dual_newton(pairs, state, Watch(pairs, 1e-11, 2000))
    assert status is Status.CONVERGED
    assert pairs.passes.total < 60


@pytest.mark.parametrize("psi", [torch.zeros(30), 100 * pts(30, 1, 5)[:, 0]])
def test_far_from_the_solution(psi):
    dense, pairs, _ = near()
    end, status = dual_newton(pairs, start(pairs, psi.double()), Watch(pairs, 1e-10, 4000))
    assert status is Status.CONVERGED
    assert gap(pairs, end, dense) < 1e-6


@pytest.mark.parametrize("limit", [2, 7, 12, 20])
def test_the_budget_is_kept(limit):
    _, pairs, state = near(off=1.0)
    limit += pairs.passes.total
    _, status = dual_newton(pairs, state, Watch(pairs, 0.0, limit))
    assert status is Status.PASS_LIMIT
    assert pairs.passes.total <= limit
