"""What `check` reports of a transport problem, as text and as advice."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ot_newton.status import Status

ISOLATED = 30.0  # exp(-30) is no mass in float32
FAR = 10.0
AVERAGED = 10.0  # how much smaller the rounding of a marginal is than that of the entries it sums


@dataclass(frozen=True)
class Cloud:
    """One side of the problem.

    Attributes:
        points, dimensions: n and d.
        spread: root of the weighted mean squared distance from the centroid, after the embedding of the cost.
        offset: distance of the centroid from the origin over the spread, of the points as they were given.
        uneven: largest over smallest spread of a coordinate that is not constant, of the points as they were given.
        duplicates: points that repeat an earlier one.
        massless: points of weight 0.
        isolated: how many of `sampled` points have a nearest cost above 30 eps and ten times the median nearest cost.
        sampled: points that were looked at for `isolated`, against all points of the other side.
    """

    points: int
    dimensions: int
    spread: float
    offset: float
    uneven: float
    duplicates: int
    massless: int
    isolated: int
    sampled: int


@dataclass(frozen=True)
class Report:
    """What `check` found; `str(report)` is the readable text.

    Attributes:
        x, y: the two clouds.
        dtype, device: of the computation.
        stored: dtype of the points as given.
        eps: the temperature, and `eps_given` whether it was given or is a twentieth of the median cost.
        mean_cost: under a⊗b, exact.
        median_cost: of the sampled pairs; `sampled_pairs` says of how many, and `whole` whether those are all.
        passes: passes over the pairs of a trial solve with the default tolerance, and how it ended: `trial_status`.
        trial: (n, m) of the trial, a subsample unless it is the shape of the problem.
        resolution: relative error of the plan's entries from rounding their exponents in this dtype.
        tol: the default tolerance in this dtype.
    """

    x: Cloud
    y: Cloud
    dtype: torch.dtype
    stored: torch.dtype
    device: torch.device
    eps: float
    eps_given: bool
    mean_cost: float
    median_cost: float
    sampled_pairs: int
    whole: bool
    passes: int
    trial_status: Status
    trial: tuple[int, int]
    resolution: float
    tol: float

    @property
    def advice(self) -> tuple[str, ...]:
        """What to change, a sentence each; empty where there is nothing."""
        return tuple(_advice(self))

    @property
    def ratio(self) -> float:
        """eps over the median cost, or over the mean cost where the median is 0."""
        return self.eps / (self.median_cost or self.mean_cost or math.inf)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _advice(r: Report) -> Iterator[str]:
    unit = torch.finfo(r.dtype).eps
    typical = r.median_cost or r.mean_cost
    if 0 < r.ratio < 1e-3:
        yield (
            f"eps is far below the cost: {r.ratio:.1e} of its median. Solves are slow and sharp; start from "
            f"{typical / 20:.2g} and lower eps while the answer still changes."
        )
    if r.ratio > 2:
        yield (
            f"eps is above the cost: {r.ratio:.1e} of its median. The plan is nearly a⊗b and hardly sees which points "
            f"match; use about {typical / 20:.2g}."
        )
    if not r.resolution < AVERAGED * r.tol:
        how = "use float64, or " if r.dtype == torch.float32 else ""
        rounded = r.eps * r.resolution if math.isfinite(r.resolution) else unit * typical
        yield (
            f"Digits are lost: the exponents round to {r.resolution:.1e}, too coarse for a tolerance of {r.tol:.0e}; "
            f"{how}eps of at least {rounded / (AVERAGED * r.tol):.2g}."
        )
    offset = max(r.x.offset, r.y.offset)
    if offset * unit > 1e-6 and offset > 10:
        yield (
            f"The clouds lie far from the origin: {offset:.1e} times their spread. That costs {math.log10(offset):.0f} "
            "digits of the coordinates; subtract a common point in float64 before anything else."
        )
    if torch.finfo(r.stored).bits == 16:
        yield (
            f"Points are stored in 16 bits: {r.stored} keeps {-math.log10(torch.finfo(r.stored).eps):.0f} digits of a "
            "coordinate; the arithmetic is float32, which cannot bring the others back."
        )
    for name, cloud in (("x", r.x), ("y", r.y)):
        if cloud.uneven > 100:
            yield (
                f"Coordinates of {name} are uneven: their spreads differ by a factor {cloud.uneven:.1e}, so the cost "
                "sees the widest alone; standardise them."
            )
        if cloud.duplicates > 0.1 * cloud.points:
            yield (
                f"Many points of {name} repeat: {cloud.duplicates} of {cloud.points}; merge them and add their weights "
                "for cheaper passes and the same answer."
            )
        if cloud.massless:
            yield (
                f"Points of {name} have no weight: {cloud.massless} of {cloud.points}; they are handled, and leaving "
                "them out makes passes cheaper."
            )
        if cloud.isolated:
            yield (
                f"Points of {name} are isolated: {cloud.isolated} of {cloud.sampled} looked at are more than "
                f"{ISOLATED:.0f} eps from all others; check them for errors, clip them, or raise eps."
            )
    if max(r.x.spread, r.y.spread) > 10 * min(r.x.spread, r.y.spread) > 0:
        yield f"Spreads differ: {r.x.spread:.2g} and {r.y.spread:.2g}; make sure that x and y are in the same units."
    if not r.trial_status.success and r.trial_status is not Status.STALLED:
        yield f"The trial did not converge: {r.trial_status.value} after {r.passes} passes. {r.trial_status.advice}"
    elif r.passes > 300:
        yield f"Many passes are needed: {r.passes} in the trial; a larger eps or tol saves most of them."


def _lines(r: Report) -> Iterator[str]:
    where = "all pairs" if r.whole else f"a sample of {r.sampled_pairs} pairs"
    sub = r.trial != (r.x.points, r.y.points)
    trial = f"a solve with {r.trial[0]}×{r.trial[1]} points, " + ("a subsample" if sub else "the whole problem")
    yield f"{r.x.points}×{r.y.points} points in {r.x.dimensions} dimensions, {str(r.dtype)[6:]} on {r.device}"
    yield f"  spread       x {r.x.spread:.3g}, y {r.y.spread:.3g}"
    yield f"  cost         mean {r.mean_cost:.3g} (exact), median {r.median_cost:.3g} ({where})"
    note = "" if r.eps_given else ", the default of this report"
    yield f"  eps          {r.eps:.3g} = {r.ratio:.2g} of the median cost{note}"
    yield f"  centring     centroids at {r.x.offset:.2g} and {r.y.offset:.2g} spreads from the origin"
    yield f"  duplicates   x {r.x.duplicates}, y {r.y.duplicates}; weight 0: x {r.x.massless}, y {r.y.massless}"
    yield f"  isolated     x {r.x.isolated} of {r.x.sampled} looked at, y {r.y.isolated} of {r.y.sampled}"
    yield f"  passes       {r.passes} ({r.trial_status.value}) in {trial}"
    yield f"  precision    exponents round to {r.resolution:.1e} of an entry; the default tolerance is {r.tol:.0e}"
    yield "advice" if r.advice else "advice: nothing to change"
    for sentence in r.advice:
        yield f"  {sentence}"
