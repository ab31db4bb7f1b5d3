"""Starts: from a high temperature, and from potentials that may be of no use."""

import pytest
import torch
from referee import Referee, pts, wts

from ot_newton.annealing import is_lost
from ot_newton.pairs import Pairs
from ot_newton.sinkhorn import solve

EPS = 0.1


def pairs_at(shift: float) -> Pairs:
    x = pts(30, 2)
    x[:, 0] += shift * torch.arange(30) / 30
    return Pairs.of(x, pts(20, 2, 1), wts(30), wts(20, 2), EPS)


def test_potentials_are_lost_where_the_points_have_left_them():
    here = pairs_at(0.0)
    plan = solve(pts(30, 2), pts(20, 2, 1), EPS, a=wts(30), b=wts(20, 2))
    for shift, lost in ((0.0, False), (1.0, False), (100.0, True)):
        there = pairs_at(shift)
        phi, psi = there.source.reduced(plan.f, EPS), there.target.reduced(plan.g, EPS)
        assert is_lost(there, phi, psi) is lost
        assert is_lost(there, phi + 1e9, psi) is lost  # a constant is no contradiction
    before = here.passes
    is_lost(here, plan.phi, plan.psi)
    assert here.passes == before


def test_points_without_mass_are_not_asked():
    a = torch.zeros(30).double()
    a[3] = 1.0
    pairs = Pairs.of(pts(30, 2), pts(20, 2, 1), a, wts(20), EPS)
    psi = pairs.target.reduced(torch.zeros(20).double(), EPS)
    phi = torch.full((30,), torch.nan).double()
    phi[3] = pairs.row(psi)[3]
    assert not is_lost(pairs, phi, psi)


@pytest.mark.parametrize("swap", [False, True])
def test_a_lost_start_costs_no_more_than_none(swap):
    x, y = pts(30, 2), pts(20, 2, 1)
    old = solve(x, y, EPS)
    x = x + torch.tensor([1e4, 0.0]) * torch.arange(30)[:, None] / 30
    args, init = ((y, x), (old.g, old.f)) if swap else ((x, y), (old.f, old.g))
    plan, cold = solve(*args, EPS, init=init), solve(*args, EPS)
    assert plan.converged
    assert plan.n_passes == cold.n_passes
    assert Referee(*args, EPS, at=(plan.f, plan.g)).error < 2e-6
    assert torch.equal(plan.f, cold.f)
