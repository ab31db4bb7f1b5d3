"""Shuffled regressions with a known answer: `Y = Π (X W* + b* + σ ξ)` with the correspondence Π lost."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SPLITS = ("paired", "permuted", "unpaired")
GENERATORS = ("near-identity", "arbitrary")


@dataclass(frozen=True, eq=False)
class RegressionData:
    """Two clouds of points with the linear map between them, and held-out pairs to judge by.

    Attributes:
        X, Y: (n, p) sources and (n, q) targets.
        W_star: (p, q), the true map; `intercept_star` (q,), zero unless asked for.
        X_test, Y_test: (n_test, p) and (n_test, q), fresh points whose pairs are known.
        noise: standard deviation of the noise in each coordinate of Y and Y_test.
        split: "paired" (row i of Y comes from row i of X), "permuted" (from an unknown row) or "unpaired" (from a point
            that is not in X).
        order: (n,) with `Y[j]` made from `X[order[j]]`; None where unpaired.
    """

    X: Tensor
    Y: Tensor
    W_star: Tensor
    intercept_star: Tensor
    X_test: Tensor
    Y_test: Tensor
    noise: float
    split: str
    order: Tensor | None


def true_map(p: int, q: int, law: str, rng: torch.Generator) -> Tensor:
    """A random map (p, q) in float64: identity plus noise, or an orthogonal matrix plus noise, of 0.15 an entry."""
    bump = 0.15 * torch.randn(p, q, generator=rng, dtype=torch.float64)
    if law == "near-identity":
        return torch.eye(p, q, dtype=torch.float64) + bump
    if law == "arbitrary":
        side = max(p, q)
        Q, R = torch.linalg.qr(torch.randn(side, side, generator=rng, dtype=torch.float64))
        return (Q * R.diagonal().sign())[:p, :q] + bump
    raise ValueError(f"w_star: expected one of {', '.join(GENERATORS)} or a tensor (p, q), got {law!r}")


def simulate(
    cells: Tensor,
    *,
    n: int,
    split: str = "permuted",
    noise: float = 0.05,
    w_star: str | Tensor = "near-identity",
    q: int | None = None,
    intercept: float = 0.0,
    n_test: int | None = None,
    seed: int = 0,
) -> RegressionData:
    """Draw sources, targets and a test set from cells (N, p), and a map W* (p, q); everything follows from the seed.

    Args:
        cells: points to draw from without replacement; their dtype and device are kept.
        n: points on each side. "unpaired" needs 2n cells, the other splits n, and the test set `n_test` more (by
            default what is left, at most n).
        noise: standard deviation σ of the noise added to each coordinate.
        w_star: "near-identity", "arbitrary" (an orthogonal matrix, both with perturbations of 0.15) or the map itself.
        q: columns of a random map; p by default.
        intercept: standard deviation of the entries of a random intercept b*.

    Raises ValueError for an unknown split or law, or where there are too few cells.
    """
    if split not in SPLITS:
        raise ValueError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")
    if not (math.isfinite(noise) and noise >= 0):
        raise ValueError(f"noise: expected a finite number ≥ 0, got {noise!r}")
    used = 2 * n if split == "unpaired" else n
    n_test = min(n, len(cells) - used) if n_test is None else n_test
    if n < 1 or n_test < 1 or used + n_test > len(cells):
        raise ValueError(
            f"n: expected at most {len(cells)} cells in all, got n={n} ({used} for split {split!r}) and n_test={n_test}"
        )
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(cells), generator=rng)[: used + n_test].to(cells.device)
    p = cells.shape[1]
    if isinstance(w_star, str):
        W = true_map(p, p if q is None else q, w_star, rng)
    else:
        W = w_star
        if W.ndim != 2 or len(W) != p:
            raise ValueError(f"w_star: expected shape ({p}, q), got {tuple(W.shape)}")
    shift = intercept * torch.randn(W.shape[1], generator=rng, dtype=torch.float64)
    W, shift = (t.to(dtype=cells.dtype, device=cells.device) for t in (W, shift))

    def image(points: Tensor) -> Tensor:
        xi = torch.randn(len(points), W.shape[1], generator=rng, dtype=torch.float64)
        return points @ W + shift + noise * xi.to(dtype=cells.dtype, device=cells.device)

    X, X_test = cells[rows[:n]], cells[rows[used:]]
    order = torch.arange(n) if split == "paired" else torch.randperm(n, generator=rng)
    Y = image(cells[rows[n:used]]) if split == "unpaired" else image(X)[order.to(cells.device)]
    return RegressionData(
        X, Y, W, shift, X_test, image(X_test), noise, split, None if split == "unpaired" else order.to(cells.device)
    )


def least_squares_on_pairs(data: RegressionData) -> Tensor | None:
    """`argmin_W |X W + b* - Y|` (p, q) with every row of Y back at its row of X, or None where the data are unpaired.

    What could be had if the correspondence were known: the measure for what losing it costs.
    """
    if data.order is None:
        return None
    X, Y = data.X[data.order].double(), (data.Y - data.intercept_star).double()
    return torch.linalg.lstsq(X, Y).solution.to(data.X)
