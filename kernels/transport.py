"""Transport application on the tensor cores: the kernels behind `P V`, `P_ij = exp(q_i·k_j + u_i + v_j)`.

A program computes `p_ij = exp2(s_ij + v_j - a_i)` under an integer shift a_i and leaves `exp2(a_i + u_i)` to the end.
With many columns p and V are split into two fp16 parts each, `p V = p_h V_h + p_h V_l + p_l V_h`, with errors of
2^-22 of the largest entries; so a row's sum `Σ_j p_ij` must lie high in the range of fp16. A potential u_i provides the
shift: rows of a plan sum to about 1/n, or to what the caller's anchor says. The kernel that adds the ranges of a row
sees when its sum missed the range and repeats such rows with their true maxima. A single column is multiplied in
float32, with the tiles of the log-sum-exp.

Reference: Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", IJHPCA 2022, for the split.
"""
# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import math

import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from ot_newton.kernels import tiles as tiling
from ot_newton.kernels.lse import highest
from ot_newton.kernels.operands import padded, padded_bias, prepare, prepare_columns
from ot_newton.kernels.tiles import cdiv, exp2, part, power_of_2, row_sum, score

MAX_COLUMNS = 64
_LOG2E = tl.constexpr(tiling.LOG2E)
# log2 of a row's sum under a good shift, and the least sum for which the entries keep their digits as fp16 parts
_NOMINAL, _LOWEST = tl.constexpr(12.0), tl.constexpr(2.0**6)


