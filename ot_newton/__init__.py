"""Newton's method for optimal-transport losses, without ever forming the n×m plan."""

from pathlib import Path as _Path

__version__ = "0.1.0"

# A checkout keeps the sub-packages `kernels`, `problems` and `experiments` beside this folder, an installed copy keeps
# them inside it. Looking in the repository root as well makes `python -m ot_newton` run from a bare checkout.
if not (_Path(__file__).parent / "kernels").is_dir():
    __path__.append(str(_Path(__file__).parent.parent))

from ot_newton.adam import Adam
from ot_newton.autograd import ot_loss
from ot_newton.batch import solve_batch
from ot_newton.certificate import Certificate, Verdict, smallest_eigenvalue
from ot_newton.check import check
from ot_newton.cubic import Cubic
from ot_newton.density import count_below, spectral_density
from ot_newton.divergence import sinkhorn_divergence, solve_divergence
from ot_newton.hessian import PlanHessian
from ot_newton.krylov import cg, minres
from ot_newton.lanczos import eigsh
from ot_newton.minimize import minimize
from ot_newton.newton_cg import NewtonCG
from ot_newton.operator_checks import check_operator
from ot_newton.operators import LinearOperator, aslinearoperator
from ot_newton.optim import SecondOrder
from ot_newton.plan import Plan
from ot_newton.problem import FunctionProblem, Problem
from ot_newton.result import OptimizeResult
from ot_newton.saddle_free import SaddleFree
from ot_newton.saddle_switch import SaddleSwitch
from ot_newton.sinkhorn import ConvergenceWarning, solve
from ot_newton.status import Status
from ot_newton.trace import trace
from ot_newton.trust_region import TrustNCG, TrustRegion
from ot_newton.unbalanced import solve_unbalanced, unbalanced_ot_loss

__all__ = [
    "Adam",
    "Certificate",
    "ConvergenceWarning",
    "Cubic",
    "FunctionProblem",
    "LinearOperator",
    "NewtonCG",
    "OptimizeResult",
    "Plan",
    "PlanHessian",
    "Problem",
    "SaddleFree",
    "SaddleSwitch",
    "SecondOrder",
    "Status",
    "TrustNCG",
    "TrustRegion",
    "Verdict",
    "aslinearoperator",
    "cg",
    "check",
    "check_operator",
    "count_below",
    "eigsh",
    "minimize",
    "minres",
    "ot_loss",
    "sinkhorn_divergence",
    "smallest_eigenvalue",
    "solve",
    "solve_batch",
    "solve_divergence",
    "solve_unbalanced",
    "spectral_density",
    "trace",
    "unbalanced_ot_loss",
]
