"""The primitives over all n×m pairs as Triton kernels: float32 on CUDA, at the accuracy of float32 arithmetic."""

from ot_newton.kernels.apply import apply, attend
from ot_newton.kernels.hadamard import hadamard
from ot_newton.kernels.lse import half_step, lse
from ot_newton.kernels.operands import padded_bias, prepare

__all__ = ["apply", "attend", "hadamard", "half_step", "lse", "padded_bias", "prepare"]
