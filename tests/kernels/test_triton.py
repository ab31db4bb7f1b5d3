"""The Triton kernels against the dense formulas in float64.

Without a CUDA device the same small cases run in Triton's interpreter, in a process of their own, since Triton reads
TRITON_INTERPRET when it is imported. On a GPU `pytest -m gpu` adds the large cases.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ot_newton.kernels import lse as lse_module
from ot_newton.kernels import transport as transport_module
from ot_newton.kernels.apply import apply, attend
from ot_newton.kernels.hadamard import hadamard
from ot_newton.kernels.lse import half_step, lse
from ot_newton.kernels.operands import prepare

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
HERE = INTERPRETED or DEVICE == "cuda"

here = pytest.mark.skipif(not HERE, reason="runs in the process of test_in_the_interpreter")
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on overflow and log2(0), which the kernels handle

FILES = [Path(__file__), Path(__file__).with_name("test_operands.py")]
SMALL = [(1, 1, 1), (257, 33, 2), (129, 1, 3), (65, 200, 5), (97, 130, 16), (33, 257, 17), (65, 129, 33), (65, 131, 65)]


@pytest.mark.skipif(HERE, reason="the kernels run in this process")
def test_in_the_interpreter():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", "-p", "no:cacheprovider", *map(str, FILES)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]


class Case:
    """A random plan with marginal mass 1, and what float64 makes of it."""

    def __init__(self, n: int, m: int, d: int, c: int, *, eps: float = 0.1, seed: int = 0, zero_weights: bool = True):
        g = torch.Generator().manual_seed(seed)
        x, y = torch.rand(n, d, generator=g) - 0.5, torch.rand(m, d, generator=g) - 0.5
        log_b = torch.log_softmax(torch.randn(m, generator=g), dim=0)
        if zero_weights and m > 2:
            log_b[::7] = -math.inf
        q, k, v = (2 / eps) * x, y, log_b - (y * y).sum(dim=1) / eps
        self.V, self.A, self.B = (torch.randn(s, generator=g) for s in ((m, c), (n, d), (m, d)))
        self.q, self.k, self.v, self.V, self.A, self.B = (t.to(DEVICE) for t in (q, k, v, self.V, self.A, self.B))
        score = self.q.double() @ self.k.double().T + self.v.double()
        self.lse = score.logsumexp(dim=1)
        self.u = (-math.log(n) - self.lse).float()
        self.P = (score + self.u.double()[:, None]).exp()
        self.size = float(self.q.norm(dim=1).max() * self.k.norm(dim=1).max() + self.v[self.v.isfinite()].abs().max())

    def plan(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.u, self.v


def worst(got: Tensor, want: Tensor, scale: Tensor | float = 1.0) -> float:
    """Largest error in units of `scale`, NaN counted as infinite."""
    return float(((got - want).abs() / scale).nan_to_num(nan=math.inf).max())


def row_scale(case: Case, W: Tensor) -> Tensor:
    """Size of each row's weighted sums, `Σ_j P_ij W_ij` times the largest entry of each column."""
    return (case.P * W).sum(dim=1, keepdim=True) * case.V.double().abs().amax(dim=0)


@here
@quiet
@pytest.mark.parametrize(("n", "m", "d"), SMALL)
def test_lse(n, m, d):
    case = Case(n, m, d, 1)
    tol = 4e-7 * case.size + 2e-6
    assert worst(lse(case.q, case.k, case.v), case.lse) < tol
    assert worst(lse(case.q, case.k, case.v, anchor=case.lse.float()), case.lse) < tol
    assert worst(lse(case.q, case.k, case.v, precision="tf32"), case.lse) < 2e-3 * case.size


@here
@quiet
@pytest.mark.parametrize(("n", "m", "d"), SMALL)
@pytest.mark.parametrize("offset", [0.3, -200.0])
def test_half_step(n, m, d, offset):
    case = Case(n, m, d, 1)
    want = -case.lse
    guess = (want + offset).float()
    potential, change = half_step(case.q, case.k, case.v, guess, operands=prepare(case.q, case.k))
    tol = 4e-7 * case.size + 2e-6
    assert worst(potential, want) < tol
    assert torch.equal(change, guess - potential)


@here
@quiet
@pytest.mark.parametrize("offset", [50.0, -50.0, 300.0, -300.0, math.inf, -math.inf, math.nan])
def test_bad_anchors_cost_no_accuracy(offset):
    case = Case(33, 65, 5, 3)
    anchor = case.lse.float()
    anchor[7] += offset
    assert worst(lse(case.q, case.k, case.v, anchor=anchor), case.lse) < 2e-5
    want, scale = case.P @ case.V.double(), row_scale(case, torch.ones_like(case.P))
    for c in (1, 3):
        assert worst(apply(*case.plan(), case.V[:, :c], anchor=anchor), want[:, :c], scale[:, :c]) < 2e-5


