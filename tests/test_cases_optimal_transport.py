"""The inputs on which other libraries' transport went wrong: over every backend and dtype, each in one test.

Where a test elsewhere covers a case, this table says which; the tests below are the rest, and those that other files
make on one backend only.

ot_newton/test_sinkhorn.py
    a temperature far too small                test_tiny_eps
    a small temperature is a linear programme  test_small_eps_is_the_linear_programme
    one-hot weights                            test_one_hot_weights
    weights of zero                            test_zero_weights_are_as_absent
    clouds without a diameter                  test_no_spread_at_all
    a divergence below zero                    test_divergence_from_itself_and_a_neighbour
    tolerance above every error                test_a_tolerance_above_every_error_stops_at_once
    tolerance zero, budgets counted wrongly    test_the_budget_is_kept
    "converged" that is not                    test_converged_can_be_recomputed
    silence when the budget runs out           test_not_converged_warns_once_and_says_so
ot_newton/test_validate.py
    masses that do not match, signs, counts    test_bad_weights
    weights off by rounding                    test_weights_almost_normalised_are_accepted
    weights in 16 bits                         test_weights_in_sixteen_bits_have_sum_one_up_to_their_rounding
    integers, mixed dtypes, shapes, no points  test_bad_points
    half precision                             test_half_precision_is_computed_with_in_single
    arrays, lists, frames, negative strides    test_arrays_of_every_layout_are_read_and_left_alone
    two devices                                test_one_device
ot_newton/test_side_effects.py
    strides                                    test_strides_do_not_matter
    grad mode, random states, inputs, filters  test_nothing_else_changes
    what an exception leaves behind            test_an_exception_restores_everything
ot_newton/test_plan.py
    a gradient before convergence              test_gradient_far_from_convergence_is_that_of_the_plan_at_hand
    a gradient that is not the value's         test_gradient_is_the_derivative_of_the_value
ot_newton/test_hessian.py
    the implicit part dropped, a cost halved   test_published_numbers
    rows of the Hessian that do not add up     test_moving_everything_along
ot_newton/test_autograd.py
    gradients in the weights                   test_the_gradient_in_the_weights_is_a_potential
    softmax weights                            test_weights_by_softmax_against_finite_differences
    a graph where none is needed               test_no_graph_without_a_need
    stride-0 gradients from above              test_upstream_gradients_of_every_stride
    derivatives that are not offered           test_third_derivatives_are_not_pretended
ot_newton/test_batch.py
    batches, weights an item, a hard item      test_equal_to_a_loop
    a batch of one                             test_a_batch_of_one_keeps_its_dimension
    one hard item among others                 test_a_hard_item_is_named_and_changes_no_other
ot_newton/test_krylov.py
    zero right-hand side, exact guess          test_a_zero_right_hand_side_or_an_exact_guess_costs_no_iteration
    singular and consistent                    test_a_consistent_singular_system_is_solved
    negative curvature                         test_cg_hands_back_nonpositive_curvature
    values that are not finite                 test_values_that_are_not_finite_are_flagged
    iterations counted wrongly                 test_the_last_allowed_iteration_counts
    a tolerance that is not relative           test_scaling_the_right_hand_side_scales_the_answer
ot_newton/test_lanczos.py
    breakdown after one step                   test_invariant_subspaces_do_not_end_the_search
    two eigenvalues, many copies               test_multiplicities_of_two_values
    ghost copies                               test_orthogonality_holds_and_no_ghosts_appear
    smallest is not smallest in magnitude      test_the_smallest_is_not_the_smallest_in_magnitude
    a seed that does not repeat                test_the_start_is_private_and_repeatable
ot_newton/test_density.py
    weights of the density                     test_weights_are_squared_first_components
kernels/test_backends.py
    dimensions and block sizes                 test_all_sizes
    triton asked for where it cannot run       test_resolve
kernels/test_triton.py
    dimensions and block sizes on a GPU        test_dimensions
    a compilation for every size               test_sizes_compile_nothing
test_packaging.py
    no triton, no GPU                          test_the_package_is_found_from_elsewhere_and_loads_without_triton
experiments/test_cli.py
    bad paths and shapes                       test_wrong_points_are_named
    plots without a display                    test_help_and_version
ot_newton/test_minimize.py
    errors in a callback                       test_errors_in_the_callback_are_the_callers
"""

import ast
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from places import INTERPRETED, everywhere, everywhere_in_float32
from referee import Referee, pts, relative, wts

