from dataclasses import replace

import pytest
import torch
from referee import pts, relative, wts

from ot_newton.linear_model import conditional_moments, linear_model_hessian
from ot_newton.marginal_shift import Moments, shift
from ot_newton.sinkhorn import solve

EPS = 0.5


def plan_at(X, W, Y, scale):
    plan = solve(X @ W, Y, EPS, a=wts(len(X)), b=wts(len(Y), 2), scale=scale, tol=1e-12)
    return plan, plan.psi


def moved(plan, psi):
    """The plan with target potential psi that has the right row sums, its matrix, and no residual to correct."""
    phi = plan.pairs.row(psi)
    P = plan.pairs.apply(phi, psi, torch.eye(len(psi)).double())
    pairs = replace(plan.pairs, target=replace(plan.pairs.target, weights=P.sum(0)))  # its logarithms stay
    return replace(plan, phi=phi, psi=psi, b=P.sum(0), row_sums=P.sum(1), col_sums=P.sum(0), pairs=pairs), P


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize(("p", "q"), [(3, 2), (2, 3), (1, 1)])
def test_against_finite_differences(p, q, scale):
    X, W, Y = pts(20, p), pts(p, q, 1) / 2, pts(17, q, 2)
    plan, psi = plan_at(X, W, Y, scale)
    bump, h = torch.sin(torch.arange(17.0)).double(), 1e-5
    up, down = (linear_model_hessian(moved(plan, psi + s * h * bump)[0], X, rtol=1e-11).matrix for s in (1, -1))
    here, P = moved(plan, psi)
    H = linear_model_hessian(here, X, rtol=1e-11)
    mean, covariance = conditional_moments(here)
    at = Moments(here.phi, here.psi, here.row_sums, here.col_sums, mean, covariance, P.T @ X)
    rows = here.row_sums[:, None]
    beta_mean, bump_mean = P @ H.dpsi / rows, P @ bump / rows[:, 0]
    v = torch.linalg.eigh(H.matrix)[1][:, 0]
    passes = here.pairs.passes.total
    change, second = shift(here.pairs, X, at, H.dpsi, beta_mean, bump, bump_mean, v)
    assert here.pairs.passes.total - passes == 2
    assert relative(change, (up - down) / (2 * h)) < 1e-6

    tau = 2 * scale / EPS
    along = (H.dpsi @ v)[None, :] + tau * (X @ v.view(p, q)) @ here.pairs.target.points.T  # (n, m)
    rate = P * (along - (P * along).sum(1, keepdim=True) / rows) ** 2
    variance = (P * (bump - bump_mean[:, None]) ** 2).sum(1) / rows[:, 0]
    assert second == pytest.approx(float(torch.expm1(variance) @ rate.sum(1) / rate.sum()), rel=1e-9)
