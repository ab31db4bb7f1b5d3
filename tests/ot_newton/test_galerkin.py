from functools import cache

import pytest
import torch
from referee import Referee, pts, relative, wts

from ot_newton.certificate import Verdict, smallest_eigenvalue
from ot_newton.cost import SquaredEuclidean
from ot_newton.linear_model import linear_model_hessian
from ot_newton.one_shot import one_shot
from ot_newton.operators import MatrixOperator
from ot_newton.pairs import Pairs
from ot_newton.problems.cytometry import cytometry_points
from ot_newton.problems.shuffled_regression import ShuffledRegression
from ot_newton.problems.simulation import simulate
from ot_newton.sinkhorn import solve_checked

COST = SquaredEuclidean(1.0)


def lowest(matrix):
    return float(torch.linalg.eigvalsh(matrix.double())[0])


def uniform(n, dtype=torch.float64):
    return torch.full((n,), 1 / n, dtype=dtype)


def plan_of(X, Y, W, eps, tol, **options):
    a, b = options.pop("a", uniform(len(X), X.dtype)), options.pop("b", uniform(len(Y), Y.dtype))
    return solve_checked(X @ W, Y, a, b, eps, COST, tol, **options)


@cache
def cells():
    return cytometry_points(4000, 2)


def cloud(seed, rng):
    """Cells, cells under a hidden map, a mixture, or two clusters with points between them; and a point W."""

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    def between(low, high):
        return low + (high - low) * float(torch.rand((), generator=rng))

    n, m = int(between(30, 90)), int(between(30, 90))
    if seed % 4 == 0:
        order = torch.randperm(len(cells()), generator=rng)
        return cells()[order[:n], :3], cells()[order[n : n + m], :3], normal(3, 3) / 3**0.5
    if seed % 4 == 1:
        order, true = torch.randperm(len(cells()), generator=rng), normal(5, 3) / 5**0.5
        Y = cells()[order[n : n + m]] @ true + 0.2 * normal(m, 3)
        return cells()[order[:n]], Y, true + between(0, 0.3) * normal(5, 3)
    X, Y = normal(n, 3), 0.3 * normal(m, 2)
    if seed % 4 == 2:
        X[: n // 2] += between(1, 6) * normal(1, 3)
        Y[: m // 2] += between(1, 8) * normal(1, 2)
        return X, Y, normal(3, 2) / 3**0.5
    X, apart = 0.3 * X[:, :2], between(2, 8)
    for points in (X, Y):
        points[: len(points) // 2, 0] -= apart / 2
        points[len(points) // 2 :, 0] += apart / 2
    X[0] = 0
    return X, Y, torch.eye(2).double() + 0.05 * normal(2, 2)


def test_the_bracket_holds_at_any_budget():
    checked, seed, skipped = 0, -1, 0
    while checked < 200:
        seed += 1
        rng = torch.Generator().manual_seed(seed)
        X, Y, W = cloud(seed, rng)
        eps = 10 ** (-1.5 + 1.3 * float(torch.rand((), generator=rng)))
        true = plan_of(X, Y, W, eps, 1e-11, max_iter=400)
        if not true.converged:  # nothing to compare with
            skipped += 1
            continue
        truth = linear_model_hessian(true, X, rtol=1e-10).matrix
        for trial in range(4):
            draws = torch.rand(2, generator=rng).tolist()
            steps = int(4 * draws[0])
            if trial % 2:
                pairs, coarse = Pairs.of(X @ W, Y, uniform(len(X)), uniform(len(Y)), eps), 10 ** (-0.5 - 2 * draws[1])
                psi = torch.zeros(len(Y), dtype=torch.float64)
                known = one_shot(pairs, X, psi, coarse=coarse, max_iter=steps).known
            else:
                plan = plan_of(X, Y, W, eps, 10 ** (-1 - 5 * draws[1]), max_iter=100)
                known = linear_model_hessian(plan, X, rtol=1e-12, max_iter=steps).known
            evidence = smallest_eigenvalue(known.operator)
            rounding = 1e-9 * float(torch.linalg.matrix_norm(truth, 2))
            where = f"seed {seed}, trial {trial}, eps {eps}"
            assert evidence.lower - rounding <= lowest(truth) <= evidence.upper + rounding, where
            assert evidence.lower <= evidence.lambda_min <= evidence.upper, where
            if evidence.verdict is Verdict.NEGATIVE:
                assert lowest(truth) < 0, where
            checked += 1
    assert skipped <= 5


@pytest.mark.parametrize(("eps", "solution", "steps"), [(0.1, False, 6), (0.5, False, 3), (0.5, True, 5)])
def test_the_bracket_closes(eps, solution, steps):
    data = simulate(cells()[:1000], n=300, split="permuted", noise=0.2, seed=2)
    W = data.W_star if solution else torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).double() / 5**0.5
    plan = plan_of(data.X, data.Y, W, eps, 1e-9)
    H = linear_model_hessian(plan, data.X, rtol=1e-12, max_iter=steps - 1, modes=torch.empty(300, 0).double())
    evidence = smallest_eigenvalue(H.known.operator)
    assert evidence.upper - evidence.lower <= 1e-3 * evidence.scale
    assert H.n_passes <= 2 + 2 * steps  # two for the moments


def test_the_ceiling_is_certain_and_the_matrix_below():
    X, W, Y = pts(210, 3), pts(3, 2, 1) / 2, pts(200, 2, 2)
    plan = plan_of(X, Y, W, 0.1, 1e-12)
    truth = linear_model_hessian(plan, X, rtol=1e-11).matrix
    ceiling = 2 * torch.kron(X.T @ X / 210, torch.eye(2).double())
    assert lowest(ceiling - truth) > 0
    for steps in (0, 1, 2):
        known = linear_model_hessian(plan, X, rtol=1e-12, max_iter=steps, modes=torch.empty(200, 0).double()).known
        assert lowest(truth - known.matrix) > -1e-10
        assert lowest(truth - known.lower) > 0
        if steps == 0:
            assert relative(known.upper, ceiling) < 1e-12


def test_the_bracket_of_a_converged_matrix_is_narrow():
    X, W, Y = pts(30, 3), pts(3, 2, 1) / 2, pts(25, 2, 2)
    known = linear_model_hessian(plan_of(X, Y, W, 0.5, 1e-13), X, rtol=1e-11).known
    dense = Referee(X @ W, Y, 0.5)
    J = torch.kron(X, torch.eye(2).double())
    want = lowest(J.T @ dense.hessian_x @ J)
    assert lowest(known.upper) - lowest(known.lower) < 1e-9
    assert lowest(known.lower) <= want + 1e-12
    assert lowest(known.upper) >= want - 1e-12


def test_without_a_bracket_a_told_error_widens_the_bounds():
    evidence = smallest_eigenvalue(MatrixOperator(torch.diag(torch.tensor([0.01, 1.0]).double())), error=0.1)
    assert evidence.lower == pytest.approx(-0.09)
    assert evidence.upper == pytest.approx(0.11)
    assert evidence.verdict is Verdict.UNDECIDED


def test_single_precision_names_its_floor():
    X, W, Y = (t.float() for t in (pts(80, 3), pts(3, 3, 1) / 2, pts(70, 3, 2)))
    known = linear_model_hessian(plan_of(X, Y, W, 0.3, 2e-6), X, rtol=1e-6).known
    truth = linear_model_hessian(plan_of(X.double(), Y.double(), W.double(), 0.3, 1e-12), X.double(), rtol=1e-10).matrix
    assert lowest(known.lower) <= lowest(truth) <= lowest(known.upper)
    error = float(torch.linalg.matrix_norm(known.matrix.double() - truth, 2) / torch.linalg.matrix_norm(truth, 2))
    assert 1e-7 < known.error < 1e-2
    assert error <= known.error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["far clusters", "zero weights", "n = 1", "m = 1", "both 1", "duplicates", "n = 3"])
def test_degenerate_clouds(kind, dtype):
    X, Y, a, b = pts(12, 2), pts(10, 2, 1), None, None
    if kind == "far clusters":
        X[:6, 0] += 1e3
        Y[:5, 0] += 1e3
    elif kind == "zero weights":
        a = torch.cat([torch.zeros(4).double(), wts(8)])
        b = torch.cat([wts(7), torch.zeros(3).double()])
    elif kind == "n = 1":
        X = X[:1]
    elif kind == "m = 1":
        Y = Y[:1]
    elif kind == "both 1":
        X, Y = X[:1], Y[:1]
    elif kind == "duplicates":
        X, Y = X[[0, 0, 0, 1, 1, 2]], Y[[0, 0, 1, 1, 1]]
    else:
        X, Y = X[:3], pts(5000, 2, 1)
    X, Y = X.to(dtype), Y.to(dtype)
    W = torch.tensor([[1.0, 0.2], [-0.1, 0.9]], dtype=dtype)
    problem = ShuffledRegression(X, Y, 0.5, a=None if a is None else a.to(dtype), b=None if b is None else b.to(dtype))
    wide = ShuffledRegression(X.double(), Y.double(), 0.5, a=a, b=b)
    w = W.reshape(-1)
    truth = wide.hessian(w.double()).to_dense()
    size = float(torch.linalg.matrix_norm(truth, 2))
    for rtol in (None, 0.05):
        _, grad = problem.value_and_grad(w, rtol)
        H = problem.hessian(w, rtol)
        assert bool(torch.isfinite(grad).all())
        evidence = smallest_eigenvalue(H)
        slack = (1e-9 if dtype == torch.float64 else 1e-4) * size
        assert evidence.lower - slack <= lowest(truth) <= evidence.upper + slack
        if problem.plan is not None and not problem.plan.converged:
            assert kind == "far clusters"
            assert dtype == torch.float32  # which cannot tell their exponents apart
            continue
        error = float(torch.linalg.matrix_norm(H.to_dense().double() - truth, 2))
        assert error <= (3 * problem.hessian_error + (1e-7 if dtype == torch.float64 else 1e-3)) * size
