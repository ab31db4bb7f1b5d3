"""Row log-sum-exp on the tensor cores: `out_i = log Σ_j exp(q_i·k_j + v_j)`.

In units of log 2, with a shift a_i that need not be the maximum, only within 2^±126 of it,

    out_i = a_i + log2 Σ_j exp2(s_ij + v_j - a_i),

so the loop over the columns keeps neither a running maximum nor a rescaled sum. The shift is the caller's anchor, or
the maximum over a first tile (over the whole range for operands too wide to hold, whose scores spread further). The
kernel that adds the ranges of a row sees when a sum overflowed or vanished under its shift and repeats those rows with
their true maxima.

Reference: Proposition 1 of "FlashSinkhorn", arXiv:2602.03067, for the half-step as biased attention scores.
"""
# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import triton
import triton.language as tl
from torch import Tensor

from ot_newton.kernels import tiles as tiling
from ot_newton.kernels.operands import check, padded, padded_bias, prepare
from ot_newton.kernels.tiles import cdiv, exp2, part, row_sum, score

_LOG2E = tl.constexpr(tiling.LOG2E)


def lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    anchor: Tensor | None = None,
    precision: str = "fp32",
    operands: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Row log-sum-exp `log Σ_j exp(q_i·k_j + v_j)`, shape (n,).

    Args:
        q, k: points, (n, d) and (m, d), float32 on one CUDA device.
        v: (m,), may hold -inf.
        anchor: (n,), a guess of the result; a bad one costs time, never accuracy.
        precision: "fp32" for scores of 22 bits, "tf32" or "bf16" for 11.
        operands: what `prepare(q, k, precision=precision)` returned, to be spared its work.

    Raises:
        TypeError: for anything but float32.
        ValueError: for tensors that are not on one CUDA device, or an unknown precision.
    """
    check(precision, q=q, k=k, v=v)
    return _launch(q, k, v, anchor, precision, operands)[0]


def half_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    guess: Tensor,
    *,
    precision: str = "fp32",
    operands: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """A Sinkhorn half-step `-lse(q, k, v)` and what the guess loses by it, `guess + lse(q, k, v)`; both (n,).

    Args:
        guess: (n,), a guess of the result, such as the potential of the last sweep; a bad one costs time only.

    The other arguments and the errors are those of `lse`.
    """
    check(precision, q=q, k=k, v=v, guess=guess)
    return _launch(q, k, v, guess, precision, operands, potential=True)


def _launch(
    q: Tensor, k: Tensor, v: Tensor, guess: Tensor | None, precision: str, operands: tuple[Tensor, Tensor] | None, *,
    potential: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The log-sum-exp for a guess of it, or the `potential` that is its negative, and the change from the guess."""
    Q, K = operands or prepare(q, k, precision=precision)
    n, m, width, products = len(q), len(k), Q.shape[-1], 3 if Q.dim() == 3 else 1
    tiles = tiling.for_lse(width, products)
    blocks, ranges, length = tiling.partition(n, m, tiles, q.device)
    sums, shifts, out = q.new_empty(ranges, n), q.new_empty(ranges, n), q.new_empty(n)
    bias = padded_bias(v, m)
    anchor = sums if guess is None else guess.contiguous()
    change = q.new_empty(n) if potential else out
    sizes = (n, padded(n), padded(m), width, cdiv(m, tiles.columns))
    shape = (tiles.rows, tiles.columns, tiles.depth, products, tiling.streaming(width, products), tiles.stages)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    _lse_kernel[blocks, ranges](
        Q, K, bias, anchor, sums, shifts, *sizes, length, *shape, guess is not None, potential, **options
    )
    _finish_kernel[blocks,](Q, K, bias, anchor, sums, shifts, out, change, *sizes, ranges, *shape, potential, **options)
    return out, change