from ot_newton import ConvergenceWarning, ot_loss, solve
from ot_newton.kernels import dispatch

HERE = Path(__file__).parent
QUIET = ["-W", "ignore::RuntimeWarning", "-p", "no:cacheprovider"]  # numpy on overflow and on 0/0, which kernels handle
limited = pytest.mark.filterwarnings("ignore::ot_newton.sinkhorn.ConvergenceWarning")
slow_when_interpreted = pytest.mark.skipif(INTERPRETED, reason="takes minutes in the interpreter")


@pytest.fixture(autouse=True)
def _triton_on_a_cpu(monkeypatch):
    """In the interpreter the kernels take CPU tensors; the library itself never lets them."""
    if INTERPRETED:
        monkeypatch.setattr(dispatch, "resolve", lambda backend, device, dtype: "triton")


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_triton_in_the_interpreter():
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", "-k", "triton", *QUIET, __file__],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout


def test_the_table_names_tests_that_exist():
    existing, found = set(), 0
    for line in (__doc__ or "").splitlines():
        if line.endswith(".py"):
            module = ast.parse((HERE / line).read_text())
            existing = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
        elif line.startswith("    "):
            assert line.split()[-1] in existing, line
            found += 1
    assert found >= 40


@everywhere
@slow_when_interpreted
@limited
@pytest.mark.parametrize("eps", [2e-3, 1e-3, 1e-4, 1e-6, 1e-9])
def test_tiny_temperatures(place, eps):
    x = (torch.arange(8).double() / 7)[:, None]
    plan = place.solve(x, x + 0.3, eps, tol=None)
    real = Referee(plan.x.cpu(), plan.y.cpu(), eps, at=(plan.f.cpu(), plan.g.cpu()))
    assert plan.value().isfinite()
    assert plan.grad().isfinite().all()
    assert plan.converged or place.dtype == torch.float32
    if plan.converged:
        assert real.error < 1e-3
        assert abs(float(plan.value()) - 0.09 - eps * math.log(8)) < 2e-6 + 2e-3 * eps
        assert relative(plan.grad().cpu(), torch.full((8, 1), -0.6 / 8).double()) < 1e-3


@everywhere
@pytest.mark.parametrize("eps", [1.0, 1e-2])
def test_one_hot_weights(place, eps):
    corners = torch.tensor([[0.0, 0], [1, 0], [0, 1], [1, 1]])
    a, b = torch.tensor([0.0, 1, 0, 0]), torch.tensor([1.0, 0, 0, 0])
    plan = place.solve(corners, corners, eps, a=a, b=b)
    exact = 8 * torch.finfo(place.dtype).eps / eps
    assert abs(float(plan.value()) - 1) <= exact
    assert (plan.grad().cpu() - torch.tensor([[0, 0], [2, 0], [0, 0], [0, 0]])).abs().max() <= exact
    assert plan.f.isfinite().all()
    assert plan.g.isfinite().all()
    assert plan.hessian().to_dense().isfinite().all()
    x, weights = place.put(corners).requires_grad_(), place.put(a).requires_grad_()
    loss = ot_loss(x, place.put(corners), eps, a=weights, b=place.put(b), backend=place.backend)
    for grad in torch.autograd.grad(loss, (x, weights)):
        assert grad.isfinite().all()


@everywhere
@slow_when_interpreted
@limited
@pytest.mark.parametrize("eps", [10.0, 1.0, 1e-3, 1e-6])
def test_no_diameter(place, eps):
    for n, m, gap in ((1, 1, 0.0), (1, 1, 1.0), (5, 5, 0.0), (1, 4, 0.5)):
        plan = place.solve(torch.zeros(n, 2), torch.full((m, 2), gap), eps, tol=None)
        digits = torch.finfo(place.dtype).eps * (1 + gap**2 / eps)
        assert abs(float(plan.value()) - 2 * gap**2) <= 8 * digits
        assert (plan.grad() + 2 * gap / n).abs().max() <= 8 * digits


@everywhere
@slow_when_interpreted
def test_a_neighbour_and_itself(place):
    """The value between a cloud and itself is positive without debiasing; the debiased one is not negative."""
    x = place.put(0.01 * pts(50, 160))
    y = place.put(0.01 * pts(50, 160) + 0.001 * pts(50, 160, 3))
    xy, xx, yy = (float(place.solve(p, q, 0.0025, scale=0.5, tol=None).value()) for p, q in ((x, y), (x, x), (y, y)))
    assert abs(xy - 9.930468e-3) < 1e-6
    assert xx > 0
    assert abs(xy - (xx + yy) / 2 - 1.60741e-4) < 2e-6


