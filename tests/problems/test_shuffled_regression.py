import math

import pandas as pd
import pytest
import torch
from referee import Referee, pts, relative, wts
from scipy.linalg import sqrtm
from scipy.sparse.linalg import eigsh as scipy_eigsh

from ot_newton.adam import Adam
from ot_newton.lanczos import eigsh
from ot_newton.minimize import minimize
from ot_newton.operators import MatrixOperator
from ot_newton.problems.cytometry import cytometry_points
from ot_newton.problems.shuffled_regression import ShuffledRegression, eps_from_noise, gaussian_monge_map
from ot_newton.problems.simulation import simulate

EPS = 0.8


def make(*, intercept: bool = False, dtype=torch.float64, n=14, m=11, p=3, q=2, **options) -> ShuffledRegression:
    X, Y, a, b = (t.to(dtype) for t in (pts(n, p), pts(m, q, 1), wts(n), wts(m, 2)))
    return ShuffledRegression(X, Y, EPS, intercept=intercept, a=a, b=b, **options)


def referee(problem: ShuffledRegression, w: torch.Tensor) -> tuple[Referee, torch.Tensor]:
    """The referee at X W + b, and the Jacobian of the parameters (n·q, size)."""
    x, weights = problem.design @ w.reshape(problem.shape), {"a": problem.a, "b": problem.b}
    dense = Referee(x, problem.Y, problem.eps, scale=problem.cost.scale, **weights)
    return dense, torch.kron(problem.design.double(), torch.eye(problem.Y.shape[1]).double())


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_value_gradient_and_hessian(intercept, scale):
    problem = make(intercept=intercept, scale=scale)
    w = torch.sin(torch.arange(problem.size).double())
    dense, J = referee(problem, w)
    value, grad = problem.value_and_grad(w)
    assert value.shape == ()
    assert grad.shape == (problem.size,)
    assert relative(value, dense.value) < 1e-10
    assert relative(problem.value(w), dense.value) < 1e-10
    assert relative(grad, J.T @ dense.grad_x.reshape(-1)) < 1e-8
    H = problem.hessian(w)
    assert H.shape == (problem.size, problem.size)
    assert relative(H.to_dense(), J.T @ dense.hessian_x @ J) < 1e-7
    assert problem.hessian_error < 1e-7


@pytest.mark.parametrize("intercept", [False, True])
def test_finite_differences(intercept):
    problem, h = make(intercept=intercept), 1e-5
    w = torch.sin(torch.arange(problem.size).double())
    _, grad = problem.value_and_grad(w)
    H = problem.hessian(w).to_dense()
    for k in range(problem.size):
        step = torch.zeros_like(w)
        step[k] = h
        (up, up_grad), (down, down_grad) = problem.value_and_grad(w + step), problem.value_and_grad(w - step)
        assert abs(grad[k] - (up - down) / (2 * h)) < 1e-7 * grad.abs().max()
        assert relative(H[k], (up_grad - down_grad) / (2 * h)) < 1e-4


@pytest.mark.parametrize("rtol", [0.5, 0.1, 0.02, 1e-3, 1e-5])
def test_a_coarse_request_gets_what_it_asked_for(rtol):
    for step in (0.0, 0.3):
        problem = make(n=60, m=50)
        w = torch.sin(torch.arange(problem.size).double())
        if step:
            problem.value_and_grad(w + step)  # a neighbour to start warm from
        dense, J = referee(problem, w)
        value, grad = problem.value_and_grad(w, rtol)
        want = J.T @ dense.grad_x.reshape(-1)
        assert (grad - want).norm() <= rtol * want.norm()
        assert abs(value - dense.value) <= problem.value_error + 1e-9
        H, exact = problem.hessian(w, rtol).to_dense(), J.T @ dense.hessian_x @ J
        assert torch.linalg.matrix_norm(H - exact, 2) <= max(rtol, 1e-8) * torch.linalg.matrix_norm(exact, 2)


def test_a_coarse_request_is_cheaper():
    X, Y = pts(200, 3), pts(200, 3, 1)
    w = torch.eye(3).double().reshape(-1)
    passes = []
    for rtol in (0.1, 1e-4, None):
        problem = ShuffledRegression(X, Y, 0.2)
        problem.value_and_grad(w, rtol)
        problem.hessian(w, rtol)
        passes.append(problem.n_passes)
    assert passes[0] < passes[1] < passes[2]


