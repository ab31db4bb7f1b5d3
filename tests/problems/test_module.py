import pytest
import torch
from modules import EPS, Dense, image, make, mlp
from referee import pts, relative, unrolled, wts
from scipy.sparse.linalg import eigsh as scipy_eigsh
from torch import nn

from ot_newton.lanczos import eigsh
from ot_newton.minimize import minimize
from ot_newton.operator_checks import check_operator
from ot_newton.operators import MatrixOperator
from ot_newton.problems.module import ModuleProblem
from ot_newton.problems.shuffled_regression import ShuffledRegression
from ot_newton.pullback import PulledBackHessian


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize(("cost", "scale"), [("sqeuclidean", 1.0), ("sqeuclidean", 0.5), ("cosine", 1.5)])
def test_value_gradient_and_hessian_of_a_network(cost, scale, vectorize):
    problem = make(cost=cost, scale=scale, vectorize=vectorize)
    w = problem.start(torch.Generator())
    dense = Dense(problem, w, cost=cost, scale=scale)
    value, grad = problem.value_and_grad(w)
    assert value.shape == ()
    assert relative(value, dense.value) < 1e-10
    assert relative(problem.value(w), dense.value) < 1e-10
    assert relative(grad, dense.grad) < 1e-8
    H = problem.hessian(w)
    assert isinstance(H, MatrixOperator)
    assert torch.equal(H.matrix, H.matrix.T)
    assert relative(H.to_dense(), dense.hessian) < 1e-8
    assert dense.curvature.norm() > 0.05 * dense.hessian.norm()  # a missing term would show
    error = torch.linalg.matrix_norm(H.matrix - dense.hessian, 2) / torch.linalg.matrix_norm(dense.hessian, 2)
    assert error <= problem.hessian_error + 1e-13
    assert problem.hessian_error < 1e-7


@pytest.mark.parametrize("cost", ["sqeuclidean", "cosine"])
def test_against_double_backward_through_the_sinkhorn_iterations(cost):
    problem = make(n=6, m=5, cost=cost)
    w = problem.start(torch.Generator())

    def loss(w):
        return unrolled(image(problem, w), problem.Y, EPS, a=problem.a, b=problem.b, cost=cost, sweeps=150)

    value, grad = problem.value_and_grad(w)
    assert relative(value, loss(w)) < 1e-10
    assert relative(grad, torch.autograd.functional.jacobian(loss, w)) < 1e-8
    assert relative(problem.hessian(w).to_dense(), torch.autograd.functional.hessian(loss, w)) < 1e-8


@pytest.mark.parametrize("vectorize", [True, False])
def test_an_operator_above_256_parameters(vectorize):
    problem = make(mlp(3, 16, 12, 2), vectorize=vectorize)
    assert problem.size == 294
    w = problem.start(torch.Generator())
    dense, H = Dense(problem, w), problem.hessian(w)
    assert isinstance(H, PulledBackHessian)
    V = torch.sin(torch.arange(294.0 * 3).double()).reshape(294, 3)
    scale = torch.linalg.matrix_norm(dense.hessian, 2)
    assert torch.linalg.vector_norm(H @ V - dense.hessian @ V, dim=0).max() < 1e-8 * scale * 20
    assert relative(H @ V[:, 0], dense.hessian @ V[:, 0]) < 1e-8
    assert H.n_matvec == 4
    assert problem.hessian_error < 1e-7
    assert H.matmat(V[:, :0]).shape == (294, 0)
    check_operator(H, grad_fn=lambda w: make(mlp(3, 16, 12, 2)).value_and_grad(w)[1], x=w, rtol=1e-7)
    low, _ = eigsh(H, k=2, which="SA")
    assert relative(low, torch.linalg.eigvalsh(dense.hessian)[:2]) < 1e-7
    other = scipy_eigsh(H.to_scipy(), k=1, which="LA", return_eigenvectors=False)
    assert relative(torch.as_tensor(other[0]), torch.linalg.eigvalsh(dense.hessian)[-1]) < 1e-8


def test_many_columns_share_the_passes():
    problem = make(mlp(3, 16, 12, 2), n=60, m=50)
    w = problem.start(torch.Generator())
    problem.value_and_grad(w)
    V = torch.sin(torch.arange(294.0 * 16).double()).reshape(294, 16)
    spent = []
    for columns in ([V], list(V[:, :, None].unbind(1))):
        H, before = problem.hessian(w), problem.n_passes
        for v in columns:
            H.matmat(v.reshape(294, -1))
        spent.append(problem.n_passes - before)
    assert spent[0] > 0
    assert spent[0] * 4 < spent[1]