@everywhere
@slow_when_interpreted
def test_the_published_value_by_default(place):
    plan = place.solve(pts(50, 4), pts(50, 4, 2), 1.0, tol=1e-5)
    assert plan.converged
    assert plan.error <= 1e-5
    assert abs(float(plan.value()) - 6.1407207) < 1e-4


@pytest.fixture(params=["tf32", "medium"])
def low_precision(request) -> Iterator[None]:
    """torch's two switches for faster and less exact products."""
    allowed, precision = torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()
    if request.param == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
    else:
        torch.set_float32_matmul_precision("medium")
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.set_float32_matmul_precision(precision)


@everywhere
@slow_when_interpreted
def test_fast_products_elsewhere_change_nothing_here(place, low_precision):
    x, y, v = pts(300, 4), pts(200, 4, 2), pts(300, 4, 7).reshape(-1)
    plan, exact = place.solve(x, y, 1.0), solve(x, y, 1.0, tol=1e-12, backend="dense")
    real = Referee(x, y, 1.0, at=(plan.f.cpu(), plan.g.cpu()))
    assert plan.converged
    assert real.error < plan.error + 2e-5
    assert relative(plan.value().cpu(), exact.value()) < 10 * place.tol
    assert relative(plan.grad().cpu(), exact.grad()) < 10 * place.tol
    assert relative((plan.hessian() @ place.put(v)).cpu(), exact.hessian() @ v) < 10 * place.tol


PUBLISHED = {  # scale: value, gradient and Hessian of three points on a line against two
    1.0: (
        1.02483342,
        [-0.57265656, -0.12915734, 0.50181390],
        [
            [0.84807806, 0.15046962, 0.00145232],
            [0.15046962, 0.34559217, 0.0039382],
            [0.00145232, 0.0039382, 0.49460948],
        ],
    ),
    0.5: (
        0.67216691,
        [-0.34880162, -0.02678229, 0.27558391],
        [
            [0.42652291, 0.05813742, 0.01533967],
            [0.05813742, 0.17570716, 0.01615542],
            [0.01533967, 0.01615542, 0.21850491],
        ],
    ),
}


@everywhere
@pytest.mark.parametrize("scale", PUBLISHED)
def test_the_whole_hessian(place, scale):
    x, y = torch.tensor([[0.0], [1], [3]]), torch.tensor([[0.5], [2]])
    a, b = torch.tensor([0.5, 0.25, 0.25]).double(), torch.tensor([0.6, 0.4], dtype=torch.float64)
    value, grad, hessian = PUBLISHED[scale]
    plan, tol = place.solve(x, y, 1.0, a=a, b=b, scale=scale), 2 * place.tol
    H = plan.hessian().to_dense().double().cpu()
    assert abs(float(plan.value()) - value) < tol
    assert (plan.grad().double().cpu()[:, 0] - torch.tensor(grad).double()).abs().max() < tol
    assert (H - torch.tensor(hessian).double()).abs().max() < tol
    assert relative(H.sum(1), 2 * scale * a) < tol
    points, weights = place.put(x).requires_grad_(), place.put(a).requires_grad_()
    options = {"b": place.put(b), "scale": scale, "backend": place.backend, "tol": 1e-11 if tol < 1e-6 else None}
    g, ga = torch.autograd.grad(
        ot_loss(points, place.put(y), 1.0, a=weights, **options), (points, weights), create_graph=True
    )
    rows = torch.stack([torch.autograd.grad(g[i, 0], points, retain_graph=True)[0][:, 0] for i in range(3)])
    assert (rows.double().cpu() - torch.tensor(hessian).double()).abs().max() < tol
    want = plan.f.double().cpu()
    assert relative((ga - ga[0]).detach().cpu(), want - want[0]) < 10 * tol


@everywhere
@limited
def test_strides_of_everything(place):
    x, y, v = place.put(pts(10, 3)), place.put(pts(8, 3, 1)), place.put(pts(10, 3, 2)).reshape(-1)
    a, V = place.put(wts(10)), place.put(pts(8, 2, 3))
    plan = place.solve(x, y, 0.5, a=a, max_iter=8, tol=1e-4)
    want = [plan.value(), plan.grad(), plan.hessian(max_iter=3) @ v, plan.apply(V)]
    wide = torch.zeros(20, 6, dtype=x.dtype, device=x.device)
    wide[::2, ::2] = x
    spread = torch.stack([a, a], 1)[:, 0]
    upper = torch.stack([v, v], 1)[:, 1]
    for other in (x.T.contiguous().T, wide[::2, ::2], torch.cat([y[:1], x])[1:]):
        assert other is not x
        same = place.solve(other, y.T.contiguous().T, 0.5, a=spread, max_iter=8, tol=1e-4)
        got = [same.value(), same.grad(), same.hessian(max_iter=3) @ upper, same.apply(V.T.contiguous().T)]
        assert all(torch.equal(one, two) for one, two in zip(got, want, strict=True))


