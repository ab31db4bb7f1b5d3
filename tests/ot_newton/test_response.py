import pytest
import torch
from referee import Referee, pts, relative, wts

from ot_newton.autograd import ot_loss
from ot_newton.problems.cytometry import cytometry_points
from ot_newton.response import grow, respond
from ot_newton.schur import SchurSpace, factor_q, inverse, orthonormal
from ot_newton.sinkhorn import ConvergenceWarning, solve
from ot_newton.status import Status

EPS = 0.8


class Case:
    """A plan, its referee, and the changes of the marginals that two moves of x make."""

    def __init__(self, n: int, m: int, *, eps: float = EPS, dtype=torch.float64, a=None, directions: int = 2) -> None:
        x, y = pts(n, 2).to(dtype), pts(m, 2, 1).to(dtype)
        a = wts(n).to(dtype) if a is None else a.to(dtype)
        self.plan = plan = solve(x, y, eps, a=a, b=wts(m, 2).to(dtype), tol=1e-12 if dtype == torch.float64 else 1e-5)
        self.dense = Referee(x, y, eps, a=a, b=plan.b, at=(plan.f, plan.g))
        self.A = pts(2 * n, directions, 3)
        gap = self.dense.x[:, None] - self.dense.y
        moved = 2 / eps * torch.einsum("ij,ijd,idk->ijk", self.dense.P, gap, self.A.reshape(n, 2, directions))
        self.rho, self.kappa = moved.sum(1).to(dtype), moved.sum(0).to(dtype)
        self.args = plan.pairs, plan.phi, plan.psi, plan.row_sums, plan.col_sums

    def respond(self, rho=None, kappa=None, **options):
        rho, kappa = (self.rho if rho is None else rho), (self.kappa if kappa is None else kappa)
        return respond(*self.args, rho, kappa, **options)

    @property
    def want(self):
        """The referee's response, (n + m, k), in units of eps."""
        return self.dense.response[:, : len(self.A)] @ self.A / self.plan.eps

    def error(self, answer) -> float:
        """Distance to the referee's response in the same gauge, `c·dpsi = 0`."""
        n = len(self.rho)
        shift = (self.dense.c @ self.want[n:]) / self.dense.c.sum()
        f, g = self.want[:n] + shift, self.want[n:] - shift
        return max(relative(answer.dphi, f), relative(answer.dpsi, g))


@pytest.mark.parametrize("method", ["block", "cg"])
@pytest.mark.parametrize("shape", [(12, 9), (9, 12), (10, 10), (2, 9), (9, 2)])
def test_against_the_pseudoinverse(method, shape):
    case = Case(*shape)
    answer = case.respond(method=method, rtol=1e-11)
    assert answer.status is Status.CONVERGED
    assert float(answer.residual.max()) <= 1e-11
    assert case.error(answer) < 1e-9
    assert (case.plan.col_sums @ answer.dpsi).abs().max() < 1e-13
    assert answer.n_passes > 0


@pytest.mark.parametrize("method", ["block", "cg"])
def test_the_residual_is_the_true_one(method):
    case = Case(300, 280, eps=0.1)
    answer = case.respond(method=method, rtol=1e-3, max_iter=1)
    P, r, c = case.dense.P, case.dense.r, case.dense.c
    S = torch.diag(c) - P.T @ (P / r[:, None])
    rhs = case.kappa - P.T @ (case.rho / r[:, None])
    residual = (rhs - S @ answer.dpsi) / c.sqrt()[:, None]
    want = residual.norm(dim=0) / (rhs / c.sqrt()[:, None]).norm(dim=0)
    assert relative(answer.residual, want) < 1e-6
    assert answer.status is (Status.CONVERGED if float(want.max()) <= 1e-3 else Status.MAX_ITER)


@pytest.mark.parametrize("method", ["block", "cg"])
def test_running_out_of_steps_is_said(method):
    case = Case(300, 280, eps=0.1, directions=1)
    answer = case.respond(method=method, rtol=1e-13, max_iter=1)
    assert answer.status is Status.MAX_ITER
    assert float(answer.residual.max()) > 1e-13


