"""What a solve must not depend on, and what it must leave alone."""

import itertools
import logging
import os
import random
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from referee import pts, wts

from ot_newton import NewtonCG, cg, eigsh, minimize, minres, ot_loss, smallest_eigenvalue, solve
from ot_newton.batch import solve_batch
from ot_newton.check import check
from ot_newton.divergence import sinkhorn_divergence, solve_divergence
from ot_newton.kernels import dispatch
from ot_newton.problems.shuffled_regression import ShuffledRegression
from ot_newton.unbalanced import solve_unbalanced, unbalanced_ot_loss


@pytest.mark.parametrize("backend", ["blocked", "dense"])
def test_strides_do_not_matter(backend):
    x, y, a = pts(20, 3), pts(16, 3, 1), wts(20)
    plan = solve(x, y, 0.5, a=a, backend=backend)
    wide = torch.zeros(40, 6).double()
    wide[::2, ::2] = x
    column = torch.stack([a, a], 1)[:, 0]
    for other in (x.T.contiguous().T, wide[::2, ::2], torch.cat([y[:1], x])[1:]):
        same = solve(other, y.T.contiguous().T, 0.5, a=column, backend=backend)
        assert torch.equal(same.value(), plan.value())
        assert torch.equal(same.grad(), plan.grad())
        assert torch.equal(same.hessian() @ x.reshape(-1), plan.hessian() @ x.reshape(-1))
        V = pts(16, 2).T.contiguous().T
        assert torch.equal(same.apply(V), plan.apply(pts(16, 2)))
    spread = solve(x[:1].expand(20, -1), y, 0.5, a=a, backend=backend)
    assert torch.equal(spread.grad(), solve(x[:1].repeat(20, 1), y, 0.5, a=a, backend=backend).grad())


def test_nothing_else_changes():
    x, y, a = pts(20, 3), pts(16, 3, 1), wts(20)
    versions, copies = [t._version for t in (x, y, a)], [t.clone() for t in (x, y, a)]
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    filters = list(warnings.filters)
    with torch.no_grad():
        solve(x, y, 0.5, a=a).hessian().to_dense()
        assert not torch.is_grad_enabled()
    with pytest.raises(ValueError, match="eps"):
        solve(x, y, -1.0)
    assert [t._version for t in (x, y, a)] == versions
    assert all(torch.equal(t, copy) for t, copy in zip((x, y, a), copies, strict=True))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()  # noqa: NPY002
    assert random.getstate() == states[2]
    assert list(warnings.filters) == filters


def every_call(x: torch.Tensor, y: torch.Tensor, a: torch.Tensor) -> None:
    """Each public function that computes, once."""
    plan = solve(x, y, 0.5, a=a)
    H = plan.hessian()
    eigsh(H, k=2), smallest_eigenvalue(H), cg(H, x.reshape(-1)), minres(H, x.reshape(-1))
    solve_batch(torch.stack([x, x]), torch.stack([y, y]), 0.5, a=a)
    check(x, y, a, eps=0.5)
    leaf = x.clone().requires_grad_()
    with torch.enable_grad():
        for loss in (ot_loss, partial(unbalanced_ot_loss, reach=1.0), sinkhorn_divergence):
            (g,) = torch.autograd.grad(loss(leaf, y, 0.5, a=a), leaf, create_graph=True)
            torch.autograd.grad(g.square().sum(), leaf)
            loss(torch.stack([x, x]), torch.stack([y, y]), 0.5, a=a)
    solve_unbalanced(x, y, 0.5, 1.0, a=a).hessian() @ x.reshape(-1)
    solve_divergence(x, y, 0.5, a=a, reach=1.0).hessian() @ x.reshape(-1)
    problem = ShuffledRegression(x, y, eps=0.5, a=a)
    minimize(problem, problem.start(torch.Generator().manual_seed(0)), method=NewtonCG(), options={"maxiter": 2})


