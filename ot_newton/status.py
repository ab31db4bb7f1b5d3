"""How a computation ended: one word for programs, one sentence of advice for people."""

from enum import StrEnum


class Status(StrEnum):
    """How an iterative computation ended. Only `CONVERGED` is a success; `advice` says what to try next.

    >>> Status.MAX_ITER == "max_iter", bool(Status.CONVERGED.success)
    (True, True)
    """

    CONVERGED = "converged"
    MAX_ITER = "max_iter"
    PASS_LIMIT = "pass_limit"
    TIME_LIMIT = "time_limit"
    STALLED = "stalled"
    NONFINITE = "nonfinite"
    NEGATIVE_CURVATURE = "negative_curvature"
    INCONSISTENT = "inconsistent"
    BOUNDARY = "boundary"
    SADDLE = "saddle"
    UNDECIDED = "undecided"
    LINE_SEARCH_FAILED = "line_search_failed"
    STOPPED = "stopped"

    @property
    def success(self) -> bool:
        """Whether the requested accuracy was reached."""
        return self is Status.CONVERGED

    @property
    def advice(self) -> str:
        """One sentence: what happened and what to try next."""
        return _ADVICE[self]


_ADVICE = {
    Status.CONVERGED: "The requested tolerance was reached.",
    Status.MAX_ITER: "The iteration limit was reached before the tolerance; raise the limit, loosen the tolerance, "
    "or start from a better point.",
    Status.PASS_LIMIT: "The budget of passes over the n×m pairs ran out before the tolerance; raise it, loosen the "
    "tolerance, or use a larger eps.",
    Status.TIME_LIMIT: "The time limit was reached; resume from the returned point or raise the limit.",
    Status.STALLED: "Rounding stops further progress at the reported residual; use float64 or accept this accuracy.",
    Status.NONFINITE: "A value that is not finite appeared; check the inputs for overflow and use a larger eps or "
    "float64.",
    Status.NEGATIVE_CURVATURE: "A direction of nonpositive curvature was found; it is returned, and descending along "
    "it leaves the saddle.",
    Status.INCONSISTENT: "The linear system is singular and its right-hand side is not in the range; the returned "
    "vector is a least-squares solution.",
    Status.BOUNDARY: "The step ends on the boundary of the trust region; this is the constrained solution.",
    Status.SADDLE: "The gradient is within tolerance but the Hessian has a negative eigenvalue; continue with a "
    "method that uses negative curvature, or perturb along the returned direction.",
    Status.UNDECIDED: "The gradient is within tolerance but the sign of the smallest eigenvalue could not be decided; "
    "raise the eigenvalue budget or the accuracy of the Hessian.",
    Status.LINE_SEARCH_FAILED: "No step along the search direction lowers the function; check that the gradient "
    "belongs to the function, or accept the point if the gradient is at its noise level.",
    Status.STOPPED: "The callback stopped the run; the returned point is the last accepted one.",
}