@pytest.mark.parametrize("method", ["block", "cg"])
@pytest.mark.parametrize("factor", [1e-12, 1e-6, 1e6, 1e12])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_linear_in_the_move(method, factor, dtype):
    case = Case(12, 9, dtype=dtype)
    rtol = 1e-10 if dtype == torch.float64 else 1e-5
    plain = case.respond(method=method, rtol=rtol)
    scaled = case.respond(factor * case.rho, factor * case.kappa, method=method, rtol=rtol)
    assert relative(scaled.dphi / factor, plain.dphi.double()) < 10 * rtol
    assert relative(scaled.dpsi / factor, plain.dpsi.double()) < 10 * rtol
    assert scaled.status is plain.status
    assert scaled.dphi.dtype == scaled.residual.dtype == dtype


@pytest.mark.parametrize("method", ["block", "cg"])
def test_no_move_no_answer(method):
    case = Case(12, 9)
    answer = case.respond(0 * case.rho, 0 * case.kappa, method=method)
    assert (answer.dphi == 0).all()
    assert (answer.dpsi == 0).all()
    assert answer.status is Status.CONVERGED


@pytest.mark.parametrize("method", ["block", "cg"])
@pytest.mark.parametrize("shape", [(12, 9), (9, 12)])
def test_points_without_mass(method, shape):
    a = wts(shape[0])
    a[:3] = 0
    case = Case(*shape, a=a / a.sum())
    answer = case.respond(method=method, rtol=1e-10)
    part = torch.arange(3, shape[0])
    n = shape[0]
    shift = (case.dense.c @ case.want[n:]) / case.dense.c.sum()
    assert relative(answer.dphi[part], case.want[part] + shift) < 1e-8
    assert relative(answer.dpsi, case.want[n:] - shift) < 1e-8
    assert answer.dphi.isfinite().all()


def test_slow_modes_of_a_neighbour_save_passes():
    case = Case(300, 280, eps=0.1)
    first = case.respond(rtol=1e-3)
    again = case.respond(rtol=1e-3, modes=first.modes)
    assert first.modes.shape == (280, 64)
    assert again.status is Status.CONVERGED
    assert again.n_passes < first.n_passes


