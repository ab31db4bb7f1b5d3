"""Operands for the tensor cores: float32 points as pairs of fp16 numbers, 22 bits in all.

A score `q·k` of float32 accuracy needs three fp16 products, `h·h' + l·h' + h·l'` with `x = h + l` (h the rounding of x,
l that of the rest; the dropped `l·l'` is below 2^-24). For few coordinates the three ride in one product, side by side:

    [h, l, h] · [h', h', l']

for many they stay apart, and each part is read once. The same holds with the roles exchanged, so one preparation serves
the rows and the columns of a plan. Before the split q and k are scaled against each other by an exact power of two,
which leaves their product as it is and fits every score below 2^30 into the range of fp16.

Reference: Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", IJHPCA 2022.
"""
# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from ot_newton.kernels.tiles import INTERPRETED, LOG2E, PAD, cdiv, power_of_2

PRECISIONS = ("fp32", "tf32", "bf16")
MAX_PACKED = 128  # widest operand that keeps its products side by side
HELD = 64  # most coordinates that a block of rows holds on chip
STEP = 32  # wider operands are a multiple of this
_RANGE_PROGRAMS = 4 if INTERPRETED else 128


def check(precision: str, **tensors: Tensor) -> None:
    """Raise unless the kernels can take these tensors: float32 on one CUDA device (any device when interpreted)."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision: expected one of {', '.join(PRECISIONS)}, got {precision!r}")
    device = next(iter(tensors.values())).device
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name}: expected torch.float32 for the Triton kernels, got {tensor.dtype}")
        if tensor.device != device or not (tensor.is_cuda or INTERPRETED):
            raise ValueError(f"{name}: expected a tensor on one CUDA device, got {tensor.device}")


def padded(n: int) -> int:
    """Rows of an operand for n points: whole tiles of every kernel."""
    return cdiv(n, PAD) * PAD


def padded_bias(v: Tensor, m: int) -> Tensor:
    """v (m,) with -inf up to whole tiles; v itself if it has them."""
    return v if len(v) == padded(m) else pad(v, (0, padded(m) - m), value=float("-inf"))


def layout(d: int, precision: str) -> tuple[int, int]:
    """Width of an operand for d coordinates, and the number of products that a score takes."""
    parts = 3 if precision == "fp32" else 1
    if parts * d <= MAX_PACKED:
        return max(16, power_of_2(parts * d)), 1
    return HELD if d <= HELD else cdiv(d, STEP) * STEP, parts


def prepare(q: Tensor, k: Tensor, *, precision: str = "fp32", factor: float = LOG2E) -> tuple[Tensor, Tensor]:
    """Operands for the scores `factor · q_i·k_j`; exchange the two for the transposed scores.

    Args:
        q, k: points, (n, d) and (m, d), float32, any strides.
        precision: "fp32" keeps 22 bits of every coordinate, "tf32" and "bf16" keep 11.
        factor: a positive number; the default turns natural exponents into exponents of 2.

    Returns:
        fp16 tensors (n', w) and (m', w), or (2, n', w) and (2, m', w) where the high and low parts stay apart. Rows and
        columns are padded with zeros.

    Raises:
        TypeError: for anything but float32.
        ValueError: for tensors that are not on one CUDA device, or an unknown precision.
    """
    check(precision, q=q, k=k)
    (n, d), m = q.shape, len(k)
    w, products = layout(d, precision)
    planes = 2 if products == 3 else 1
    Q = q.new_empty(planes, padded(n), w, dtype=torch.float16)
    K = q.new_empty(planes, padded(m), w, dtype=torch.float16)
    ranges = q.new_empty(2, _RANGE_PROGRAMS)
    columns = min(w, 64) if w % 64 == 0 else min(w, 32)
    rows = 2048 // columns
    strides = (*q.stride(), *k.stride())
    _range_kernel[_RANGE_PROGRAMS, 2](q, k, ranges, n, m, d, *strides, rows, columns, _RANGE_PROGRAMS)
    grid = (cdiv(max(padded(n), padded(m)), rows), cdiv(w, columns), 2)
    _split_kernel[grid](
        q, k, ranges, Q, K, n, m, padded(n), padded(m), d, w, *strides, factor,
        rows, columns, planes, precision == "fp32", _RANGE_PROGRAMS,
    )  # fmt: skip
    return (Q, K) if products == 3 else (Q[0], K[0])


def prepare_columns(V: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Columns V (m, c) as fp16 parts (2, m', width) of `V / scale`, and the scales (width,), exact powers of two."""
    m, c = V.shape
    largest = torch.linalg.vector_norm(V, ord=float("inf"), dim=0)
    parts = V.new_empty(2, padded(m), width, dtype=torch.float16)
    scale = V.new_empty(width)
    rows = 2048 // width
    _columns_kernel[cdiv(padded(m), rows),](V, largest, parts, scale, m, padded(m), c, *V.stride(), rows, width)
    return parts, scale


