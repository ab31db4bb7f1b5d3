"""The primitives over all n×m pairs as Triton kernels: float32 on CUDA, at the accuracy of float32 arithmetic."""

from torch import Tensor

from ot_newton.kernels.apply import apply
from ot_newton.kernels.hadamard import hadamard
from ot_newton.kernels.lse import lse

__all__ = ["apply", "attend", "hadamard", "lse"]


def attend(q: Tensor, k: Tensor, v: Tensor, V: Tensor, *, anchor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Row log-sum-exp (n,) and softmax-weighted averages (n, c), as a log-sum-exp and an application: two passes."""
    log_sum = lse(q, k, v, anchor=anchor)
    return log_sum, apply(q, k, -log_sum, v, V)
