"""The one door to the primitives over all n×m pairs: same calls, whichever backend does the work.

A plan is `P_ij = exp(q_i·k_j + u_i + v_j)` for q (n, d), k (m, d), u (n,), v (m,); swap the roles for its transpose.
Each call is one pass over the pairs. Backends: "dense" (the formulas, O(n·m) memory), "blocked" (streaming torch, any
device, float32 and float64) and "triton" (CUDA, float32).
"""

import importlib
import importlib.util
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

BACKENDS = ("auto", "blocked", "dense", "triton")
_MODULES = {"dense": "reference", "blocked": "blocked", "triton": "fused"}


@cache
def _module(backend: str) -> ModuleType:
    return importlib.import_module(f"ot_newton.kernels.{_MODULES[backend]}")


@cache
def has_triton() -> bool:
    """Whether the Triton backend can run here: the package is installed and there is a CUDA device."""
    return importlib.util.find_spec("triton") is not None and torch.cuda.is_available()


def resolve(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that serves a request for `backend` on tensors of this device and dtype.

    "auto" is "triton" for float32 on CUDA and "blocked" elsewhere. Raises ValueError for an unknown name and
    RuntimeError where Triton is asked for and cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    suits = device.type == "cuda" and dtype == torch.float32 and has_triton()
    if backend == "auto":
        return "triton" if suits else "blocked"
    if backend == "triton" and not suits:
        raise RuntimeError(
            f"backend 'triton': expected float32 on a CUDA device with triton installed, got {dtype} on {device}; "
            "use backend='auto' or 'blocked'"
        )
    return backend


def lse(q: Tensor, k: Tensor, v: Tensor, *, anchor: Tensor | None = None, backend: str = "auto") -> Tensor:
    """Row log-sum-exp `log Σ_j exp(q_i·k_j + v_j)`, shape (n,). `anchor` (n,), a guess of it, saves a maximum."""
    return _module(resolve(backend, q.device, q.dtype)).lse(q, k, v, anchor=anchor)


def attend(
    q: Tensor, k: Tensor, v: Tensor, V: Tensor, *, anchor: Tensor | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Row log-sum-exp (n,) and softmax-weighted averages `Σ_j softmax_j(q_i·k_j + v_j) V_j` (n, c)."""
    return _module(resolve(backend, q.device, q.dtype)).attend(q, k, v, V, anchor=anchor)


def apply(q: Tensor, k: Tensor, u: Tensor, v: Tensor, V: Tensor, *, backend: str = "auto") -> Tensor:
    """Transport application `P V`, shape (n, c) for V of shape (m, c)."""
    return _module(resolve(backend, q.device, q.dtype)).apply(q, k, u, v, V)


def hadamard(
    q: Tensor, k: Tensor, u: Tensor, v: Tensor, A: Tensor, B: Tensor, V: Tensor, *, backend: str = "auto"
) -> Tensor:
    """Hadamard-weighted transport `(P ∘ A Bᵀ) V`, shape (n, c), for A (n, h), B (m, h), V (m, c)."""
    return _module(resolve(backend, q.device, q.dtype)).hadamard(q, k, u, v, A, B, V)
