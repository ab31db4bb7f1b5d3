"""`cg` and `minres` on systems where others fail, against dense solutions and scipy."""

import doctest
import importlib
import math

import numpy as np
import pytest
import scipy.sparse.linalg as sla
import torch

from ot_newton.krylov import cg, minres
from ot_newton.operators import DiagonalOperator, FunctionOperator, MatrixOperator
from ot_newton.status import Status

SOLVERS = [cg, minres]


def with_spectrum(values, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    values = torch.as_tensor(values, dtype=torch.float64)
    g = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(len(values), len(values), generator=g, dtype=torch.float64))[0]
    A = (Q * values) @ Q.mT
    return ((A + A.mT) / 2).to(dtype)


def randn(n: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def diag(*values: float) -> MatrixOperator:
    return MatrixOperator(torch.diag(torch.tensor(values, dtype=torch.float64)))


def ones(n: int) -> torch.Tensor:
    return torch.ones(n, dtype=torch.float64)


@pytest.mark.parametrize("solve", SOLVERS)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("preconditioned", [False, True])
def test_definite_systems_agree_with_the_dense_solution(solve, dtype, rtol, preconditioned):
    d = torch.logspace(0, 3, 60, dtype=torch.float64)
    A = torch.diag(d) + 0.2 * with_spectrum(torch.linspace(0.1, 1, 60))
    operator, b = MatrixOperator(A.to(dtype)), randn(60, dtype=dtype)
    M = DiagonalOperator((1 / A.diagonal()).to(dtype)) if preconditioned else None
    found = solve(operator, b, rtol=rtol, M=M)
    exact = torch.linalg.solve(A, b.double())
    assert found.status is Status.CONVERGED
    assert found.x.dtype == dtype
    assert (A @ found.x.double() - b).norm() <= 1.5 * rtol * b.norm()
    assert (found.x.double() - exact).norm() <= 1.5 * rtol * b.norm() / 0.9
    assert found.n_matvec == operator.n_matvec
    if preconditioned:
        assert found.n_iter < solve(operator, b, rtol=rtol).n_iter


@pytest.mark.parametrize(("solve", "theirs"), [(cg, sla.cg), (minres, sla.minres)])
def test_scipy_takes_the_same_iterates(solve, theirs):
    A, b = MatrixOperator(with_spectrum(torch.linspace(1, 50, 40))), randn(40)
    ours, reference = [], []
    x, info = solve(A, b, rtol=1e-8, callback=lambda x: ours.append(x.clone()))
    y, _ = theirs(A.to_scipy(), b.numpy(), rtol=1e-8, callback=lambda x: reference.append(x.copy()))
    assert info == 0
    np.testing.assert_allclose(x, y, rtol=0, atol=1e-7)
    for mine, other in zip(ours[:10], reference[:10], strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("solve", SOLVERS)
def test_a_zero_right_hand_side_or_an_exact_guess_costs_no_iteration(solve):
    A, b = with_spectrum([1.0, 2.0, 3.0]), randn(3)
    zero = solve(A, torch.zeros(3, dtype=torch.float64))
    assert (zero.status, zero.n_iter, zero.n_matvec) == (Status.CONVERGED, 0, 0)
    assert torch.equal(zero.x, torch.zeros(3, dtype=torch.float64))
    exact = solve(A, b, torch.linalg.solve(A, b))
    assert (exact.status, exact.n_iter, exact.n_matvec) == (Status.CONVERGED, 0, 1)
    guess = torch.linalg.solve(A, b) + 1.0
    kept = guess.clone()
    assert solve(A, b, guess, rtol=1e-12).success
    assert torch.equal(guess, kept)


@pytest.mark.parametrize("solve", SOLVERS)
def test_the_last_allowed_iteration_counts(solve):
    found = solve(diag(1, 2, 3), ones(3), rtol=1e-10, maxiter=3)
    assert (found.info, found.n_iter, found.status) == (0, 3, Status.CONVERGED)
    short = solve(diag(1, 2, 3), ones(3), rtol=1e-10, maxiter=2)
    assert (short.info, short.n_iter, short.status) == (2, 2, Status.MAX_ITER)
    none = solve(diag(1, 2, 3), ones(3), maxiter=0)
    assert (none.info, none.n_iter, none.n_matvec, none.status) == (1, 0, 0, Status.MAX_ITER)


@pytest.mark.parametrize("solve", SOLVERS)
def test_a_consistent_singular_system_is_solved(solve):
    A = with_spectrum([0.0, 0.0, 1.0, 2.0, 5.0])
    b = A @ randn(5)
    found = solve(A, b, rtol=1e-10)
    assert found.success
    torch.testing.assert_close(found.x, torch.linalg.pinv(A, rtol=1e-10) @ b, rtol=0, atol=1e-8)


@pytest.mark.parametrize("values", [(1, -1), (1, -2), (-1, -2), (0, 0), (1, 0)])
def test_cg_hands_back_nonpositive_curvature(values):
    A, b = diag(*values), ones(2)
    found = cg(A, b)
    d = found.npc_direction
    assert found.status is Status.NEGATIVE_CURVATURE
    assert d is not None
    assert d.norm() > 0
    assert d @ (A @ d) <= 1e-15
    assert b @ d >= 0
    assert found.npc_curvature == pytest.approx(float(d @ (A @ d) / (d @ d)), abs=1e-15)
    assert found.x.isfinite().all()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("radius", [None, 0.3])
def test_negative_curvature_is_a_descent_direction(seed, radius):
    n = 12
    H, g = with_spectrum(randn(n, seed), seed), randn(n, seed + 100)
    found = cg(H, -g, radius=radius)
    if found.status is Status.BOUNDARY:
        assert found.x.norm() == pytest.approx(0.3, rel=1e-10)
        return
    d = found.npc_direction
    assert found.status is Status.NEGATIVE_CURVATURE
    assert d is not None
    assert g @ d <= 0
    assert d @ H @ d < 0
    assert float(d @ H @ d / (d @ d)) == pytest.approx(found.npc_curvature, rel=1e-8)
    x = found.x + 1e-3 * d / d.norm()
    model = [float(g @ s + s @ H @ s / 2) for s in (torch.zeros_like(g), found.x, x)]
    assert model[2] < model[1] <= model[0]


@pytest.mark.parametrize("scale", [1e-150, 1e-8, 1.0, 1e8, 1e150])
def test_scaling_the_right_hand_side_scales_the_answer(scale):
    A, b = with_spectrum(torch.linspace(1, 30, 25)), randn(25)
    for solve in SOLVERS:
        one, two = solve(A, b), solve(A, scale * b)
        assert two.n_iter == one.n_iter
        torch.testing.assert_close(two.x / scale, one.x, rtol=1e-12, atol=1e-14)
        assert two.residual_norm / scale == pytest.approx(one.residual_norm)


@pytest.mark.parametrize("scale", [1e-14, 1e14])
def test_scaling_the_operator_changes_no_decision(scale):
    for dtype in (torch.float32, torch.float64):
        for values in ([1.0, 2.0, 3.0, 10.0], [1.0, -2.0, 3.0, 4.0]):
            A, b = with_spectrum(values, dtype=dtype), randn(4, dtype=dtype)
            for solve in SOLVERS:
                one, two = solve(A, b), solve(A * scale, b)
                assert (one.status, one.n_iter) == (two.status, two.n_iter)
                torch.testing.assert_close(two.x * scale, one.x, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(4))
def test_minres_solves_indefinite_systems(dtype, seed):
    signs = torch.where(randn(50, seed) < 0, -1.0, 1.0)
    A = with_spectrum(torch.logspace(-1.5, 0, 50, dtype=torch.float64) * signs, seed, dtype)
    b = randn(50, dtype=dtype)
    found = minres(A, b, rtol=1e-4)
    assert found.success
    assert (A.double() @ found.x.double() - b).norm() <= 1.1e-4 * b.norm()
    d = found.npc_direction
    assert d is not None
    assert float(d @ A @ d / (d @ d)) == pytest.approx(found.npc_curvature, rel=1e-3)
    assert float(d @ A @ d) < 0
    early = minres(A, b, stop_on_npc=True)
    assert early.status is Status.NEGATIVE_CURVATURE
    assert early.n_iter <= found.n_iter


@pytest.mark.parametrize("values", [(1, 0), (0, 0), (2, -1, 0), (3, 0, 0, -3)])
def test_minres_gives_least_squares_on_inconsistent_systems(values):
    A, b = diag(*values), ones(len(values))
    found = minres(A, b)
    assert found.status is Status.INCONSISTENT
    assert found.info > 0
    projected = (torch.tensor(values) != 0).double()
    torch.testing.assert_close(A @ found.x, projected, rtol=0, atol=1e-12)
    assert found.x.norm() < 2
    assert found.residual_norm == pytest.approx(float((b - projected).norm()))


@pytest.mark.parametrize(("dtype", "slack"), [(torch.float64, 1e-6), (torch.float32, 1e-2)])
@pytest.mark.parametrize("rtol", [1e-5, 1e-12])
def test_minres_stays_bounded_on_large_inconsistent_systems(dtype, slack, rtol):
    n = 50
    values = torch.logspace(-2, 0, n, dtype=torch.float64) * torch.where(randn(n, 3) < -0.5, -1.0, 1.0)
    values[:3] = 0
    A, b = with_spectrum(values, 5), randn(n, 6)
    found = minres(A.to(dtype), b.to(dtype), rtol=rtol)
    best = torch.linalg.pinv(A, rtol=1e-10) @ b
    r, least = b - A @ found.x.double(), (b - A @ best).norm()
    assert found.status is Status.INCONSISTENT
    assert r.norm() <= (1 + slack) * least
    assert found.x.norm() <= 10 * best.norm()
    assert found.residual_norm == pytest.approx(float(r.norm()), rel=slack)


def test_ill_conditioned_is_not_called_inconsistent():
    for dtype, small in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        found = minres(torch.diag(torch.tensor([1.0, 0.5, small], dtype=dtype)), torch.ones(3, dtype=dtype), rtol=1e-3)
        assert found.success
        assert found.x[2] * small == pytest.approx(1, rel=1e-2)


@pytest.mark.parametrize("solve", SOLVERS)
def test_converged_means_the_true_residual(solve):
    A = with_spectrum(torch.logspace(-6, 0, 80, dtype=torch.float64), dtype=torch.float32)
    b = randn(80, dtype=torch.float32)
    found = solve(A, b, rtol=1e-6, maxiter=4000)
    true = float((b.double() - A.double() @ found.x.double()).norm())
    assert not found.success or true <= 1.1e-6 * float(b.norm())
    loose = solve(A, b, rtol=0.5)
    assert loose.success
    true = float((b.double() - A.double() @ loose.x.double()).norm())
    assert true == pytest.approx(loose.residual_norm, rel=0.05)


@pytest.mark.parametrize("solve", SOLVERS)
def test_rounding_level_is_reported_as_stalled(solve):
    A, b = with_spectrum(torch.logspace(-2, 0, 40, dtype=torch.float64)), randn(40)
    found = solve(A, b, rtol=0.0, atol=0.0, maxiter=3000)
    assert found.status is Status.STALLED
    assert found.residual_norm <= 1e-13 * b.norm()
    assert found.residual_norm == pytest.approx(float((b - A @ found.x).norm()))


@pytest.mark.parametrize("solve", SOLVERS)
def test_values_that_are_not_finite_are_flagged(solve):
    nan = FunctionOperator((3, 3), matvec=lambda v: v * torch.nan, dtype=torch.float64)
    found = solve(nan, ones(3))
    assert (found.status, found.n_iter) == (Status.NONFINITE, 1)
    assert found.x.isfinite().all()
    bad = solve(diag(1, 2), torch.tensor([1.0, math.inf], dtype=torch.float64))
    assert (bad.status, bad.n_iter) == (Status.NONFINITE, 0)
    calls = []

    def fails_late(v):
        calls.append(v)
        return v * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) * (1 if len(calls) < 3 else math.nan)

    late = solve(FunctionOperator((3, 3), matvec=fails_late, dtype=torch.float64), ones(3), rtol=1e-10)
    assert (late.status, late.n_iter, late.n_matvec) == (Status.NONFINITE, 3, 3)
    assert late.x.isfinite().all()
    assert late.x.norm() > 0


def test_the_boundary_is_measured_in_the_norm_of_the_preconditioner():
    inverse = DiagonalOperator(torch.tensor([1.0, 0.01], dtype=torch.float64))
    for A in (diag(0.1, 0.2), diag(0.1, -0.2), diag(-1, -1)):
        found = cg(A, ones(2), M=inverse, radius=1.0)
        assert found.status in (Status.BOUNDARY, Status.NEGATIVE_CURVATURE)
        assert float(found.x[0] ** 2 + 100 * found.x[1] ** 2) == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("radius", [1e-9, 0.1, 3.0, 1e9])
@pytest.mark.parametrize("preconditioned", [False, True])
def test_the_trust_region_step_lowers_the_model_and_obeys_the_radius(radius, preconditioned):
    n = 30
    A = with_spectrum(torch.linspace(0.5, 20, n))
    b, weights = randn(n), torch.linspace(1, 50, n, dtype=torch.float64)
    M = DiagonalOperator(1 / weights) if preconditioned else None
    found = cg(A, b, M=M, radius=radius, rtol=1e-10)
    length = float(((weights if preconditioned else 1) * found.x**2).sum().sqrt())
    inside = float(((weights if preconditioned else 1) * torch.linalg.solve(A, b) ** 2).sum().sqrt()) < radius
    assert found.status is (Status.CONVERGED if inside else Status.BOUNDARY)
    assert length <= radius * (1 + 1e-10)
    assert inside or length == pytest.approx(radius, rel=1e-10)
    model = float(found.x @ A @ found.x / 2 - b @ found.x)
    z = b / weights if preconditioned else b
    cauchy = min(float(b @ z / (z @ A @ z)), radius / float((b @ z).sqrt()))
    assert model <= float(cauchy**2 * (z @ A @ z) / 2 - cauchy * (b @ z)) * (1 - 1e-10)
    assert float((b - A @ found.x).norm()) == pytest.approx(found.residual_norm, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("solve", SOLVERS)
def test_every_iteration_reaches_the_callback(solve):
    seen = []
    found = solve(diag(1, 2, 3, 4), ones(4), rtol=1e-10, callback=lambda x: seen.append(x.clone()))
    assert len(seen) == found.n_iter
    assert torch.equal(seen[-1], found.x)


@pytest.mark.parametrize("solve", SOLVERS)
def test_gradients_do_not_leak_into_the_iteration(solve):
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    A = FunctionOperator((2, 2), matvec=lambda v: weight * v, dtype=torch.float32)
    found = solve(A, torch.ones(2, requires_grad=True))
    assert not found.x.requires_grad


@pytest.mark.parametrize("solve", SOLVERS)
def test_mistakes_are_named_before_any_work(solve):
    A, b = diag(1, 2, 3), ones(3)
    for call, message in (
        (lambda: solve(A, ones(2)), r"expected b of shape \(3,\), got \(2,\)"),
        (lambda: solve(A, b.float()), "expected b in torch.float64"),
        (lambda: solve(A, b, ones(2)), "expected x0 of shape"),
        (lambda: solve(A, b, M=torch.eye(2, dtype=torch.float64)), "expected M of shape"),
        (lambda: solve(A, b, M=-torch.eye(3, dtype=torch.float64)), "expected a positive definite preconditioner"),
        (lambda: solve(A, b, rtol=-1.0), "expected rtol ≥ 0"),
        (lambda: solve(A, b, maxiter=-1), "expected maxiter ≥ 0, got -1"),
        (lambda: solve(torch.eye(3).double().roll(1, 0), b), "expected a symmetric operator"),
        (lambda: solve(torch.ones(3, 2).double(), b), "expected a square operator"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="expected b to be a torch tensor, got list"):
        solve(A, [1.0, 1.0, 1.0])
    assert A.n_matvec == 0
    for radius, message in ((0.0, "expected a positive radius"), (math.nan, "expected a positive radius")):
        with pytest.raises(ValueError, match=message):
            cg(A, b, radius=radius)
    with pytest.raises(ValueError, match="expected no x0 with a radius"):
        cg(A, b, b, radius=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("solve", SOLVERS)
def test_the_gpu_gives_the_same_answer(solve):
    A, b = with_spectrum(torch.linspace(1, 20, 50)), randn(50)
    here, there = solve(A, b, rtol=1e-10), solve(A.cuda(), b.cuda(), rtol=1e-10)
    assert there.x.is_cuda
    torch.testing.assert_close(there.x.cpu(), here.x, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("module", ["krylov"])
def test_the_examples_run(module):
    tried = doctest.testmod(importlib.import_module(f"ot_newton.{module}"))
    assert tried.attempted > 0
    assert tried.failed == 0
