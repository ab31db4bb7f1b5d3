"""Transport application on the tensor cores: `out = P V` with `P_ij = exp(q_i·k_j + u_i + v_j)`.

A program computes `p_ij = exp2(s_ij + v_j - a_i)` under a shift a_i of its own and leaves `exp2(a_i + u_i)` to the end. With
many columns p and V are split into two fp16 parts each, `p V = p_h V_h + p_h V_l + p_l V_h`, with errors of 2^-22 of the
largest entries; so a_i must lie close to the row's maximum. A single column is multiplied in float32.

The shift comes from the caller's anchor or from the first tile. A program whose sums show that it was too far off finds the
true maximum and repeats its range.

Reference: Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", IJHPCA 2022, for the split.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from ot_newton.kernels import tiles as tiling
from ot_newton.kernels.lse import highest
from ot_newton.kernels.operands import check, padded, prepare, prepare_bias, prepare_columns
from ot_newton.kernels.tiles import exp2, part, row_sum, score

MAX_COLUMNS = 64
_LOG2E = tl.constexpr(tiling.LOG2E)
_FINISH_ENTRIES = 1024


def apply(
    q: Tensor,
    k: Tensor,
    u: Tensor,
    v: Tensor,
    V: Tensor,
    *,
    anchor: Tensor | None = None,
    precision: str = "fp32",
    operands: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Transport application `P V`, shape (n, c), for `P_ij = exp(q_i·k_j + u_i + v_j)`; one pass for each 64 columns.

    Args:
        q, k: points, (n, d) and (m, d), float32 on one CUDA device.
        u, v: (n,) and (m,), may hold -inf.
        V: (m, c).
        anchor: (n,), a guess of `lse(q, k, v)`, which a potential provides; it saves time where eps is small.
        precision: "fp32" splits P and V, "tf32" or "bf16" round them to 11 bits.
        operands: what `prepare(q, k, precision=precision)` returned, to be spared its work.

    Raises:
        TypeError: for anything but float32.
        ValueError: for tensors that are not on one CUDA device, or an unknown precision.
    """
    check(precision, q=q, k=k, u=u, v=v, V=V)
    operands = operands or prepare(q, k, precision=precision)
    out = q.new_empty(len(q), V.shape[1])
    for c in range(0, V.shape[1], MAX_COLUMNS):
        _, acc, shifts, scale = transport(len(q), len(k), *operands, v, V[:, c : c + MAX_COLUMNS], anchor, precision)
        finish(acc, shifts, scale, out[:, c : c + MAX_COLUMNS], u=u)
    return out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    V: Tensor,
    *,
    anchor: Tensor | None = None,
    precision: str = "fp32",
    operands: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Row log-sum-exp (n,) and softmax-weighted averages `Σ_j softmax_j(q_i·k_j + v_j) V_j` (n, c); see `apply`."""
    check(precision, q=q, k=k, v=v, V=V)
    operands = operands or prepare(q, k, precision=precision)
    log_sum, mean = torch.empty_like(q[:, 0]), q.new_empty(len(q), V.shape[1])
    for c in range(0, max(V.shape[1], 1), MAX_COLUMNS):
        columns = V[:, c : c + MAX_COLUMNS]
        sums, acc, shifts, scale = transport(len(q), len(k), *operands, v, columns, anchor, precision, with_sums=True)
        finish(acc, shifts, scale, mean[:, c : c + MAX_COLUMNS], sums=sums, log_sum=log_sum)
    return log_sum, mean


def transport(
    n: int, m: int, Q: Tensor, K: Tensor, v: Tensor, V: Tensor, anchor: Tensor | None, precision: str,
    *, with_sums: bool = False, weights: tuple[Tensor, Tensor, float] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Unfinished products, one for each range of columns: row sums, `p V` (ranges, n, C), shifts, and scales of columns.

    With `weights`, operands of A and B and a bound of `A_i·B_j`, the product is `(p ∘ A Bᵀ / bound) V`.
    """
    c, device = V.shape[1], V.device
    vector = c == 1 and not with_sums and weights is None
    width, products = Q.shape[-1], 3 if Q.dim() == 3 else 1
    tiles = tiling.for_lse(width, products) if vector else tiling.for_columns(width, products)
    blocks, ranges, length = tiling.partition(n, m, tiles, device)
    if vector:
        C, parts, scale = 1, pad(V[:, 0], (0, padded(m) - m)), V.new_ones(1)
    else:
        C = max(16, triton.next_power_of_2(c))
        parts, scale = prepare_columns(V, C)
    acc = V.new_empty(ranges, n, C)
    sums, shifts = V.new_empty(2, ranges, n)
    A, B, bound = weights or (Q, K, 1.0)
    a_width, a_products = A.shape[-1], 3 if A.dim() == 3 else 1
    a_depth = tiling.for_columns(a_width, a_products).depth
    _transport_kernel[blocks, ranges](
        Q, K, A, B, prepare_bias(v), parts, sums if anchor is None else anchor.contiguous(),
        acc, sums, shifts, 1 / bound, n, padded(n), padded(m), width, a_width, triton.cdiv(m, tiles.columns), length,
        tiles.rows, tiles.columns, tiles.depth, products, width > tiles.depth, tiles.stages,
        C, precision == "fp32", anchor is not None and not vector,
        weights is not None, a_depth, a_products, a_width > a_depth,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return sums, acc, shifts, scale


def finish(
    acc: Tensor, shifts: Tensor, scale: Tensor, out: Tensor,
    *, u: Tensor | None = None, sums: Tensor | None = None, log_sum: Tensor | None = None,
) -> None:  # fmt: skip
    """Add the ranges into `out` (n, c): scaled by exp(u), or divided by the row sums, whose logarithm goes to `log_sum`."""
    ranges, n, C = acc.shape
    rows = _FINISH_ENTRIES // C
    mean = sums is not None
    _finish_kernel[triton.cdiv(n, rows),](
        acc, shifts, sums if mean else shifts, scale, shifts if u is None else u.contiguous(), out,
        log_sum if log_sum is not None else shifts, n, ranges, out.shape[1], out.stride(0), rows, C, mean,
    )  # fmt: skip


@triton.jit
def _apply_range(
    high, low, q_ptr, q_plane, k_ptr, k_plane, a_high, a_low, a_ptr, a_plane, b_ptr, b_plane,
    v_ptr, V_ptr, V_plane, shift, weight, D, A_D, length,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRODUCTS: tl.constexpr, STREAMED: tl.constexpr,
    STAGES: tl.constexpr,
    C: tl.constexpr, SPLIT: tl.constexpr,
    WEIGHTED: tl.constexpr, A_DEPTH: tl.constexpr, A_PRODUCTS: tl.constexpr, A_STREAMED: tl.constexpr,
):  # fmt: skip
    """Row sums [ROWS] of p and products [ROWS, C] with V over `length` tiles."""
    total = tl.zeros((ROWS, 8), tl.float32)
    acc = tl.zeros((ROWS, C), tl.float32)
    j = tl.arange(0, COLUMNS)
    for _ in tl.range(length, num_stages=1 if STREAMED else STAGES):
        v = tl.load(v_ptr + j)
        s = score(high, low, q_ptr, q_plane, k_ptr, k_plane, D, ROWS, COLUMNS, DEPTH, PRODUCTS, STREAMED, STAGES)
        p = exp2(s + (v[None, :] - shift[:, None]), C == 1 and PRODUCTS == 1 and not STREAMED)
        if C == 1:
            total += row_sum(p * tl.load(V_ptr + j)[None, :], ROWS, COLUMNS)
        else:
            total += row_sum(p, ROWS, COLUMNS)
            if WEIGHTED:
                p *= weight * score(
                    a_high, a_low, a_ptr, a_plane, b_ptr, b_plane, A_D,
                    ROWS, COLUMNS, A_DEPTH, A_PRODUCTS, A_STREAMED, STAGES,
                )  # fmt: skip
                b_ptr += COLUMNS * A_D
            p_high = p.to(tl.float16)
            V_high = part(V_ptr, 0, C, COLUMNS, C)
            if SPLIT:
                acc = tl.dot(p_high, part(V_ptr, V_plane, C, COLUMNS, C), acc)
                acc = tl.dot((p - p_high.to(tl.float32)).to(tl.float16), V_high, acc)
            acc = tl.dot(p_high, V_high, acc)
        k_ptr += COLUMNS * D
        v_ptr += COLUMNS
        V_ptr += COLUMNS * C
    return tl.sum(total, 1), acc


@triton.jit(do_not_specialize=["weight", "n", "n_padded", "m_padded", "total", "length"])
def _transport_kernel(
    q_ptr, k_ptr, a_ptr, b_ptr, v_ptr, V_ptr, anchor_ptr, acc_ptr, sum_ptr, shift_ptr,
    weight, n, n_padded, m_padded, D, A_D, total, length,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRODUCTS: tl.constexpr, STREAMED: tl.constexpr,
    STAGES: tl.constexpr,
    C: tl.constexpr, SPLIT: tl.constexpr, ANCHORED: tl.constexpr,
    WEIGHTED: tl.constexpr, A_DEPTH: tl.constexpr, A_PRODUCTS: tl.constexpr, A_STREAMED: tl.constexpr,
):  # fmt: skip
    """Products of one block of rows over one range of columns, with the shift under which they were taken."""
    row = tl.program_id(0).to(tl.int64) * ROWS
    first = tl.program_id(1).to(tl.int64) * length
    length = tl.minimum(length, total - first).to(tl.int32)
    q_ptr += row * D
    k_ptr += first * COLUMNS * D
    a_ptr += row * A_D
    b_ptr += first * COLUMNS * A_D
    v_ptr += first * COLUMNS
    V_ptr += first * COLUMNS * C
    q_plane, k_plane = n_padded.to(tl.int64) * D, m_padded.to(tl.int64) * D
    a_plane, b_plane = n_padded.to(tl.int64) * A_D, m_padded.to(tl.int64) * A_D
    V_plane = m_padded.to(tl.int64) * C
    high = part(q_ptr, 0, D, ROWS, DEPTH)
    low = part(q_ptr, q_plane if PRODUCTS == 3 else 0, D, ROWS, DEPTH)
    if WEIGHTED:
        a_high = part(a_ptr, 0, A_D, ROWS, A_DEPTH)
        a_low = part(a_ptr, a_plane if A_PRODUCTS == 3 else 0, A_D, ROWS, A_DEPTH)
    else:
        a_high, a_low = high, low
    rows = row + tl.arange(0, ROWS)
    real = rows < n
    if ANCHORED:
        shift = tl.floor(tl.load(anchor_ptr + rows, mask=real, other=0.0) * _LOG2E) - 10.0
    else:
        shift = tl.floor(
            highest(high, low, q_ptr, q_plane, k_ptr, k_plane, v_ptr, D, 1, ROWS, COLUMNS, DEPTH, PRODUCTS, STREAMED, STAGES)
        )
    sums, acc = _apply_range(
        high, low, q_ptr, q_plane, k_ptr, k_plane, a_high, a_low, a_ptr, a_plane, b_ptr, b_plane,
        v_ptr, V_ptr, V_plane, shift, weight, D, A_D, length, ROWS, COLUMNS, DEPTH, PRODUCTS, STREAMED, STAGES, C, SPLIT,
        WEIGHTED, A_DEPTH, A_PRODUCTS, A_STREAMED,
    )  # fmt: skip
    lost = (tl.max((tl.abs(acc) < 1e37).to(tl.int32), 1) == 0) | ~(tl.abs(sums) < 1e37)
    if C > 1:
        lost = lost | (sums < 0.03125)
    if tl.max((lost & real).to(tl.int32), 0) == 1:
        shift = tl.floor(
            highest(
                high, low, q_ptr, q_plane, k_ptr, k_plane, v_ptr, D, length,
                ROWS, COLUMNS, DEPTH, PRODUCTS, STREAMED, STAGES,
            )  # fmt: skip
        )
        sums, acc = _apply_range(
            high, low, q_ptr, q_plane, k_ptr, k_plane, a_high, a_low, a_ptr, a_plane, b_ptr, b_plane,
            v_ptr, V_ptr, V_plane, shift, weight, D, A_D, length, ROWS, COLUMNS, DEPTH, PRODUCTS, STREAMED, STAGES, C, SPLIT,
            WEIGHTED, A_DEPTH, A_PRODUCTS, A_STREAMED,
        )  # fmt: skip
    place = tl.program_id(1).to(tl.int64) * n + rows
    tl.store(shift_ptr + place, shift, mask=real)
    if C == 1:
        tl.store(acc_ptr + place, sums, mask=real)
    else:
        tl.store(sum_ptr + place, sums, mask=real)
        tl.store(acc_ptr + place[:, None] * C + tl.arange(0, C)[None, :], acc, mask=real[:, None])


@triton.jit(do_not_specialize=["n", "ranges", "c", "out_row"], do_not_specialize_on_alignment=["out_ptr", "u_ptr"])
def _finish_kernel(
    acc_ptr, shift_ptr, sum_ptr, scale_ptr, u_ptr, out_ptr, log_ptr, n, ranges, c, out_row,
    ROWS: tl.constexpr, C: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Add the ranges of a row in their order: `exp(u) Σ p V`, or `Σ p V / Σ p` and the logarithm of `Σ p`."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, C)
    real = rows < n
    shifts, sums = shift_ptr + rows, sum_ptr + rows
    accs = acc_ptr + rows[:, None] * C + j[None, :]
    step = n.to(tl.int64) * C
    if MEAN:
        base = tl.full((ROWS,), float("-inf"), tl.float32)
        for _ in range(ranges):
            shift = tl.load(shifts, mask=real, other=0.0)
            base = tl.maximum(base, tl.where(tl.load(sums, mask=real, other=0.0) == 0.0, float("-inf"), shift))
            shifts, sums = shifts + n, sums + n
        base = tl.where(base == float("-inf"), 0.0, -base)
        shifts, sums = shift_ptr + rows, sum_ptr + rows
    else:
        base = tl.load(u_ptr + rows, mask=real, other=0.0) * _LOG2E
    out = tl.zeros((ROWS, C), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for _ in range(ranges):
        weight = tl.exp2(tl.load(shifts, mask=real, other=0.0) + base)
        acc = tl.load(accs, mask=real[:, None], other=0.0)
        out += tl.where(acc == 0.0, 0.0, acc * weight[:, None])
        if MEAN:
            s = tl.load(sums, mask=real, other=0.0)
            total += tl.where(s == 0.0, 0.0, s * weight)
            sums += n
        shifts, accs = shifts + n, accs + step
    out *= tl.load(scale_ptr + j)[None, :]
    if MEAN:
        out /= total[:, None]
        tl.store(log_ptr + rows, (tl.log2(total) - base) / _LOG2E, mask=real)
    tl.store(out_ptr + rows[:, None] * out_row + j[None, :], out, mask=real[:, None] & (j < c)[None, :])
