import numpy as np
import pytest
import torch
from referee import plan_matrix, potentials, pts, relative, wts

from ot_newton.sinkhorn import solve

EPS = 0.5
X, Y, A, B = pts(12, 3), pts(9, 3, 1), wts(12), wts(9, 2)
RNG = np.random.default_rng(0)
CLASSES = RNG.integers(0, 4, 12), RNG.integers(0, 2, 9), 2 * RNG.random((4, 2))
COST = torch.cdist(X, Y) ** 2 + torch.from_numpy(CLASSES[2])[CLASSES[0]][:, CLASSES[1]]


@pytest.mark.parametrize("swap", [False, True])
def test_plan_value_and_gradient(swap):
    x, y, a, b, C = (Y, X, B, A, COST.T) if swap else (X, Y, A, B, COST)
    labels = (CLASSES[1], CLASSES[0], CLASSES[2].T) if swap else CLASSES
    plan = solve(x, y, EPS, a=a, b=b, labels=labels, tol=1e-11)
    f, g = potentials(C, a, b, EPS)
    P = plan_matrix(C, a, b, f, g, EPS)
    assert plan.converged
    assert relative(plan.to_dense(), P) < 1e-9
    assert relative(plan.value(), a @ f + b @ g) < 1e-10
    assert relative(plan.grad(), 2 * (P.sum(1, keepdim=True) * x - P @ y)) < 1e-9


def test_hessian_is_the_derivative_of_the_gradient():
    V, h = pts(12, 3, 4), 1e-5
    solved = [solve(X + t * V, Y, EPS, a=A, b=B, labels=CLASSES, tol=1e-12).grad() for t in (-h, h)]
    H = solve(X, Y, EPS, a=A, b=B, labels=CLASSES, tol=1e-12).hessian()
    assert relative((H @ V.reshape(-1)).reshape(V.shape), (solved[1] - solved[0]) / (2 * h)) < 1e-6


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        ((CLASSES[0], CLASSES[1]), TypeError, "labels: expected (l_x, l_y, W), got tuple"),
        ((CLASSES[0] * 1.0, *CLASSES[1:]), TypeError, "labels: expected l_x as integers, got torch.float64"),
        ((CLASSES[0][:5], *CLASSES[1:]), ValueError, "labels: expected l_x of shape (12,), got (5,)"),
        ((CLASSES[0] + 1, *CLASSES[1:]), ValueError, "labels: expected l_x from 0 to 3"),
        ((*CLASSES[:2], CLASSES[2] * np.nan), ValueError, "labels: expected W as a finite matrix"),
    ],
)
def test_what_is_refused(labels, error, message):
    with pytest.raises(error) as caught:
        solve(X, Y, EPS, labels=labels)
    assert message in str(caught.value)


def test_a_precision_that_needs_a_gpu():
    with pytest.raises(ValueError, match="precision 'tf32': expected 'fp32' with backend 'blocked'"):
        solve(X, Y, EPS, precision="tf32")
    with pytest.raises(ValueError, match="precision: expected one of fp32, tf32, bf16, got 'half'"):
        solve(X, Y, EPS, precision="half")
