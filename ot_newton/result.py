"""What a minimisation leaves behind: the point, and the evidence for it."""

from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch

from ot_newton.certificate import Certificate
from ot_newton.pairs import Counted, Passes
from ot_newton.status import Status

HISTORY = {
    "step": "int64",
    "phase": "object",
    "fun": "float64",
    "grad_norm": "float64",
    "lambda_min": "float64",
    "lambda_lower": "float64",
    "lambda_upper": "float64",
    "step_norm": "float64",
    "accepted": "bool",
    "nhev": "int64",
    "n_passes": "int64",
    "half_steps": "int64",
    "applications": "int64",
    "columns": "int64",
    "seconds": "float64",
}


@dataclass(frozen=True)
class OptimizeResult(Counted):
    """The end of a minimisation, or its state after a step where a callback receives it.

    Attributes:
        x: the point, in the shape of `x0`.
        fun, jac: value and gradient (shape of `x`) at `x`.
        success: whether `x` is a minimiser to the tolerance, in the second order: `status` is CONVERGED.
        status, message: how it ended, and in a few sentences what that means and what was found; None and empty while
            it runs.
        nit: steps taken, accepted or not.
        nfev, njev, nhev: values, gradients (each with a value), and Hessian products; a Hessian that comes as a matrix
            counts as one.
        passes, n_passes: passes over the n×m pairs, by kind and in all.
        lambda_min: smallest eigenvalue of the Hessian at `x`, NaN if it was not computed.
        certificate: the evidence for it, None if it was not computed.
        history: a DataFrame with a row for every step, the start included. Each row describes the point that the step
            led to: `step`, `phase`, `fun`, `grad_norm`, `lambda_min` (NaN where it was not computed), `step_norm`,
            `accepted`, `nhev`, `n_passes`, of them `half_steps` and `applications`, with what `columns`, `seconds` (all
            from `nhev` on cumulative).
    """

    x: torch.Tensor
    fun: float
    jac: torch.Tensor
    status: Status | None
    message: str
    nit: int
    nfev: int
    njev: int
    nhev: int
    passes: Passes
    lambda_min: float
    certificate: Certificate | None
    rows: list[dict[str, Any]] = field(repr=False)

    @property
    def success(self) -> bool:
        """Whether `x` is a minimiser to the tolerance, in the second order."""
        return self.status is not None and self.status.success

    @property
    def history(self) -> pd.DataFrame:
        """A row for every step up to this result."""
        return pd.DataFrame(self.rows[: self.nit + 1], columns=list(HISTORY)).astype(HISTORY)

    def __repr__(self) -> str:
        lines = [f"{name}: {getattr(self, name)}" for name in ("message", "success", "status", "fun", "x", "jac")]
        counts = ("nit", "nfev", "njev", "nhev", "n_passes", "lambda_min")
        return "\n".join([*lines, ", ".join(f"{name}: {getattr(self, name)}" for name in counts)])