@pytest.mark.parametrize("eps", [0.1, 0.25, 0.5])
def test_adam_knows_the_bracket_at_every_step_for_few_passes(eps):
    data = simulate(cytometry_points(800, seed=0), n=200, split="permuted", noise=0.2, seed=0)
    problem = ShuffledRegression(data.X, data.Y, eps)
    converged, errors, points = ShuffledRegression(data.X, data.Y, eps), [], []

    def look(intermediate_result):
        points.append(intermediate_result.x.clone())
        if intermediate_result.nit % 5 == 0:
            want = converged.value_and_grad(points[-1])[1]
            errors.append(float((intermediate_result.jac - want).norm() / want.norm()))

    start = problem.start(torch.Generator().manual_seed(0))
    result = minimize(problem, start, method=Adam(lr=0.02), callback=look, options={"maxiter": 30})
    history = result.history
    assert history.n_passes.diff()[1:].median() <= 10
    assert max(errors) <= 0.02
    assert history[["lambda_min", "lambda_lower", "lambda_upper"]].notna().all(axis=None)
    for point, row in zip(points[4::5], history.iloc[5::5].itertuples(), strict=True):
        exact = float(torch.linalg.eigvalsh(converged.hessian(point, 1e-6).to_dense())[0])
        assert row.lambda_lower <= exact <= row.lambda_upper
        assert row.lambda_lower <= row.lambda_min <= row.lambda_upper


def test_the_matrix_at_hand():
    problem = make(n=60, m=50)
    w = torch.sin(torch.arange(6).double())
    assert problem.hessian_at_hand(w) is None
    problem.value_and_grad(w, 0.05)
    before = problem.n_passes
    rough = problem.hessian_at_hand(w)
    assert rough is not None
    assert problem.n_passes == before
    tight = problem.hessian(w, 1e-6)
    again = problem.hessian_at_hand(w)
    assert again is not None
    assert torch.equal(again.matrix, tight.to_dense())
    assert problem.hessian_error <= 1e-6
    assert problem.hessian_at_hand(w + 1) is None


def test_many_parameters_give_an_operator():
    X, Y = pts(40, 19), pts(35, 14, 1)
    problem = ShuffledRegression(X / 4, Y / 4, 1.0)
    w = 0.1 * torch.sin(torch.arange(problem.size).double())
    assert problem.size == 266
    H = problem.hessian(w, 1e-6)
    assert not isinstance(H, MatrixOperator)
    assert H.symmetric
    V = torch.randn(266, 3, generator=torch.Generator().manual_seed(0)).double()
    before, J = problem.n_passes, torch.kron(X / 4, torch.eye(14).double())
    got = H.matmat(V)
    assert problem.n_passes > before
    plan = problem.plan
    assert plan is not None
    assert relative(got, J.T @ (plan.hessian(rtol=1e-11) @ (J @ V))) < 1e-6
    h = 1e-4
    up, down = (problem.value_and_grad(w + s * h * V[:, 0])[1] for s in (1, -1))
    assert relative(got[:, 0], (up - down) / (2 * h)) < 1e-4


def test_one_point_one_solve():
    problem = make()
    w = torch.sin(torch.arange(6).double())
    problem.value_and_grad(w)
    before = problem.n_passes
    problem.value_and_grad(w)
    problem.value(w)
    assert problem.n_passes == before
    problem.hessian(w)
    with_hessian = problem.n_passes
    assert with_hessian > before
    problem.hessian(w)
    assert problem.n_passes == with_hessian
    near, cold = w + 1e-3, make()
    problem.value_and_grad(near)
    cold.value_and_grad(near)
    assert problem.n_passes - with_hessian < cold.n_passes
    assert problem.plan is not None
    assert problem.plan.converged


def test_the_answer_does_not_depend_on_the_way():
    points = [torch.sin(torch.arange(6.0) + k).double() for k in (0, 3, 0.01, 8)]
    walker = make()
    for w in points:
        walker.value_and_grad(w, 0.1)
        walker.hessian(w, 0.1)
        walker.value_and_grad(w)
    for w in reversed(points):
        fresh = make()
        assert relative(walker.value_and_grad(w)[1], fresh.value_and_grad(w)[1]) < 1e-8
        assert relative(walker.hessian(w).to_dense(), fresh.hessian(w).to_dense()) < 1e-7


def test_parameters_are_not_kept_by_reference():
    problem = make()
    w = torch.sin(torch.arange(6).double())
    problem.value_and_grad(w)
    problem.hessian(w)
    w += 1
    assert relative(problem.value_and_grad(w)[1], make().value_and_grad(w)[1]) < 1e-8
    assert relative(problem.hessian(w).to_dense(), make().hessian(w).to_dense()) < 1e-7


