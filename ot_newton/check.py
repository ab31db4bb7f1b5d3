"""`check`: what to know about two point clouds and a temperature before, or after, a solve that disappoints.

What is exact costs O((n + m) d): the mean cost `s (Σ a_i|x_i|² + Σ b_j|y_j|²) - 2s <x̄, ȳ>`, the offset of the clouds,
duplicates and zero weights. The rest is measured on a seeded subsample, and the report says so: the median cost,
isolated points, and the passes that a solve takes. Rounding the exponents `(f + g - C)/eps`, of size L, changes every
entry of the plan by the relative amount u·L with the unit u of the dtype: no marginal error below that means much.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ot_newton.check_report import FAR, ISOLATED, Cloud, Report
from ot_newton.cost import Cost, make_cost
from ot_newton.pairs import Pairs
from ot_newton.plan import Plan
from ot_newton.potentials import resolution
from ot_newton.sinkhorn import solve_checked
from ot_newton.validate import POINTS, as_real, check_measures, check_positive

SAMPLE = 512  # points of a side whose costs are looked at
TRIAL = 256  # points of a side in the trial solve
TRIAL_ITERATIONS = 1000


def check(
    x: Any,
    y: Any,
    a: Any = None,
    b: Any = None,
    eps: float | None = None,
    *,
    cost: str = "sqeuclidean",
    scale: float = 1.0,
) -> Report:
    """Look at a transport problem without solving it: `print(check(x, y, eps=0.1))`.

    Args:
        x, y, a, b, cost, scale: as in `solve`.
        eps: temperature; a twentieth of the median cost where None.

    Takes O((n + m) d) time, a few hundred points of each side against all of the other, and a solve with at most 256
    points a side. The same input gives the same report. Raises what `solve` raises for its inputs.

    >>> x = torch.rand(100, 2, generator=torch.Generator().manual_seed(0))
    >>> report = check(x + 1000, x + 1001, eps=1e-6)
    >>> for sentence in report.advice:
    ...     print(sentence.split(":")[0])
    eps is far below the cost
    Digits are lost
    The clouds lie far from the origin
    """
    x = as_real(x, "x", *POINTS)
    stored = x.dtype
    x, y, a, b = (t.detach() for t in check_measures(x, y, a, b))
    kind = make_cost(cost, check_positive(scale, "scale"))
    given = None if eps is None else check_positive(eps, "eps")
    rng = torch.Generator().manual_seed(0)
    tx, ty = _embedded(x, kind, "x"), _embedded(y, kind, "y")
    rows, columns = _sample(a, SAMPLE, rng), _sample(b, SAMPLE, rng)
    C = kind.scale * _squared(tx[rows], ty[columns])
    mean, median = _mean_cost(tx, ty, a, b, kind.scale), float(C.median())
    if not (math.isfinite(mean) and bool(torch.isfinite(C).all())):
        raise ValueError(
            f"x and y: expected points whose cost is finite in {x.dtype}, got an overflow; rescale the points"
        )
    temperature = given if given is not None else (median or mean or 1.0) / 20
    tol = 1e-6 if x.dtype == torch.float64 else 1e-5
    i, j = _sample(a, TRIAL, rng), _sample(b, TRIAL, rng)
    trial = solve_checked(
        x[i], y[j], a[i] / a[i].sum(), b[j] / b[j].sum(), temperature, kind, max_iter=TRIAL_ITERATIONS
    )
    return Report(
        x=_cloud(x, tx, a, rows, ty[b > 0], kind.scale, temperature),
        y=_cloud(y, ty, b, columns, tx[a > 0], kind.scale, temperature),
        dtype=x.dtype,
        stored=stored,
        device=x.device,
        eps=temperature,
        eps_given=given is not None,
        mean_cost=mean,
        median_cost=median,
        sampled_pairs=C.numel(),
        whole=len(rows) == int((a > 0).sum()) and len(columns) == int((b > 0).sum()),
        passes=trial.n_passes,
        trial_status=trial.status,
        trial=trial.shape,
        resolution=_resolution(Pairs.of(tx, ty, a, b, temperature, kind.scale), trial),
        tol=tol,
    )


def _embedded(points: Tensor, kind: Cost, name: str) -> Tensor:
    embedded = kind.embed(points)
    if not bool(torch.isfinite(embedded).all()):
        raise ValueError(f"{name}: expected points whose cost is finite, got a zero vector or an overflow")
    return embedded


def _sample(weights: Tensor, most: int, rng: torch.Generator) -> Tensor:
    """Indices of at most so many points with mass, in order, drawn without replacement."""
    held = weights.nonzero()[:, 0]
    if len(held) <= most:
        return held
    return held[torch.randperm(len(held), generator=rng)[:most].sort().values.to(held.device)]


def _squared(x: Tensor, y: Tensor) -> Tensor:
    """|x_i - y_j|², (n, m), of the differences: no digit is lost to the origin."""
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square()


def _mean_cost(x: Tensor, y: Tensor, a: Tensor, b: Tensor, scale: float) -> float:
    x, y, a, b = (t.to(torch.float64) for t in (x, y, a, b))
    x, y = x - x[0], y - x[0]
    mx, my = a @ x, b @ y
    inner = a @ (x - mx).square().sum(1) + b @ (y - my).square().sum(1)
    return scale * float(inner + (mx - my).square().sum())


def _resolution(pairs: Pairs, trial: Plan) -> float:
    """What `potentials.resolution` will be: that of the trial, or more by as much as the points reach out further."""
    found = resolution(trial.pairs, trial.phi, trial.psi)
    reach = [float(max(side.norm.max() for side in (p.source, p.target))) for p in (pairs, trial.pairs)]
    further = max(reach[0] / reach[1], 1.0) if reach[1] > 0 else 1.0
    return math.inf if math.isnan(found) else found * further


def _cloud(
    points: Tensor, embedded: Tensor, weights: Tensor, sample: Tensor, others: Tensor, scale: float, eps: float
) -> Cloud:
    wide, w, inner = points.to(torch.float64), weights.to(torch.float64), embedded.to(torch.float64)
    shifted = wide - wide[0]  # points that are all the same have no spread, to the last bit
    variance = w @ (shifted - w @ shifted).square()  # (d,)
    total, distance = float(variance.sum().sqrt()), float((w @ wide).norm())
    spreads = variance[variance > 0].sqrt()
    inner = inner - inner[0]
    nearest = torch.cat(
        [_squared(part, others).amin(1) for part in embedded[sample].split(max(1, 2**24 // len(others)))]
    )
    nearest = scale * nearest
    limit = max(ISOLATED * eps, FAR * float(nearest.median()))
    return Cloud(
        points=len(points),
        dimensions=points.shape[1],
        spread=float((w @ (inner - w @ inner).square()).sum().sqrt()),
        offset=distance / total if total > 0 else math.inf if distance > 0 else 0.0,
        uneven=float(spreads.max() / spreads.min()) if total > 0 else 1.0,
        duplicates=len(points) - len(torch.unique(points, dim=0)),
        massless=int((weights == 0).sum()),
        isolated=int((nearest > limit).sum()),
        sampled=len(sample),
    )
