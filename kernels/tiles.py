"""What the Triton kernels share: tile sizes, the split of the work, exponentials and score tiles.

A program owns a block of rows and a range of column tiles; a second, short kernel adds the ranges in a fixed order, so
that results do not depend on scheduling. Sizes are fixed by the number of coordinates and columns, never tuned at run
time.
"""
# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import os
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
PAD = 256  # operands are padded to a multiple of this many rows, a multiple of every tile
LOG2E = 1.4426950408889634

_LOG2E = tl.constexpr(LOG2E)
_ASSEMBLY = tl.constexpr(not INTERPRETED)
_WAVES = 40  # programs for each multiprocessor to choose from: enough that the last ones to finish hardly matter
_MAX_RANGES = 256  # and few enough to be added one after the other
_CPU_MULTIPROCESSORS = 4


class Tiles(NamedTuple):
    """Rows and columns of a tile, coordinates per step, and the launch options."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def for_lse(width: int, products: int) -> Tiles:
    """Tiles of the log-sum-exp and of the application to one column."""
    if streaming(width, products):
        if width <= 128:
            return Tiles(128, 256, 64, 8, 2) if width == 128 else Tiles(128, 128, 32, 4, 2)
        return Tiles(128, 128, 64 if width % 64 == 0 else 32, 8, 3)
    if products == 3:
        return Tiles(128, 64, width, 4, 2)
    return Tiles(64, 64 if width == 64 else 128, width, 4, 3)


def for_columns(width: int, products: int, columns: int) -> Tiles:
    """Tiles of the applications that end in a matrix product with (padded) columns."""
    if streaming(width, products):
        return Tiles(64, 128, 64, 4, 2) if width % 64 == 0 else Tiles(64, 128, 32, 4, 3)
    if products == 3:
        return Tiles(64, 64, width, 4, 3) if columns == 64 else Tiles(128, 64, width, 4, 2)
    return Tiles(64, 128 if columns <= 32 and width <= 32 else 64, width, 4, 3)


def for_weights(width: int, products: int) -> Tiles:
    """Tiles of the applications with weights, which hold two scores at a time."""
    if streaming(width, products):
        return Tiles(64, 64, 64 if width % 64 == 0 else 32, 4, 2)
    return Tiles(64, 64, width, 4, 3 if products == 1 else 2)


def cdiv(n: int, size: int) -> int:
    """Pieces of this size that cover n."""
    return -(-n // size)


def power_of_2(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def streaming(width: int, products: int) -> int:
    """How a program reads an operand: 0 holds its rows, 1 streams them, 2 also adds long sums in short pieces."""
    if width <= (64 if products == 3 else 128):
        return 0
    return 1 if width <= 128 else 2


def partition(n: int, m: int, tiles: Tiles, device: torch.device) -> tuple[int, int, int]:
    """Blocks of rows, ranges of columns, and tiles in a range."""
    blocks, total = cdiv(n, tiles.rows), cdiv(m, tiles.columns)
    multiprocessors = _multiprocessors(device) if device.type == "cuda" else _CPU_MULTIPROCESSORS
    ranges = min(max(_WAVES * multiprocessors // blocks, 1), cdiv(total, 2), _MAX_RANGES)
    length = cdiv(total, ranges)
    return blocks, cdiv(total, length), length


@triton.jit
def exp2(x, POLYNOMIAL: tl.constexpr):
    """2^x with results below 2^-126 flushed to zero.

    With POLYNOMIAL every eighth element is computed on the multiply-add units, which would idle where the
    special-function unit limits the loop: 2^x = 2^r · p(x - r) with r = round(x), p of degree 5 with error 6e-8.
    """
    if not _ASSEMBLY:
        return tl.where(x < -126.0, 0.0, tl.exp2(x))
    elif POLYNOMIAL:  # noqa: RET505 - compiled branches
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 t, r, p; .reg .b32 a;
            ex2.approx.ftz.f32 $0, $8;
            ex2.approx.ftz.f32 $1, $9;
            ex2.approx.ftz.f32 $2, $10;
            ex2.approx.ftz.f32 $3, $11;
            ex2.approx.ftz.f32 $4, $12;
            ex2.approx.ftz.f32 $5, $13;
            ex2.approx.ftz.f32 $6, $14;
            max.NaN.f32 r, $15, 0fC2FE0000;
            min.NaN.f32 r, r, 0f43000000;
            add.rn.ftz.f32 t, r, 0f4B400000;
            sub.rn.ftz.f32 p, t, 0f4B400000;
            sub.rn.ftz.f32 r, r, p;
            fma.rn.ftz.f32 p, r, 0f3AAD8D0C, 0f3C1E82CC;
            fma.rn.ftz.f32 p, p, r, 0f3D635CC0;
            fma.rn.ftz.f32 p, p, r, 0f3E75FCA3;
            fma.rn.ftz.f32 p, p, r, 0f3F317213;
            fma.rn.ftz.f32 p, p, r, 0f3F800000;
            mov.b32 a, t;
            shl.b32 a, a, 23;
            add.s32 a, a, 0x3F800000;
            mov.b32 t, a;
            mul.rn.ftz.f32 $7, p, t;
            }""",
            "=f,=f,=f,=f,=f,=f,=f,=f,f,f,f,f,f,f,f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=8,
        )
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def part(ptr, plane, D, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    """One part of an operand, [SIZE, DEPTH], at the row that ptr points to; the low part lies `plane` elements on."""
    return tl.load(ptr + plane + tl.arange(0, SIZE)[:, None] * D + tl.arange(0, DEPTH)[None, :])


@triton.jit
def score(
    high, low, q_ptr, q_plane, k_ptr, k_plane, D,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRODUCTS: tl.constexpr, STREAMED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Scores [ROWS, COLUMNS]. `high` and `low` hold the rows' operand unless that is too wide and is STREAMED.

    The tensor cores truncate their sums, so that long ones are better made of short ones: see `streaming`.
    """
    if STREAMED:
        s = tl.zeros((ROWS, COLUMNS), tl.float32)
        for c in tl.range(0, D, DEPTH, num_stages=STAGES):
            q_high = part(q_ptr + c, 0, D, ROWS, DEPTH)
            k_high = part(k_ptr + c, 0, D, COLUMNS, DEPTH)
            step = s if STREAMED == 1 else tl.zeros((ROWS, COLUMNS), tl.float32)
            if PRODUCTS == 3:
                step = tl.dot(q_high, part(k_ptr + c, k_plane, D, COLUMNS, DEPTH).T, step)
                step = tl.dot(part(q_ptr + c, q_plane, D, ROWS, DEPTH), k_high.T, step)
            step = tl.dot(q_high, k_high.T, step)
            s = step if STREAMED == 1 else s + step
    else:
        k_high = part(k_ptr, 0, DEPTH, COLUMNS, DEPTH)
        if PRODUCTS == 3:
            s = tl.dot(high, part(k_ptr, k_plane, DEPTH, COLUMNS, DEPTH).T)
            s = tl.dot(low, k_high.T, s)
            s = tl.dot(high, k_high.T, s)
        else:
            s = tl.dot(high, k_high.T)
    return s


@triton.jit
def row_sum(p, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Partial row sums [ROWS, 8]: the part of the reduction that stays inside a thread."""
    return tl.sum(tl.reshape(p, (ROWS, COLUMNS // 8, 8)), 1)