@triton.jit
def highest(
    high, low, q_ptr, q_plane, k_ptr, k_plane, v_ptr, D, length,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRODUCTS: tl.constexpr, STREAMED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Row maxima [ROWS] of the exponents over `length` tiles."""
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    for _ in tl.range(length, num_stages=1 if STREAMED else STAGES):
        v = tl.load(v_ptr + tl.arange(0, COLUMNS))
        s = score(high, low, q_ptr, q_plane, k_ptr, k_plane, D, ROWS, COLUMNS, DEPTH, PRODUCTS, STREAMED, STAGES)
        top = tl.maximum(top, tl.max(tl.fma(v[None, :], _LOG2E, s), 1))
        k_ptr += COLUMNS * D
        v_ptr += COLUMNS
    return top


@triton.jit
def _sum_range(
    high, low, q_ptr, q_plane, k_ptr, k_plane, v_ptr, shift, D, length,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRODUCTS: tl.constexpr, STREAMED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Row sums [ROWS] of exp2(exponent - shift) over `length` tiles."""
    total = tl.zeros((ROWS, 8), tl.float32)
    for _ in tl.range(length, num_stages=1 if STREAMED else STAGES):
        v = tl.load(v_ptr + tl.arange(0, COLUMNS))
        s = score(high, low, q_ptr, q_plane, k_ptr, k_plane, D, ROWS, COLUMNS, DEPTH, PRODUCTS, STREAMED, STAGES)
        total += row_sum(
            exp2(s + tl.fma(v[None, :], _LOG2E, -shift[:, None]), PRODUCTS == 1 and not STREAMED), ROWS, COLUMNS
        )
        k_ptr += COLUMNS * D
        v_ptr += COLUMNS
    return tl.sum(total, 1)


@triton.jit(
    do_not_specialize=["n", "n_padded", "m_padded", "total", "length"],
    do_not_specialize_on_alignment=["anchor_ptr"],
)
def _lse_kernel(
    q_ptr, k_ptr, v_ptr, anchor_ptr, sum_ptr, shift_ptr, n, n_padded, m_padded, D, total, length,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRODUCTS: tl.constexpr, STREAMED: tl.constexpr,
    STAGES: tl.constexpr, ANCHORED: tl.constexpr, POTENTIAL: tl.constexpr,
):  # fmt: skip
    """Sums of one block of rows over one range of columns, with the shift under which they were taken."""
    row = tl.program_id(0).to(tl.int64) * ROWS
    first = tl.program_id(1).to(tl.int64) * length
    length = tl.minimum(length, total - first).to(tl.int32)
    q_ptr += row * D
    k_ptr += first * COLUMNS * D
    v_ptr += first * COLUMNS
    q_plane, k_plane = n_padded.to(tl.int64) * D, m_padded.to(tl.int64) * D
    high = part(q_ptr, 0, D, ROWS, DEPTH)
    low = part(q_ptr, q_plane if PRODUCTS == 3 else 0, D, ROWS, DEPTH)
    rows = row + tl.arange(0, ROWS)
    real = rows < n
    if ANCHORED:
        shift = tl.load(anchor_ptr + rows, mask=real, other=0.0) * (-_LOG2E if POTENTIAL else _LOG2E)
    else:
        shift = highest(
            high, low, q_ptr, q_plane, k_ptr, k_plane, v_ptr, D, length if STREAMED else 1,
            ROWS, COLUMNS, DEPTH, PRODUCTS, STREAMED, STAGES,
        )  # fmt: skip
        if tl.min(shift, 0) == float("-inf"):
            shift = highest(
                high, low, q_ptr, q_plane, k_ptr, k_plane, v_ptr, D, length,
                ROWS, COLUMNS, DEPTH, PRODUCTS, STREAMED, STAGES,
            )  # fmt: skip
            shift = tl.where(shift == float("-inf"), 0.0, shift)
    sums = _sum_range(
        high, low, q_ptr, q_plane, k_ptr, k_plane, v_ptr, shift, D, length,
        ROWS, COLUMNS, DEPTH, PRODUCTS, STREAMED, STAGES,
    )  # fmt: skip
    place = tl.program_id(1).to(tl.int64) * n + rows
    tl.store(sum_ptr + place, sums, mask=real)
    tl.store(shift_ptr + place, shift, mask=real)


@triton.jit(
    do_not_specialize=["n", "n_padded", "m_padded", "total", "ranges"],
    do_not_specialize_on_alignment=["anchor_ptr"],
)
def _finish_kernel(
    q_ptr, k_ptr, v_ptr, anchor_ptr, sum_ptr, shift_ptr, out_ptr, change_ptr,
    n, n_padded, m_padded, D, total, ranges,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRODUCTS: tl.constexpr, STREAMED: tl.constexpr,
    STAGES: tl.constexpr, POTENTIAL: tl.constexpr,
):  # fmt: skip
    """Add the ranges of a block of rows in their order, or repeat the block where its shifts were bad.

    With POTENTIAL the result is negated, and the guess's difference from it is written too.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS
    rows = row + tl.arange(0, ROWS)
    real = rows < n
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    sums, shifts = sum_ptr + rows, shift_ptr + rows
    for _ in range(ranges):
        s = tl.load(sums, mask=real, other=1.0)
        top = tl.maximum(top, tl.where(s == 0.0, float("-inf"), tl.load(shifts, mask=real, other=0.0)))
        sums, shifts = sums + n, shifts + n
    top = tl.where(top == float("-inf"), 0.0, top)
    sums, shifts = sum_ptr + rows, shift_ptr + rows
    out = tl.zeros((ROWS,), tl.float32)
    for _ in range(ranges):
        s = tl.load(sums, mask=real, other=1.0)
        half = tl.exp2(0.5 * (tl.load(shifts, mask=real, other=0.0) - top))  # the whole may vanish where s is huge
        out += tl.where(s == 0.0, 0.0, s * half * half)
        sums, shifts = sums + n, shifts + n
    if tl.min(((out > 1e-30) & (out < 1e37)).to(tl.int32), 0) == 0:
        q_ptr += row * D
        q_plane, k_plane = n_padded.to(tl.int64) * D, m_padded.to(tl.int64) * D
        high = part(q_ptr, 0, D, ROWS, DEPTH)
        low = part(q_ptr, q_plane if PRODUCTS == 3 else 0, D, ROWS, DEPTH)
        top = highest(
            high, low, q_ptr, q_plane, k_ptr, k_plane, v_ptr, D, total,
            ROWS, COLUMNS, DEPTH, PRODUCTS, STREAMED, STAGES,
        )  # fmt: skip
        top = tl.where(top == float("-inf"), 0.0, top)
        out = _sum_range(
            high, low, q_ptr, q_plane, k_ptr, k_plane, v_ptr, top, D, total,
            ROWS, COLUMNS, DEPTH, PRODUCTS, STREAMED, STAGES,
        )  # fmt: skip
    result = (top + tl.log2(out)) / _LOG2E
    if POTENTIAL:
        result = -result
        tl.store(change_ptr + rows, tl.load(anchor_ptr + rows, mask=real, other=0.0) - result, mask=real)
    tl.store(out_ptr + rows, result, mask=real)
