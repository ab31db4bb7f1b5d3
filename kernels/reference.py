"""The primitives over all n×m pairs as dense formulas: the specification that the other backends are tested against.

Every primitive works on a score `S_ij = q_i·k_j + v_j` or a plan `P_ij = exp(q_i·k_j + u_i + v_j)`. The scale of the
cost and 1/eps are folded into `q`; potentials and log-weights into `u` and `v` (-inf: weight zero).
Any dtype, memory O(n·m).
"""

import torch
from torch import Tensor


def lse(q: Tensor, k: Tensor, v: Tensor, *, anchor: Tensor | None = None) -> Tensor:
    """Row log-sum-exp `log Σ_j exp(q_i·k_j + v_j)`, shape (n,). The anchor is a hint and not needed here."""
    return torch.logsumexp(q @ k.T + v, dim=1)


def half_step(q: Tensor, k: Tensor, v: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
    """`-lse(q, k, v)` and its difference from a guess of it, `guess + lse`; both (n,)."""
    potential = -lse(q, k, v)
    return potential, guess - potential


def plan(q: Tensor, k: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """The plan itself, `exp(q_i·k_j + u_i + v_j)`, shape (n, m)."""
    return torch.exp(q @ k.T + u[:, None] + v)


def apply(q: Tensor, k: Tensor, u: Tensor, v: Tensor, V: Tensor) -> Tensor:
    """Transport application `P V`, shape (n, c) for V of shape (m, c)."""
    return plan(q, k, u, v) @ V


def hadamard(
    q: Tensor, k: Tensor, u: Tensor | None, v: Tensor, A: Tensor, B: Tensor, V: Tensor, *, anchor: Tensor | None = None
) -> Tensor:
    """Hadamard-weighted transport `(P ∘ A Bᵀ) V`, shape (n, c), for A (n, h), B (m, h), V (m, c).

    Without u the rows of P sum to one, and the anchor is as in `lse`.
    """
    P = torch.softmax(q @ k.T + v, dim=1) if u is None else plan(q, k, u, v)
    return (P * (A @ B.T)) @ V


def attend(q: Tensor, k: Tensor, v: Tensor, V: Tensor, *, anchor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Row log-sum-exp and softmax-weighted averages `Σ_j softmax_j(S_ij) V_j`, shapes (n,) and (n, c)."""
    S = q @ k.T + v
    return torch.logsumexp(S, dim=1), torch.softmax(S, dim=1) @ V