@pytest.mark.parametrize(("n", "m"), [(14, 11), (9, 30)])
@pytest.mark.parametrize("intercept", [False, True])
def test_a_linear_model_is_shuffled_regression(n, m, intercept):
    X, Y, a, b = pts(n, 3), pts(m, 2, 1), wts(n), wts(m, 2)
    other = ShuffledRegression(X, Y, EPS, a=a, b=b, intercept=intercept)
    net = nn.Linear(3, 2, bias=intercept).double()
    problem = ModuleProblem(net, X, Y, EPS, a=a, b=b)
    w = problem.start(torch.Generator())
    assert problem.size == other.size
    # nn.Linear keeps Wᵀ
    order = torch.arange(6).reshape(3, 2).T.reshape(-1)
    order = torch.cat([order, torch.arange(6, problem.size)])
    v = torch.empty_like(w)
    v[order] = w
    value, grad = problem.value_and_grad(w)
    their_value, their_grad = other.value_and_grad(v)
    assert relative(value, their_value) < 1e-8
    assert relative(grad, their_grad[order]) < 1e-8
    assert relative(problem.hessian(w).to_dense(), other.hessian(v).to_dense()[order][:, order]) < 1e-8


def test_finite_differences():
    problem, h = make(), 1e-5
    w = problem.start(torch.Generator()) + 0.1
    _, grad = problem.value_and_grad(w)
    H = problem.hessian(w).to_dense()
    for k in range(0, problem.size, 5):
        step = torch.zeros_like(w)
        step[k] = h
        (up, up_grad), (down, down_grad) = problem.value_and_grad(w + step), problem.value_and_grad(w - step)
        assert abs(grad[k] - (up - down) / (2 * h)) < 1e-7 * grad.abs().max()
        assert relative(H[k], (up_grad - down_grad) / (2 * h)) < 1e-5


@pytest.mark.parametrize("vectorize", [True, False])
def test_an_intercept_alone_has_a_closed_form(vectorize):
    # moving all points by t changes the cost by s |t|² and terms that every plan pays alike
    X, Y, a, b, s = pts(14, 2), pts(11, 2, 1), wts(14), wts(11, 2), 0.5
    problem = ModuleProblem(lambda t, X: X + t, X, Y, EPS, theta0=[0.3, -0.1], a=a, b=b, scale=s, vectorize=vectorize)
    t = problem.start(torch.Generator())
    assert relative(problem.value_and_grad(t)[1], 2 * s * (a @ X + t - b @ Y)) < 1e-8
    assert relative(problem.hessian(t).to_dense(), 2 * s * torch.eye(2).double()) < 1e-8


@pytest.mark.parametrize("vectorize", [True, False])
def test_one_parameter_and_one_point(vectorize):
    problem = ModuleProblem(
        lambda w: w[None] ** 2, None, torch.ones(1, 1).double(), EPS, theta0=3.0, vectorize=vectorize
    )
    w = problem.start(torch.Generator())
    value, grad = problem.value_and_grad(w)
    H = problem.hessian(w)
    assert H.shape == (1, 1)
    assert [float(t) for t in (value, grad, H.to_dense())] == pytest.approx([64.0, 96.0, 104.0])  # of (w² − 1)²


@pytest.mark.parametrize("vectorize", [True, False])
def test_parameters_without_effect(vectorize):
    problem = make(lambda w, X: X[:, :2] + 0 * w[:0].sum(), theta0=[1.0, 2.0], vectorize=vectorize)
    w = problem.start(torch.Generator())
    assert (problem.value_and_grad(w)[1] == 0).all()
    assert (problem.hessian(w).to_dense() == 0).all()


