"""Trace estimates against dense traces, and their standard errors against the spread over repetitions."""

import doctest
import importlib
import math

import numpy as np
import pytest
import scipy.sparse.linalg as sla
import scipy.stats
import torch
from spectra import rotated
from torch import Tensor

from ot_newton.operators import FunctionOperator, MatrixOperator, aslinearoperator
from ot_newton.status import Status
from ot_newton.trace import TraceEstimate, student, trace

METHODS = ["hutchinson", "hutch++", "xtrace"]
DTYPES = [torch.float64, torch.float32]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SPECTRA = {
    "indefinite": torch.linspace(-1, 2, 120),
    "trace zero": torch.cat([torch.ones(60), -torch.ones(60)]),
    "geometric": 0.8 ** torch.arange(120.0),
    "power": 1 / (1 + torch.arange(120.0)) ** 2,
    "rank 1": torch.cat([torch.ones(1), torch.zeros(119)]),
    "rank 5": torch.cat([torch.arange(1.0, 6.0), torch.zeros(115)]),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("budget", [8, 30])
def test_intervals_hold_at_their_rate(method, name, budget):
    values, repetitions = SPECTRA[name].double(), 200
    A, exact = MatrixOperator(rotated(values, generator())), float(values.sum())
    runs = [trace(A, method=method, budget=budget, rng=generator(s)) for s in range(repetitions)]
    hits = sum(low <= exact <= high for low, high in (run.interval(0.95) for run in runs))
    assert hits >= scipy.stats.binom.ppf(1e-4, repetitions, 0.95)
    errors = torch.tensor([run.value - exact for run in runs])
    spread = float(errors.square().mean().sqrt())
    claimed = math.sqrt(sum(run.standard_error**2 for run in runs) / repetitions)
    rounding = 1e-12 * float(values.abs().sum())
    assert 0.85 * spread <= claimed <= 1.7 * spread + rounding
    assert abs(float(errors.mean())) <= 4 * spread / math.sqrt(repetitions) + rounding


@pytest.mark.parametrize("method", ["hutch++", "xtrace"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_low_rank_is_exact_to_rounding(method, dtype):
    eps = torch.finfo(dtype).eps
    matrices = (
        torch.ones(50, 50),
        torch.zeros(50, 50),
        rotated(torch.cat([torch.tensor([-4.0, 1.0, 7.0]), torch.zeros(47)]).double(), generator()),
    )
    for matrix in matrices:
        estimate = trace(matrix.to(dtype), method=method, budget=24)
        exact = float(matrix.double().trace())
        assert estimate.status is Status.CONVERGED
        assert abs(estimate.value - exact) <= 50 * eps * 50
        assert estimate.standard_error <= 50 * eps * 50
        low, high = estimate.interval(0.999)
        assert low <= exact <= high


def test_decaying_spectra_reward_the_better_methods():
    A = rotated(0.7 ** torch.arange(200, dtype=torch.float64), generator())
    simple, plus, best = (trace(A, method=method, budget=60) for method in METHODS)
    assert plus.standard_error < 1e-2 * simple.standard_error
    assert best.standard_error < 1e-1 * plus.standard_error


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_multiples_of_the_identity_have_no_error(method, dtype):
    estimate = trace(-3 * torch.eye(400, dtype=dtype), method=method, budget=12)
    eps = torch.finfo(dtype).eps
    assert estimate.value == pytest.approx(-1200, rel=20 * eps)
    assert estimate.standard_error <= 1200 * 20 * eps


def test_equal_estimates_are_not_taken_for_certainty():
    swap = torch.zeros(64, 64, dtype=torch.float64)
    swap[0, 1] = swap[1, 0] = 1.0
    signs = torch.tensor([1.0, 1.0] * 32, dtype=torch.float64)
    assert float(signs @ swap @ signs) == float(-signs @ swap @ -signs) == 2.0  # random signs agree on a wrong answer
    for seed in range(50):
        estimate = trace(swap, method="hutchinson", budget=2, rng=generator(seed))
        assert estimate.standard_error > 0
        low, high = estimate.interval(0.999)
        assert low <= 0 <= high
    diagonal = torch.diag(torch.linspace(1, 2, 64, dtype=torch.float64))
    assert trace(diagonal, method="hutchinson", budget=20).standard_error > 0


@pytest.mark.parametrize("method", METHODS)
def test_products_are_counted_and_come_in_blocks(method):
    A, calls = rotated(torch.linspace(-1, 2, 70).double(), generator()), []

    def matmat(V: Tensor) -> Tensor:
        calls.append(V.shape[1])
        return A @ V

    operator = FunctionOperator((70, 70), matmat=matmat, dtype=torch.float64)
    estimate = trace(operator, method=method, budget=32)
    assert calls == {"hutchinson": [32], "hutch++": [10, 10, 12], "xtrace": [16, 16]}[method]
    assert estimate.n_matvec == operator.n_matvec == 32
    odd = trace(operator, method=method, budget=31)
    assert odd.n_matvec == (30 if method == "xtrace" else 31)
    calls.clear()
    exact = trace(operator, method=method, budget=70)
    assert (exact.n_matvec, sum(calls)) == (70, 70)
    assert exact.value == pytest.approx(float(A.trace()), rel=1e-13)
    assert exact.standard_error <= 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_smallest_sizes(method):
    for n in (1, 2, 5):
        estimate = trace(torch.diag(torch.arange(1.0, n + 1)), method=method)
        assert (estimate.value, estimate.n_matvec) == (n * (n + 1) / 2, n)
    least = {"hutchinson": 1, "hutch++": 3, "xtrace": 4}[method]
    A = rotated(torch.linspace(-1, 1, 7).double(), generator())
    estimate = trace(A, method=method, budget=least)
    assert estimate.n_matvec == least
    assert estimate.standard_error > 0
    low, high = estimate.interval()
    assert low <= 0 <= high


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-14, 1e14])
def test_scaling_the_operator_scales_everything(method, dtype, scale):
    A = rotated(torch.linspace(-1, 2, 90).double(), generator(), dtype)
    one, two = trace(A, method=method), trace(scale * A, method=method)
    rel = 1e4 * torch.finfo(dtype).eps
    assert two.value / scale == pytest.approx(one.value, rel=rel)
    assert two.standard_error / scale == pytest.approx(one.standard_error, rel=rel)


@pytest.mark.parametrize("method", METHODS)
def test_scipy_operators_and_the_private_start(method):
    A = rotated(torch.linspace(0.5, 2, 80).double(), generator())
    state = torch.get_rng_state()
    ours = trace(A, method=method, budget=20)
    theirs = trace(aslinearoperator(sla.aslinearoperator(A.numpy())), method=method, budget=20)
    assert torch.equal(torch.get_rng_state(), state)
    assert theirs.value == pytest.approx(ours.value, rel=1e-12)
    assert trace(A, method=method, budget=20) == ours
    assert trace(A, method=method, budget=20, rng=generator(3)).value != ours.value
    assert abs(ours.value - np.trace(A.numpy())) <= 5 * ours.standard_error


def test_intervals_are_those_of_student():
    estimate = TraceEstimate(10.0, 2.0, 5, 6)
    np.testing.assert_allclose(estimate.interval(0.9), scipy.stats.t.interval(0.9, 5, 10, 2), rtol=1e-12)
    np.testing.assert_allclose(TraceEstimate(0.0, 1.0, math.inf, 9).interval(), scipy.stats.norm.interval(0.95))
    low, high = TraceEstimate(10.0, 2.0, 5, 6, quadrature_error=3.0).interval(0.9)
    assert high - low == pytest.approx(2 * (2 * student(0.9, 5) + 3))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("after", [0, 1])
def test_values_that_are_not_finite_are_flagged(method, after):
    calls = []

    def matmat(V: Tensor) -> Tensor:
        calls.append(V)
        return V * (math.nan if len(calls) > after else 1.0)

    operator = FunctionOperator((99, 99), matmat=matmat, dtype=torch.float64)
    estimate = trace(operator, method=method, budget=12)
    if after and method == "hutchinson":
        assert estimate.value == pytest.approx(99)  # a single product
        return
    assert estimate.status is Status.NONFINITE
    assert math.isnan(estimate.value)
    assert math.isnan(estimate.standard_error)
    assert estimate.n_matvec == operator.n_matvec
    assert trace(torch.full((3, 3), math.inf), method=method).status is Status.NONFINITE


@pytest.mark.parametrize("method", METHODS)
def test_half_precision_operators_are_summed_in_full(method):
    A = (3 * torch.eye(300)).bfloat16()
    estimate = trace(A, method=method, budget=30)
    low, high = estimate.interval()
    assert low <= 900 <= high
    assert estimate.value == pytest.approx(900, rel=0.02)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda A: trace(A, method="hutch"), r"expected a method in hutchinson, hutch\+\+, xtrace, got 'hutch'"),
        (lambda A: trace(A, method="xtrace", budget=3), "expected a budget of at least 4 products for xtrace, got 3"),
        (lambda A: trace(A, method="hutch++", budget=2), "expected a budget of at least 3 products"),
        (lambda A: trace(A, method="hutchinson", budget=0), "expected a budget of at least 1 products"),
        (lambda A: trace(torch.ones(3, 2)), "expected a square operator"),
        (lambda A: trace(torch.eye(6).roll(1, 0)), "expected a symmetric operator"),
        (lambda A: TraceEstimate(1.0, 1.0, 3, 4).interval(1.0), "expected 0 < confidence < 1, got 1"),
    ],
)
def test_mistakes_are_named_before_any_work(call, message):
    A = MatrixOperator(torch.eye(6))
    with pytest.raises(ValueError, match=message):
        call(A)
    assert A.n_matvec == 0


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gpu_gives_the_same_answer(method, dtype):
    A = rotated(torch.linspace(-1, 2, 200).double(), generator(), dtype)
    here, there = (trace(B, method=method, budget=30) for B in (A, A.cuda()))
    rel = 1e-3 if dtype == torch.float32 else 1e-10
    assert there.value == pytest.approx(here.value, rel=rel)
    assert there.standard_error == pytest.approx(here.standard_error, rel=rel)


@pytest.mark.parametrize("module", ["trace"])
def test_the_examples_run(module):
    tried = doctest.testmod(importlib.import_module(f"ot_newton.{module}"))
    assert tried.attempted > 0
    assert tried.failed == 0
