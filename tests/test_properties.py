"""What must hold for every problem, on problems that hypothesis thinks up: sizes, weights, strides, dtypes, scales.

The profile is derandomised, so that a run tests the same examples every time. All tolerances are multiples of the
rounding of the exponents: with exponents of size L every entry of a plan is known to u·L only.
"""

import warnings
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from referee import Referee
from torch import Tensor

from ot_newton import ConvergenceWarning, Plan, solve, solve_divergence, solve_unbalanced
from ot_newton.unbalanced import UnbalancedPlan

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
FEW = settings(settings.get_profile("repeatable"), max_examples=15)


@dataclass(frozen=True)
class Problem:
    """Points, weights and a temperature of three hundredths to ten times the squared size of the clouds."""

    x: Tensor
    y: Tensor
    a: Tensor
    b: Tensor
    size: float
    ratio: float
    backend: str

    @property
    def eps(self) -> float:
        return self.ratio * self.size**2

    @property
    def double(self) -> bool:
        return self.x.dtype == torch.float64

    def solve(self, x: Tensor | None = None, y: Tensor | None = None, **change) -> Plan:
        x, y = self.x if x is None else x, self.y if y is None else y
        options = {"a": self.a, "b": self.b, "eps": self.eps, "tol": 1e-12 if self.double else 1e-6} | change
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # float32 need not reach 1e-6
            return solve(x, y, backend=self.backend, **options)

    @property
    def digits(self) -> float:
        """Relative rounding of an entry of the plan."""
        return 100 * (2.3e-16 if self.double else 1.2e-7) * (1 + 40 / self.ratio) + (1e-10 if self.double else 1e-5)

    def same(self, got: Tensor, want: Tensor, unit: float, factor: float = 1.0) -> bool:
        return bool((got.double() - want.double()).abs().max() <= factor * self.digits * unit)


