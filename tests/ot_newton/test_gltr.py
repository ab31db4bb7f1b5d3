import pytest
import torch
from scipy.optimize import brentq

from ot_newton.gltr import cubic_step, gltr
from ot_newton.krylov_model import KrylovModel, local_model
from ot_newton.operators import FunctionOperator, MatrixOperator
from ot_newton.secular import ball_minimiser
from ot_newton.status import Status


def by_products(H):
    return FunctionOperator(tuple(H.shape), matmat=lambda V: H @ V, dtype=H.dtype, symmetric=True)


def orthogonal(n, rng):
    return torch.linalg.qr(torch.randn(n, n, generator=rng, dtype=torch.float64))[0]


def random_system(seed, *, hard=False, n=20):
    """H (n, n) with a random spectrum and g (n,), without a part along the lowest eigenvalue if hard."""
    rng = torch.Generator().manual_seed(seed)
    kind = seed % 4
    values = torch.randn(n, generator=rng, dtype=torch.float64).sort().values
    if kind == 1:  # a few multiple eigenvalues: the Krylov space of g is small
        values = values.round().sort().values
        values[values == 0] = 0.5
    elif kind == 2:
        values = values.sign() * 10 ** (3 * values.abs() - 3)
    elif kind == 3:
        values = values.abs() + 0.01
    values = values.sort().values
    Q = orthogonal(n, rng)
    c = torch.randn(n, generator=rng, dtype=torch.float64)
    if hard:
        c[values <= values[0] + 1e-9] = 0
    return (Q * values) @ Q.T, Q @ c, values, c


def least_in_ball(values, c, radius):
    """The global minimum by bisection in eigencoordinates, with the hard case."""

    def at(mu):
        return torch.where(c == 0, 0, -c / (values + mu))

    start = max(0.0, -float(values[0]))
    y = at(start) if start == 0 else torch.where(values <= values[0] + 1e-9, 0, at(start + 1e-300))
    y = torch.nan_to_num(y, nan=0.0, posinf=1e300, neginf=-1e300)
    lowest_free = bool((c[values <= values[0] + 1e-9] == 0).all())
    if (start == 0 or lowest_free) and float(y.norm()) <= radius:
        if start:
            y = y.clone()
            y[0] += (radius**2 - float(y @ y)) ** 0.5
    else:
        high = start + 1.0
        while float(at(high).norm()) > radius:
            high = start + 4 * (high - start)
        y = at(brentq(lambda mu: float(at(mu).norm()) - radius, start + 1e-14, high, xtol=1e-300, rtol=1e-15))
    return float(c @ y + 0.5 * y @ (values * y))


@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_global_minimum_in_the_ball(seed, hard, matrix):
    H, g, values, c = random_system(seed, hard=hard)
    for radius in (1e-2, 1.0, 30.0):
        found = gltr(H if matrix else by_products(H), g, radius, rtol=1e-10)
        s = found.step
        reached = float(g @ s + 0.5 * s @ (H @ s))
        least = least_in_ball(values, c, radius)
        assert reached == pytest.approx(least, rel=1e-7)
        assert found.decrease == pytest.approx(-reached, rel=1e-7)
        assert float(s.norm()) <= radius * (1 + 1e-10)
        assert float(g @ s) <= 0
        torch.testing.assert_close(H @ s + found.multiplier * s, -g, rtol=0, atol=1e-6 * float(g.norm()))
        assert found.multiplier >= -float(values[0]) - 1e-8 * float(values.abs().max())
        inside = found.status is Status.CONVERGED
        assert inside == (found.multiplier == 0)
        assert inside or float(s.norm()) == pytest.approx(radius)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_global_minimum_of_the_cubic(seed, hard):
    H, g, values, _ = random_system(seed, hard=hard)
    for sigma in (1e-2, 1.0, 1e3):
        found = cubic_step(by_products(H), g, sigma, rtol=1e-10)
        s, mu = found.step, found.multiplier
        assert mu == pytest.approx(sigma * float(s.norm()), rel=1e-6)
        assert mu >= -float(values[0]) - 1e-8 * float(values.abs().max())
        torch.testing.assert_close(H @ s + mu * s, -g, rtol=0, atol=1e-6 * float(g.norm()))


def test_the_hard_case_is_looked_for_only_when_asked():
    H, g = torch.diag(torch.tensor([2.0, -2.0])).double(), torch.tensor([2.0, 0.0]).double()
    seen, blind = (gltr(by_products(H), g, 0.5, hard_case=hard) for hard in (True, False))
    assert blind.n_matvec == 1
    torch.testing.assert_close(seen.step.abs(), torch.tensor([0.5, 0.0]).double(), atol=1e-6, rtol=0)
    assert seen.multiplier == pytest.approx(2.0)
    wide_seen, wide_blind = (gltr(by_products(H), g, 2.0, hard_case=hard) for hard in (True, False))
    torch.testing.assert_close(wide_seen.step.abs(), torch.tensor([0.5, 3.75**0.5]).double())
    torch.testing.assert_close(wide_blind.step, torch.tensor([-1.0, 0.0]).double())
    assert (wide_blind.status, wide_seen.status) == (Status.CONVERGED, Status.BOUNDARY)


def test_the_hard_case_in_many_dimensions_is_found_without_all_of_them():
    n, rng = 600, torch.Generator().manual_seed(0)
    values = torch.linspace(1, 2, n).double()
    values[0] = -0.5
    values[1:300] = 1.0
    values[300:] = 2.0
    Q = orthogonal(n, rng)
    c = torch.ones(n).double()
    c[0] = 0
    A = by_products((Q * values) @ Q.T)
    found = gltr(A, Q @ c, 100.0)
    assert found.multiplier == pytest.approx(0.5, rel=1e-6)
    assert found.n_matvec < 200


