import math

import numpy as np
import pandas as pd
import pytest
import torch
from referee import Referee, pts, relative, wts

from ot_newton.autograd import ot_loss
from ot_newton.sinkhorn import solve
from ot_newton.validate import (
    check_batch,
    check_choice,
    check_integer,
    check_measures,
    check_nonnegative,
    check_points,
    check_positive,
    check_ratio,
    check_weights,
)

X, Y = pts(5, 2), pts(4, 2, 1)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (X[:, 0], ValueError, r"x: expected shape \(n, d\) with n, d ≥ 1, got \(5,\)"),
        (X[None], ValueError, r"expected shape.*got \(1, 5, 2\)"),
        (X.to_sparse(), TypeError, r"x: expected a dense tensor, got torch.sparse_coo; convert with .to_dense\(\)"),
        (X > 0, TypeError, r"x: expected floating-point numbers, got torch.bool"),
        (X.to(torch.float8_e4m3fn), TypeError, r"got torch.float8_e4m3fn; convert with"),
        (X.to("meta"), ValueError, r"x: expected a tensor with data, got one on the device 'meta'"),
        (X.numpy().astype(np.longdouble), TypeError, r"x: expected a tensor or array of points.* got ndarray of float"),
        (X.numpy().astype(object), TypeError, r"got ndarray of object; convert with .double\(\)"),
        ([[1.0, 2.0], [3.0]], TypeError, r"x: expected a tensor or array of points \(n, d\), got list"),
        (X[:0], ValueError, r"x: expected shape \(n, d\).*got \(0, 2\)"),
        (X[:, :0], ValueError, r"x: expected shape \(n, d\).*got \(5, 0\)"),
        (X[:, :1], ValueError, r"x and y: expected points of one dimension d, got \(5, 1\) and \(4, 2\)"),
        (X.int(), TypeError, r"x: expected floating-point numbers, got torch.int32; convert with .double\(\)"),
        (X.long(), TypeError, r"got torch.int64"),
        (X.to(torch.complex64), TypeError, r"got torch.complex64"),
        (X.float(), TypeError, r"x and y: expected one dtype, got torch.float32 and torch.float64"),
        (X.index_fill(0, torch.tensor([1, 2]), math.nan), ValueError, r"x: expected finite coordinates, got 2 rows"),
        (X.index_fill(0, torch.tensor([3]), math.inf), ValueError, r"x: expected finite coordinates, got 1 rows"),
        ("points", TypeError, r"x: expected a tensor or array of points \(n, d\), got str"),
        (None, TypeError, r"x: expected a tensor or array of points"),
    ],
)
@pytest.mark.parametrize("call", [solve, ot_loss])
def test_bad_points(call, x, error, message):
    with pytest.raises(error, match=message):
        call(x, Y, 1.0)


@pytest.mark.parametrize(
    ("a", "error", "message"),
    [
        (wts(4), ValueError, r"a: expected shape \(5,\), one weight a point, got \(4,\)"),
        (wts(5)[:, None], ValueError, r"a: expected shape \(5,\).*got \(5, 1\)"),
        (wts(5) * 3, ValueError, r"a and b: expected total mass 1 each, got 3 and 1"),
        (wts(5) * 0, ValueError, r"a and b: expected total mass 1 each, got 0 and 1"),
        (torch.tensor([0.5, 0.7, -0.2, 0, 0]), ValueError, r"a: expected finite weights ≥ 0, got a minimum of -0.2"),
        (wts(5) * math.nan, ValueError, r"a: expected finite weights ≥ 0, got a minimum of nan"),
        (torch.tensor([1, 2, 3, 4, 5]), TypeError, r"a: expected floating-point numbers, got torch.int64; divide"),
    ],
)
def test_bad_weights(a, error, message):
    with pytest.raises(error, match=message):
        solve(X, Y, 1.0, a=a)


def test_weights_almost_normalised_are_accepted():
    a = wts(5).float() * (1 + 1e-6)
    plan = solve(X.float(), Y.float(), 1.0, a=a)
    assert abs(float(plan.a.double().sum()) - 1) < 2e-7
    assert plan.converged


@pytest.mark.parametrize("eps", [0.0, -1.0, math.inf, math.nan])
def test_bad_eps(eps):
    with pytest.raises(ValueError, match="eps: expected a finite number above 0"):
        solve(X, Y, eps)


@pytest.mark.parametrize("value", ["small", None, [1.0, 2.0], True])
def test_check_positive_wants_a_number(value):
    with pytest.raises((TypeError, ValueError), match="eps: expected a"):
        check_positive(value, "eps")