def test_hessian_at_zero_on_real_data():
    X = cytometry_points(150, seed=0)
    data = simulate(cytometry_points(300, seed=1), n=150, seed=2)
    X, Y = data.X - data.X.mean(0), data.Y - data.Y.mean(0)
    eps = 0.25
    problem = ShuffledRegression(X, Y, eps)
    H = problem.hessian(torch.zeros(25).double())
    Sx, Sy = X.T @ X / 150, Y.T @ Y / 150
    want = 2 * torch.kron(Sx, torch.eye(5) - (2 / eps) * Sy)
    assert relative(H.to_dense(), want) < 1e-9
    exact = torch.linalg.eigvalsh(want)
    low, _ = eigsh(H, k=1, which="SA")
    assert float(exact[0]) < 0
    assert relative(low[0], exact[0]) < 1e-9
    other = scipy_eigsh(H.to_scipy(), k=1, which="SA", return_eigenvectors=False)
    assert relative(torch.as_tensor(other[0]), exact[0]) < 1e-9


def test_starts_on_real_data():
    data = simulate(cytometry_points(400, seed=0), n=200, split="permuted", noise=0.05, seed=0)
    problem = ShuffledRegression(data.X, data.Y, 0.25)
    rng = torch.Generator().manual_seed(0)
    monge = problem.start(rng, "monge")
    low, _ = eigsh(problem.hessian(monge), k=1, which="SA")
    assert float(low[0]) > 0
    assert problem.metrics(monge, data)["rel_W"] < 0.3
    for _ in range(3):
        low, _ = eigsh(problem.hessian(problem.start(rng)), k=1, which="SA")
        assert float(low[0]) < 0


def test_start_laws():
    problem = make(p=3, q=3, intercept=True)
    first, again = (problem.start(torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, problem.start(torch.Generator().manual_seed(5)))
    W, b = problem.split(problem.start(torch.Generator(), "identity"))
    assert torch.equal(W, torch.eye(3).double())
    W, b = problem.split(problem.start(torch.Generator(), "monge"))
    x, y = problem.X @ W + b, problem.Y
    mean_x, mean_y = problem.a @ x, problem.b @ y
    assert (mean_x - mean_y).abs().max() < 1e-12
    cov_x = (x - mean_x).T @ (problem.a[:, None] * (x - mean_x))
    cov_y = (y - mean_y).T @ (problem.b[:, None] * (y - mean_y))
    assert relative(cov_x, cov_y) < 1e-10
    many = torch.stack([make(p=3, q=2).start(torch.Generator().manual_seed(k)) for k in range(300)])
    assert abs(float(many.std()) - 3**-0.5) < 0.03
    with pytest.raises(ValueError, match="law: expected one of random, monge, identity, got 'zero'"):
        problem.start(torch.Generator(), "zero")
    with pytest.raises(ValueError, match="law 'monge': expected as many columns in X as in Y, got 3 and 2"):
        make(p=3, q=2).start(torch.Generator(), "monge")


def test_the_monge_map_against_scipy():
    X, Y, a, b = pts(30, 3), pts(25, 3, 1), wts(30), wts(25)
    cov = [((P - w @ P).T * w) @ (P - w @ P) for P, w in ((X, a), (Y, b))]
    root = sqrtm(cov[0].numpy())
    inner = sqrtm(root @ cov[1].numpy() @ root)
    want = torch.linalg.inv(torch.as_tensor(root)) @ torch.as_tensor(inner) @ torch.linalg.inv(torch.as_tensor(root))
    assert relative(gaussian_monge_map(X, Y, a, b), want) < 1e-10


def test_split_and_join():
    problem = make(intercept=True)
    w = torch.arange(problem.size).double()
    W, b = problem.split(w)
    assert W.shape == (3, 2)
    assert torch.equal(problem.join(W, b), w)
    means = problem.split(problem.join(W))[1]
    assert relative(problem.a @ problem.X @ W + means, problem.b @ problem.Y) < 1e-12
    W, b = make().split(torch.arange(6).double())
    assert (b == 0).all()


def test_metrics():
    data = simulate(pts(200, 3), n=80, noise=0.0, intercept=1.0, seed=0)
    problem = ShuffledRegression(data.X, data.Y, 0.1, intercept=True)
    best = problem.join(data.W_star, data.intercept_star)
    metrics = problem.metrics(best, data, reference=float(problem.value(best)))
    assert metrics["rel_W"] == 0
    assert metrics["r2_held_out"] == pytest.approx(1)
    assert metrics["loss_above_reference"] == pytest.approx(0, abs=1e-9)
    mean = problem.join(0 * data.W_star, data.Y_test.mean(0))
    assert problem.metrics(mean, data) == {"rel_W": 1.0, "r2_held_out": pytest.approx(0, abs=1e-12)}


def test_eps_from_noise():
    assert eps_from_noise(0.2) == pytest.approx(0.08)
    assert eps_from_noise(0.2, scale=0.5) == pytest.approx(0.04)
    with pytest.raises(ValueError, match="sigma: expected a finite number above 0"):
        eps_from_noise(0.0)


def test_single_precision():
    problem = make(dtype=torch.float32, n=40, m=30)
    w = torch.sin(torch.arange(6)).float()
    dense, J = referee(problem, w)
    value, grad = problem.value_and_grad(w)
    H = problem.hessian(w)
    assert value.dtype == grad.dtype == H.dtype == torch.float32
    assert relative(value, dense.value) < 1e-4
    assert relative(grad, J.T @ dense.grad_x.reshape(-1)) < 1e-3
    assert relative(H.to_dense(), J.T @ dense.hessian_x @ J) < 2e-3
    assert problem.start(torch.Generator()).dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"X": pts(5, 3)[:, 0]}, ValueError, r"X: expected shape \(n, d\)"),
        ({"Y": pts(5, 3).int()}, TypeError, "Y: expected floating-point numbers, got torch.int32"),
        ({"Y": pts(5, 2).float()}, ValueError, "X and Y: expected one dtype and device, got torch.float64"),
        ({"eps": 0.0}, ValueError, "eps: expected a finite number above 0"),
        ({"scale": -1.0}, ValueError, "scale: expected a finite number above 0"),
        ({"a": wts(4)}, ValueError, r"a: expected shape \(6,\)"),
        ({"b": wts(5) * math.nan}, ValueError, "b: expected finite weights"),
        ({"backend": "keops"}, ValueError, "backend: expected one of auto, blocked, dense, triton, got 'keops'"),
    ],
)
def test_bad_problems(change, error, message):
    with pytest.raises(error, match=message):
        ShuffledRegression(**({"X": pts(6, 3), "Y": pts(5, 2), "eps": 0.5} | change))