def test_other_radii_on_the_same_space_repeat_no_product():
    H, g, _, _ = random_system(0)
    A = by_products(H)
    model = local_model(A, g)
    tol = 1e-8 * float(g.norm())
    model.solve(lambda values, c: ball_minimiser(values, c, 10.0), tol)
    spent = A.n_matvec
    for radius in (3.0, 1.0, 0.1, 1e-3):
        model.solve(lambda values, c, radius=radius: ball_minimiser(values, c, radius), tol)
    assert A.n_matvec == spent


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("c", [1e-12, 1e-8, 1e8, 1e12])
def test_scaling_the_function_changes_nothing(c, dtype):
    H, g, _, _ = random_system(0)
    H, g = H.to(dtype), g.to(dtype)
    one, many = (gltr(by_products(s * H), s * g, 1.0, rtol=1e-4) for s in (1.0, c))
    assert one.step.dtype == many.step.dtype == dtype
    torch.testing.assert_close(one.step, many.step, rtol=1e-3, atol=1e-4)
    assert one.n_matvec == many.n_matvec


def test_rotating_the_coordinates_rotates_the_step():
    H, g, _, _ = random_system(0)
    Q = orthogonal(20, torch.Generator().manual_seed(9))
    one, other = gltr(by_products(H), g, 1.0), gltr(by_products(Q @ H @ Q.T), Q @ g, 1.0)
    torch.testing.assert_close(Q @ one.step, other.step, rtol=0, atol=1e-6)
    assert one.n_matvec == other.n_matvec


@pytest.mark.parametrize("matrix", [False, True])
def test_nothing_to_do(matrix):
    for H in (torch.zeros(3, 3).double(), torch.eye(3).double(), torch.diag(torch.tensor([0.0, 1.0, 2.0])).double()):
        A = H if matrix else by_products(H)
        for found in (gltr(A, torch.zeros(3).double(), 1.0), cubic_step(A, torch.zeros(3).double(), 1.0)):
            assert torch.equal(found.step, torch.zeros(3).double())
            assert (found.decrease, found.multiplier) == (0.0, 0.0)


@pytest.mark.parametrize("matrix", [False, True])
def test_no_gradient_at_a_saddle(matrix):
    H = torch.diag(torch.tensor([1.0, -3.0, 2.0])).double()
    found = gltr(H if matrix else by_products(H), torch.zeros(3).double(), 2.0)
    torch.testing.assert_close(found.step.abs(), torch.tensor([0.0, 2.0, 0.0]).double(), atol=1e-7, rtol=0)
    assert found.multiplier == pytest.approx(3.0)


@pytest.mark.parametrize("n", [1, 2])
def test_one_and_two_dimensions(n):
    for sign in (1.0, -1.0):
        H = sign * torch.eye(n).double()
        found = gltr(by_products(H), torch.ones(n).double(), 0.5)
        torch.testing.assert_close(found.step, -0.5 / n**0.5 * torch.ones(n).double())


def test_nan_ends_it_at_once():
    calls = 0

    def product(V):
        nonlocal calls
        calls += 1
        return V * torch.nan

    A = FunctionOperator((50, 50), matmat=product, dtype=torch.float64, symmetric=True)
    found = gltr(A, torch.ones(50).double(), 1.0)
    assert (found.status, calls) == (Status.NONFINITE, 1)
    assert torch.equal(found.step, torch.zeros(50).double())
    assert gltr(MatrixOperator(torch.eye(2) * torch.nan, symmetric=True), torch.ones(2), 1.0).status is Status.NONFINITE
    for A in (torch.eye(2), by_products(torch.eye(2))):
        assert gltr(A, torch.tensor([1.0, torch.nan]), 1.0).status is Status.NONFINITE


def test_limit_on_the_space():
    H, g, _, _ = random_system(3)
    A = by_products(H)
    found = gltr(A, g, 1.0, rtol=1e-12, maxiter=4, hard_case=False)
    assert found.n_matvec == 4
    assert found.decrease > 0
    full = gltr(by_products(H), g, 1.0, rtol=1e-12)
    assert found.decrease < full.decrease


def test_values_within_the_error_of_the_operator_count_as_positive():
    H = torch.diag(torch.tensor([-1e-3, 1.0, 2.0])).double()
    g = torch.tensor([1e-6, 1.0, 1.0]).double()
    for A in (MatrixOperator(H), by_products(H)):
        sure, unsure = local_model(A, g, error=1e-6), local_model(A, g, error=1e-2)
        for model in (sure, unsure):
            while isinstance(model, KrylovModel) and len(model.values) < 3:
                model.grow()
        assert not sure.bounded
        assert unsure.bounded
        assert float(unsure.values[0]) == pytest.approx(0.02, rel=1e-6)


@pytest.mark.parametrize("solve", [gltr, cubic_step])
def test_bad_arguments(solve):
    eye, g = torch.eye(2), torch.ones(2)
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="expected a finite"):
            solve(eye, g, wrong)
    with pytest.raises(ValueError, match="expected g of shape"):
        solve(eye, torch.ones(3), 1.0)
    with pytest.raises(ValueError, match="expected g in"):
        solve(eye, g.double(), 1.0)
    with pytest.raises(TypeError, match="expected g"):
        solve(eye, [1.0, 1.0], 1.0)
    with pytest.raises(ValueError, match="rtol"):
        solve(eye, g, 1.0, rtol=0.0)
    with pytest.raises(ValueError, match="maxiter"):
        solve(eye, g, 1.0, maxiter=0)
    with pytest.raises(ValueError, match="symmetric"):
        solve(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), g, 1.0)