def test_numbers_of_all_kinds():
    for value in (2, 2.0, np.float32(2), torch.tensor(2.0)):
        for check in (check_positive, check_nonnegative):
            assert check(value, "eps") == 2.0
            assert isinstance(check(value, "eps"), float)
    assert check_nonnegative(0, "tol") == 0.0
    assert check_ratio(np.float64(1), "anneal") == 1.0
    for value in (3, np.int64(3), np.uint8(3), torch.tensor(3)):
        assert type(check_integer(value, "max_iter")) is int
        assert check_integer(value, "max_iter") == 3


@pytest.mark.parametrize("check", [check_positive, check_nonnegative, check_ratio])
def test_what_is_no_number_is_refused_by_every_check(check):
    for value in ("1", b"1", None, 1j, [1.0], True, np.True_, torch.tensor(True), torch.ones((), requires_grad=True)):
        with pytest.raises(TypeError, match="tol: expected a"):
            check(value, "tol")
    for value in (10**400, -(10**5000), math.inf, math.nan, -1.0):
        with pytest.raises(ValueError, match="tol: expected a"):
            check(value, "tol")


@pytest.mark.parametrize("value", [0, -3, 2.5, "3", None, True, np.True_, torch.tensor(True), [1], math.nan])
def test_check_integer_wants_an_integer(value):
    with pytest.raises(ValueError, match="max_iter: expected an integer ≥ 1, got"):
        check_integer(value, "max_iter")


@pytest.mark.parametrize("value", ["c", "", None, 1, ["a"], {}, np.array(["a", "b"])])
def test_check_choice_wants_one_of_the_names(value):
    assert check_choice("a", "method", ("a", "b")) == "a"
    with pytest.raises(ValueError, match="method: expected one of a, b, got"):
        check_choice(value, "method", ("a", "b"))


def test_integers_of_numpy_are_accepted():
    assert solve(X, Y, 1.0, max_iter=np.int64(50)).converged  # pyright: ignore[reportArgumentType]


def test_points_in_three_dimensions_are_told_of_batches():
    with pytest.raises(ValueError, match="solve_batch and the losses take batches"):
        solve(X[None], Y, 1.0)


