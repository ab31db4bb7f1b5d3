"""What a solve must not depend on, and what it must leave alone."""

import random
import warnings

import numpy as np
import pytest
import torch
from referee import pts, wts

from ot_newton.sinkhorn import solve


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


def test_the_same_call_gives_the_same_bits():
    x, y = pts(40, 2), pts(30, 2, 1)
    first, second = solve(x, y, 0.1), solve(x, y, 0.1)
    assert torch.equal(first.f, second.f)
    assert first.n_passes == second.n_passes


def test_points_that_require_gradients_are_detached():
    plan = solve(pts(8, 2).requires_grad_(), pts(6, 2, 1), 0.5)
    assert not plan.value().requires_grad
    assert not plan.x.requires_grad