@st.composite
def problems(draw, dtypes=(torch.float64, torch.float32, torch.float16, torch.bfloat16), widest: int = 6) -> Problem:
    n, m, d = draw(st.integers(1, 12)), draw(st.integers(1, 12)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(dtypes))
    wide = dtype in (torch.float64, torch.float32)
    size = 10.0 ** draw(st.integers(-widest, widest)) if wide else 1.0
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def cloud(rows: int) -> Tensor:
        points = size * torch.randn(rows, d, generator=rng, dtype=torch.float64)
        if draw(st.booleans()):
            points = points[torch.randint(0, rows, (rows,), generator=rng)]  # duplicates
        points = points.to(dtype)
        layout = draw(st.sampled_from(["plain", "transposed", "strided", "reversed"]))
        if layout == "transposed":
            return points.T.contiguous().T
        if layout == "strided":
            return torch.stack([points, points], 2).reshape(rows, 2 * d)[:, ::2]
        return points.flip(0) if layout == "reversed" else points

    def weights(rows: int) -> Tensor:
        w = torch.rand(rows, generator=rng, dtype=torch.float64) + 0.05
        if rows > 1 and draw(st.booleans()):
            w[torch.randint(0, rows, (rows // 2,), generator=rng)] = 0
            w[-1] = 0.5
        return (w / w.sum()).to(torch.float64 if dtype == torch.float64 else torch.float32)

    ratio = draw(st.sampled_from([0.03, 0.1, 1.0, 10.0]))
    return Problem(cloud(n), cloud(m), weights(n), weights(m), size, ratio, draw(st.sampled_from(["dense", "blocked"])))


every = given(p=problems())
exact = given(p=problems(dtypes=(torch.float64,)))


@FEW
@every
def test_marginals_from_the_returned_potentials_agree_with_the_reported_error(p):
    plan = p.solve()
    dense = Referee(plan.x, plan.y, p.eps, a=plan.a, b=plan.b, at=(plan.f, plan.g))
    assert plan.f.dtype == (torch.float64 if p.double else torch.float32)
    assert abs(dense.error - plan.error) <= p.digits + 1e-3 * plan.error
    assert p.same(plan.row_sums, dense.r, 1.0)
    assert p.same(plan.col_sums, dense.c, 1.0)
    assert p.same(plan.value(), dense.value, p.size**2 * (1 + p.ratio), 10)
    assert p.same(plan.grad(), dense.grad_x, p.size, 10)
    assert p.same(plan.grad_y(), dense.grad_y, p.size, 10)
    if p.double:
        assert plan.converged or plan.status.advice


@FEW
@exact
def test_translation(p):
    shift = p.size * torch.tensor([3.0, -7.0, 0.5, 11.0], dtype=torch.float64)[: p.x.shape[1]]
    plan, moved = p.solve(), p.solve(p.x + shift, p.y + shift)
    assert p.same(moved.value(), plan.value(), p.size**2, 10)
    assert p.same(moved.grad(), plan.grad(), p.size, 10)


@FEW
@every
def test_permutation(p):
    rng = torch.Generator().manual_seed(0)
    i, j = torch.randperm(len(p.x), generator=rng), torch.randperm(len(p.y), generator=rng)
    plan, other = p.solve(), p.solve(p.x[i], p.y[j], a=p.a[i], b=p.b[j])
    assert p.same(other.value(), plan.value(), p.size**2 * (1 + p.ratio), 10)
    assert p.same(other.grad(), plan.grad()[i], p.size, 10)
    assert p.same(other.grad_y(), plan.grad_y()[j], p.size, 10)


@FEW
@every
def test_exchange(p):
    plan, other = p.solve(), p.solve(p.y, p.x, a=p.b, b=p.a)
    assert p.same(other.value(), plan.value(), p.size**2 * (1 + p.ratio), 10)
    assert p.same(other.grad_y(), plan.grad(), p.size, 10)
    assert p.same(other.grad(), plan.grad_y(), p.size, 10)


@FEW
@every
def test_scale(p):
    """By a power of two, which rounds nothing: value and cost by its square, the gradient by itself."""
    plan, large = p.solve(), p.solve(4 * p.x, 4 * p.y, eps=16 * p.eps)
    half = p.solve(eps=p.eps / 2, scale=0.5)
    assert p.same(large.value() / 16, plan.value(), p.size**2, 10)
    assert p.same(large.grad() / 4, plan.grad(), p.size, 10)
    assert p.same(2 * half.value(), plan.value(), p.size**2, 10)
    assert p.same(2 * half.grad(), plan.grad(), p.size, 10)


@FEW
@every
@pytest.mark.parametrize("side", ["x", "y"])
def test_a_point_split_into_two_of_half_the_weight(p, side):
    points, weights = (p.x, p.a) if side == "x" else (p.y, p.b)
    split = torch.cat([weights[:1] / 2, weights[1:], weights[:1] / 2])
    change = {side: torch.cat([points, points[:1]]), "a" if side == "x" else "b": split}
    plan, other = p.solve(), p.solve(**change)
    assert p.same(other.value(), plan.value(), p.size**2 * (1 + p.ratio), 10)
    got, want = (other.grad(), plan.grad()) if side == "x" else (other.grad_y(), plan.grad_y())
    assert p.same(got[0] + got[-1], want[0], p.size, 10)
    assert p.same(got[1:-1], want[1:], p.size, 10) if len(want) > 1 else True


@FEW
@every
def test_points_without_weight_are_as_absent(p):
    plan = p.solve()
    zero = p.a.new_zeros(2)
    far = torch.cat([p.x, p.x[:1] + p.size, p.x[-1:]])
    other = p.solve(far, a=torch.cat([p.a, zero]))
    assert p.same(other.value(), plan.value(), p.size**2 * (1 + p.ratio), 10)
    assert p.same(other.grad()[:-2], plan.grad(), p.size, 10)
    assert bool((other.grad()[-2:] == 0).all())


@FEW
@exact
def test_the_hessian_is_linear_and_symmetric(p):
    H = p.solve().hessian(rtol=1e-12)
    rng = torch.Generator().manual_seed(0)
    u, v = (torch.randn(H.shape[0], generator=rng, dtype=torch.float64) for _ in range(2))
    Hu, Hv, unit = H @ u, H @ v, H.shape[0] * (1 + 10 / p.ratio)
    assert p.same(H @ (2 * u - 3 * v), 2 * Hu - 3 * Hv, unit, 10)
    assert p.same(u @ Hv, v @ Hu, unit * H.shape[0], 10)
    assert p.same(H @ torch.stack([u, v], 1), torch.stack([Hu, Hv], 1), unit, 10)


@FEW
@exact
def test_the_hessian_on_translations(p):
    """All points together: the gradient moves by 2s r_i, whatever the plan."""
    plan = p.solve()
    ones = torch.zeros_like(plan.x)
    ones[:, 0] = 1
    moved = (plan.hessian(rtol=1e-12) @ ones.reshape(-1)).reshape(plan.x.shape)
    assert p.same(moved, 2 * plan.row_sums[:, None] * ones, 1 + 10 / p.ratio, 10)


@FEW
@exact
def test_value_lies_between_its_bounds(p):
    """Duality from below; from above the value of the independent plan, which has no entropy to pay for."""
    plan = p.solve()
    C = torch.cdist(plan.x, plan.y).square()
    unit = p.size**2 * (1 + p.ratio)
    assert float(plan.dual_value()) <= float(plan.value()) + 10 * p.digits * unit
    assert float(plan.value()) <= float(plan.a @ C @ plan.b) + 10 * p.digits * unit
    assert float(plan.value()) >= -10 * p.digits * unit


REACHES = [0.5, (None, 2.0), (3.0, 1.0)]  # in units of the size of the clouds
exact_with_reach = given(p=problems(dtypes=(torch.float64,)), reach=st.sampled_from(REACHES))


def relaxed(p: Problem, reach, x=None, y=None, **change) -> UnbalancedPlan:
    """The unbalanced plan for masses 3 and 0.5; `reach` in units of the size."""
    scaled = tuple(None if r is None else p.size * r for r in (reach if isinstance(reach, tuple) else (reach, reach)))
    options = {"a": 3 * p.a, "b": 0.5 * p.b, "eps": p.eps, "reach": scaled, "tol": 1e-12} | change
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # rounding may end it before
        return solve_unbalanced(p.x if x is None else x, p.y if y is None else y, backend=p.backend, **options)


@FEW
@exact_with_reach
def test_unbalanced_marginals_from_the_returned_potentials(p, reach):
    plan = relaxed(p, reach)
    C = torch.cdist(plan.x, plan.y, compute_mode="donot_use_mm_for_euclid_dist").square()
    P = plan.a[:, None] * plan.b * torch.exp((plan.f[:, None] + plan.g - C) / p.eps)
    sides = (P.sum(1), plan.a, plan.f, plan.rho[0]), (P.sum(0), plan.b, plan.g, plan.rho[1])
    missed = P.new_zeros(())
    for marginal, weights, potential, rho in sides:
        missed = missed + (marginal - (weights if rho is None else weights * torch.exp(-potential / rho))).abs().sum()
    assert abs(float(missed / P.sum()) - plan.error) <= p.digits + 1e-3 * plan.error
    assert p.same(plan.row_sums, P.sum(1), 1.0)
    assert p.same(plan.col_sums, P.sum(0), 1.0)
    assert plan.converged or plan.status.advice


@FEW
@exact_with_reach
def test_unbalanced_exchange_scale_and_absence(p, reach):
    plan, unit = relaxed(p, reach), p.size**2 * (1 + p.ratio)
    other = relaxed(p, reach if isinstance(reach, float) else reach[::-1], p.y, p.x, a=0.5 * p.b, b=3 * p.a)
    assert p.same(other.value(), plan.value(), unit, 10)
    assert p.same(other.grad_y(), plan.grad(), p.size, 10)
    scaled = relaxed(replace(p, x=4 * p.x, y=4 * p.y, size=4 * p.size), reach)
    assert p.same(scaled.value() / 16, plan.value(), unit, 10)
    assert p.same(scaled.grad() / 4, plan.grad(), p.size, 10)
    more = relaxed(p, reach, torch.cat([p.x, p.x[:1] + p.size]), a=torch.cat([3 * p.a, p.a.new_zeros(1)]))
    assert p.same(more.value(), plan.value(), unit, 10)
    assert p.same(more.grad()[:-1], plan.grad(), p.size, 10)


@FEW
@given(p=problems(dtypes=(torch.float64,)), reach=st.sampled_from([None, 0.5, 3.0]))
def test_the_divergence_is_symmetric_and_zero_on_the_diagonal(p, reach):
    reach = None if reach is None else reach * p.size

    def between(x, y, a, b):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return solve_divergence(x, y, p.eps, a=a, b=b, reach=reach, tol=1e-12, backend=p.backend)

    unit, order = p.size**2 * (1 + p.ratio), torch.randperm(len(p.x), generator=torch.Generator().manual_seed(0))
    there, back = between(p.x, p.y, p.a, p.b), between(p.y, p.x, p.b, p.a)
    assert p.same(there.value(), back.value(), unit, 10)
    assert p.same(there.grad(), back.grad_y(), p.size, 10)
    assert float(there.value()) >= -10 * p.digits * unit
    own = between(p.x, p.x[order], p.a, p.a[order])
    assert p.same(own.value(), torch.zeros(()), unit, 10)
    assert p.same(own.grad(), torch.zeros(()), p.size, 10)
