"""Hadamard-weighted transport on the tensor cores: `out = (P ∘ A Bᵀ) V` with `P_ij = exp(q_i·k_j + u_i + v_j)`.

The kernel is that of the plain application with a second score per pair. Every row of A, and B as a whole, is scaled by
a power of two into the range of fp16; the powers are given back exactly at the end.

Reference: the explicit term of the Hessian of entropic transport, arXiv:2602.03067, where A is the direction and
B = V = y.
"""

import math

import torch
from torch import Tensor

from ot_newton.kernels.operands import check, prepare
from ot_newton.kernels.transport import transport

_EXPONENT = 14  # A's rows and B reach 2^14, near the top of fp16's range, so that their low parts keep all digits
_HEADROOM = 4  # weighted entries stay below 2^4


def hadamard(
    q: Tensor,
    k: Tensor,
    u: Tensor | None,
    v: Tensor,
    A: Tensor,
    B: Tensor,
    V: Tensor,
    *,
    anchor: Tensor | None = None,
    precision: str = "fp32",
    operands: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Hadamard-weighted transport `(P ∘ A Bᵀ) V`, shape (n, c); one pass for each 64 columns.

    Args:
        q, k: points, (n, d) and (m, d), float32 on one CUDA device.
        u, v: (n,) and (m,), may hold -inf; without u the rows of P are normalised to sum to one.
        A, B: factors of the weights, (n, h) and (m, h).
        V: (m, c).
        anchor, precision, operands: as in `apply`.

    Raises:
        TypeError: for anything but float32.
        ValueError: for tensors that are not on one CUDA device, or an unknown precision.
    """
    check(precision, q=q, k=k, v=v, A=A, B=B, V=V, **({} if u is None else {"u": u}))
    a, b = _excess(A.abs().amax(dim=1)), _excess(B.abs().amax())
    weights = prepare(torch.ldexp(A, -a[:, None]), torch.ldexp(B, -b), precision=precision, factor=1.0)
    power = 2 * _EXPONENT + math.ceil(math.log2(A.shape[1])) - _HEADROOM
    out, _ = transport(
        q, k, v, V, u=u, anchor=anchor, precision=precision, operands=operands, weights=(*weights, 2.0**power)
    )
    return torch.ldexp(out, (a + (b + power))[:, None])


def _excess(x: Tensor) -> Tensor:
    """How far the exponents of x lie above `_EXPONENT`."""
    return torch.frexp(x).exponent.to(x.dtype) - _EXPONENT
