"""`lanczos` and `eigsh` against dense eigenvalues and scipy, on the spectra where others fail."""

import doctest
import importlib
import math

import numpy as np
import pytest
import scipy.sparse.linalg as sla
import torch
from spectra import WHICH, case, rotated, wanted
from torch import Tensor

from ot_newton import lanczos as lanczos_module
from ot_newton.lanczos import eigsh, lanczos
from ot_newton.operators import DiagonalOperator, FunctionOperator, IdentityOperator, MatrixOperator
from ot_newton.status import Status

DTYPES = [torch.float64, torch.float32]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def diag(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.diag(torch.tensor(values, dtype=dtype))


def orthonormality(V: Tensor) -> float:
    V = V.double()
    return float((V.mT @ V - torch.eye(V.shape[1], dtype=torch.float64)).abs().max())


@pytest.mark.parametrize("seed", range(500))
def test_random_spectra(seed):
    problem = case(seed)
    A, k, which = problem.matrix, problem.k, problem.which
    operator, eps = MatrixOperator(A), torch.finfo(A.dtype).eps
    found = eigsh(operator, k, which=which)
    w, V = found
    values = torch.linalg.eigvalsh(A.double())
    anorm = float(values.abs().max())
    true = A.double() @ V.double() - V.double() * w.double()

    assert w.dtype == V.dtype == found.residuals.dtype == A.dtype
    assert found.n_matvec == operator.n_matvec
    assert bool((w.diff() >= 0).all())
    assert orthonormality(V) <= 100 * eps
    assert bool((V.gather(0, V.abs().argmax(0, keepdim=True)) > 0).all())
    assert float((true.norm(dim=0) - found.residuals).abs().max()) <= 32 * eps * anorm, problem.name
    assert found.success, problem.name
    best = wanted(values, k, which)
    got = w.double()
    if which in ("LM", "SM"):  # of two values equal in magnitude either will do
        best, got = best.abs().sort().values, got.abs().sort().values
    rounding = (32 * torch.finfo(torch.float64).eps + 8 * eps) * anorm  # of the referee; the level at which pairs stop
    assert float((got - best).abs().max()) <= float(found.residuals.max()) + rounding, problem.name


@pytest.mark.parametrize(
    ("which", "k", "expected"),
    [("LM", 1, [-5]), ("SM", 1, [0.1]), ("LA", 2, [3, 4]), ("SA", 2, [-5, -1]), ("BE", 3, [-5, 3, 4])],
)
def test_magnitude_is_not_algebraic_order(which, k, expected):
    w, _ = eigsh(diag(-5, -1, 0.1, 2, 3, 4), k, which=which)
    torch.testing.assert_close(w, torch.tensor(expected, dtype=torch.float64))


def test_the_smallest_is_not_the_smallest_in_magnitude():
    w, V = eigsh(diag(-1, *range(11)), 1, which="SA")
    assert float(w) == pytest.approx(-1)
    assert float(V[0, 0]) == pytest.approx(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", WHICH)
def test_invariant_subspaces_do_not_end_the_search(dtype, which):
    eps = torch.finfo(dtype).eps
    threes = eigsh(3 * torch.eye(100, dtype=dtype), 6, which=which)
    assert threes.success
    torch.testing.assert_close(threes.w, torch.full((6,), 3.0, dtype=dtype))
    assert orthonormality(threes.V) <= 100 * eps
    one = eigsh(torch.ones(10, 10, dtype=dtype), 10, which=which)
    assert one.success
    torch.testing.assert_close(one.w, torch.tensor([0.0] * 9 + [10.0], dtype=dtype), rtol=0, atol=1e3 * eps)
    assert orthonormality(one.V) <= 100 * eps
    zero = eigsh(torch.zeros(50, 50, dtype=dtype), 4, which=which)
    assert zero.success
    assert bool((zero.w == 0).all())
    assert bool((zero.residuals == 0).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [None, 1, 3])
@pytest.mark.parametrize(("which", "expected"), [("LA", [50] * 20), ("SA", [1] * 20), ("BE", [1] * 10 + [50] * 10)])
def test_multiplicities_of_two_values(dtype, block_size, which, expected):
    values = torch.where(torch.arange(200) % 2 == 0, 1.0, 50.0).double()
    A = rotated(values, generator(), dtype)
    found = eigsh(A, 20, which=which, block_size=block_size)
    eps = torch.finfo(dtype).eps
    assert found.success
    torch.testing.assert_close(found.w, torch.tensor(expected, dtype=dtype), rtol=32 * eps, atol=50 * 32 * eps)
    assert float(found.residuals.max()) <= 1e2 * eps * 50


@pytest.mark.parametrize("block_size", [None, 1, 2])
@pytest.mark.parametrize("sign", [1, -1])
def test_copies_beyond_the_block_are_found_in_a_generic_spectrum(block_size, sign):
    values = torch.cat([torch.full((12,), 2.0), torch.linspace(-1, 1.9, 188)]).double()
    A, which = sign * rotated(values, generator()), "LA" if sign > 0 else "SA"
    found = eigsh(A, 10, which=which, block_size=block_size, ncv=70)
    assert found.success
    torch.testing.assert_close(found.w, torch.full((10,), 2.0 * sign, dtype=torch.float64), rtol=1e-12, atol=0)


def test_orthogonality_holds_and_no_ghosts_appear():
    values = torch.cat([torch.linspace(0, 1, 498), torch.tensor([10.0, -8.0])]).double()
    A = rotated(values, generator())
    T = lanczos(A, steps=120)
    assert orthonormality(T.V) <= 1e-12
    ritz = torch.linalg.eigvalsh(T.T)
    assert int(((ritz - 10).abs() < 0.1).sum()) == 1
    assert int(((ritz + 8).abs() < 0.1).sum()) == 1
    torch.testing.assert_close(T.V.mT @ A @ T.V, T.T, rtol=0, atol=1e-12)
    tall = lanczos(diag(*range(99), 1000), steps=60)
    assert int((torch.linalg.eigvalsh(tall.T) > 500).sum()) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [-14, -7, 7, 14])
def test_scaling_the_operator_scales_the_values(dtype, exponent):
    scale, eps = 10.0**exponent, torch.finfo(dtype).eps
    for values in (torch.linspace(-1, 2, 150), torch.cat([torch.zeros(100), torch.linspace(-5, 3, 50)])):
        A = rotated(values.double(), generator(), dtype)
        one, two = eigsh(A, 5, which="SA"), eigsh(scale * A, 5, which="SA")
        assert one.status is two.status is Status.CONVERGED
        torch.testing.assert_close(two.w / scale, one.w, rtol=0, atol=64 * eps * float(values.abs().max()))


def test_shifting_the_operator_shifts_the_values():
    A = MatrixOperator(rotated(torch.linspace(-1, 2, 80).double(), generator()))
    moved = A + 5 * IdentityOperator(80, torch.float64)
    torch.testing.assert_close(eigsh(moved, 4, which="SA").w, eigsh(A, 4, which="SA").w + 5, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", WHICH)
def test_smallest_sizes(dtype, which):
    for n in (1, 2, 3):
        values = torch.arange(-1.0, n - 1, dtype=dtype)
        for k in range(1, n + 1):
            w, V = eigsh(torch.diag(values), k, which=which)
            assert V.shape == (n, k)
            torch.testing.assert_close(w.abs().sort().values, wanted(values, k, which).abs().sort().values)
        full = eigsh(torch.diag(values), n, which=which, ncv=n)
        torch.testing.assert_close(full.w, values, rtol=0, atol=1e-6)


def test_negative_definite_residuals_are_not_negative():
    found = eigsh(-rotated(torch.linspace(1, 9, 60).double(), generator()), 3, which="LA")
    assert found.success
    assert bool((found.residuals >= 0).all())
    torch.testing.assert_close(found.w, wanted(-torch.linspace(1, 9, 60).double(), 3, "LA"))


@pytest.mark.parametrize("which", ["LA", "SA", "LM", "BE"])
def test_scipy_agrees(which):
    A = MatrixOperator(rotated(randn(400, seed=3), generator(4)))
    theirs = np.sort(sla.eigsh(A.to_scipy(), 7, which=which, return_eigenvectors=False))
    np.testing.assert_allclose(eigsh(A, 7, which=which).w, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("which", ["LA", "SA", "BE", "SM"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_restarts_in_a_small_space(which, dtype):
    values = torch.cat([torch.tensor([-0.03, 0.01, 0.02]), torch.linspace(0.2, 1, 200), torch.linspace(-0.9, -0.2, 97)])
    A = MatrixOperator(rotated(values.double(), generator(), dtype))
    found = eigsh(A, 3, which=which, ncv=24, maxiter=400)
    assert found.success
    assert found.n_matvec > 48
    torch.testing.assert_close(found.w.double(), wanted(values.double(), 3, which), rtol=0, atol=20 * 24 * 1e-7)


def test_one_product_a_block():
    calls = []
    A = rotated(torch.linspace(-1, 2, 120).double(), generator())

    def matmat(V):
        calls.append(V.shape[1])
        return A @ V

    found = eigsh(FunctionOperator((120, 120), matmat=matmat, dtype=torch.float64), 4, which="SA")
    assert found.success
    assert set(calls) == {4}
    assert found.n_matvec == sum(calls)


def test_the_start_is_private_and_repeatable():
    A = rotated(torch.linspace(-1, 2, 90).double(), generator())
    state = torch.get_rng_state()
    one, two = eigsh(A, 3, which="SA"), eigsh(A, 3, which="SA")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.V, two.V)
    other = eigsh(A, 3, which="SA", rng=generator(7))
    assert not torch.equal(one.V, other.V)
    torch.testing.assert_close(one.V, other.V, rtol=0, atol=1e-9)


def test_a_guess_helps_and_a_misleading_one_does_no_harm():
    values = torch.linspace(-1, 2, 300).double()
    A = torch.diag(values)
    cold = eigsh(A, 1, which="SA")
    close = eigsh(A, 1, which="SA", v0=torch.eye(300, dtype=torch.float64)[:, 0] + 1e-9 * randn(300))
    wrong = eigsh(A, 1, which="SA", v0=torch.eye(300, dtype=torch.float64)[:, 150])
    assert close.success
    assert close.n_matvec < cold.n_matvec
    assert wrong.success
    assert float(wrong.w) == pytest.approx(-1)
    kept = eigsh(A.float(), 2, v0=randn(300))  # a float64 guess for a float32 operator
    assert kept.w.dtype == kept.V.dtype == torch.float32


def test_half_precision_is_kept():
    found = eigsh(torch.diag(torch.arange(1.0, 9.0)).bfloat16(), 2, which="LA")
    assert found.w.dtype == found.V.dtype == torch.bfloat16
    torch.testing.assert_close(found.w.float(), torch.tensor([7.0, 8.0]), rtol=0.02, atol=0)


def test_noise_is_reported_and_not_called_converged():
    A, g = rotated(torch.linspace(0, 1, 150).double(), generator()), generator(1)
    noisy = FunctionOperator(
        (150, 150),
        matmat=lambda V: A @ V + 1e-5 * torch.randn(150, V.shape[1], generator=g, dtype=torch.float64) / 150**0.5,
        dtype=torch.float64,
    )
    found = eigsh(noisy, 2, which="LA")
    assert found.status is Status.STALLED
    assert 1e-6 < found.noise < 1e-4
    assert bool((found.residuals < 1e-4).all())
    assert float((found.w - torch.tensor([148 / 149, 1.0]).double()).abs().max()) < 1e-5
    assert found.n_matvec <= 150 + 4
    assert eigsh(noisy, 2, which="LA", tol=1e-3).success
    roll = eigsh(FunctionOperator((150, 150), matmat=lambda V: V.roll(1, 0), dtype=torch.float64), 2)
    assert roll.status is Status.STALLED
    assert roll.noise > 0.1


def test_values_that_are_not_finite_are_flagged():
    found = eigsh(FunctionOperator((9, 9), matmat=lambda V: V * torch.nan, dtype=torch.float64), 2)
    assert found.status is Status.NONFINITE
    assert found.w.shape == (2,)
    assert found.V.shape == (9, 2)
    assert not bool(found.converged.any())
    late = []

    def fails_late(V):
        late.append(V)
        return V * torch.linspace(0, 1, 99, dtype=torch.float64)[:, None] * (1.0 if len(late) < 6 else math.inf)

    operator = FunctionOperator((99, 99), matmat=fails_late, dtype=torch.float64)
    assert eigsh(operator, 1).status is Status.NONFINITE
    late.clear()
    T = lanczos(operator, steps=20)
    assert (T.status, T.alpha.shape, T.V.shape) == (Status.NONFINITE, (5,), (99, 5))


def test_giving_up_is_reported():
    A = torch.diag(1 / torch.arange(1, 401, dtype=torch.float64))
    found = eigsh(A, 2, which="SA", ncv=10, maxiter=3)
    assert found.status is Status.MAX_ITER
    assert not bool(found.converged.any())
    w, V = found
    torch.testing.assert_close((A @ V - V * w).norm(dim=0), found.residuals, rtol=1e-6, atol=1e-15)


@pytest.fixture(params=[1, 8])
def stride(request, monkeypatch):
    """As on a CPU, and as on a GPU, whose coefficients the host sees only every few steps."""
    monkeypatch.setitem(lanczos_module.LOOK_EVERY, "cpu", request.param)


@pytest.mark.usefixtures("stride")
def test_lanczos_is_the_recurrence():
    A, start = rotated(torch.linspace(-1, 2, 50).double(), generator()), randn(50, 3)
    run = lanczos(A, start, steps=20)
    V, last = run.V, torch.zeros(20, dtype=torch.float64).index_fill(0, torch.tensor(19), 1.0)
    left = A @ V - V @ run.T
    torch.testing.assert_close((left[..., :-1]).abs().amax(), torch.tensor(0.0).double(), rtol=0, atol=1e-13)
    torch.testing.assert_close((left @ last).norm(dim=-1), run.beta[:, -1], rtol=1e-12, atol=0)
    torch.testing.assert_close(V[:, :, 0], (start / start.norm(dim=0)).mT, rtol=1e-14, atol=1e-14)


@pytest.mark.usefixtures("stride")
@pytest.mark.parametrize("dtype", DTYPES)
def test_lanczos_survives_breakdown_and_finds_everything(dtype):
    eps = torch.finfo(dtype).eps
    for values in ([1.0] * 10 + [50.0] * 10, [0.0] * 20, [3.0] * 20, [0.0] * 15 + [1.0, 2.0, 3.0, 4.0, 5.0]):
        A = rotated(torch.tensor(values, dtype=torch.float64), generator(), dtype)
        T = lanczos(A, steps=40)
        assert T.alpha.shape == (20,)
        assert T.alpha.dtype == torch.float64
        assert T.V.dtype == dtype
        assert T.status is Status.CONVERGED
        assert orthonormality(T.V) <= 100 * eps
        assert int((T.beta == 0).sum()) >= 20 / len(set(values))
        found = torch.linalg.eigvalsh(T.T)
        assert float((found - torch.tensor(values).double()).abs().max()) <= 100 * eps * (max(values) or 1)


def test_lanczos_stops_the_coupling_at_an_invariant_subspace():
    T = lanczos(diag(1, 2, 3, 4, 5), torch.tensor([1.0, 1, 0, 0, 0], dtype=torch.float64), steps=4)
    assert T.beta[1] == 0
    torch.testing.assert_close(torch.linalg.eigvalsh(T.T[:2, :2]), torch.tensor([1.0, 2.0], dtype=torch.float64))


def test_many_starts_run_side_by_side():
    A = MatrixOperator(rotated(torch.cat([torch.zeros(20), torch.linspace(1, 2, 20)]).double(), generator()))
    starts = torch.stack([randn(40, seed=1), torch.linalg.eigh(A.matrix).eigenvectors[:, -1], randn(40, seed=2)], 1)
    calls = A.n_matvec
    together = lanczos(A, starts, steps=12)
    assert A.n_matvec - calls == together.n_matvec == 36
    assert together.T.shape == (3, 12, 12)
    assert together.V.shape == (3, 40, 12)
    for i in (0, 2):
        alone = lanczos(A, starts[:, i], steps=12)
        torch.testing.assert_close(together.alpha[i], alone.alpha, rtol=0, atol=1e-10)
        torch.testing.assert_close(together.beta[i], alone.beta, rtol=0, atol=1e-10)
    assert float(together.beta[1, 0]) == 0
    assert float(together.alpha[1, 0]) == pytest.approx(2)


def test_squared_first_components_are_the_moments_of_the_start():
    values, v = torch.rand(80, generator=generator()).double() - 0.4, randn(80, seed=5)
    T = lanczos(torch.diag(values), v, steps=9)
    nodes, S = torch.linalg.eigh(T.T)
    weights = S[0] ** 2
    assert float(weights.sum()) == pytest.approx(1)
    for degree in range(18):
        exact = float((v**2 * values**degree).sum() / (v**2).sum())
        assert float((weights * nodes**degree).sum()) == pytest.approx(exact, rel=1e-10, abs=1e-14)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda A: eigsh(A, 0), "expected 1 ≤ k ≤ n = 6, got 0"),
        (lambda A: eigsh(A, 7), "expected 1 ≤ k ≤ n = 6, got 7"),
        (lambda A: eigsh(A, 2, which="XX"), "expected which in LM, SM, LA, SA, BE, got 'XX'"),
        (lambda A: eigsh(A, 2, ncv=2), "expected k < ncv ≤ n = 6, got 2"),
        (lambda A: eigsh(A, 2, ncv=9), "expected k < ncv ≤ n = 6, got 9"),
        (lambda A: eigsh(A, 2, tol=-1.0), "tol: expected a finite number ≥ 0, got -1.0"),
        (lambda A: eigsh(A, 2.5), "expected k as an integer, got 2.5"),
        (lambda A: eigsh(A, True), "expected k as an integer, got True"),
        (lambda A: eigsh(A, "2"), "expected k as an integer, got '2'"),
        (lambda A: eigsh(A, 2, ncv=4.0), "expected ncv as an integer, got 4.0"),
        (lambda A: eigsh(A, 2, maxiter=math.inf), "expected maxiter as an integer, got inf"),
        (lambda A: eigsh(A, 2, block_size=1.5), "expected block_size as an integer, got 1.5"),
        (lambda A: lanczos(A, steps=2.5), "expected steps as an integer, got 2.5"),
        (lambda A: eigsh(A, 2, maxiter=-1), "expected maxiter ≥ 0"),
        (lambda A: eigsh(A, 2, block_size=0), "expected block_size ≥ 1"),
        (lambda A: eigsh(A, 2, v0=torch.zeros(6).double()), "expected a start that is finite and not zero"),
        (lambda A: eigsh(A, 2, v0=torch.full((6,), torch.nan)), "expected a start that is finite and not zero"),
        (lambda A: eigsh(A, 2, v0=torch.ones(5)), r"expected a start of shape \(6,\) or \(6, c\), got \(5,\)"),
        (lambda A: eigsh(A, 2, v0=torch.ones(6, device="meta")), "expected a start on cpu, got meta"),
        (lambda A: eigsh(torch.ones(3, 2)), "expected a square operator"),
        (lambda A: eigsh(torch.eye(6).roll(1, 0), 1), "expected a symmetric operator"),
        (lambda A: lanczos(A, steps=0), "expected steps ≥ 1, got 0"),
        (lambda A: lanczos(A, torch.zeros(6)), "expected a start that is finite and not zero"),
    ],
)
def test_mistakes_are_named_before_any_work(call, message):
    A = DiagonalOperator(torch.arange(6.0))
    with pytest.raises(ValueError, match=message):
        call(A)
    assert A.n_matvec == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gpu_gives_the_same_answer(dtype):
    A = rotated(torch.linspace(-1, 2, 200).double(), generator(), dtype)
    here, there = eigsh(A, 4, which="SA"), eigsh(A.cuda(), 4, which="SA")
    assert there.V.is_cuda
    assert there.success
    torch.testing.assert_close(there.w.cpu(), here.w, rtol=0, atol=64 * torch.finfo(dtype).eps)
    v0 = torch.randn(200, generator=generator(), dtype=dtype)
    T, T_there = lanczos(A, v0, steps=20), lanczos(A.cuda(), v0.cuda(), steps=20)
    torch.testing.assert_close(T_there.alpha[:8], T.alpha[:8], rtol=0, atol=1e-4 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("module", ["lanczos"])
def test_the_examples_run(module):
    tried = doctest.testmod(importlib.import_module(f"ot_newton.{module}"))
    assert tried.attempted > 0
    assert tried.failed == 0