@triton.jit
def _power_of_2(exponent):
    """2^exponent, exact, for integer exponents in [-126, 127]."""
    return ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit(
    do_not_specialize=["n", "m", "d", "q_row", "q_col", "k_row", "k_col"],
    do_not_specialize_on_alignment=["q_ptr", "k_ptr"],
)
def _range_kernel(
    q_ptr, k_ptr, out_ptr, n, m, d, q_row, q_col, k_row, k_col,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Largest magnitude in each of PROGRAMS strips of q (side 0) and k (side 1)."""
    program, side = tl.program_id(0), tl.program_id(1)
    ptr, size, row, col = q_ptr, n, q_row, q_col
    if side == 1:
        ptr, size, row, col = k_ptr, m, k_row, k_col
    largest = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(program * ROWS, size, PROGRAMS * ROWS):
        i = start + tl.arange(0, ROWS)
        for first in range(0, d, COLUMNS):
            c = first + tl.arange(0, COLUMNS)
            x = tl.load(
                ptr + i.to(tl.int64)[:, None] * row + c.to(tl.int64)[None, :] * col,
                mask=(i < size)[:, None] & (c < d)[None, :],
                other=0.0,
            )
            largest = tl.maximum(largest, tl.abs(x))
    tl.store(out_ptr + side * PROGRAMS + program, tl.max(tl.max(largest, 1), 0))


@triton.jit(
    do_not_specialize=["n", "m", "n_padded", "m_padded", "d", "w", "q_row", "q_col", "k_row", "k_col", "factor"],
    do_not_specialize_on_alignment=["q_ptr", "k_ptr"],
)
def _split_kernel(
    q_ptr, k_ptr, range_ptr, Q_ptr, K_ptr, n, m, n_padded, m_padded, d, w, q_row, q_col, k_row, k_col, factor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PLANES: tl.constexpr, SPLIT: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Write one tile of the operand of q (side 0) or k (side 1)."""
    side = tl.program_id(2)
    strip = tl.arange(0, PROGRAMS)
    q_max = tl.maximum(tl.max(tl.load(range_ptr + strip), 0) * factor, 1e-37)
    k_max = tl.maximum(tl.max(tl.load(range_ptr + PROGRAMS + strip), 0), 1e-37)
    exponent = tl.floor(0.5 * (tl.log2(k_max) - tl.log2(q_max)))
    ptr, out, size, size_padded, row, col = q_ptr, Q_ptr, n, n_padded, q_row, q_col
    scale = factor * _power_of_2(exponent)
    if side == 1:
        ptr, out, size, size_padded, row, col = k_ptr, K_ptr, m, m_padded, k_row, k_col
        scale = _power_of_2(-exponent)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = i.to(tl.int64)[:, None] * w + c[None, :]
    inside = (i < size_padded)[:, None] & (c < w)[None, :]
    block = c // d if SPLIT and PLANES == 1 else c * 0
    coordinate = c - block * d
    real = (coordinate < d) & (block < 3)
    x = tl.load(
        ptr + i.to(tl.int64)[:, None] * row + coordinate.to(tl.int64)[None, :] * col,
        mask=(i < size)[:, None] & real[None, :],
        other=0.0,
    )
    x *= scale
    high = x.to(tl.float16)
    low = (x - high.to(tl.float32)).to(tl.float16)
    if PLANES == 2:
        tl.store(out + place, high, mask=inside)
        tl.store(out + size_padded.to(tl.int64) * w + place, low, mask=inside)
    else:
        tl.store(out + place, tl.where((block == 1 + side)[None, :], low, high), mask=inside)


@triton.jit(
    do_not_specialize=["m", "m_padded", "c", "row", "col"], do_not_specialize_on_alignment=["v_ptr", "largest_ptr"]
)
def _columns_kernel(
    v_ptr, largest_ptr, out_ptr, scale_ptr, m, m_padded, c, row, col, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """Scale every column to a largest entry in [2^14, 2^15), split it, pad it."""
    j = tl.arange(0, WIDTH)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    largest = tl.load(largest_ptr + j, mask=j < c, other=0.0)
    bits = largest.to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum((bits >> 23) - (127 + 14), -126), 126)
    exponent = tl.where(largest > 0.0, exponent, 0)
    x = tl.load(
        v_ptr + i.to(tl.int64)[:, None] * row + j.to(tl.int64)[None, :] * col,
        mask=(i < m)[:, None] & (j < c)[None, :],
        other=0.0,
    )
    x *= _power_of_2(-exponent)[None, :]
    high = x.to(tl.float16)
    low = (x - high.to(tl.float32)).to(tl.float16)
    place = i.to(tl.int64)[:, None] * WIDTH + j[None, :]
    inside = (i < m_padded)[:, None]
    tl.store(out_ptr + place, high, mask=inside)
    tl.store(out_ptr + m_padded.to(tl.int64) * WIDTH + place, low, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr + j, _power_of_2(exponent))