@pytest.mark.parametrize("w", [torch.zeros(5).double(), torch.zeros(2, 3).double(), torch.zeros(6), [0.0] * 6])
def test_bad_parameters(w):
    with pytest.raises((ValueError, TypeError), match="expected"):
        make().value_and_grad(w)


@pytest.mark.parametrize("method", ["adam", "newton-cg", "trust-krylov", "adam-newton"])
def test_a_continued_run_is_the_uninterrupted_one(method, tmp_path):
    def run(maxiter, **options):
        problem = make(n=60, m=50)
        start = problem.start(torch.Generator().manual_seed(1))
        return minimize(problem, start, method=method, options={"maxiter": maxiter}, **options)

    whole = run(9)
    run(4, checkpoint=tmp_path / "run")
    continued = run(9, checkpoint=tmp_path / "run")
    assert torch.equal(continued.x, whole.x)
    assert torch.equal(continued.jac, whole.jac)
    assert continued.n_passes == whole.n_passes
    columns = ["fun", "grad_norm", "lambda_min", "n_passes"]
    pd.testing.assert_frame_equal(continued.history[columns], whole.history[columns], check_exact=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_that_overflow_have_no_value(dtype):
    problem = ShuffledRegression(pts(8, 2).to(dtype), pts(6, 2, 1).to(dtype), 0.5)
    w = torch.full((4,), torch.finfo(dtype).max, dtype=dtype)
    for rtol in (None, 0.05):
        value, grad = problem.value_and_grad(w, rtol)
        assert bool(value.isnan())
        assert bool(grad.isnan().all())
    assert bool(problem.value(w).isnan())
    assert bool(problem.value(torch.zeros(4, dtype=dtype)).isfinite())


def test_all_targets_in_one_point():
    """The width of the targets, by which accuracies are measured, is zero where X W is there too."""
    problem = ShuffledRegression(pts(8, 1), torch.tensor([[0.0]]).double(), 16.0)
    result = minimize(problem, torch.tensor([1.0]).double(), method="newton-cg")
    assert result.success
    assert abs(float(result.x)) < 1e-8
