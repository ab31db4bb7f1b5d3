import doctest
import math
import sys
import warnings

import numpy as np
import pytest
import torch
from referee import cost_matrix, pts, relative, wts

from ot_newton.check import check
from ot_newton.check_report import Report
from ot_newton.potentials import Watch
from ot_newton.sinkhorn import ConvergenceWarning, solve


def cloud(n: int, d: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def headlines(report: Report) -> list[str]:
    return [sentence.split(":")[0] for sentence in report.advice]


@pytest.mark.parametrize("cost", ["sqeuclidean", "cosine"])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_exact_numbers_against_the_cost_matrix(cost, scale):
    x, y, a, b = cloud(30), cloud(20, seed=1) + 1, wts(30), wts(20, 2)
    report = check(x, y, a, b, 0.3, cost=cost, scale=scale)
    C = cost_matrix(x, y, cost, scale)
    assert report.mean_cost == pytest.approx(float(a @ C @ b), rel=1e-12)
    assert report.median_cost == pytest.approx(float(C.median()), rel=1e-12)
    assert report.ratio == pytest.approx(0.3 / float(C.median()))
    assert report.whole
    assert report.sampled_pairs == 600
    z = x if cost == "sqeuclidean" else x / x.norm(dim=1, keepdim=True)
    assert report.x.spread == pytest.approx(float((a @ (z - a @ z).square().sum(1)).sqrt()), rel=1e-12)
    assert report.y.offset == pytest.approx(float((b @ y).norm() / (b @ (y - b @ y).square().sum(1)).sqrt()), rel=1e-12)


def test_the_trial_of_a_small_problem_is_its_solve():
    x, y = cloud(60), cloud(50, seed=1)
    report, plan = check(x, y, eps=0.2), solve(x, y, 0.2)
    assert report.trial == (60, 50)
    assert report.passes == plan.n_passes
    assert report.trial_status is plan.status
    assert "the whole problem" in str(report)


def test_a_large_problem_is_sampled_and_says_so():
    x, y = cloud(3000), cloud(2000, seed=1)
    report = check(x, y, eps=0.5)
    assert report.trial == (256, 256)
    assert report.sampled_pairs == 512 * 512
    assert not report.whole
    assert relative(torch.tensor(report.median_cost), cost_matrix(x, y).median()) < 0.05
    text = str(report)
    assert "a sample of 262144 pairs" in text
    assert "256×256 points, a subsample" in text
    assert 0.3 < report.passes / solve(x, y, 0.5).n_passes < 3
    assert str(check(x, y, eps=0.5)) == text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("eps", [1.0, 0.01])
def test_the_resolution_is_that_of_the_solver(dtype, eps):
    x, y = pts(40, 2).to(dtype), pts(30, 2, 1).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the smaller eps is too small for float32
        plan = solve(x, y, eps)
    state = type("State", (), {"phi": plan.phi, "psi": plan.psi})
    want = Watch(plan.pairs, 1e-6, 100).resolution(state)
    assert want / 2 < check(x, y, eps=eps).resolution < 2 * want


def test_nothing_to_change():
    report = check(cloud(200), cloud(150, seed=1))
    assert report.advice == ()
    assert not report.eps_given
    assert report.eps == pytest.approx(report.median_cost / 20)
    assert str(report).endswith("advice: nothing to change")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_temperature_that_does_not_fit(dtype):
    x, y = cloud(50).to(dtype), cloud(50, seed=1).to(dtype)
    low, high = check(x, y, eps=1e-6), check(x, y, eps=1e3)
    assert headlines(high) == ["eps is above the cost"]
    assert headlines(low)[0] == "eps is far below the cost"
    assert ("Digits are lost" in headlines(low)) == (dtype == torch.float32)
    if dtype == torch.float32:
        assert any("use float64, or eps of at least" in sentence for sentence in low.advice)
        fitting = low.eps * low.resolution / low.tol
        assert "Digits are lost" not in headlines(check(x, y, eps=2 * fitting))


def test_a_temperature_below_all_numbers():
    report = check(cloud(50), cloud(50, seed=1), eps=1e-320)
    assert headlines(report)[:2] == ["eps is far below the cost", "Digits are lost"]
    assert not any(word in str(report.advice) for word in ("nan", "least inf"))


def test_clouds_far_from_the_origin_and_unlike():
    x, y = cloud(50), cloud(50, seed=1)
    far = check((x + 1e4).float(), (y + 1e4).float(), eps=0.5)
    assert headlines(far) == ["The clouds lie far from the origin"]
    assert far.x.offset == pytest.approx(1e4, rel=0.1)
    assert headlines(check(x + 1e4, y + 1e4, eps=0.5)) == []  # float64 has digits to spare
    assert "Spreads differ" in headlines(check(x, 100 * y))
    assert "Coordinates of x are uneven" in headlines(check(x * torch.tensor([1, 1, 1e3]), y))


def test_duplicates_zero_weights_and_isolated_points():
    x, y = cloud(40), cloud(30, seed=1)
    x[20:] = x[:20]
    y[3] = 1000.0
    b = torch.cat([wts(25), torch.zeros(5).double()])
    report = check(x, y, b=b, eps=0.5)
    assert report.x.duplicates == 20
    assert report.y.massless == 5
    assert report.y.isolated == 1
    assert report.y.sampled == 25
    assert report.x.isolated == 0
    named = dict(sentence.split(":", 1) for sentence in report.advice)
    assert "20 of 40" in named["Many points of x repeat"]
    assert "5 of 30" in named["Points of y have no weight"]
    assert "1 of 25 looked at" in named["Points of y are isolated"]
    assert not any(headline in named for headline in ("Many points of y repeat", "Points of x are isolated"))


def test_sixteen_bits_are_named():
    for dtype in (torch.float16, torch.bfloat16):
        report = check(cloud(50).to(dtype), cloud(50, seed=1).to(dtype))
        assert headlines(report) == ["Points are stored in 16 bits"]
        assert report.dtype == torch.float32
    assert check(cloud(50).half().numpy(), cloud(50, seed=1).half()).stored == torch.float16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("gap", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (1, 4)])
