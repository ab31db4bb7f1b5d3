"""Spectral densities, shares and counts against dense eigenvalues, and their bands against their own promise."""

import doctest
import importlib
import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse.linalg as sla
import scipy.stats
import torch
from spectra import rotated
from torch import Tensor

from ot_newton.block_krylov import gaussian as gaussian_vectors
from ot_newton.density import SpectralDensity, count_below, spectral_density
from ot_newton.operators import DiagonalOperator, FunctionOperator, MatrixOperator, aslinearoperator
from ot_newton.quadrature import gaussian, gaussian_error, polynomial_error, share_below
from ot_newton.status import Status

DTYPES = [torch.float64, torch.float32]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mixed() -> Tensor:
    """An isolated negative value, a band, a multiple value, and a loose upper end (200,)."""
    parts = (
        torch.tensor([-3.0]),
        torch.linspace(0, 1, 150),
        torch.full((20,), 2.0),
        3 * torch.rand(29, generator=generator(1)),
    )
    return torch.cat(parts).double()


def smoothed(values: Tensor, x: Tensor, sigma: float) -> Tensor:
    return torch.from_numpy(scipy.stats.norm.pdf(x[:, None].numpy(), values.numpy(), sigma)).mean(1)


def binomial_floor(rate: float, repetitions: int) -> float:
    """What a rate may come out as in so many repetitions, but for one case in ten thousand."""
    return float(scipy.stats.binom.ppf(1e-4, repetitions, rate)) / repetitions


def repeated(values: Tensor, repetitions: int, *, n_probes: int, steps: int) -> list[SpectralDensity]:
    """As many independent densities of diag(values), all probes of which advance side by side."""
    whole = spectral_density(DiagonalOperator(values), n_probes=repetitions * n_probes, steps=steps, rng=generator(11))
    names = ("nodes", "weights", "alpha", "beta", "exact")
    parts = zip(*(getattr(whole, name).split(n_probes) for name in names), strict=True)
    return [replace(whole, **dict(zip(names, part, strict=True))) for part in parts]


@pytest.mark.parametrize(("n_probes", "steps", "confidence"), [(8, 24, 0.95), (3, 32, 0.7), (1, 48, 0.95)])
def test_the_bands_hold_at_their_rate_over_repetitions(n_probes, steps, confidence):
    values, repetitions = mixed(), 200
    x = torch.tensor([-3.0, -2.9, -1.0, 0.0, 0.3, 0.5, 1.1, 1.5, 2.0, 2.4, 2.95], dtype=torch.float64)
    least, most = (f(values, x[:, None]).double().mean(1) for f in (torch.lt, torch.le))
    density, cdf = torch.zeros(len(x)), torch.zeros(len(x))
    for spectrum in repeated(values, repetitions, n_probes=n_probes, steps=steps):
        band = spectrum.density(x, confidence=confidence)
        true = smoothed(values, x, spectrum.sigma)
        density += (band.lower <= true) & (true <= band.upper)
        shares = spectrum.cdf(x, confidence=confidence)
        cdf += (shares.lower <= most + 1e-12) & (least - 1e-12 <= shares.upper)
    assert float(density.min()) / repetitions >= binomial_floor(confidence, repetitions)
    assert float(cdf.min()) / repetitions >= binomial_floor(confidence, repetitions)
    assert float(density.min()) < repetitions  # a band that never fails would be too wide


def test_the_band_is_narrow_where_the_spectrum_is_smooth(monkeypatch):
    values = torch.linspace(-1, 1, 4000, dtype=torch.float64)
    spectrum = spectral_density(DiagonalOperator(values), steps=48)
    x = torch.linspace(-0.8, 0.8, 30, dtype=torch.float64)
    band = spectrum.density(x)
    variance = 0.5 / (2 * spectrum.sigma * math.sqrt(math.pi)) - 0.5**2  # of the kernel over a density of 0.5
    sampling = 2 * float(scipy.stats.t.ppf(0.9775, 7)) * math.sqrt(2 * variance / (4002 * 8))
    assert float((band.upper - band.lower).mean()) < 1.1 * sampling  # so the quadrature adds less than a tenth
    torch.testing.assert_close(band.value, torch.full_like(x, 0.5), rtol=0, atol=sampling)  # nearly 5 standard errors
    shares = spectrum.cdf(x)
    torch.testing.assert_close(shares.value, (x + 1) / 2, rtol=0, atol=0.03)
    grid = spectrum.density()
    monkeypatch.setattr("ot_newton.density._MOST_ENTRIES", 10_000)
    pieces = spectrum.density()
    torch.testing.assert_close(pieces.upper, grid.upper, rtol=1e-10, atol=1e-14)
    assert float(torch.trapezoid(grid.value, grid.x)) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("steps", [1, 2, 5, 11])
