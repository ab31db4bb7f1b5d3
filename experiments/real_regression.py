"""The shuffled regression of real cells with a known answer, that several experiments share."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from ot_newton.certificate import Certificate, smallest_eigenvalue
from ot_newton.experiments.environment import pick_device
from ot_newton.experiments.run import RunConfig
from ot_newton.problems.cytometry import cytometry_points
from ot_newton.problems.shuffled_regression import ShuffledRegression
from ot_newton.problems.simulation import RegressionData, simulate

DTYPES = {"float32": torch.float32, "float64": torch.float64}
N_CELLS = 76_671


@dataclass(frozen=True, kw_only=True)
class RegressionConfig(RunConfig):
    """Y = the rows of X W* + noise in unknown order; X are cells of healthy donors, five channels, standardised."""

    n: int = 1000
    """Cells on each side."""
    noise: float = 0.2
    """Standard deviation of the noise, in standard deviations of a channel."""
    w_star: Literal["near-identity", "arbitrary"] = "near-identity"
    """The map to be found: a calibration, or any rotation and mixing."""
    split: Literal["paired", "permuted", "unpaired"] = "permuted"
    """Whether Y comes from the cells of X in order, from the cells of X in unknown order, or from other cells."""
    cofactor: float = 3000.0
    """Of the arcsinh that the raw values go through."""
    clip: float = 5.0
    """Farthest distance of a cell from the mean, in standard deviations."""
    seed: int = 2
    """Of the cells, W*, the noise and the starts."""
    dtype: Literal["float32", "float64"] = "float64"
    """Precision."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto is cuda where there is one."""

    def __post_init__(self) -> None:
        if self.n < 2:
            raise ValueError(f"expected n ≥ 2 cells, got {self.n}")

    @cached_property
    def data(self) -> RegressionData:
        """Both clouds, the map between them, and held-out pairs."""
        used = 2 * self.n if self.split == "unpaired" else self.n
        cells = cytometry_points(
            min(used + self.n, N_CELLS),
            self.seed,
            cofactor=self.cofactor,
            clip=self.clip,
            dtype=DTYPES[self.dtype],
            device=pick_device(self.device),
        )
        return simulate(cells, n=self.n, split=self.split, noise=self.noise, w_star=self.w_star, seed=self.seed)

    def problem(self, eps: float) -> ShuffledRegression:
        """A fresh problem at temperature `eps`."""
        return ShuffledRegression(self.data.X, self.data.Y, eps)


def curvature_at(problem: ShuffledRegression, w: torch.Tensor) -> Certificate:
    """λ_min at a point where a run has ended, from a Hessian that is more exact than the run's own."""
    return smallest_eigenvalue(problem.hessian(w, 1e-4), error=problem.hessian_error)
