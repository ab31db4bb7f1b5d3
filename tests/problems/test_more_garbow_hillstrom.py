"""The collections against what is published about them, and against scipy, which knows nothing of our formulas."""

from math import cos, exp, sin

import numpy as np
import pytest
import scipy.optimize
import torch

from ot_newton.problems.more_garbow_hillstrom import MORE_GARBOW_HILLSTROM
from ot_newton.problems.strict_saddles import STRICT_SADDLES

ENTRIES = {entry.name: entry for entry in MORE_GARBOW_HILLSTROM}
EVERY = {**ENTRIES, **{entry.name: entry for entry in STRICT_SADDLES}}
every_entry = pytest.mark.parametrize("entry", EVERY.values(), ids=EVERY)

# f at the standard start, by hand where it is a short sum, else as other implementations print it
AT_START = {
    "rosenbrock": 24.2,
    "freudenstein_roth": 400.5,
    "powell_badly_scaled": 1 + (exp(0) + exp(-1) - 1.0001) ** 2,
    "brown_badly_scaled": (1 - 1e6) ** 2 + (1 - 2e-6) ** 2 + 1,
    "beale": 1.5**2 + 2.25**2 + 2.625**2,
    "jennrich_sampson": sum((2 + 2 * i - exp(0.3 * i) - exp(0.4 * i)) ** 2 for i in range(1, 11)),
    "helical_valley": 2500.0,
    "bard": 41.6817,
    "gaussian": 3.88811e-6,
    "meyer": 1.69361e9,
    "gulf_research": 12.1107,
    "box_3d": 1031.154,
    "powell_singular": 215.0,
    "wood": 19192.0,
    "kowalik_osborne": 5.31317e-3,
    "brown_dennis": 7926693.336,
    "osborne_1": 0.879026,
    "biggs_exp6": 0.779070,
    "osborne_2": 2.09342,
    "watson": 30.0,
    "extended_rosenbrock": 242.0,
    "extended_powell_singular": 1075.0,
    "penalty_1": 148032.565,
    "penalty_2": 162.6528,
    "variably_dimensioned": 2198551.16,
    "trigonometric": sum((10 - 10 * cos(0.1) + i * (1 - cos(0.1)) - sin(0.1)) ** 2 for i in range(1, 11)),
    "brown_almost_linear": 9 * (0.5 + 5 - 11) ** 2 + (0.5**10 - 1) ** 2,
    "broyden_tridiagonal": (-5 + 2 + 1) ** 2 + 8 * (-5 + 3 + 1) ** 2 + (-5 + 1 + 1) ** 2,
    "broyden_banded": 360.0,
    "linear_full_rank": 10 * (1 - 1 - 1) ** 2 + 10 * (-1 - 1) ** 2,
    "linear_rank_1": sum((55.0 * i - 1) ** 2 for i in range(1, 21)),
    "linear_rank_1_zeros": 2 + sum((44.0 * i - 1) ** 2 for i in range(1, 19)),
    "chebyquad": 3.86177e-2,
}
MINIMISERS = {
    "freudenstein_roth": (5.0, 4.0),
    "brown_badly_scaled": (1e6, 2e-6),
    "beale": (3.0, 0.5),
    "helical_valley": (1.0, 0.0, 0.0),
    "gulf_research": (50.0, 25.0, 1.5),
    "box_3d": (1.0, 10.0, 1.0),
    "powell_singular": (0.0,) * 4,
    "wood": (1.0,) * 4,
    "biggs_exp6": (1.0, 10.0, 1.0, 5.0, 4.0, 3.0),
    "variably_dimensioned": (1.0,) * 10,
    "trigonometric": (0.0,) * 10,
    "brown_almost_linear": (1.0,) * 10,
    "linear_full_rank": (-1.0,) * 10,
    "extended_rosenbrock": (1.0,) * 20,
}


def point(values):
    return torch.tensor(values, dtype=torch.float64)


def test_the_collections_are_complete():
    assert [entry.number for entry in MORE_GARBOW_HILLSTROM] == list(range(1, 36))
    assert len(EVERY) == 35 + 11
    assert all(entry.minima[0] == min(entry.minima) for entry in EVERY.values())