@pytest.mark.parametrize("block_size", [None, 2])
def test_moments_are_exact_while_steps_exceed_the_degree(steps, block_size):
    values = 2 * torch.rand(60, generator=generator(3), dtype=torch.float64) - 0.8
    A = rotated(values, generator())
    V = gaussian_vectors(60, 5, generator(7))
    V = V / V.norm(dim=0)
    spectrum = spectral_density(A, n_probes=5, steps=steps, block_size=block_size, rng=generator(7))
    product = V
    for degree in range(2 * steps):
        exact = float((V * product).sum(0).mean())
        got = float((spectrum.weights * spectrum.nodes**degree).sum(1).mean())
        assert got == pytest.approx(exact, rel=1e-11, abs=1e-13)
        assert spectrum.trace_of(lambda t, degree=degree: t**degree).value == pytest.approx(60 * exact, abs=1e-11)
        product = A @ product
    torch.testing.assert_close(spectrum.weights.sum(1), torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-13)


def test_weights_are_squared_first_components():
    A = rotated(1 + torch.rand(100, generator=generator(2), dtype=torch.float64), generator())
    spectrum = spectral_density(A, n_probes=400, steps=20, rng=generator(5))
    assert float((spectrum.weights.sum(1) - 1).abs().max()) <= 1e-13
    for power in (1, 2):
        estimate = spectrum.trace_of(lambda t, power=power: t**power)
        exact = float((torch.linalg.eigvalsh(A) ** power).sum())
        assert abs(estimate.value - exact) <= 4 * estimate.standard_error
        assert estimate.standard_error < 0.003 * exact


def test_every_probe_lies_within_the_bounds_of_its_quadrature():
    values = mixed()
    V = gaussian_vectors(200, 6, generator(9))
    shares = (V**2 / (V**2).sum(0)).mT  # (6, 200)
    spectrum = spectral_density(torch.diag(values), n_probes=6, steps=24, rng=generator(9))
    nodes, weights, none = spectrum.nodes, spectrum.weights, torch.zeros(1, dtype=torch.bool)
    x = torch.linspace(-3.5, 3.5, 141, dtype=torch.float64)
    below = shares @ (values[:, None] < x).double()
    low, high = share_below(nodes, weights, x, spectrum.exact, spectrum.rounding)
    assert bool(((low <= below + 1e-12) & (below <= high + 1e-12)).all())
    for sigma in (0.02, 0.25, 1.0):
        kernel = gaussian(values[:, None] - x, sigma)
        for i in range(6):
            exact = shares[i] @ kernel
            rule = weights[i] @ gaussian(nodes[i][:, None] - x, sigma)
            under, over = gaussian_error(nodes[i : i + 1], weights[i : i + 1], x, sigma, none)
            rounding = 1e-12 / sigma
            assert bool(((rule - under - rounding <= exact) & (exact <= rule + over + rounding)).all())
            smooth = polynomial_error(x, sigma, (-3.0, 3.0), 24)
            assert bool(((rule - exact).abs() <= smooth + rounding).all())
    assert bool(polynomial_error(x, 0.02, (-3.0, 3.0), 24).isinf().all())
    assert float(polynomial_error(x, 1.0, (-3.0, 3.0), 24).max()) < 1e-12  # a bound that says something


