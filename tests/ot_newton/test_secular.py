import pytest
import torch
from scipy.optimize import brentq

from ot_newton.secular import ball_minimiser, cubic_minimiser, decrease

SCALES = [1e-100, 1e-8, 1.0, 1e8, 1e100]


def instance(seed, scale=1.0, hard=False, definite=False):
    rng = torch.Generator().manual_seed(seed)
    n = 1 + seed % 9
    values = torch.randn(n, generator=rng, dtype=torch.float64).sort().values
    if definite:
        values = values.abs().sort().values + 0.1
    if seed % 3 == 1:  # clustered
        values = (2 * values).round() / 2
        values = values.where(values != 0, torch.tensor(0.5, dtype=torch.float64)).sort().values
    c = torch.randn(n, generator=rng, dtype=torch.float64)
    if hard:
        c = c.where(values > values[0], torch.zeros_like(c))
    return scale * values, scale * c


def by_bisection(values, c, excess):
    """min of the regularised quadratic where excess(μ, ‖y(μ)‖) falls through zero; y of shape (n,)."""
    start = max(-float(values[0]), 0.0)

    def length(mu):
        return float((c / (values + mu)).norm())

    high = start + 1.0
    while excess(high, length(high)) > 0:
        high = start + 4 * (high - start)
    low = start + 1e-13 * (high - start)
    if excess(low, length(low)) <= 0:
        return None
    mu = brentq(lambda mu: excess(mu, length(mu)), low, high, xtol=1e-300, rtol=1e-15)
    return -c / (values + mu)


@pytest.mark.parametrize("seed", range(18))
@pytest.mark.parametrize("radius", [1e-6, 0.3, 20.0])
def test_ball_against_bisection(seed, radius):
    values, c = instance(seed)
    y, _ = ball_minimiser(values, c, radius)
    expected = by_bisection(values, c, lambda mu, length: length - radius)
    if expected is None:
        assert values[0] > 0
        expected = -c / values
    torch.testing.assert_close(y, expected, rtol=1e-7, atol=1e-9 * radius)


def optimal(values, c, y, mu, atol):
    """The conditions that, together with the length, make y a global minimiser."""
    assert mu >= 0
    assert float(values[0]) + mu >= -1e-12 * float(values.abs().max())
    torch.testing.assert_close((values + mu) * y, -c, rtol=1e-8, atol=atol)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("seed", range(9))
def test_ball_is_globally_optimal_at_every_scale(seed, hard, scale):
    values, c = instance(seed, scale, hard)
    for radius in (1e-3, 1.0, 1e3):
        y, mu = ball_minimiser(values, c, radius)
        length = float(y.norm())
        assert length <= radius * (1 + 1e-14)
        assert mu == 0 or length == pytest.approx(radius, rel=1e-10)
        optimal(values, c, y, mu, 1e-9 * scale)


@pytest.mark.parametrize("seed", range(18))
@pytest.mark.parametrize("sigma", [1e-4, 0.3, 1e4])
def test_cubic_against_bisection(seed, sigma):
    values, c = instance(seed)
    y, _ = cubic_minimiser(values, c, sigma)
    expected = by_bisection(values, c, lambda mu, length: length - mu / sigma)
    assert expected is not None
    torch.testing.assert_close(y, expected, rtol=1e-7, atol=1e-9 * float(expected.norm()))


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("seed", range(9))
def test_cubic_is_globally_optimal(seed, hard):
    values, c = instance(seed, hard=hard)
    for sigma in (1e-6, 1.0, 1e6):
        y, mu = cubic_minimiser(values, c, sigma)
        assert sigma * float(y.norm()) == pytest.approx(mu, rel=1e-9)
        optimal(values, c, y, mu, 1e-9)


def test_the_hard_case_fills_the_gap_with_the_lowest_eigenvector():
    values, c = torch.tensor([-2.0, 1.0, 3.0]).double(), torch.tensor([0.0, 3.0, 0.0]).double()
    y, mu = ball_minimiser(values, c, 2.0)
    torch.testing.assert_close(y.abs(), torch.tensor([3**0.5, 1.0, 0.0]).double())
    assert mu == 2.0
    y, mu = cubic_minimiser(values, c, 1.0)
    torch.testing.assert_close(y.abs(), torch.tensor([3**0.5, 1.0, 0.0]).double())
    assert mu == 2.0


@pytest.mark.parametrize("tiny", [1e-300, 1e-30, 1e-12])
def test_nearly_hard(tiny):
    values, c = torch.tensor([-2.0, 1.0]).double(), torch.tensor([tiny, 3.0], dtype=torch.float64)
    for y, mu in (ball_minimiser(values, c, 2.0), cubic_minimiser(values, c, 1.0)):
        torch.testing.assert_close(y, torch.tensor([-(3**0.5), -1.0]).double())
        assert mu == pytest.approx(2.0)


@pytest.mark.parametrize("values", [[0.0, 0.0], [0.0, 1.0], [1.0, 2.0]])
def test_no_gradient_and_no_negative_curvature_give_no_step(values):
    values, c = torch.tensor(values).double(), torch.zeros(2).double()
    for y, mu in (ball_minimiser(values, c, 1.0), cubic_minimiser(values, c, 1.0)):
        assert torch.equal(y, c)
        assert mu == 0


def test_a_flat_quadratic_goes_down_the_gradient():
    c = torch.tensor([3.0, 4.0]).double()
    y, mu = ball_minimiser(torch.zeros(2).double(), c, 0.5)
    torch.testing.assert_close(y, -c / 10)
    assert mu == pytest.approx(10.0)


def test_a_larger_ball_is_never_worse():
    values, c = instance(7)
    falls = [decrease(values, c, ball_minimiser(values, c, r)[0]) for r in (0.01, 0.1, 1.0, 10.0, 100.0)]
    assert falls == sorted(falls)


def test_limits():
    values, c = torch.tensor([1.0, 2.0]).double(), torch.tensor([1.0, 1.0]).double()
    newton = -c / values
    torch.testing.assert_close(ball_minimiser(values, c, float("inf"))[0], newton)
    torch.testing.assert_close(cubic_minimiser(values, c, 0.0)[0], newton)
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="expected radius > 0"):
            ball_minimiser(values, c, wrong)
    with pytest.raises(ValueError, match="expected a finite radius"):
        ball_minimiser(-values.flip(0), c, float("inf"))
    with pytest.raises(ValueError, match="expected sigma > 0"):
        cubic_minimiser(-values.flip(0), c, 0.0)
    with pytest.raises(ValueError, match="expected a finite sigma"):
        cubic_minimiser(values, c, -1.0)
