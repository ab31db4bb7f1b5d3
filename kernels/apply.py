"""Transport application by Triton kernels: `out = P V` with `P_ij = exp(q_i·k_j + u_i + v_j)`, and softmax averages.

One pass over the pairs carries up to 64 columns for little more than one costs; `transport.py` says how.

Reference: "FlashSinkhorn", arXiv:2602.03067, for transport as attention without normalisation.
"""

from torch import Tensor

from ot_newton.kernels.operands import check
from ot_newton.kernels.transport import transport


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
        anchor: (n,), a guess of `lse(q, k, v)`; by default rows of P are taken to sum to about 1/n. A bad guess costs
            time, never accuracy.
        precision: "fp32" splits P and V, "tf32" or "bf16" round them to 11 bits.
        operands: what `prepare(q, k, precision=precision)` returned, to be spared its work.

    Raises:
        TypeError: for anything but float32.
        ValueError: for tensors that are not on one CUDA device, or an unknown precision.
    """
    check(precision, q=q, k=k, u=u, v=v, V=V)
    return transport(q, k, v, V, u=u, anchor=anchor, precision=precision, operands=operands)[0]


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
    """Row log-sum-exp (n,) and softmax-weighted averages `Σ_j softmax_j(q_i·k_j + v_j) V_j` (n, c).

    Arguments and errors are those of `apply`. Without an anchor every row's maximum is found first.
    """
    check(precision, q=q, k=k, v=v, V=V)
    mean, log_sum = transport(q, k, v, V, u=None, anchor=anchor, precision=precision, operands=operands)
    return log_sum, mean
