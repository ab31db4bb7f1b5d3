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

from ot_newton.kernels.precision import full_precision

BACKENDS = ("auto", "blocked", "dense", "triton")
Operands = tuple[Tensor, Tensor]
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


def prepare(q: Tensor, k: Tensor, *, precision: str = "fp32", backend: str = "auto") -> Operands | None:
    """What the backend can work out beforehand for all calls on q and k; exchange the two parts with the roles.

    None for a backend that needs nothing. `precision` is that of the scores: "fp32", "tf32" or "bf16". Raises
    ValueError for the last two without Triton.
    """
    backend = resolve(backend, q.device, q.dtype)
    if backend == "triton":
        return _module(backend).prepare(q, k, precision=precision)
    if precision != "fp32":
        raise ValueError(f"precision {precision!r}: expected 'fp32' with backend {backend!r}; others need 'triton'")
    return None


def padded(v: Tensor, *, backend: str = "auto") -> Tensor:
    """v (m,) as the backend wants it where many calls take the same; it may be longer, with -inf at its end."""
    backend = resolve(backend, v.device, v.dtype)
    return _module(backend).padded_bias(v, len(v)) if backend == "triton" else v


@full_precision
def lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    anchor: Tensor | None = None,
    operands: Operands | None = None,
    backend: str = "auto",
) -> Tensor:
    """Row log-sum-exp `log Σ_j exp(q_i·k_j + v_j)`, shape (n,). `anchor` (n,), a guess of it, saves a maximum."""
    module = _module(resolve(backend, q.device, q.dtype))
    return module.lse(q, k, v, anchor=anchor, **_given(operands))


@full_precision
def half_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    guess: Tensor,
    *,
    operands: Operands | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """A Sinkhorn half-step `-lse(q, k, v)`, and `guess + lse` for a guess of it."""
    module = _module(resolve(backend, q.device, q.dtype))
    return module.half_step(q, k, v, guess, **_given(operands))


@full_precision
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    V: Tensor,
    *,
    anchor: Tensor | None = None,
    operands: Operands | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Row log-sum-exp (n,) and softmax-weighted averages `Σ_j softmax_j(q_i·k_j + v_j) V_j` (n, c)."""
    module = _module(resolve(backend, q.device, q.dtype))
    return module.attend(q, k, v, V, anchor=anchor, **_given(operands))


@full_precision
def apply(
    q: Tensor, k: Tensor, u: Tensor, v: Tensor, V: Tensor, *, operands: Operands | None = None, backend: str = "auto"
) -> Tensor:
    """Transport application `P V`, shape (n, c) for V of shape (m, c)."""
    return _module(resolve(backend, q.device, q.dtype)).apply(q, k, u, v, V, **_given(operands))


@full_precision
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
    operands: Operands | None = None,
    backend: str = "auto",
) -> Tensor:
    """Hadamard-weighted transport `(P ∘ A Bᵀ) V`, shape (n, c), for A (n, h), B (m, h), V (m, c).

    Without u the rows of P are normalised to sum to one; `anchor` is as in `lse`.
    """
    module = _module(resolve(backend, q.device, q.dtype))
    return module.hadamard(q, k, u, v, A, B, V, anchor=anchor, **_given(operands))


def _given(operands: Operands | None) -> dict[str, Operands]:
    return {} if operands is None else {"operands": operands}