def test_exact_slow_modes_do_no_harm():
    """They drop out of the block in the first step, and without random columns in their place it would creep on."""
    x = cytometry_points(400, 0)
    y = x.flip(0) + 0.05 * torch.randn(400, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plan = solve(x, y, 0.1, tol=1e-9)
    A = x @ torch.randn(5, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    z = (x * A).sum(1, keepdim=True)
    P = plan.to_dense()
    rho, kappa = plan.row_sums[:, None] * z - (A * (P @ y)).sum(1, keepdim=True), P.T @ z - (y * (P.T @ A)).sum(1, True)
    args = plan.pairs, plan.phi, plan.psi, plan.row_sums, plan.col_sums, rho, kappa
    cold = respond(*args, rtol=1e-6)
    warm = respond(*args, rtol=1e-6, modes=respond(*args, rtol=1e-9).modes)
    assert cold.status is warm.status is Status.CONVERGED
    assert cold.n_passes <= 20
    assert warm.n_passes <= cold.n_passes + 2


def test_grow_keeps_the_width():
    case = Case(300, 280)
    space = SchurSpace(*case.args)
    K = case.dense.P / case.dense.r.sqrt()[:, None] / case.dense.c.sqrt()
    space.expand(torch.linalg.eigh(torch.eye(280).double() - K.T @ K)[1][:, 1:21])
    assert space.n_new == 20
    assert grow(space, 30) == 10  # an invariant space, to which the operator adds nothing
    assert grow(space, 30) == 30
    assert (space.Q.T @ space.Q - torch.eye(60)).abs().max() < 1e-12


def test_dependent_columns_are_solved_once_and_answered_each():
    case = Case(40, 30)
    mix = torch.tensor([[1.0, 0.0, 1.0, -2.0, 0.0], [0.0, 1.0, 1.0, 0.5, 0.0]]).double()
    answer, plain = case.respond(case.rho @ mix, case.kappa @ mix, rtol=1e-10), case.respond(rtol=1e-10)
    assert answer.status is Status.CONVERGED
    assert answer.residual.shape == (5,)
    assert float(answer.residual[4]) == 0
    assert relative(answer.dphi, plain.dphi @ mix) < 1e-8
    assert relative(answer.dpsi, plain.dpsi @ mix) < 1e-8


def test_every_column_decides_when_to_stop():
    """A column that is a slow mode is solved at once; the tiny one beside it is not, and counts as much."""
    case = Case(300, 280, eps=0.1)
    rho = torch.cat([case.rho[:, :1], 1e-9 * case.rho[:, 1:]], 1)
    kappa = torch.cat([case.kappa[:, :1], 1e-9 * case.kappa[:, 1:]], 1)
    answer = case.respond(rho, kappa, rtol=1e-5)
    assert answer.status is Status.CONVERGED
    assert float(answer.residual.max()) <= 1e-5
    P, r, c = case.dense.P, case.dense.r, case.dense.c
    rhs = kappa - P.T @ (rho / r[:, None])
    off = (rhs - (torch.diag(c) - P.T @ (P / r[:, None])) @ answer.dpsi) / c.sqrt()[:, None]
    assert (off.norm(dim=0) <= 1.01e-5 * (rhs / c.sqrt()[:, None]).norm(dim=0)).all()


def test_the_slow_modes_are_those_of_the_operator():
    case = Case(300, 280, eps=0.1)
    modes = case.respond(rtol=1e-9).modes[:, :5]
    K = case.dense.P / case.dense.r.sqrt()[:, None] / case.dense.c.sqrt()
    values, vectors = torch.linalg.eigh(torch.eye(280).double() - K.T @ K)
    found = case.dense.c.sqrt()[:, None] * modes
    assert (found.T @ found - torch.eye(5)).abs().max() < 1e-10
    overlap = torch.linalg.svdvals(vectors[:, 1:6].T @ found)
    assert float(values[5]) < 0.9 * float(values[6]) or float(overlap[:4].min()) > 0.999
    assert float(overlap[:4].min()) > 0.99


def test_in_a_large_space_the_slow_modes_alone_are_found(monkeypatch):
    """Those well apart from the ones that follow come out as from all eigenvectors, without computing those."""
    case = Case(300, 280, eps=0.05)
    space = SchurSpace(*case.args)
    space.expand(torch.randn(280, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    for _ in range(3):
        grow(space, 40)
    theta, E = torch.linalg.eigh(space.T)
    assert float(theta[5]) < 0.2 * float(theta[20])
    monkeypatch.setattr("ot_newton.schur.MANY", 100)
    monkeypatch.setattr(space, "ritz", lambda: pytest.fail("all eigenvectors were computed"))
    found = space.slowest(10)
    assert found.shape == (160, 10)
    assert (found.T @ found - torch.eye(10)).abs().max() < 1e-12
    left = float(theta[5] / theta[20]) ** 3  # of what is not slow, in three rounds
    assert relative(torch.diag(found.T @ space.T @ found)[:5], theta[:5]) < 10 * left**2
    assert float(torch.linalg.svdvals(E[:, :6].T @ found[:, :5]).min()) > 1 - 10 * left**2


def test_the_factor_grows_with_the_space():
    case = Case(300, 280, eps=0.1)
    space = SchurSpace(*case.args)
    right = torch.randn(280, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(1)
    for step in range(5):
        space.expand(torch.randn(280, 30).double())
        if step != 2:  # two growths at once
            y, _ = space.solve(right)
            assert relative(y, torch.linalg.solve(space.T, space.Q.T @ right)) < 1e-10


def test_damping_moves_the_answer():
    case = Case(12, 9)
    damped = case.respond(damping=0.1, rtol=1e-11)
    P, r, c = case.dense.P, case.dense.r, case.dense.c
    S = 1.1 * torch.diag(c) - P.T @ (P / r[:, None])
    want = torch.linalg.solve(S, case.kappa - P.T @ (case.rho / r[:, None]))
    assert relative(damped.dpsi, want) < 1e-9
    assert case.error(damped) > 1e-2


def test_unknown_method():
    with pytest.raises(ValueError, match="method: expected 'block' or 'cg', got 'lu'"):
        Case(4, 3).respond(method="lu")


@pytest.mark.parametrize("n", [20, 500])
def test_orthonormal_adds_no_rounding_in_float32(n):
    """What is left of columns inside the span is noise of one size, well conditioned by itself."""
    V = pts(n, 12).float()
    Q = orthonormal(V, V[:, :0], 1e-5)
    assert Q.shape == (n, 12)
    assert float((Q.T @ Q - torch.eye(12)).abs().max()) < 1e-5
    assert orthonormal(V @ pts(12, 5).float(), Q, 1e-5).shape == (n, 0)
    more = orthonormal(torch.cat([pts(n, 6, 3).float(), V[:, :2]], 1), Q, 1e-5)
    assert more.shape == (n, 6)
    assert float((Q.T @ more).abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_orthonormal_factor_of_well_and_badly_conditioned_columns(dtype):
    V = pts(50, 6).to(dtype)
    V[:, 5] = V[:, 4] + 1e-9 * V[:, 3]
    for columns in (V[:, :5], V, V[:, :0]):
        Q = factor_q(columns)
        assert Q.dtype == dtype
        assert Q.shape == columns.shape
        assert float((Q.T @ Q - torch.eye(Q.shape[1])).abs().max() if Q.shape[1] else 0) < 1e-5
        left = columns - Q @ (Q.T @ columns)
        assert not left.numel() or float(left.abs().max()) < 1e-5


def test_weights_whose_inverse_overflows_count_as_none():
    tiny = torch.finfo(torch.float32).tiny
    torch.testing.assert_close(inverse(torch.tensor([0.0, 1e-44, tiny, 0.5])), torch.tensor([0.0, 0.0, 1 / tiny, 2.0]))


def test_orthonormal_drops_dependent_columns():
    V = pts(20, 3)
    Q = torch.linalg.qr(pts(20, 2, 1)).Q
    basis = orthonormal(torch.cat([V, V @ pts(3, 2), Q, torch.zeros(20, 1)], 1), Q, 1e-10)
    assert basis.shape == (20, 3)
    assert (basis.T @ basis - torch.eye(3)).abs().max() < 1e-14
    assert (Q.T @ basis).abs().max() < 1e-14


def test_krylov_space_is_exact_once_complete():
    case = Case(12, 9)
    space = SchurSpace(*case.args)
    B = space.project(pts(9, 2))
    assert space.expand(torch.eye(9).double()) == 8  # all but the gauge
    y, residual = space.solve(B)
    assert relative(space.product(space.Q @ y)[0], B) < 1e-10
    assert residual.abs().max() < 1e-10
    eigenvalues = torch.linalg.eigvalsh(space.T)
    assert float(eigenvalues.min()) > 0
    assert float(eigenvalues.max()) < 1 + 1e-12


def test_inverse():
    assert inverse(torch.tensor([0.0, 0.5, 2.0])).tolist() == [0.0, 2.0, 0.5]


@pytest.mark.parametrize("method", ["block", "cg"])
@pytest.mark.parametrize("shape", [(12, 9), (9, 12)])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_move_that_is_not_finite_has_no_answer(method, shape, value, dtype):
    case = Case(*shape, dtype=dtype)
    for rho, kappa in ((case.rho.clone(), case.kappa), (case.rho, case.kappa.clone())):
        (rho if rho is not case.rho else kappa)[1, 0] = value
        answer = case.respond(rho, kappa, method=method)
        assert answer.status is Status.NONFINITE
        assert answer.n_passes == 1  # of the right-hand side
        assert (answer.dphi.shape, answer.dpsi.shape, answer.residual.shape) == (rho.shape, kappa.shape, (2,))
        assert answer.modes.shape == (min(shape), 0)
        for part in (answer.dphi, answer.dpsi, answer.residual):
            assert part.isnan().all()
            assert part.dtype == dtype


@pytest.mark.parametrize("method", ["block", "cg"])
def test_a_product_with_nan_is_nan(method):
    plan = Case(12, 9).plan
    H = plan.hessian(method=method)
    assert (H @ torch.full((24,), torch.nan, dtype=torch.float64)).isnan().all()
    assert H.last_response is not None
    assert H.last_response.status is Status.NONFINITE
    assert (H @ torch.ones(24, dtype=torch.float64)).isfinite().all()


@pytest.mark.parametrize("both", [False, True])
def test_a_double_backward_of_nan_is_nan_and_says_so(both):
    x, y = pts(12, 2).requires_grad_(), pts(9, 2, 1).requires_grad_(both)
    points = [x, y] if both else [x]
    grads = torch.autograd.grad(ot_loss(x, y, EPS), points, create_graph=True)
    with pytest.warns(ConvergenceWarning, match=r"response of the potentials: relative residual nan \(nonfinite\)"):
        products = torch.autograd.grad(grads, points, [torch.full_like(g, torch.nan) for g in grads])
    assert all(part.isnan().all() for part in products)
