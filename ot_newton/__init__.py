"""Newton's method for optimal-transport losses, without ever forming the n×m plan."""

from pathlib import Path as _Path

__version__ = "0.1.0"

# A checkout keeps the sub-packages `kernels`, `problems` and `experiments` beside this folder, an installed copy keeps
# them inside it. Looking in the repository root as well makes `python -m ot_newton` run from a bare checkout.
if not (_Path(__file__).parent / "kernels").is_dir():
    __path__.append(str(_Path(__file__).parent.parent))

from ot_newton.adam import Adam
from ot_newton.autograd import ot_loss
from ot_newton.certificate import smallest_eigenvalue
from ot_newton.hessian import PlanHessian
from ot_newton.krylov import cg, minres
from ot_newton.lanczos import eigsh
from ot_newton.minimize import minimize
from ot_newton.newton_cg import NewtonCG
from ot_newton.operators import LinearOperator, aslinearoperator
from ot_newton.plan import Plan
from ot_newton.problem import FunctionProblem, Problem
from ot_newton.result import OptimizeResult
from ot_newton.saddle_switch import SaddleSwitch
from ot_newton.sinkhorn import ConvergenceWarning, solve
from ot_newton.status import Status

__all__ = [
    "Adam",
    "ConvergenceWarning",
    "FunctionProblem",
    "LinearOperator",
    "NewtonCG",
    "OptimizeResult",
    "Plan",
    "PlanHessian",
    "Problem",
    "SaddleSwitch",
    "Status",
    "aslinearoperator",
    "cg",
    "eigsh",
    "minimize",
    "minres",
    "ot_loss",
    "smallest_eigenvalue",
    "solve",
]
