"""What the GPU can do at best: exponentials and matrix products per second, measured beside what is judged by them."""
# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl

PRODUCT_SIZE = 8192
_LOOPS, _LANES = 4096, 2048


@triton.jit
def _exponentials(out_ptr, LOOPS: tl.constexpr, LANES: tl.constexpr):
    """A chain of `LOOPS` exponentials in each of `LANES` lanes: the special-function units and nothing else."""
    x = tl.arange(0, LANES).to(tl.float32) / LANES
    for _ in range(LOOPS):
        x = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [-x], tl.float32, is_pure=True, pack=1)
    tl.store(out_ptr + tl.program_id(0) * LANES + tl.arange(0, LANES), x)


def seconds(run, repeats: int = 20) -> float:
    """Median time of `run` by CUDA events, after three calls that do not count."""
    times = []
    for repeat in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def exponentials_per_second() -> float:
    """exp2 of float32 numbers per second."""
    programs = 16 * torch.cuda.get_device_properties("cuda").multi_processor_count
    out = torch.empty(programs * _LANES, device="cuda")
    taken = seconds(lambda: _exponentials[programs,](out, _LOOPS, _LANES, num_warps=4))
    return programs * _LANES * _LOOPS / taken


def products_per_second(dtype: torch.dtype) -> float:
    """Floating-point operations per second of the library's square matrix product; float32 means TF32."""
    a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device="cuda").to(dtype) for _ in range(2))
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return 2 * PRODUCT_SIZE**3 / seconds(lambda: a @ b)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