def test_a_batch_is_checked_by_what_it_is_given():
    def check(*measures):
        seen.append(measures)
        return check_measures(*measures)

    seen, x, y, b = [], torch.stack([X, -X]), torch.stack([Y, -Y]), wts(4)
    items = check_batch(x, y, None, b, [1.0, 2.0], check=check)
    assert [item[4] for item in items] == [1.0, 2.0]
    assert len(seen) == 2
    assert torch.equal(seen[1][0], -X)
    assert seen[1][2] is None
    assert seen[1][3] is b

    def refuse(*measures):
        raise ValueError("expected nothing")

    with pytest.raises(ValueError, match="item 0: expected nothing"):
        check_batch(x, y, None, b, 1.0, check=refuse)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "lbfgs"}, "method: expected one of auto, alternating, symmetric, two-level, newton, got 'lbfgs'"),
        ({"max_iter": 0}, "max_iter: expected an integer ≥ 1, got 0"),
        ({"max_iter": 2.5}, "max_iter: expected an integer ≥ 1, got 2.5"),
        ({"tol": -1e-3}, "tol: expected a finite number ≥ 0, got -0.001"),
        ({"tol": math.nan}, "tol: expected a finite number ≥ 0, got nan"),
        ({"tol": math.inf}, "tol: expected a finite number ≥ 0, got inf"),
        ({"anneal": 0.0}, r"anneal: expected a ratio in \(0, 1\], got 0.0"),
        ({"anneal": 1.5}, r"anneal: expected a ratio in \(0, 1\], got 1.5"),
        ({"scale": 0.0}, "scale: expected a finite number above 0"),
        ({"cost": "l1"}, "cost: expected one of sqeuclidean, cosine, got 'l1'"),
        ({"method": ["auto"]}, "method: expected one of auto, .* got"),
        ({"precision": ["fp32"]}, "precision: expected one of fp32, tf32, bf16, got"),
        ({"backend": "keops"}, "backend: expected one of auto, blocked, dense, triton, got 'keops'"),
        ({"init": (torch.zeros(4), torch.zeros(4))}, r"init: expected a potential f of shape \(5,\), got \(4,\)"),
        ({"init": (torch.zeros(5), torch.zeros(4) + math.nan)}, "init: expected a finite potential g"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        solve(X, Y, 1.0, **options)


@pytest.mark.parametrize("option", ["tol", "anneal", "scale"])
@pytest.mark.parametrize("value", ["1", True, [0.5]])
def test_options_that_are_no_numbers(option, value):
    with pytest.raises(TypeError, match=f"{option}: expected a"):
        solve(X, Y, 1.0, **{option: value})


def test_a_zero_vector_has_no_direction():
    with pytest.raises(ValueError, match="x: expected points whose cost is finite, got a zero vector"):
        solve(X * torch.tensor([[0.0], [1], [1], [1], [1]]), Y, 1.0, cost="cosine")


def test_arrays_and_lists_are_welcome():
    want = solve(X, Y, 1.0).value()
    assert torch.equal(solve(X.numpy(), Y.numpy(), 1.0, a=np.full(5, 0.2)).value(), want)
    assert solve(X.numpy().tolist(), Y.numpy().astype(np.float32), 1.0).x.dtype == torch.float32


def test_arrays_of_every_layout_are_read_and_left_alone():
    want, points = solve(X, Y, 1.0).value(), X.numpy()
    frozen = points.copy()
    frozen.flags.writeable = False
    reversed_twice = points[::-1].copy()[::-1]  # negative strides
    for array in (frozen, reversed_twice, points.astype(">f8"), np.asfortranarray(points), pd.DataFrame(frozen)):
        assert torch.equal(solve(array, Y, 1.0).value(), want)
    assert torch.equal(solve(X, Y, 1.0, a=pd.Series(np.full(5, 0.2))).value(), want)
    assert (frozen == points).all()


def test_lazy_negation_is_carried_out():
    x = torch.complex(X, -X[:, :1].expand(-1, 2)).conj().imag
    assert x.is_neg()
    assert torch.equal(check_points(x, "x"), X[:, :1].expand(-1, 2))


def test_weights_in_sixteen_bits_have_sum_one_up_to_their_rounding():
    for dtype in (torch.float16, torch.bfloat16):
        a = torch.full((300,), 1 / 300, dtype=dtype)
        assert abs(float(a.double().sum()) - 1) > 1e-4
        x = pts(300, 2).to(dtype)
        _, _, got, _ = check_measures(x, x, a, None)
        assert got.dtype == torch.float32
        assert relative(got, torch.full((300,), 1 / 300).double()) < 1e-6
        with pytest.raises(ValueError, match="expected total mass 1 each"):
            check_measures(x.float(), x.float(), a.float(), None)


def test_checking_twice_changes_nothing():
    a = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    for weights in (a / a.sum(), (a / a.sum()).double(), a.double() / a.double().sum() * (1 + 1e-5)):
        x = pts(1000, 1).to(weights.dtype)
        once = check_measures(x, x, weights, None)
        assert abs(float(once[2].double().sum()) - 1) <= 2 * torch.finfo(weights.dtype).eps
        assert all(torch.equal(first, second) for first, second in zip(once, check_measures(*once), strict=True))


def test_weights_follow_the_points():
    plan = solve(X.float(), Y.float(), 1.0, a=wts(5), b=wts(4).numpy())
    assert plan.a.dtype == plan.b.dtype == torch.float32
    assert solve(X, Y, 1.0, a=wts(5).float()).a.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_with_in_single(dtype):
    plan = solve(X.to(dtype), Y.to(dtype), 1.0)
    assert plan.value().dtype == plan.f.dtype == plan.grad().dtype == torch.float32
    dense = Referee(X.to(dtype), Y.to(dtype), 1.0)
    assert relative(plan.value(), dense.value) < 1e-4


def test_checked_tensors_are_not_copied():
    a = check_weights(wts(5), 5, X, "a")
    assert check_points(X, "x") is X
    assert check_weights(None, 5, X.float(), "a").dtype == torch.float32
    x, y, a, b = check_measures(X, Y, a, None)
    assert x is X
    assert y is Y
    assert relative(a.sum(), torch.ones(()).double()) < 1e-15
    assert relative(b, torch.full((4,), 0.25).double()) < 1e-15


@pytest.mark.gpu
def test_one_device():
    with pytest.raises(ValueError, match="x and y: expected one device, got cuda:0 and cpu"):
        solve(X.cuda(), Y, 1.0)
    with pytest.raises(ValueError, match="a: expected device cuda:0 like the points, got cpu"):
        solve(X.cuda(), Y.cuda(), 1.0, a=wts(5))