def test_the_polynomial_bound_is_the_tail_of_a_chebyshev_series():
    x, sigma, steps = torch.tensor([0.3, 1.4], dtype=torch.float64), 0.2, 8
    for i, got in enumerate(polynomial_error(x, sigma, (-1.0, 2.0), steps)):
        series = np.polynomial.chebyshev.chebinterpolate(
            lambda s, centre=float(x[i]): scipy.stats.norm.pdf(0.5 + 1.5 * s, centre, sigma), 200
        )
        assert float(got) == pytest.approx(2 * np.abs(series[2 * steps :]).sum(), rel=1e-8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["3 I", "zero", "ones", "rank 2", "one row", "all steps"])
def test_invariant_subspaces_make_the_rules_exact(name, dtype):
    A = {
        "3 I": 3 * torch.eye(100),
        "zero": torch.zeros(50, 50),
        "ones": torch.ones(10, 10),
        "rank 2": rotated(torch.cat([torch.tensor([-1.0, 5.0]), torch.zeros(28)]).double(), generator()),
        "one row": torch.full((1, 1), -2.0),
        "all steps": torch.diag(torch.arange(12.0)),
    }[name].to(dtype)
    n, values = len(A), torch.linalg.eigvalsh(A.double())
    spectrum = spectral_density(A, rng=generator(4))
    assert spectrum.status is Status.CONVERGED
    assert bool(spectrum.exact.all())
    assert spectrum.sigma > 0
    distance = (spectrum.nodes[:, :, None] - values).abs().amin(2)
    assert float((distance * (spectrum.weights > 1e-10)).max()) <= 100 * torch.finfo(dtype).eps * float(
        values.abs().max()
    )
    for x in (-4.0, -1.5, 2.5, 7.5, 20.0):  # not an eigenvalue of any
        count = spectrum.count_below(x)
        true = int((values < x).sum())
        assert count.lower <= true <= count.upper
        if true in (0, n):
            assert count.lower == count.value == count.upper == true
    assert bool(spectrum.density().value.isfinite().all())
    low, high = spectrum.trace_of(lambda t: torch.ones_like(t)).interval()
    assert low - 1e-9 <= n <= high + 1e-9


def test_an_eigenvalue_at_the_point_itself_is_left_open():
    spectrum = spectral_density(3 * torch.eye(100, dtype=torch.float64))
    assert (spectrum.count_below(3.0).lower, spectrum.count_below(3.0).upper) == (0, 100)
    low_rank = rotated(torch.cat([-torch.ones(3), torch.zeros(97)]).double(), generator())
    count = count_below(low_rank, 0.0)
    assert count.lower <= 3
    assert count.upper == 100
    count = count_below(low_rank, -0.5, n_probes=200)
    assert 1 <= count.lower <= 3 <= count.upper <= 4


@pytest.mark.parametrize("n_probes", [1, 8])
@pytest.mark.parametrize("negative", [1, 5, 40])
def test_counts_hold_at_their_rate(negative, n_probes):
    g, repetitions = generator(8), 200
    values = torch.cat([-1 - torch.rand(negative, generator=g), 0.5 + torch.rand(120 - negative, generator=g)]).double()
    counts = [s.count_below(0.0, confidence=0.9) for s in repeated(values, repetitions, n_probes=n_probes, steps=40)]
    assert all(c.lower <= c.value <= c.upper for c in counts)
    hits = sum(c.lower <= negative <= c.upper for c in counts)
    assert hits / repetitions >= binomial_floor(0.9, repetitions)


def test_a_count_beside_many_zeros_shows_its_width():
    g = generator(2)
    values = torch.cat([-0.1 - torch.rand(50, generator=g), torch.zeros(100), torch.rand(850, generator=g)]).double()
    count = count_below(torch.diag(values), -0.05, n_probes=20, steps=80)
    assert count.lower <= 50 <= count.upper
    assert 0 < count.upper - count.lower < 150
    assert count_below(torch.diag(values), -2.0).upper == 0
    assert count_below(torch.diag(values), 2.0).lower == 1000


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-14, 1e14])
def test_scaling_and_shifting_the_operator_move_the_density(scale, dtype):
    A = rotated(torch.linspace(-1, 2, 90).double(), generator(), dtype)
    one, two = (spectral_density(c * A, steps=20) for c in (1.0, scale))
    moved = spectral_density(A + 5 * torch.eye(90, dtype=dtype), steps=20)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(two.nodes / scale, one.nodes, rtol=0, atol=1e4 * eps)
    torch.testing.assert_close(moved.nodes, one.nodes + 5, rtol=0, atol=1e5 * eps)
    x = torch.linspace(-1, 2, 9, dtype=torch.float64)
    torch.testing.assert_close(two.density(scale * x).value * scale, one.density(x).value, rtol=0, atol=1e5 * eps)
    assert two.nodes.dtype == two.density(x).value.dtype == torch.float64


