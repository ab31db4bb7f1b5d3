"""The primitives over all n×m pairs in blocks, in plain torch: float32 and float64, any device.

Memory is O((n + m)(d + c)) plus one block of at most `BLOCK_BYTES`. The exponent of a pair comes finished out of one
matrix product, `[q, u, 1]·[k, 1, v]`, in base 2, so that a block costs a product, an in-place `exp2` and a reduction.
A log-sum-exp with an anchor close to its result needs no running maximum; rows where the anchor was too far off are
found and redone with one.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
MAX_COLUMNS = 1024
LOG2E = math.log2(math.e)


def _augmented(q: Tensor, k: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Operands whose product is the exponent in base 2, `log2(e)·(q_i·k_j + u_i + v_j)`."""
    left = torch.cat([q * LOG2E, (u * LOG2E)[:, None], torch.ones_like(u)[:, None]], dim=1)  # (n, d+2)
    right = torch.cat([k, torch.ones_like(v)[:, None], (v * LOG2E)[:, None]], dim=1)  # (m, d+2)
    return left, right.T


def _blocks(left: Tensor, n: int, m: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Row and column ranges that cover all pairs, with one buffer that they share."""
    budget = BLOCK_BYTES.get(left.device.type, BLOCK_BYTES["cuda"]) // left.element_size()
    columns = min(m, MAX_COLUMNS)
    rows = max(1, min(n, budget // columns))
    buffer = left.new_empty(rows * columns)
    for i in range(0, n, rows):
        height = min(rows, n - i)
        for j in range(0, m, columns):
            width = min(columns, m - j)
            yield slice(i, i + height), slice(j, j + width), buffer[: height * width].view(height, width)


def _plan_blocks(q: Tensor, k: Tensor, u: Tensor, v: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    left, right = _augmented(q, k, u, v)
    for i, j, block in _blocks(left, len(q), len(k)):
        yield i, j, _exp2_(torch.mm(left[i], right[:, j], out=block))


def _exp2_(S: Tensor) -> Tensor:
    """2^S in place. A CPU takes ten times as long over results that underflow, so they are cut off to 0 beforehand."""
    if S.device.type != "cpu":
        return S.exp2_()
    tiny = torch.finfo(S.dtype).tiny
    return S.clamp_(min=math.log2(tiny)).exp2_().sub_(tiny)


def lse(q: Tensor, k: Tensor, v: Tensor, *, anchor: Tensor | None = None) -> Tensor:
    """Row log-sum-exp `log Σ_j exp(q_i·k_j + v_j)`, shape (n,); `anchor` (n,) is a guess of the result."""
    if anchor is None:
        return _attend_online(q, k, v, None)[0]
    total = q.new_zeros(len(q))
    for i, _, P in _plan_blocks(q, k, -anchor, v):
        total[i] += P.sum(dim=1)
    lost = _lost(total)
    out = total.log_().add_(anchor)
    if len(lost):
        out[lost] = _attend_online(q[lost], k, v, None)[0]
    return out


def half_step(q: Tensor, k: Tensor, v: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
    """`-lse(q, k, v)` and its difference from a guess of it, `guess + lse`; both (n,)."""
    potential = -lse(q, k, v, anchor=-guess)
    return potential, guess - potential


def _lost(total: Tensor) -> Tensor:
    """Rows whose anchored sum overflowed, vanished, or came so close to either that digits are gone."""
    limits = torch.finfo(total.dtype)
    sound = (total > limits.tiny / limits.eps**2) & (total < limits.max * limits.eps)
    return (~sound).nonzero().squeeze(1)


def attend(q: Tensor, k: Tensor, v: Tensor, V: Tensor, *, anchor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Row log-sum-exp and softmax-weighted averages `Σ_j softmax_j(S_ij) V_j`, shapes (n,) and (n, c), in one pass."""
    if anchor is None:
        return _attend_online(q, k, v, V)
    ones = torch.ones_like(v)[:, None]
    sums = apply(q, k, -anchor, v, torch.cat([V, ones], dim=1))  # (n, c+1)
    lost = _lost(sums[:, -1])
    log_sum, mean = sums[:, -1].log() + anchor, sums[:, :-1] / sums[:, -1:]
    if len(lost):
        log_sum[lost], mean[lost] = _attend_online(q[lost], k, v, V)
    return log_sum, mean


def _attend_online(q: Tensor, k: Tensor, v: Tensor, V: Tensor | None) -> tuple[Tensor, Tensor]:
    """`attend` with a running maximum; without V the averages are empty."""
    left, right = _augmented(q, k, torch.zeros_like(q[:, 0]), v)
    V = v.new_empty(len(v), 0) if V is None else V
    top = q.new_full((len(q),), -math.inf)
    total, mean = q.new_zeros(len(q)), q.new_zeros(len(q), V.shape[1])
    for i, j, S in _blocks(left, len(q), len(k)):
        torch.mm(left[i], right[:, j], out=S)
        high = torch.maximum(top[i], S.amax(dim=1))
        # A row that has met nothing but weight zero keeps the maximum -inf; any finite reference will do for it.
        reference = torch.where(torch.isneginf(high), 0.0, high)
        _exp2_(S.sub_(reference[:, None]))
        shrink = torch.exp2(top[i] - reference)
        total[i] = total[i] * shrink + S.sum(dim=1)
        mean[i] = mean[i] * shrink[:, None] + S @ V[j]
        top[i] = high
    return (top + total.log2()) / LOG2E, mean / total[:, None]


def apply(q: Tensor, k: Tensor, u: Tensor, v: Tensor, V: Tensor) -> Tensor:
    """Transport application `P V`, shape (n, c) for V of shape (m, c)."""
    out = q.new_zeros(len(q), V.shape[1])
    for i, j, P in _plan_blocks(q, k, u, v):
        out[i].addmm_(P, V[j])
    return out


def hadamard(
    q: Tensor, k: Tensor, u: Tensor | None, v: Tensor, A: Tensor, B: Tensor, V: Tensor, *, anchor: Tensor | None = None
) -> Tensor:
    """Hadamard-weighted transport `(P ∘ A Bᵀ) V`, shape (n, c), for A (n, h), B (m, h), V (m, c).

    Without u the rows of P sum to one; the sums come in the same pass where there is an anchor.
    """
    out, total = q.new_zeros(len(q), V.shape[1]), q.new_zeros(len(q))
    shift = u if u is not None else -(lse(q, k, v) if anchor is None else anchor)
    for i, j, P in _plan_blocks(q, k, shift, v):
        if u is None:
            total[i] += P.sum(dim=1)
        out[i].addmm_(P.mul_(A[i] @ B[j].T), V[j])
    if u is not None:
        return out
    out /= total[:, None]
    lost = _lost(total)
    if len(lost) and anchor is not None:
        out[lost] = hadamard(q[lost], k, None, v, A[lost], B, V)
    return out