def surroundings() -> list:
    """All that a call could change around itself."""
    return [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_rng_state().tolist(),
        np.random.get_state()[1].tolist(),  # noqa: NPY002
        random.getstate(),
        list(warnings.filters),
        warnings.showwarning,
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        np.geterr(),
        logging.getLogger().level,
        logging.getLogger("ot_newton").handlers,
        torch.cuda.current_device() if torch.cuda.is_available() else None,
        sorted(os.environ.items()),
        os.getcwd(),
        os.times().children_user,  # no process of its own
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("grad", [True, False])
def test_nothing_around_a_call_changes(dtype, grad, capsys):
    x, y, a = pts(20, 3).to(dtype), pts(16, 3, 1).to(dtype), wts(20).to(dtype)
    versions, copies = [t._version for t in (x, y, a)], [t.clone() for t in (x, y, a)]
    with torch.set_grad_enabled(grad):
        before = surroundings()
        every_call(x, y, a)
        assert surroundings() == before
    assert [t._version for t in (x, y, a)] == versions
    assert all(torch.equal(t, copy) for t, copy in zip((x, y, a), copies, strict=True))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_default_dtype_and_device_do_not_matter(dtype):
    x, y, v = (p.to(dtype) for p in (pts(20, 3), pts(16, 3, 1), pts(20, 3, 2).reshape(-1)))

    def answers() -> list[torch.Tensor]:
        plan, apart = solve(x, y, 0.5), solve_divergence(x, y, 0.5, reach=1.0)
        of_plan = [plan.value(), plan.grad(), plan.hessian() @ v, eigsh(plan.hessian(), k=2).w]
        of_losses = [ot_loss(x, y, 0.5), unbalanced_ot_loss(x, y, 0.5, 1.0), sinkhorn_divergence(x, y, 0.5)]
        regression = ShuffledRegression(x, y, 0.5)
        w = regression.start(torch.Generator(device="cpu").manual_seed(0))
        of_regression = [*regression.value_and_grad(w, 0.05), regression.hessian(w, 0.05).to_dense()]
        return [*of_plan, *of_losses, apart.value(), apart.hessian() @ v, *of_regression]

    want = answers()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):  # what is created without a device lands where it cannot be computed with
            got = answers()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one, two) for one, two in zip(got, want, strict=True))


@pytest.mark.parametrize("late", [0, 1, 5])
@pytest.mark.parametrize(
    "call", [solve, ot_loss, solve_batch, check, sinkhorn_divergence, partial(solve_unbalanced, reach=1.0), "hessian"]
)
def test_an_exception_restores_everything(call, late, monkeypatch):
    """In the middle of the work, as from an interrupt or a device out of memory."""
    x, y, calls = pts(20, 3), pts(16, 3, 1), itertools.count()
    plan = solve(x, y, 0.5)

    def failing(primitive):
        def wrapped(*arguments, **options):
            if next(calls) >= late:
                raise KeyboardInterrupt
            return primitive(*arguments, **options)

        return wrapped

    for name in ("lse", "half_step", "attend", "apply", "hadamard"):
        monkeypatch.setattr(dispatch, name, failing(getattr(dispatch, name)))
    before = surroundings()
    if call == "hessian":
        with pytest.raises(KeyboardInterrupt):
            plan.hessian() @ x.reshape(-1)
    else:
        points = (x[None], y[None]) if call is solve_batch else (x, y)
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            call(*points, eps=0.01)
    assert surroundings() == before
    monkeypatch.undo()
    assert torch.equal(solve(x, y, 0.5).f, plan.f)


def test_several_threads_get_the_same_answers():
    x, y = pts(40, 2), pts(30, 2, 1)
    want = [solve(x, y, eps).f for eps in (0.3, 0.5, 1.0, 2.0)]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda eps: solve(x, y, eps).f, (0.3, 0.5, 1.0, 2.0)))
    assert all(torch.equal(one, two) for one, two in zip(got, want, strict=True))


def test_the_same_call_gives_the_same_bits():
    x, y = pts(40, 2), pts(30, 2, 1)
    first, second = solve(x, y, 0.1), solve(x, y, 0.1)
    assert torch.equal(first.f, second.f)
    assert first.n_passes == second.n_passes


def test_points_that_require_gradients_are_detached():
    plan = solve(pts(8, 2).requires_grad_(), pts(6, 2, 1), 0.5)
    assert not plan.value().requires_grad
    assert not plan.x.requires_grad
