"""Random symmetric matrices with spectra of every awkward kind, and the wanted part of a spectrum."""

from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = (
    "uniform",
    "gaussian",
    "clustered",
    "two values",
    "rank deficient",
    "geometric",
    "equispaced",
    "multiple of I",
    "pairs",
    "outliers",
)
WHICH = ("LA", "SA", "LM", "SM", "BE")


@dataclass(frozen=True)
class Case:
    """A matrix (n, n), how many eigenvalues of which kind to ask for, and what it is."""

    matrix: Tensor
    k: int
    which: str
    name: str


def rotated(values: Tensor, g: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    """A symmetric matrix with these eigenvalues (n,) and random eigenvectors."""
    n = len(values)
    Q = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64))[0]
    A = (Q * values) @ Q.mT
    return ((A + A.mT) / 2).to(dtype)


def spectrum(kind: str, n: int, g: torch.Generator) -> Tensor:
    """n eigenvalues of order one."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    match kind:
        case "uniform":
            return 2 * uniform(n) - 1
        case "gaussian":
            return normal(n)
        case "clustered":
            return normal(5)[torch.randint(5, (n,), generator=g)] + 1e-6 * normal(n)
        case "two values":
            return torch.where(uniform(n) < 0.5, 1.0, 50.0).double()
        case "rank deficient":
            return torch.cat([normal(max(1, n // 10)), torch.zeros(n, dtype=torch.float64)])[:n]
        case "geometric":
            return 10.0 ** torch.linspace(0, -8, n, dtype=torch.float64)
        case "equispaced":
            return torch.linspace(-1, 1, n, dtype=torch.float64)
        case "multiple of I":
            return torch.full((n,), -3.0, dtype=torch.float64)
        case "pairs":
            return uniform(n // 2 + 1).repeat(2)[:n]
        case "outliers":
            return torch.cat([torch.tensor([10.0, -8.0], dtype=torch.float64), uniform(n)])[:n]
    raise ValueError(f"expected a kind in {KINDS}, got {kind!r}")


def case(seed: int) -> Case:
    """The seed-th random case: kind, size, scale from 1e-14 to 1e14, dtype, k (often n) and `which` all vary."""
    g = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=g))

    kind = KINDS[seed % len(KINDS)]
    n = integer(1, 4) if integer(0, 9) == 0 else integer(5, 160)
    k = n if integer(0, 9) == 0 else integer(1, min(n, 24))
    which = WHICH[integer(0, 4)]
    dtype = (torch.float64, torch.float32)[integer(0, 1)]
    scale = 10.0 ** integer(-14, 14)
    matrix = rotated(spectrum(kind, n, g) * scale, g, dtype)
    return Case(matrix, k, which, f"{kind}, n={n}, k={k}, {which}, {dtype}, scale {scale:.0e}")


def wanted(values: Tensor, k: int, which: str) -> Tensor:
    """The k values that `which` names, ascending, by sorting all of them."""
    values = values.sort().values
    match which:
        case "LA":
            return values[len(values) - k :]
        case "SA":
            return values[:k]
        case "BE":
            return torch.cat([values[: k // 2], values[len(values) - (k - k // 2) :]])
    return values[values.abs().argsort(descending=which == "LM")[:k]].sort().values