@here
@quiet
@pytest.mark.parametrize(("n", "m", "d", "c"), [(*s, c) for s, c in zip(SMALL, [1, 3, 1, 3, 1, 1, 3, 3], strict=True)])
def test_apply(n, m, d, c):
    case = Case(n, m, d, c)
    want, scale = case.P @ case.V.double(), row_scale(case, torch.ones_like(case.P))
    tol = 6e-7 * case.size + 2e-6
    assert worst(apply(*case.plan(), case.V), want, scale) < tol
    if c > 1:
        assert worst(apply(*case.plan(), case.V, precision="bf16"), want, scale) < 3e-3 * case.size


@here
@quiet
@pytest.mark.parametrize(("n", "m", "d"), SMALL)
def test_hadamard(n, m, d):
    case = Case(n, m, d, 2)
    case.A *= torch.exp(5 * torch.randn(n, 1, generator=torch.Generator().manual_seed(1))).to(DEVICE)
    want = (case.P * (case.A.double() @ case.B.double().T)) @ case.V.double()
    scale = row_scale(case, case.A.double().abs() @ case.B.double().abs().T)
    tol = 6e-7 * case.size + 2e-6
    assert worst(hadamard(*case.plan(), case.A, case.B, case.V), want, scale) < tol
    mass, (q, k, _, v) = case.P.sum(dim=1, keepdim=True), case.plan()
    for anchor in (None, case.lse.float()):
        means = hadamard(q, k, None, v, case.A, case.B, case.V, anchor=anchor)
        assert worst(means, want / mass, scale / mass) < tol


@here
@quiet
@pytest.mark.parametrize("c", [1, 17, 64, 65, 70])
def test_more_columns(c):
    case = Case(33, 65, 5, c)
    want, scale = case.P @ case.V.double(), row_scale(case, torch.ones_like(case.P))
    assert worst(apply(*case.plan(), case.V), want, scale) < 2e-5
    for anchor in (None, case.lse.float()):
        log_sum, mean = attend(case.q, case.k, case.v, case.V, anchor=anchor)
        assert worst(log_sum, case.lse) < 2e-5
        assert worst(mean, want * 33, scale * 33) < 2e-5


@here
@quiet
def test_strides_and_transpose():
    case = Case(65, 130, 5, 3)
    q, k = case.q.repeat_interleave(2, dim=1)[:, ::2], case.k.T.contiguous().T
    v, u, V = case.v.repeat_interleave(3)[::3], case.u.repeat_interleave(2)[::2], case.V.T.contiguous().T
    assert worst(lse(q, k, v), case.lse) < 2e-5
    assert worst(apply(q, k, u, v, V), case.P @ case.V.double(), row_scale(case, torch.ones_like(case.P))) < 2e-5
    Q, K = prepare(case.q, case.k)
    U = torch.ones(65, 1, device=DEVICE)
    assert worst(apply(k, q, v, u, U, operands=(K, Q)), case.P.sum(dim=0)[:, None]) < 2e-5


@here
@quiet
def test_shift_that_overflows_is_found():
    """The first tile lies far below the rest, further than a float32 exponent reaches."""
    case = Case(5, 257, 2, 3, zero_weights=False)
    case.v[:140] -= 500.0
    case.lse = (case.q.double() @ case.k.double().T + case.v.double()).logsumexp(dim=1)
    case.u = (-case.lse).float()
    P = (case.q.double() @ case.k.double().T + case.v.double() - case.lse[:, None]).exp()
    assert worst(lse(case.q, case.k, case.v), case.lse) < 1e-4
    for c in (1, 3):
        assert worst(apply(*case.plan(), case.V[:, :c]), P @ case.V[:, :c].double()) < 1e-4


@here
@quiet
def test_ranges_of_unlike_size_add_up():
    """One range of columns starts so low that its sum is huge, and is still a part of the result."""
    q, k, v = (torch.zeros(s, device=DEVICE) for s in ((3, 1), (513, 1), (513,)))
    v[:] = -math.inf
    v[0], v[200], v[300] = -126.5 * math.log(2), -4.5 * math.log(2), 0.0
    assert worst(lse(q, k, v), torch.full_like(q[:, 0], math.log(1 + 2**-4.5))) < 1e-6


@here
@quiet
def test_weight_zero_everywhere():
    case = Case(5, 40, 2, 3)
    v = torch.full_like(case.v, -math.inf)
    assert torch.isneginf(lse(case.q, case.k, v)).all()
    assert (apply(case.q, case.k, case.u, v, case.V) == 0).all()
    u = torch.where(torch.arange(5, device=DEVICE) == 2, -math.inf, case.u)
    out = apply(case.q, case.k, u, case.v, case.V)
    assert (out[2] == 0).all()
    assert (out[1] != 0).all()