@pytest.mark.parametrize("name", AT_START)
def test_values_at_the_standard_start(name):
    entry = ENTRIES[name]
    assert float(entry.problem().value(point(entry.start))) == pytest.approx(AT_START[name], rel=1e-5)


@pytest.mark.parametrize("name", MINIMISERS)
def test_known_minimisers(name):
    entry = ENTRIES[name]
    w = point(MINIMISERS[name])
    f, g = entry.problem().value_and_grad(w)
    assert float(f) == pytest.approx(entry.minima[0], abs=1e-20, rel=1e-12)
    assert float(g.norm()) < 1e-8
    assert float(entry.problem().value(w + 1e-3)) > float(f)


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_least_squares_of_scipy_ends_at_a_published_minimum(entry):
    residuals = entry.fun.residuals
    found = scipy.optimize.least_squares(
        lambda x: residuals(point(x)).numpy(),
        np.array(entry.start),
        lambda x: torch.func.jacrev(residuals)(point(x)).numpy(),
        method="lm",
        max_nfev=5000,
        xtol=1e-15,
        ftol=1e-15,
        gtol=1e-15,
    )
    assert any(2 * found.cost == pytest.approx(minimum, rel=5e-6, abs=1e-17) for minimum in entry.minima)


@every_entry
def test_gradient_and_hessian(entry):
    problem, rng = entry.problem(), torch.Generator().manual_seed(3)
    w = point(entry.start)
    w = w + 1e-2 * (1 + w.abs()) * torch.rand(entry.size, generator=rng, dtype=torch.float64)
    # central differences along a direction, extrapolated once; each coordinate moves in its own scale
    v = (1 + w.abs()) * (0.5 + torch.rand(entry.size, generator=rng, dtype=torch.float64))

    def slope(f, h):
        return (f(w + h * v) - f(w - h * v)) / (2 * h)

    def extrapolated(f, h=1e-4):
        return (4 * slope(f, h) - slope(f, 2 * h)) / 3

    f, g = problem.value_and_grad(w)
    assert float(f) == float(problem.value(w))
    size = float(f.abs() + (g * v).abs().sum())
    assert float(extrapolated(problem.value)) == pytest.approx(float(g @ v), rel=1e-6, abs=1e-9 * size)
    Hv = problem.hessian(w) @ v
    expected = extrapolated(lambda x: problem.value_and_grad(x)[1])
    torch.testing.assert_close(Hv, expected, rtol=1e-6, atol=1e-7 * float(expected.abs().max() + g.abs().max()))


@pytest.mark.parametrize("entry", STRICT_SADDLES, ids=lambda entry: entry.name)
def test_gradients_lead_into_a_strict_saddle(entry):
    """Descent along the exact gradient, from the start itself, comes to rest where λ_min < 0, above the minimum."""
    problem = entry.problem()
    w = point(entry.start)
    for _ in range(2000):
        g = problem.value_and_grad(w)[1]
        if float(g.norm()) < 1e-4:
            break
        w = w - 0.1 * g
    assert float(g.norm()) < 1e-4
    eigenvalues = torch.linalg.eigvalsh(problem.hessian(w).to_dense())
    assert float(eigenvalues[0]) < -9e-4 * float(eigenvalues.abs().max())
    assert float(problem.value(w)) > entry.minima[0] + 1e-7


@pytest.mark.parametrize("entry", STRICT_SADDLES, ids=lambda entry: entry.name)
def test_minimal_values_of_strict_saddles(entry):
    """From random starts scipy's BFGS, which never sees a Hessian, ends at the stated value and never below it."""
    problem, rng = entry.problem(), torch.Generator().manual_seed(0)
    values = []
    for trial in range(4):
        w = torch.randn(entry.size, generator=rng, dtype=torch.float64)
        w = w.abs() if trial % 2 else w  # the long chain has local minima where its signs change
        found = scipy.optimize.minimize(
            lambda x: float(problem.value(point(x))),
            w.numpy(),
            jac=lambda x: problem.value_and_grad(point(x))[1].numpy(),
            method="BFGS",
            options={"gtol": 1e-7},
        )
        values.append(found.fun)
    assert min(values) == pytest.approx(entry.minima[0], rel=1e-6, abs=1e-10)
