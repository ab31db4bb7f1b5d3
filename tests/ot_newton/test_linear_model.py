import pytest
import torch
from referee import Referee, pts, relative, unrolled, wts

from ot_newton.lanczos import eigsh
from ot_newton.linear_model import conditional_moments, linear_model_grad, linear_model_hessian
from ot_newton.operators import MatrixOperator
from ot_newton.sinkhorn import solve
from ot_newton.status import Status

EPS = 0.8
SHAPES = [(12, 9, 3, 3), (9, 12, 2, 4), (10, 8, 4, 1), (8, 10, 1, 3), (12, 9, 2, 2)]


class Case:
    """X W against y with non-uniform weights, and the referee pulled back by the Jacobian of W ↦ X W."""

    def __init__(self, n: int, m: int, p: int, q: int, *, scale: float = 1.0, dtype=torch.float64) -> None:
        self.X, self.W, self.y = (t.to(dtype) for t in (pts(n, p), pts(p, q, 1) / 2, pts(m, q, 2)))
        self.a, self.b = wts(n).to(dtype), wts(m, 2).to(dtype)
        tol = 1e-13 if dtype == torch.float64 else 2e-6
        x = self.X @ self.W
        self.plan = solve(x, self.y, EPS, a=self.a, b=self.b, scale=scale, tol=tol)
        self.dense = Referee(x, self.y, EPS, a=self.a, b=self.b, scale=scale)
        self.J = torch.kron(self.X.double(), torch.eye(q).double())  # (n·q, p·q)
        self.want = self.J.T @ self.dense.hessian_x @ self.J


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_against_the_referee(shape, scale):
    case = Case(*shape, scale=scale)
    known = linear_model_hessian(case.plan, case.X, rtol=1e-10)
    assert relative(linear_model_grad(case.plan, case.X), case.X.T @ case.dense.grad_x) < 1e-8
    assert relative(known.matrix, case.want) < 1e-9
    assert relative(known.matrix, known.matrix.T) < 1e-14
    assert known.status is Status.CONVERGED
    assert known.residual <= 1e-10
    assert known.n_passes > 0


def test_against_the_operator():
    case = Case(12, 9, 3, 2)
    H = case.plan.hessian()
    got = case.J.T @ (H @ case.J)
    assert relative(linear_model_hessian(case.plan, case.X, rtol=1e-10).matrix, got) < 1e-8


def test_against_double_backward_through_the_sweeps():
    case = Case(9, 8, 2, 2)

    def loss(W):
        return unrolled(case.X @ W, case.y, EPS, a=case.a, b=case.b)

    want = torch.autograd.functional.hessian(loss, case.W).reshape(4, 4)
    assert relative(linear_model_hessian(case.plan, case.X, rtol=1e-10).matrix, want) < 1e-8


def test_against_finite_differences():
    case, h = Case(9, 8, 2, 2), 1e-5
    columns = []
    for k in range(4):
        step = torch.zeros(4).double()
        step[k] = h
        up, down = (
            linear_model_grad(
                solve(case.X @ (case.W + sign * step.reshape(2, 2)), case.y, EPS, a=case.a, b=case.b, tol=1e-13), case.X
            )
            for sign in (1, -1)
        )
        columns.append((up - down).reshape(-1) / (2 * h))
    assert relative(linear_model_hessian(case.plan, case.X, rtol=1e-10).matrix, torch.stack(columns, 1)) < 1e-7


def test_the_response_is_that_of_the_potentials():
    case, h = Case(9, 8, 2, 2), 1e-6
    known = linear_model_hessian(case.plan, case.X, rtol=1e-11)
    step = torch.tensor([[1.0, -0.5], [0.3, 0.8]]).double()
    up, down = (
        solve(case.X @ (case.W + sign * h * step), case.y, EPS, a=case.a, b=case.b, tol=1e-13) for sign in (1, -1)
    )
    for got, change, weights in (
        (known.dphi @ step.reshape(-1), (up.f - down.f) / (2 * h * EPS), case.a),
        (known.dpsi @ step.reshape(-1), (up.g - down.g) / (2 * h * EPS), case.b),
    ):
        # The common centroid moves with the points, so only differences within one side can be compared.
        assert relative(got - weights @ got, change - weights @ change) < 1e-5


def test_conditional_moments():
    case = Case(9, 8, 2, 3)
    mean, covariance = conditional_moments(case.plan)
    P, y = case.dense.P / case.dense.r[:, None], case.plan.pairs.target.points
    want = P @ y
    assert relative(mean, want) < 1e-9
    assert relative(covariance, torch.einsum("ij,jk,jl->ikl", P, y, y) - want[:, :, None] * want[:, None]) < 1e-9


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("eps", [0.5, 2.0, 20.0])
def test_hessian_at_zero_in_closed_form(eps, scale):
    X, y, a, b = pts(20, 3), pts(15, 4, 1), wts(20), wts(15, 2)
    X, y = X - a @ X, y - b @ y
    plan = solve(X @ torch.zeros(3, 4).double(), y, eps, a=a, b=b, scale=scale, tol=1e-13)
    Sx, Sy = X.T @ (a[:, None] * X), y.T @ (b[:, None] * y)
    want = 2 * scale * torch.kron(Sx, torch.eye(4) - (2 * scale / eps) * Sy)
    H = linear_model_hessian(plan, X, rtol=1e-10).matrix
    assert relative(H, want) < 1e-9
    low, _ = eigsh(MatrixOperator(H), k=1, which="SA")
    assert relative(low[0], torch.linalg.eigvalsh(want)[0]) < 1e-9
    assert (float(low[0]) < 0) == (eps < 2 * scale * float(torch.linalg.eigvalsh(Sy)[-1]))


def test_an_unfinished_solve_lies_below_with_a_quadratic_error():
    X, W, y = pts(150, 3), pts(3, 3, 1) / 2, pts(140, 3, 2)
    plan = solve(X @ W, y, 0.1, tol=1e-10)
    exact = linear_model_hessian(plan, X, rtol=1e-11).matrix
    for rtol in (0.3, 1e-2, 1e-4):
        rough = linear_model_hessian(plan, X, rtol=rtol)
        assert rough.residual <= rtol
        gap = torch.linalg.eigvalsh(exact - rough.matrix)
        size = torch.linalg.eigvalsh(exact).abs().max()
        assert gap[0] > -1e-9 * size
        assert gap[-1] <= 10 * rough.error * size + 1e-9 * size


def test_zero_weights():
    case = Case(9, 8, 2, 2)
    a = torch.cat([torch.zeros(3).double(), wts(6)])
    x = case.X @ case.W
    whole = linear_model_hessian(solve(x, case.y, EPS, a=a, tol=1e-12), case.X, rtol=1e-10)
    part = linear_model_hessian(solve(x[3:], case.y, EPS, a=a[3:], tol=1e-12), case.X[3:], rtol=1e-10)
    assert relative(whole.matrix, part.matrix) < 1e-8
    assert whole.dphi.isfinite().all()


def test_single_precision():
    case = Case(30, 25, 3, 3, dtype=torch.float32)
    known = linear_model_hessian(case.plan, case.X, rtol=1e-4)
    assert known.matrix.dtype == known.dphi.dtype == torch.float32
    assert relative(known.matrix, case.want) < 2e-3
    assert relative(linear_model_grad(case.plan, case.X), case.X.double().T @ case.dense.grad_x) < 1e-3