@here
@quiet
def test_nan_stays_nan():
    case = Case(5, 130, 5, 3)
    case.q[3, 1] = math.nan
    assert lse(case.q, case.k, case.v)[3].isnan()
    case = Case(3, 130, 5, 3)
    for j in range(60, 62 if INTERPRETED else 76):
        k = case.k.clone()
        k[j, 1] = math.nan
        assert lse(case.q, k, torch.zeros_like(case.v)).isnan().all()
        assert apply(case.q, k, case.u, torch.zeros_like(case.v), case.V[:, :1]).isnan().all()


@here
def test_refuses():
    case = Case(3, 4, 2, 1)
    with pytest.raises(TypeError, match=r"q: expected torch.float32"):
        lse(case.q.double(), case.k, case.v)
    with pytest.raises(ValueError, match="precision: expected one of"):
        lse(case.q, case.k, case.v, precision="fp8")


@pytest.mark.gpu
@pytest.mark.parametrize("eps", [0.1, 0.01])
@pytest.mark.parametrize("d", [1, 2, 3, 5, 6, 10, 11, 16, 21, 22, 32, 42, 43, 64, 65, 80, 96, 128, 256, 300, 512, 1000])
def test_dimensions(d, eps):
    n, m = 1031, 2053
    case = Case(n, m, d, 20, eps=eps)
    tol = (4e-7 + 1e-9 * d) * case.size + 2e-6  # the tensor cores truncate their sums: errors grow with the steps
    assert worst(lse(case.q, case.k, case.v), case.lse) < tol
    assert worst(lse(case.q, case.k, case.v, anchor=case.lse.float()), case.lse) < tol
    scale = row_scale(case, torch.ones_like(case.P))
    want = case.P @ case.V.double()
    for anchor in (None, case.lse.float()):
        for c in (1, 20):
            assert worst(apply(*case.plan(), case.V[:, :c], anchor=anchor), want[:, :c], scale[:, :c]) < 2 * tol
    W = case.A.double() @ case.B.double().T
    scale = row_scale(case, case.A.double().abs() @ case.B.double().abs().T)
    assert worst(hadamard(*case.plan(), case.A, case.B, case.V), (case.P * W) @ case.V.double(), scale) < 2 * tol


@pytest.mark.gpu
@pytest.mark.parametrize("power", [-14, 14])
@pytest.mark.parametrize("d", [5, 64, 128])
def test_scales(d, power):
    case = Case(500, 700, d, 4)
    q, k = case.q * 2.0**-power, case.k * 2.0**power
    tol = 4e-7 * case.size + 2e-6
    assert worst(lse(q, k, case.v), case.lse) < tol
    assert worst(apply(q, k, case.u, case.v, case.V * 2.0**power) * 2.0**-power, case.P @ case.V.double()) < tol


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "d"), [(1, 5), (40_001, 5), (9_999, 64), (3_000, 300)])
def test_two_runs_give_the_same_bits(n, d):
    g = torch.Generator("cuda").manual_seed(0)
    q, k, V = (torch.randn(n, s, device="cuda", generator=g) for s in (d, d, 16))
    v = -(k * k).sum(dim=1)
    u = -lse(q, k, v)
    for call in (
        lambda: lse(q, k, v),
        lambda: apply(q, k, u, v, V[:, :1]),
        lambda: apply(q, k, u, v, V),
        lambda: hadamard(q, k, u, v, q, k, V),
    ):
        first = call()
        assert all(torch.equal(first, call()) for _ in range(3))


@pytest.mark.gpu
def test_sizes_compile_nothing():
    kernels = [lse_module._lse_kernel, lse_module._finish_kernel]
    kernels += [transport_module._transport_kernel, transport_module._finish_kernel]

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    counts = []
    for n in [1, 2, 15, 16, 17, 32, 64, 100, 128, 255, 256, 257, 512, 1000, 1024, 2048, 3333, 4096, 5000, 8192]:
        q, v = torch.rand(n, 5, device="cuda"), torch.zeros(n, device="cuda")
        u = -lse(q, q, v)
        assert worst(apply(q, q, u, v, torch.ones(n, 1, device="cuda")), torch.ones(n, 1, device="cuda")) < 1e-5
        counts.append(compiled())
    assert counts[-1] == counts[0]


@pytest.mark.gpu
def test_offsets_beyond_2_to_the_31():
    n, d = 2_200_000, 1024
    q = torch.randn(3, d, device="cuda") / d**0.5
    k = torch.zeros(n, d, device="cuda")
    k[-1] = 1.0
    v = torch.zeros(n, device="cuda")
    want = torch.logaddexp(torch.tensor(n - 1.0).log().cuda(), q.sum(dim=1))
    assert worst(lse(q, k, v), want) < 1e-5
    u = torch.zeros(3, device="cuda")
    V = torch.zeros(n, 1, device="cuda")
    V[-1] = 1.0
    assert worst(apply(q, k, u, v, V)[:, 0], q.sum(dim=1).exp(), q.sum(dim=1).exp()) < 1e-4
    last = lse(k, torch.ones(3, d, device="cuda"), torch.zeros(3, device="cuda"))[-1:]
    assert worst(last, torch.full_like(last, math.log(3) + d)) < 1e-5 * d
