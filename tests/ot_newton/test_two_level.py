import pytest
import torch
from referee import Referee, pts, relative, wts

from ot_newton.pairs import Pairs
from ot_newton.potentials import Watch
from ot_newton.sinkhorn import solve
from ot_newton.status import Status
from ot_newton.two_level import capped, correction, orthonormal_under, ritz_steps, two_level


def problem(n=40, m=30, eps=0.5):
    x, y, a, b = pts(n, 2), pts(m, 2, 1), wts(n), wts(m, 2)
    return Pairs.of(x, y, a, b, eps), Referee(x, y, eps, a=a, b=b)


def test_correction_is_newton_on_the_modes():
    _, dense = problem()
    c, J = dense.c, (dense.P / dense.c).T @ (dense.P / dense.r[:, None])  # (m, m), Jacobian of a sweep
    V = orthonormal_under(pts(30, 4, 3), c)
    step = pts(30, 1, 5)[:, 0]
    M, H = V.T @ (c[:, None] * V), V.T @ (c[:, None] * (J @ V))
    want = J @ V @ torch.linalg.solve(M - H, V.T @ (c * step))
    assert relative(correction(V, J @ V, step, c), want) < 1e-9
    modes, share = ritz_steps(V, J @ V, step, c)
    assert relative(modes @ share, want) < 1e-9
    assert (V.T @ (c[:, None] * V) - torch.eye(4)).abs().max() < 1e-12
    assert (c @ V).abs().max() < 1e-12


def test_a_complete_block_leaves_nothing_to_do():
    _, dense = problem(12, 6)
    c, J = dense.c, (dense.P / dense.c).T @ (dense.P / dense.r[:, None])
    V, off = orthonormal_under(torch.eye(6)[:, :5].double(), c), 1e-4 * pts(6, 1, 5)[:, 0]
    off = off - c @ off
    residual = J @ off - off  # of a sweep at a psi that is off by so much
    assert relative(-off, residual + correction(V, J @ V, residual, c)) < 1e-9


def test_capped_holds_each_mode_by_itself():
    modes = torch.tensor([[1.0, 0.0], [-2.0, 3.0]]).double()
    assert capped(modes, torch.tensor([5.0, -0.5]).double(), 4.0).tolist() == [2.0, -0.5]


@pytest.mark.parametrize("distance", [60.0, 1e3])
def test_a_far_solution_is_reached_in_growing_steps(distance):
    x, y = pts(40, 2), pts(40, 2, 2)
    x[20:, 0] += distance
    y[15:, 0] += distance  # an eighth of the mass has to cross
    plan = solve(x, y, 1.0, tol=1e-9, method="two-level", anneal=1.0)
    assert plan.converged
    assert plan.n_passes < 300  # plain sweeps move by less than one eps each, and there are distance² to go
    assert Referee(x, y, 1.0, at=(plan.f, plan.g)).error < 1e-8


def test_without_modes_it_is_a_sweep():
    pairs, dense = problem()
    empty = torch.empty(30, 0, dtype=torch.float64)
    state, status = two_level(pairs, -pairs.target.norm, Watch(pairs, 1e-10, 1000), modes=empty)
    assert status is Status.CONVERGED
    g = pairs.target.whole(state.psi, pairs.eps)
    assert relative(g - g[0], dense.g - dense.g[0]) < 1e-7


def test_latest_or_best():
    x, y = pts(50, 2), pts(50, 2, 5) + 0.5
    ends = []
    for latest in (False, True):
        pairs = Pairs.of(x, y, wts(50), wts(50, 1), 0.02)
        seen = []

        class Seeing(Watch):
            def check(self, state, seen=seen):
                seen.append(float(state.error))
                return super().check(state)

        state, status = two_level(pairs, -pairs.target.norm, Seeing(pairs, 0.0, 30), latest=latest)
        assert status is Status.PASS_LIMIT
        ends.append((float(state.error), min(seen), seen[-1]))
    assert ends[0][0] == ends[0][1]
    assert ends[1][0] == ends[1][2]
    assert ends[1][1] < ends[1][2]