def test_products_are_counted_and_come_in_blocks():
    A, calls = rotated(torch.linspace(-1, 2, 70).double(), generator()), []

    def matmat(V: Tensor) -> Tensor:
        calls.append(V.shape[1])
        return A @ V

    operator = FunctionOperator((70, 70), matmat=matmat, dtype=torch.float64)
    whole = spectral_density(operator, n_probes=6, steps=10)
    assert (calls, whole.n_matvec, operator.n_matvec) == ([6] * 10, 60, 60)
    calls.clear()
    parts = spectral_density(operator, n_probes=6, steps=10, block_size=4)
    assert (calls, parts.n_matvec) == ([4] * 10 + [2] * 10, 60)
    torch.testing.assert_close(parts.nodes, whole.nodes, rtol=0, atol=1e-10)
    calls.clear()
    whole.density(), whole.cdf(), whole.count_below(0.3), whole.trace_of(torch.exp)
    assert not calls


def test_scipy_operators_and_the_private_start():
    values = torch.linspace(0.5, 2, 80).double()
    A = rotated(values, generator())
    state = torch.get_rng_state()
    ours, theirs = spectral_density(A), spectral_density(aslinearoperator(sla.aslinearoperator(A.numpy())))
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(theirs.nodes, ours.nodes, rtol=0, atol=1e-10)
    assert torch.equal(spectral_density(A).nodes, ours.nodes)
    assert not torch.equal(spectral_density(A, rng=generator(3)).nodes, ours.nodes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_functions_of_the_operator_have_their_traces(dtype):
    values = torch.logspace(-2, 0, 300).double()
    A = rotated(values, generator(), dtype)
    spectrum = spectral_density(A, n_probes=20, steps=60)
    for f in (torch.exp, torch.log, torch.sqrt, torch.reciprocal, torch.cos):
        estimate, exact = spectrum.trace_of(f), float(f(values).sum())
        low, high = estimate.interval(0.99)
        assert low <= exact <= high
        assert estimate.standard_error < 0.05 * abs(exact)
        assert estimate.n_matvec == 1200
    low, high = spectrum.logdet().interval(0.99)
    assert low <= float(torch.logdet(A.double())) <= high
    few = spectral_density(A, n_probes=20, steps=8).trace_of(torch.reciprocal)
    assert few.quadrature_error > few.standard_error  # eight steps do not reach the small end, and it shows
    assert abs(few.value - float((1 / values).sum())) <= 3 * few.quadrature_error


def test_standard_errors_are_those_over_repetitions():
    spectra = repeated(mixed(), 400, n_probes=4, steps=24)
    for f in (torch.exp, torch.abs, torch.square):
        runs = [spectrum.trace_of(f) for spectrum in spectra]
        spread = float(torch.tensor([run.value for run in runs]).std())
        claimed = math.sqrt(sum(run.standard_error**2 for run in runs) / len(runs))
        assert claimed == pytest.approx(spread, rel=0.15)


def test_determinants_need_a_definite_operator():
    for values in ([-1.0, 1.0, 2.0], [0.0, 1.0, 2.0], [1e-17, 1.0, 2.0]):
        A = torch.diag(torch.tensor(values, dtype=torch.float64))
        with pytest.raises(ValueError, match="expected a positive definite operator, got an eigenvalue ≤"):
            spectral_density(A).logdet()
    low_rank = torch.ones(10, 10, dtype=torch.float64)
    with pytest.raises(ValueError, match="positive definite"):
        spectral_density(low_rank).logdet()
    with pytest.raises(ValueError, match="got an eigenvalue ≤ 1"):
        spectral_density(torch.eye(3)).logdet(tol=2.0)
    assert spectral_density(2 * torch.eye(7).double()).logdet().value == pytest.approx(7 * math.log(2))


def test_values_that_are_not_finite_are_flagged():
    calls = []

    def late(V: Tensor) -> Tensor:
        calls.append(V)
        return V * (1.0 if len(calls) < 6 else math.inf) * torch.linspace(0, 1, 99, dtype=torch.float64)[:, None]

    for matmat in (late, lambda V: V * math.nan):
        calls.clear()
        operator = FunctionOperator((99, 99), matmat=matmat, dtype=torch.float64)
        spectrum = spectral_density(operator, n_probes=3, block_size=2)
        assert spectrum.status is Status.NONFINITE
        assert spectrum.n_matvec == operator.n_matvec
        assert bool(spectrum.nodes.isnan().all())
        for band in (spectrum.density(), spectrum.cdf(torch.zeros(2))):
            assert band.status is Status.NONFINITE
            assert bool(band.value.isnan().all() & band.lower.isnan().all())
        count = spectrum.count_below(0.0)
        assert (count.status, count.lower, count.upper) == (Status.NONFINITE, 0, 99)
        for estimate in (spectrum.trace_of(torch.exp), spectrum.logdet()):
            assert estimate.status is Status.NONFINITE
            assert math.isnan(estimate.value)
    assert spectral_density(torch.eye(3)).trace_of(lambda t: 1 / (t - t)).status is Status.NONFINITE


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda A: spectral_density(A, n_probes=0), "expected n_probes ≥ 1, got 0"),
        (lambda A: spectral_density(A, steps=0), "expected steps ≥ 1, got 0"),
        (lambda A: spectral_density(A, block_size=-1), "expected block_size ≥ 1, got -1"),
        (lambda A: spectral_density(torch.zeros(0, 0)), "expected n ≥ 1, got 0"),
        (lambda A: spectral_density(torch.ones(3, 2)), "expected a square operator"),
        (lambda A: spectral_density(torch.eye(6).roll(1, 0)), "expected a symmetric operator"),
        (lambda A: count_below(A, 0.0, confidence=1.0), "expected 0 < confidence < 1, got 1"),
        (lambda A: count_below(A, math.nan), "expected a finite point, got nan"),
    ],
)
def test_mistakes_are_named_before_any_work(call, message):
    A = MatrixOperator(torch.eye(6))
    with pytest.raises(ValueError, match=message):
        call(A)
    assert A.n_matvec == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.density(sigma=0.0), "expected a finite sigma > 0, got 0"),
        (lambda s: s.density(confidence=-0.05), "expected 0 < confidence < 1, got -0.05"),
        (lambda s: s.cdf(confidence=0.0), "expected 0 < confidence < 1, got 0"),
        (lambda s: s.cdf([1.0]), r"expected a grid of shape \(g,\), got list"),
        (lambda s: s.density(torch.zeros(2, 2)), r"expected a grid of shape \(g,\), got \(2, 2\)"),
        (lambda s: s.trace_of(lambda t: t.sum()), r"expected f to return a tensor of shape \(8, 6\), got \(\)"),
    ],
)
def test_mistakes_with_a_density_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(spectral_density(torch.diag(torch.arange(6.0))))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gpu_gives_the_same_answer(dtype):
    A = rotated(torch.linspace(-1, 2, 200).double(), generator(), dtype)
    here, there = (spectral_density(B, steps=12) for B in (A, A.cuda()))
    assert isinstance(there, SpectralDensity)
    assert not there.nodes.is_cuda
    torch.testing.assert_close(there.nodes, here.nodes, rtol=0, atol=1e-3 if dtype == torch.float32 else 1e-11)
    assert count_below(A.cuda(), 0.5).lower > 0


@pytest.mark.parametrize("module", ["density"])
def test_the_examples_run(module):
    tried = doctest.testmod(importlib.import_module(f"ot_newton.{module}"))
    assert tried.attempted > 0
    assert tried.failed == 0