def test_no_spread_at_all(shape, gap, dtype):
    n, m = shape
    report = check(torch.full((n, 2), 3.0, dtype=dtype), torch.full((m, 2), 3.0 + gap, dtype=dtype))
    assert report.eps == pytest.approx(2 * gap**2 / 20 if gap else 0.05)
    assert report.x.spread == 0
    assert report.x.offset == math.inf
    assert report.trial_status.success
    assert str(report)


def test_nothing_is_changed():
    x, y, a = cloud(600).requires_grad_(), cloud(300, seed=1), wts(600)
    versions, copy, state = [t._version for t in (x, y, a)], x.detach().clone(), torch.get_rng_state()
    check(x, y, a, eps=0.1)
    assert [t._version for t in (x, y, a)] == versions
    assert torch.equal(x.detach(), copy)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [1.0]}, ValueError, r"x: expected shape \(n, d\)"),
        ({"eps": 0.0}, ValueError, "eps: expected a finite number above 0"),
        ({"scale": -1.0}, ValueError, "scale: expected a finite number above 0"),
        ({"cost": "l1"}, ValueError, "cost: expected one of sqeuclidean, cosine"),
        ({"a": np.ones(5)}, ValueError, "total mass 1 each, got 5 and 1"),
        (
            {"x": 1e200 * pts(5, 2)},
            ValueError,
            r"expected points whose cost is finite in torch.float64, got an overflow",
        ),
        (
            {"x": 1e25 * pts(5, 2).float(), "y": pts(4, 2, 1).float()},
            ValueError,
            r"expected points whose cost is finite in torch.float32, got an overflow; rescale",
        ),
        ({"x": torch.zeros(5, 2).double(), "cost": "cosine"}, ValueError, "x: expected points whose cost is finite"),
    ],
)
def test_bad_inputs(change, error, message):
    with pytest.raises(error, match=message):
        check(**({"x": pts(5, 2), "y": pts(4, 2, 1)} | change))


def test_the_examples_run():
    assert doctest.testmod(sys.modules[check.__module__], extraglobs={"torch": torch}).failed == 0


@pytest.mark.gpu
def test_on_a_gpu():
    x, y = cloud(3000).float().cuda(), cloud(2000, seed=1).float().cuda()
    report = check(x, y, eps=0.5)
    assert report.device.type == "cuda"
    assert report.mean_cost == pytest.approx(check(x.cpu(), y.cpu(), eps=0.5).mean_cost, rel=1e-5)
    assert report.trial_status.success
