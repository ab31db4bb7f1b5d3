"""Every backend against numpy and scipy in float64: one body, all primitives."""

import math

import numpy as np
import pytest
import torch
from referee import relative
from scipy.special import logsumexp
from torch.utils._python_dispatch import TorchDispatchMode

from ot_newton.kernels import blocked, dispatch

BACKENDS = ["dense", "blocked"]
DTYPES = [torch.float64, torch.float32]
TOL = {torch.float64: 1e-12, torch.float32: 2e-5}
SIZES = [1, 2, 31, 33, 127, 129]
DIMENSIONS = [1, 2, 3, 5, 15, 16, 17, 31, 33, 63, 65, 96, 127, 1000, 1025, 4096]


@pytest.fixture
def tiny_blocks(monkeypatch):
    """Blocks of 7 columns and at most 5 rows, so that small inputs meet every edge of the tiling."""
    monkeypatch.setattr(blocked, "MAX_COLUMNS", 7)
    monkeypatch.setattr(blocked, "BLOCK_BYTES", dict.fromkeys(blocked.BLOCK_BYTES, 8 * 35))


class Inputs:
    """Operands of all primitives, and the answers by numpy in float64."""

    def __init__(self, n: int, m: int, d: int, dtype: torch.dtype, c: int = 3, zeros: bool = True) -> None:
        g = torch.Generator().manual_seed(n + 131 * m + 17 * d)
        shapes = {"q": (n, d), "k": (m, d), "u": (n,), "v": (m,), "V": (m, c), "A": (n, 2), "B": (m, 2)}
        for name, shape in shapes.items():
            setattr(self, name, torch.randn(shape, generator=g, dtype=torch.float64).to(dtype))
        self.q /= d**0.5
        if zeros and m > 2:
            self.v[::3] = -math.inf
        q, k, u, v, V, A, B = (getattr(self, name).double().numpy() for name in shapes)
        S = q @ k.T + v
        P = np.exp(S + u[:, None])
        self.want = {
            "lse": logsumexp(S, axis=1),
            "attend": np.exp(S - logsumexp(S, axis=1, keepdims=True)) @ V,
            "apply": P @ V,
            "hadamard": (P * (A @ B.T)) @ V,
            "hadamard means": (P * (A @ B.T)) @ V / P.sum(axis=1, keepdims=True),
        }
        self.want = {name: torch.from_numpy(value) for name, value in self.want.items()}

    def run(self, backend: str, anchor: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        q, k, u, v, V = self.q, self.k, self.u, self.v, self.V
        log_sum, mean = dispatch.attend(q, k, v, V, anchor=anchor, backend=backend)
        plain = dispatch.lse(q, k, v, anchor=anchor, backend=backend)
        torch.testing.assert_close(plain, log_sum, rtol=10 * TOL[q.dtype], atol=10 * TOL[q.dtype])
        guess = -(plain if anchor is None else anchor)
        potential, change = dispatch.half_step(q, k, v, guess, backend=backend)
        torch.testing.assert_close(potential, -plain, rtol=10 * TOL[q.dtype], atol=10 * TOL[q.dtype])
        torch.testing.assert_close(change, guess - potential, rtol=0, atol=0, equal_nan=True)
        return {
            "lse": plain,
            "attend": mean,
            "apply": dispatch.apply(q, k, u, v, V, backend=backend),
            "hadamard": dispatch.hadamard(q, k, u, v, self.A, self.B, V, backend=backend),
            "hadamard means": dispatch.hadamard(q, k, None, v, self.A, self.B, V, anchor=anchor, backend=backend),
        }

    def check(self, got: dict[str, torch.Tensor]) -> None:
        for name, want in self.want.items():
            assert got[name].dtype == self.q.dtype
            assert got[name].shape == want.shape
            assert relative(got[name], want) < TOL[self.q.dtype], name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("d", DIMENSIONS)
def test_all_sizes(backend, d, dtype):
    for n in SIZES:
        m = SIZES[(SIZES.index(n) + d) % len(SIZES)]
        for shape in {(n, m), (m, n)} if d <= 1000 or n < 31 else {(n, 2)}:
            case = Inputs(*shape, d, dtype)
            case.check(case.run(backend))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (6, 8), (36, 50), (3, 71), (71, 3)])