def transport(
    q: Tensor, k: Tensor, v: Tensor, V: Tensor, *, u: Tensor | None, anchor: Tensor | None, precision: str,
    operands: tuple[Tensor, Tensor] | None, weights: tuple[Tensor, Tensor, float] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`P V` for potentials u, or averages without them, and the logarithms of the row sums of `exp(q_i·k_j + v_j)`.

    With `weights`, operands of A and B and a bound of `|A_i·B_j|`, the product is `(P ∘ A Bᵀ / bound) V`.
    """
    n, m = len(q), len(k)
    Q, K = operands or prepare(q, k, precision=precision)
    bias = padded_bias(v, m)
    log_sum, out = q.new_empty(n), q.new_empty(n, V.shape[1])
    potential = log_sum if u is None else u.contiguous()
    width, products = Q.shape[-1], 3 if Q.dim() == 3 else 1
    A, B, bound = weights or (Q, K, 1.0)
    a_width, a_products = A.shape[-1], 3 if A.dim() == 3 else 1
    for start in range(0, max(V.shape[1], 1), MAX_COLUMNS):
        columns = V[:, start : start + MAX_COLUMNS]
        result = out[:, start : start + MAX_COLUMNS]
        single = columns.shape[1] == 1 and weights is None
        exact = anchor is None and u is None
        if anchor is None or (
            single and u is not None
        ):  # a row's shift is sign · guess + offset, in natural logarithms
            guess, sign, offset = potential, -1.0, -math.log(n)
        else:
            guess, sign, offset = anchor.contiguous(), 1.0, 0.0
        C = 1 if single else max(16, power_of_2(columns.shape[1]))
        if single:
            tiles = tiling.for_lse(width, products)
        elif weights is None:
            tiles = tiling.for_columns(width, products, C)
        else:
            tiles = tiling.for_weights(width, products)
        blocks, ranges, length = tiling.partition(n, m, tiles, q.device)
        sums, shifts = q.new_empty(ranges, n), q.new_empty(ranges, n)
        if single:
            parts, scale = pad(columns[:, 0], (0, padded(m) - m)), sums
        else:
            parts, scale = prepare_columns(columns, C)
        acc = q.new_empty(ranges, n, C)
        sizes = (n, padded(n), padded(m), width, a_width, cdiv(m, tiles.columns))
        shape = (
            tiles.rows, tiles.columns, tiles.depth, products, tiling.streaming(width, products), tiles.stages,
            C, precision == "fp32", u is None, weights is not None,
            tiling.for_weights(a_width, a_products).depth, a_products, tiling.streaming(a_width, a_products),
        )  # fmt: skip
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        _transport_kernel[blocks, ranges](
            Q, K, A, B, bias, parts, guess, acc, sums, shifts, sign, offset, 1 / bound,
            *sizes, length, *shape, exact, **options,
        )  # fmt: skip
        _finish_kernel[blocks,](
            Q, K, A, B, bias, parts, acc, sums, shifts, scale, potential, result, log_sum,
            1 / bound, *sizes, ranges, result.shape[1], result.stride(0), *shape, not (single and u is not None),
            **options,
        )  # fmt: skip
    return out, log_sum


@triton.jit
def _apply_range(
    high, low, q_ptr, q_plane, k_ptr, k_plane, a_high, a_low, a_ptr, a_plane, b_ptr, b_plane,
    v_ptr, V_ptr, V_plane, shift, weight, D, A_D, length,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRODUCTS: tl.constexpr, STREAMED: tl.constexpr,
    STAGES: tl.constexpr, C: tl.constexpr, SPLIT: tl.constexpr, MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr, A_DEPTH: tl.constexpr, A_PRODUCTS: tl.constexpr, A_STREAMED: tl.constexpr,
):  # fmt: skip
    """Row sums [ROWS] of p over `length` tiles (0 where nobody asks for them) and its products [ROWS, C] with V."""
    total = tl.zeros((ROWS, 8), tl.float32)
    single = tl.zeros((ROWS, 8), tl.float32)
    acc = tl.zeros((ROWS, C), tl.float32)
    j = tl.arange(0, COLUMNS)
    for _ in tl.range(length, num_stages=1 if STREAMED else STAGES):
        v = tl.load(v_ptr + j)
        s = score(high, low, q_ptr, q_plane, k_ptr, k_plane, D, ROWS, COLUMNS, DEPTH, PRODUCTS, STREAMED, STAGES)
        p = exp2(s + tl.fma(v[None, :], _LOG2E, -shift[:, None]), C == 1 and PRODUCTS == 1 and not STREAMED)
        if C > 1 or MEAN:
            total += row_sum(p, ROWS, COLUMNS)
        if C == 1:
            single += row_sum(p * tl.load(V_ptr + j)[None, :], ROWS, COLUMNS)
        else:
            if WEIGHTED:
                p *= weight * score(
                    a_high, a_low, a_ptr, a_plane, b_ptr, b_plane, A_D,
                    ROWS, COLUMNS, A_DEPTH, A_PRODUCTS, A_STREAMED, STAGES,
                )  # fmt: skip
                b_ptr += COLUMNS * A_D
            p_high = p.to(tl.float16)
            V_high = part(V_ptr, 0, C, COLUMNS, C)
            step = tl.zeros((ROWS, C), tl.float32)
            if SPLIT:
                step = tl.dot(p_high, part(V_ptr, V_plane, C, COLUMNS, C), step)
                step = tl.dot((p - p_high.to(tl.float32)).to(tl.float16), V_high, step)
            acc += tl.dot(p_high, V_high, step)
        k_ptr += COLUMNS * D
        v_ptr += COLUMNS
        V_ptr += COLUMNS * C
    if C == 1:
        acc = tl.sum(single, 1)[:, None]
    return tl.sum(total, 1), acc


@triton.jit
def _held(
    q_ptr, q_plane, a_ptr, a_plane, D, A_D, ROWS: tl.constexpr, DEPTH: tl.constexpr, PRODUCTS: tl.constexpr,
    WEIGHTED: tl.constexpr, A_DEPTH: tl.constexpr, A_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """The parts of the rows' operands that a program holds; where there are none, the first stands in."""
    high = part(q_ptr, 0, D, ROWS, DEPTH)
    low = part(q_ptr, q_plane if PRODUCTS == 3 else 0, D, ROWS, DEPTH)
    if WEIGHTED:
        return (
            high,
            low,
            part(a_ptr, 0, A_D, ROWS, A_DEPTH),
            part(a_ptr, a_plane if A_PRODUCTS == 3 else 0, A_D, ROWS, A_DEPTH),
        )
    else:  # noqa: RET505 - compiled branches
        return high, low, high, low


@triton.jit(
    do_not_specialize=["sign", "offset", "weight", "n", "n_padded", "m_padded", "total", "length"],
    do_not_specialize_on_alignment=["guess_ptr"],
)
def _transport_kernel(
    q_ptr, k_ptr, a_ptr, b_ptr, v_ptr, V_ptr, guess_ptr, acc_ptr, sum_ptr, shift_ptr, sign, offset, weight,
    n, n_padded, m_padded, D, A_D, total, length,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRODUCTS: tl.constexpr, STREAMED: tl.constexpr,
    STAGES: tl.constexpr, C: tl.constexpr, SPLIT: tl.constexpr, MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr, A_DEPTH: tl.constexpr, A_PRODUCTS: tl.constexpr, A_STREAMED: tl.constexpr,
    EXACT: tl.constexpr,
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
    high, low, a_high, a_low = _held(
        q_ptr, q_plane, a_ptr, a_plane, D, A_D, ROWS, DEPTH, PRODUCTS, WEIGHTED, A_DEPTH, A_PRODUCTS
    )
    rows = row + tl.arange(0, ROWS)
    real = rows < n
    if EXACT:
        shift = highest(
            high, low, q_ptr, q_plane, k_ptr, k_plane, v_ptr, D, length,
            ROWS, COLUMNS, DEPTH, PRODUCTS, STREAMED, STAGES,
        )  # fmt: skip
    else:
        shift = (sign * tl.load(guess_ptr + rows, mask=real, other=0.0) + offset) * _LOG2E
    shift = tl.where(tl.abs(shift) < float("inf"), tl.floor(shift) - _NOMINAL, 0.0)
    sums, acc = _apply_range(
        high, low, q_ptr, q_plane, k_ptr, k_plane, a_high, a_low, a_ptr, a_plane, b_ptr, b_plane,
        v_ptr, V_ptr, m_padded.to(tl.int64) * C, shift, weight, D, A_D, length,
        ROWS, COLUMNS, DEPTH, PRODUCTS, STREAMED, STAGES, C, SPLIT, MEAN, WEIGHTED, A_DEPTH, A_PRODUCTS, A_STREAMED,
    )  # fmt: skip
    place = tl.program_id(1).to(tl.int64) * n + rows
    tl.store(shift_ptr + place, shift, mask=real)
    tl.store(acc_ptr + place[:, None] * C + tl.arange(0, C)[None, :], acc, mask=real[:, None])
    if C > 1 or MEAN:
        tl.store(sum_ptr + place, sums, mask=real)


@triton.jit(
    do_not_specialize=["weight", "n", "n_padded", "m_padded", "total", "ranges", "c", "out_row"],
    do_not_specialize_on_alignment=["out_ptr", "u_ptr"],
)
def _finish_kernel(
    q_ptr, k_ptr, a_ptr, b_ptr, v_ptr, V_ptr, acc_ptr, sum_ptr, shift_ptr, scale_ptr, u_ptr, out_ptr, log_ptr, weight,
    n, n_padded, m_padded, D, A_D, total, ranges, c, out_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRODUCTS: tl.constexpr, STREAMED: tl.constexpr,
    STAGES: tl.constexpr, C: tl.constexpr, SPLIT: tl.constexpr, MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr, A_DEPTH: tl.constexpr, A_PRODUCTS: tl.constexpr, A_STREAMED: tl.constexpr,
    REPEAT: tl.constexpr,
):  # fmt: skip
    """Add the ranges of a block of rows in their order, or repeat the block where its shifts were bad, and scale.

    The result is `exp(u) Σ p V`, or with MEAN `Σ p V / Σ p` and the logarithm of the row's sum.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS
    rows = row + tl.arange(0, ROWS)
    j = tl.arange(0, C)
    real = rows < n
    base = tl.full((ROWS,), float("-inf"), tl.float32)
    shifts = shift_ptr + rows
    for _ in range(ranges):
        base = tl.maximum(base, tl.load(shifts, mask=real, other=0.0))
        shifts += n
    out = tl.zeros((ROWS, C), tl.float32)
    sums = tl.zeros((ROWS,), tl.float32)
    shifts, parts, accs = shift_ptr + rows, sum_ptr + rows, acc_ptr + rows[:, None] * C + j[None, :]
    for _ in range(ranges):
        factor = tl.exp2(tl.load(shifts, mask=real, other=0.0) - base)
        out += tl.load(accs, mask=real[:, None], other=0.0) * factor[:, None]
        if C > 1 or MEAN:
            sums += tl.load(parts, mask=real, other=0.0) * factor
        shifts, parts, accs = shifts + n, parts + n, accs + n.to(tl.int64) * C
    if REPEAT:
        finite = tl.min((tl.abs(out) < float("inf")).to(tl.int32), 1) == 1
        lost = real & ~((sums > _LOWEST) & finite)
        if not MEAN:
            lost = lost & (tl.load(u_ptr + rows, mask=real, other=0.0) > float("-inf"))
        if tl.max(lost.to(tl.int32), 0) == 1:
            q_ptr += row * D
            a_ptr += row * A_D
            q_plane, k_plane = n_padded.to(tl.int64) * D, m_padded.to(tl.int64) * D
            a_plane, b_plane = n_padded.to(tl.int64) * A_D, m_padded.to(tl.int64) * A_D
            high, low, a_high, a_low = _held(
                q_ptr, q_plane, a_ptr, a_plane, D, A_D, ROWS, DEPTH, PRODUCTS, WEIGHTED, A_DEPTH, A_PRODUCTS
            )
            base = highest(
                high, low, q_ptr, q_plane, k_ptr, k_plane, v_ptr, D, total,
                ROWS, COLUMNS, DEPTH, PRODUCTS, STREAMED, STAGES,
            )  # fmt: skip
            base = tl.where(tl.abs(base) < float("inf"), tl.floor(base) - _NOMINAL, 0.0)
            sums, out = _apply_range(
                high, low, q_ptr, q_plane, k_ptr, k_plane, a_high, a_low, a_ptr, a_plane, b_ptr, b_plane,
                v_ptr, V_ptr, m_padded.to(tl.int64) * C, base, weight, D, A_D, total,
                ROWS, COLUMNS, DEPTH, PRODUCTS, STREAMED, STAGES, C, SPLIT, MEAN,
                WEIGHTED, A_DEPTH, A_PRODUCTS, A_STREAMED,
            )  # fmt: skip
    if C > 1:
        out *= tl.load(scale_ptr + j)[None, :]
    if MEAN:
        out /= sums[:, None]
        tl.store(log_ptr + rows, (tl.log2(sums) + base) / _LOG2E, mask=real)
    else:
        factor = tl.exp2(tl.load(u_ptr + rows, mask=real, other=0.0) * _LOG2E + base)
        out = tl.where(factor[:, None] == 0.0, 0.0, out * factor[:, None])
    tl.store(out_ptr + rows[:, None] * out_row + j[None, :], out, mask=real[:, None] & (j < c)[None, :])
