"""scipy's second-order methods on a `Problem`, with the same derivatives and the same counters as ours."""

import warnings

import numpy as np
import scipy.optimize
import torch

from ot_newton.counting import CountedProblem
from ot_newton.experiments.errors import one_line
from ot_newton.experiments.run import Row
from ot_newton.operators import LinearOperator
from ot_newton.problem import Problem

SCIPY_METHODS = tuple(f"scipy-{name}" for name in ("newton-cg", "trust-ncg", "trust-krylov", "trust-exact"))


class _BudgetError(Exception):
    """The budget of Hessian products is spent."""


class _Oracle:
    """A problem as scipy wants it: functions of numpy arrays. The Hessian is set up once for each point."""

    def __init__(self, problem: Problem, max_products: int) -> None:
        self.problem, self.max_products = CountedProblem(problem), max_products
        self.x = problem.start(torch.Generator())
        self._point: torch.Tensor | None = None
        self._operator: LinearOperator | None = None

    def value(self, x: np.ndarray) -> float:
        return float(self.problem.value(self._tensor(x)))

    def grad(self, x: np.ndarray) -> np.ndarray:
        self.x = self._tensor(x)
        return self.problem.value_and_grad(self.x)[1].numpy()

    def product(self, x: np.ndarray, v: np.ndarray) -> np.ndarray:
        self._spend()
        return (self._hessian(x) @ self._tensor(v).reshape(-1)).numpy()

    def matrix(self, x: np.ndarray) -> np.ndarray:
        self._spend()
        return self._hessian(x).to_dense().numpy()

    def _hessian(self, x: np.ndarray) -> LinearOperator:
        point = self._tensor(x)
        if self._operator is None or self._point is None or not torch.equal(point, self._point):
            self._point, self._operator = point, self.problem.hessian(point)
        return self._operator

    def _spend(self) -> None:
        if self.problem.nhev >= self.max_products:
            raise _BudgetError(f"stopped after {self.problem.nhev} Hessian products")

    def _tensor(self, x: np.ndarray) -> torch.Tensor:
        return torch.tensor(x, dtype=self.problem.dtype)


def minimize_by_scipy(
    problem: Problem, method: str, *, gtol: float, xtol: float, maxiter: int, max_products: int
) -> tuple[torch.Tensor, Row]:
    """Where scipy ends (size,), what it says, and what it asked for.

    Args:
        problem: in float64 on the CPU; its own start is used.
        method: one of `SCIPY_METHODS`. "scipy-trust-exact" gets the whole Hessian, which counts as `size` products.
        gtol: gradient norm to stop at; newton-cg does not look at it and has `xtol` instead.
        xtol: mean change of a coordinate at which newton-cg stops.
        maxiter, max_products: limits of steps and Hessian products.
    """
    oracle = _Oracle(problem, max_products)
    name = method.removeprefix("scipy-")
    second = {"hess": oracle.matrix} if name == "trust-exact" else {"hessp": oracle.product}
    options = {"maxiter": maxiter, **({"xtol": xtol} if name == "newton-cg" else {"gtol": gtol})}
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            result = scipy.optimize.minimize(
                oracle.value, oracle.x.numpy(), jac=oracle.grad, method=name, options=options, **second
            )
        end, claimed, message, nit = torch.tensor(result.x), bool(result.success), result.message, int(result.nit)
        status = "converged" if claimed else "failed"
    except _BudgetError as error:
        end, claimed, message, nit, status = oracle.x, False, str(error), 0, "stopped"
    except (ValueError, ArithmeticError, np.linalg.LinAlgError) as error:  # NaN, or no factorisation
        end, claimed, message, nit, status = oracle.x, False, one_line(error), 0, "error"
    counts = {name: getattr(oracle.problem, name) for name in ("nfev", "njev", "nhev")}
    return end, {
        "claimed": claimed,
        "status": status,
        "message": one_line(ValueError(message)),
        "nit": nit,
        **counts,
        "n_certificate": 0,
    }