@pytest.mark.parametrize(
    ("rtol", "widths"),
    [(rtol, (3, 4, 2)) for rtol in (0.5, 0.1, 0.02, 1e-3, 1e-5)] + [(rtol, (3, 16, 12, 2)) for rtol in (0.1, 1e-4)],
)
def test_a_coarse_request_gets_what_it_asked_for(rtol, widths):
    for step in (0.0, 0.3):
        problem = make(mlp(*widths), n=60, m=50)
        w = problem.start(torch.Generator())
        if step:
            problem.value_and_grad(w + step)  # a neighbour to start warm from
        dense = Dense(problem, w)
        value, grad = problem.value_and_grad(w, rtol)
        assert (grad - dense.grad).norm() <= rtol * dense.grad.norm()
        assert abs(value - dense.value) <= problem.value_error + 1e-9
        H = problem.hessian(w, rtol).to_dense()
        assert torch.linalg.matrix_norm(H - dense.hessian, 2) <= rtol * torch.linalg.matrix_norm(dense.hessian, 2)


def test_a_coarse_request_is_cheaper():
    passes = []
    for rtol in (0.1, 1e-4, None):
        problem = make(n=200, m=200)
        w = problem.start(torch.Generator())
        problem.value_and_grad(w, rtol)
        problem.hessian(w, rtol)
        passes.append(problem.n_passes)
    assert passes[0] < passes[1] < passes[2]


def test_one_point_one_solve():
    problem = make()
    w = problem.start(torch.Generator())
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
    w += 1
    assert relative(problem.value_and_grad(w)[1], make().value_and_grad(w)[1]) < 1e-8


def test_the_answer_does_not_depend_on_the_way():
    start = make().start(torch.Generator())
    points = [start + 0.5 * torch.sin(torch.arange(float(len(start))) + k).double() for k in (0, 3, 0.01, 8)]
    walker = make()
    for w in points:
        walker.value_and_grad(w, 0.1)
        walker.hessian(w, 0.1)
        walker.value_and_grad(w)
    for w in reversed(points):
        fresh = make()
        assert relative(walker.value_and_grad(w)[1], fresh.value_and_grad(w)[1]) < 1e-8
        assert relative(walker.hessian(w).to_dense(), fresh.hessian(w).to_dense()) < 1e-7


def test_single_precision():
    for widths in ((3, 4, 2), (3, 16, 12, 2)):
        problem = make(mlp(*widths, dtype=torch.float32), dtype=torch.float32, n=40, m=30)
        w = problem.start(torch.Generator())
        dense = Dense(problem, w)
        value, grad = problem.value_and_grad(w)
        H = problem.hessian(w)
        assert value.dtype == grad.dtype == H.dtype == torch.float32
        assert relative(value, dense.value) < 1e-4
        assert relative(grad, dense.grad) < 1e-3
        assert relative(H.to_dense(), dense.hessian) < 2e-3
        spent = problem.n_passes
        assert problem.hessian(w).shape == H.shape
        assert problem.n_passes == spent


@pytest.mark.parametrize("widths", [(3, 4, 2), (3, 16, 12, 2)])
def test_minimize_goes_on_from_a_checkpoint_bit_for_bit(widths, tmp_path):
    def run(maxiter, **options):
        return minimize(make(mlp(*widths)), method="newton-cg", options={"maxiter": maxiter}, **options)

    file = tmp_path / "run"
    for maxiter in (2, 3, 6):
        last = run(maxiter, checkpoint=file)
    whole = run(6)
    assert last.fun == whole.fun
    assert torch.equal(last.x, whole.x)
    assert torch.equal(last.jac, whole.jac)
    assert whole.history.fun.is_monotonic_decreasing


def test_minimize_learns_a_map_from_unmatched_points():
    rng = torch.Generator().manual_seed(0)
    X = torch.randn(50, 2, generator=rng, dtype=torch.float64)

    def truth(X):
        return torch.stack([X[:, 0] + 0.5 * torch.tanh(2 * X[:, 1]), X[:, 1]], 1)

    class Bent(nn.Module):
        def __init__(self):
            super().__init__()
            self.bend, self.shift = nn.Parameter(torch.tensor(0.1).double()), nn.Parameter(torch.zeros(2).double())

        def forward(self, X):
            return X + self.shift + self.bend * torch.stack([torch.tanh(2 * X[:, 1]), torch.zeros(len(X))], 1)

    problem = ModuleProblem(Bent(), X, truth(X).flip(0), 0.05)
    result = minimize(problem, method="newton-cg", options={"maxiter": 40})
    assert result.success, result.message
    assert abs(result.x[0] - 0.5) < 0.05
    fitted = Bent()
    fitted.load_state_dict(problem.parameters(result.x), strict=False)
    assert torch.equal(fitted(X).detach(), problem.image(result.x))