def test_block_edges(shape, dtype, tiny_blocks):
    case = Inputs(*shape, 4, dtype)
    case.check(case.run("blocked"))
    case.check(case.run("blocked", anchor=case.want["lse"].to(dtype) + 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "offset", [0.0, 3.0, -3.0, 80.0, -80.0, 900.0, -900.0, 1e5, -1e5, math.inf, -math.inf, math.nan]
)
def test_an_anchor_is_only_a_hint(backend, dtype, offset, tiny_blocks):
    case = Inputs(20, 30, 3, dtype)
    anchor = case.want["lse"].to(dtype, copy=True)
    case.check(case.run(backend, anchor + offset))
    anchor[::4] += offset  # some rows only
    case.check(case.run(backend, anchor))


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores(backend, tiny_blocks):
    case = Inputs(20, 30, 3, torch.float64)
    v = 1e4 * torch.linspace(-1, 1, 30, dtype=torch.float64)
    want = torch.from_numpy(logsumexp((case.q @ case.k.T + v).numpy(), axis=1))
    assert relative(dispatch.lse(case.q, case.k, v, backend=backend), want) < 1e-14
    shifted = dispatch.apply(case.q, case.k, -want, v, case.V, backend=backend)
    assert relative(shifted, dispatch.attend(case.q, case.k, v, case.V, backend=backend)[1]) < 1e-10


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_mass_at_all(backend):
    case = Inputs(4, 5, 2, torch.float64)
    v = torch.full((5,), -math.inf, dtype=torch.float64)
    for anchor in (None, torch.zeros(4, dtype=torch.float64)):
        assert torch.isneginf(dispatch.lse(case.q, case.k, v, anchor=anchor, backend=backend)).all()
    assert (dispatch.apply(case.q, case.k, case.u, v, case.V, backend=backend) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_do_not_matter(backend, dtype):
    case = Inputs(24, 40, 6, dtype)
    plain = case.run(backend)
    case.q = torch.stack([case.q, -case.q], 2)[:, :, 0]  # column slices of a larger array
    case.k = case.k.T.contiguous().T  # column-major
    case.u = torch.stack([case.u, case.u + 1], 1).reshape(-1)[::2]
    case.v = torch.cat([torch.ones_like(case.v), case.v])[len(case.v) :]  # storage offset
    case.V, case.A = case.V.T.contiguous().T, case.A.T.contiguous().T
    for name, value in case.run(backend).items():
        assert relative(value, plain[name].double()) < 16 * torch.finfo(dtype).eps, name
    case.V = case.V[:, :1].expand(-1, 3)  # stride 0
    expanded = dispatch.apply(case.q, case.k, case.u, case.v, case.V, backend=backend)
    assert relative(expanded, plain["apply"][:, :1].double()) < 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_left_alone(backend):
    case = Inputs(24, 40, 6, torch.float64)
    names = ("q", "k", "u", "v", "V", "A", "B")
    before = [(getattr(case, name).clone(), getattr(case, name)._version) for name in names]
    anchor = case.want["lse"].clone()
    case.run(backend, anchor)
    assert torch.equal(anchor, case.want["lse"])
    for name, (value, version) in zip(names, before, strict=True):
        assert torch.equal(getattr(case, name), value)
        assert getattr(case, name)._version == version


class _Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returned."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


def test_blocked_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK_BYTES", dict.fromkeys(blocked.BLOCK_BYTES, 1 << 18))
    case = Inputs(600, 700, 3, torch.float32)
    with _Largest() as largest:
        got = case.run("blocked")
        case.run("blocked", case.want["lse"].float())
    case.check(got)
    assert largest.bytes <= 1 << 18  # the pairs would take six times as much


def test_resolve():
    cpu = torch.device("cpu")
    assert dispatch.resolve("auto", cpu, torch.float32) == "blocked"
    assert dispatch.resolve("dense", cpu, torch.float32) == "dense"
    with pytest.raises(ValueError, match=r"expected one of auto, blocked, dense, triton, got 'keops'"):
        dispatch.resolve("keops", cpu, torch.float32)
    with pytest.raises(RuntimeError, match=r"expected float32 .*on a CUDA device.*got torch.float32 on cpu"):
        dispatch.resolve("triton", cpu, torch.float32)
    case = Inputs(3, 4, 2, torch.float32)
    with pytest.raises(RuntimeError, match=r"backend 'triton'"):
        dispatch.lse(case.q, case.k, case.v, backend="triton")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_underflows_is_zero(dtype):
    limits = torch.finfo(dtype)
    exponents = torch.tensor([-math.inf, -1e4, math.log(limits.tiny) + 8, -1.0, 0.0], dtype=dtype)
    zero, one = torch.zeros(5, 1, dtype=dtype), torch.ones(1, 1, dtype=dtype)
    out = dispatch.apply(zero, zero[:1], exponents, zero[0], one, backend="blocked")[:, 0]
    assert out[:2].tolist() == [0, 0]
    assert 0 < float(out[2]) < 1e4 * limits.tiny
    torch.testing.assert_close(out[3:], exponents[3:].exp())