@everywhere_in_float32
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_is_storage(place, half):
    x, y = pts(6, 2).to(place.device, half), pts(5, 2, 1).to(place.device, half)
    plan, same = (solve(p, q, 1.0, backend=place.backend) for p, q in ((x, y), (x.float(), y.float())))
    assert plan.value().dtype == torch.float32
    assert torch.equal(plan.value(), same.value())
    assert torch.equal(plan.grad(), same.grad())
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(ot_loss(leaf, y, 1.0, backend=place.backend), leaf)
    assert grad.dtype == half
    assert relative(grad.cpu(), same.grad().double().cpu()) < torch.finfo(half).eps


@everywhere
@slow_when_interpreted
def test_not_converged_is_said_once(place):
    x, y = pts(50, 2), pts(50, 2, 5) + 0.5
    with pytest.warns(ConvergenceWarning, match=r"marginal error .* passes \(pass_limit\)") as caught:
        plan = place.solve(x, y, 0.02, a=wts(50), b=wts(50, 1), max_iter=10, method="alternating")
    assert len(caught) == 1
    real = Referee(plan.x.cpu(), plan.y.cpu(), 0.02, a=plan.a.cpu(), b=plan.b.cpu(), at=(plan.f.cpu(), plan.g.cpu()))
    assert plan.error == pytest.approx(real.error, rel=1e-3)
    assert relative(plan.grad().cpu(), real.grad_x) < 1e-3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert place.solve(x, y, 5.0, tol=1e-4).converged


@everywhere
@slow_when_interpreted
@pytest.mark.parametrize("d", [1, 2, 17, 65, 127, 1025])
def test_dimensions_and_sizes(place, d):
    for n, m in ((1, 33), (33, 1), (31, 129), (129, 127)):
        x, y = pts(n, d) / d**0.5, pts(m, d, 1) / d**0.5
        plan = place.solve(x, y, 2.0)
        real = Referee(plan.x.cpu(), plan.y.cpu(), 2.0, at=(plan.f.cpu(), plan.g.cpu()))
        assert plan.converged
        assert real.error < plan.error + 1e-4
        want = 2 * (real.r[:, None] * real.x - real.P @ real.y)
        assert relative(plan.grad().cpu(), want) < 1e3 * torch.finfo(place.dtype).eps
        V = place.put(pts(n * d, 1, 2))
        assert (plan.hessian(rtol=1e-4) @ V).isfinite().all()


@slow_when_interpreted
@pytest.mark.parametrize("cost", ["sqeuclidean", "cosine"])
@pytest.mark.parametrize("method", ["auto", "two-level", "alternating", "symmetric", "newton"])
def test_dense_and_blocked_agree_to_the_last_digits(method, cost):
    x, y = pts(40, 3), pts(30, 3, 1)
    plans = [solve(x, y, 1.0, method=method, cost=cost, tol=1e-11, backend=name) for name in ("dense", "blocked")]
    assert relative(plans[0].value(), plans[1].value()) < 1e-12
    assert relative(plans[0].grad(), plans[1].grad()) < 1e-9


@pytest.mark.gpu
@slow_when_interpreted
def test_another_gpu_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x, y = pts(50, 3).float(), pts(40, 3, 1).float()
    plan, here = solve(x.to("cuda:1"), y.to("cuda:1"), 1.0), torch.cuda.current_device()
    assert plan.backend == "triton"
    assert plan.grad().device == torch.device("cuda:1")
    assert relative(plan.grad().cpu(), Referee(x, y, 1.0).grad_x) < 1e-3
    assert torch.cuda.current_device() == here


@pytest.mark.gpu
@slow_when_interpreted
def test_importing_takes_no_gpu_memory():
    code = "import torch, ot_newton; raise SystemExit(torch.cuda.is_initialized())"
    assert subprocess.run([sys.executable, "-c", code], cwd=HERE.parent, check=False).returncode == 0
