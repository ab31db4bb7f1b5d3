"""Any torch model fitted to unmatched targets: `L(θ) = OT_eps(z(θ), Y)`, with z(θ) the points that the model makes.

With J the Jacobian of z, g = ∇_z OT and T = ∇²_z OT (`hessian`, `pullback`),

    ∇L = Jᵀ g,    ∇²L v = Jᵀ T (J v) + Σ_i ∇²<g_i, z_i> v :

the chain rule for second derivatives, with neither J nor T formed; k directions share their passes over the pairs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor, nn

from ot_newton.cost import make_cost
from ot_newton.kernels import dispatch
from ot_newton.linearised import ByColumns, Linearised, Vectorised
from ot_newton.operators import FunctionOperator, LinearOperator, MatrixOperator
from ot_newton.pairs import Pairs, Passes
from ot_newton.plan import Plan
from ot_newton.problem import Problem
from ot_newton.problems.flat_model import FlatModule, check_deterministic, flat_model
from ot_newton.problems.warm_start import WarmStart
from ot_newton.pullback import PulledBackHessian, PulledBackMatrix, pulled_back_matrix
from ot_newton.sinkhorn import solve_checked
from ot_newton.validate import check_measures, check_points, check_positive

DENSE_SIZE = 256
DENSE_DIMENSIONS = 64  # of the points: the matrix needs d(d + 1)/2 columns of moments
TIGHTEST = {torch.float64: 1e-10, torch.float32: 2e-6}
PROBES = 4
SOLVED = (
    "phi",
    "psi",
    "row_sums",
    "col_sums",
    "error",
    "status",
    "n_iter",
    "passes",
    "modes",
)  # the rest of a plan is data


class ModuleProblem(Problem):
    """`L(θ) = OT_eps(model_θ(X), Y)` as a `Problem` in the flat parameters θ of a module, or of a function.

    Value, gradient and Hessian at one point share one transport plan, and the next plan starts from the last one, moved
    along the response of its potentials where a matrix has been computed. That cache is the only state; the module is
    never written to.

    Args:
        model: an `nn.Module`, whose trainable parameters are θ, in the order of `named_parameters` (the order of
            `torch.nn.utils.parameters_to_vector`); frozen parameters and buffers keep the values that they have now.
            Or a function `model(θ, X)` of the flat parameters.
        X: what the model is called with, a tensor; None for a model without input, `module()` or `model(θ)`.
        Y: (m, d), the targets. The model must return points (n, d) in the dtype of its parameters and of Y.
        eps: temperature in units of the cost.
        theta0: starting point, for a function; a module brings its own.
        cost, scale, backend: as in `solve`.
        a, b: weights (n,) and (m,) with sum 1; uniform where None.
        vectorize: differentiate many columns at once by `torch.func`; False needs nothing but backward passes, one
            column at a time, for models that `torch.func` does not support.
        chunk: columns that are differentiated at once; the activations of so many copies of the model are in memory.

    Attributes:
        plan: the transport plan at the last point, or None.
        passes, n_passes: passes over the n×m pairs so far, by kind and in all.

    Raises ValueError and TypeError for inputs that are not what is said above, and for a model that draws random
    numbers or changes its buffers (dropout, batch normalisation in training mode).

    >>> X = torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    >>> problem = ModuleProblem(model, X, X.flip(0), eps=0.5)
    >>> problem.size, problem.hessian(problem.start(torch.Generator())).shape
    (17, (17, 17))
    """

    def __init__(
        self,
        model: nn.Module | Callable[..., Tensor],
        X: Tensor | None,
        Y: Any,
        eps: float,
        *,
        theta0: Any = None,
        cost: str = "sqeuclidean",
        scale: float = 1.0,
        a: Any = None,
        b: Any = None,
        vectorize: bool = True,
        chunk: int = 64,
        backend: str = "auto",
    ) -> None:
        if X is not None and not isinstance(X, Tensor):
            raise TypeError(f"X: expected a tensor or None, got {type(X).__name__}")
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
            raise ValueError(f"chunk: expected an integer ≥ 1, got {chunk!r}")
        self._model, self._theta0 = flat_model(model, () if X is None else (X.detach(),), theta0)
        self.size, self.dtype, self.device = self._theta0.numel(), self._theta0.dtype, self._theta0.device
        if self.dtype not in TIGHTEST:
            raise TypeError(f"model: expected parameters in torch.float32 or torch.float64, got {self.dtype}")
        Y = check_points(Y, "Y").detach()
        for name, t in (("X", X), ("Y", Y)):
            if t is not None and t.dtype.is_floating_point and t.dtype != self.dtype:
                raise TypeError(f"{name}: expected {self.dtype} like the parameters, got {t.dtype}")
            if t is not None and t.device != self.device:
                raise ValueError(f"{name}: expected device {self.device} like the parameters, got {t.device}")
        z = check_deterministic(self._model, self._theta0)
        if z.ndim != 2 or z.shape[1] != Y.shape[1] or z.dtype != self.dtype or z.device != self.device:
            wanted = f"shape (n, {Y.shape[1]}) in {self.dtype} on {self.device}"
            raise ValueError(f"model: expected points of {wanted}, got {tuple(z.shape)} in {z.dtype} on {z.device}")
        _, self.Y, self.a, self.b = check_measures(z, Y, a, b)
        self.cost, self.eps = make_cost(cost, check_positive(scale, "scale")), check_positive(eps, "eps")
        self.backend = dispatch.resolve(backend, self.device, self.dtype)
        self.vectorize, self.chunk = bool(vectorize), chunk
        self._point: _Point | None = None
        self._last: WarmStart | None = None

    @property
    def plan(self) -> Plan | None:
        """The transport plan at the last point, or None."""
        return None if self._point is None else self._point.plan

    def start(self, rng: torch.Generator) -> Tensor:
        """The parameters (size,) that the module had, or `theta0`; nothing is drawn."""
        return self._theta0.clone()

    def image(self, w: Tensor) -> Tensor:
        """The points that the model makes of X at w, (n, d)."""
        return self._at(w).model.image

    def parameters(self, w: Tensor) -> dict[str, Tensor]:
        """The parameters at w by name, as `module.load_state_dict(parameters, strict=False)` takes them.

        Raises ValueError where the model is a function, whose parameters have no names.
        """
        if not isinstance(self._model, FlatModule):
            raise ValueError("parameters: expected a problem made of a module, got one made of a function")
        return {name: p.clone() for name, p in self._model.unflatten(self.check(w)).items()}

    def value(self, w: Tensor) -> Tensor:
        """L(w), shape (): the dual value, whose error is quadratic in the marginal error. NaN where z(w) overflows."""
        point = self._at(w)
        if not point.finite:
            return w.new_tensor(nan)
        return self._value(self._solved(point, TIGHTEST[self.dtype] ** 0.5))

    def value_and_grad(self, w: Tensor, rtol: float | None = None) -> tuple[Tensor, Tensor]:
        """L(w), shape (), and ∇L(w), (size,), to a relative accuracy of about `rtol`. NaN where z(w) overflows."""
        point, tightest = self._at(w), TIGHTEST[self.dtype]
        if not point.finite:
            return w.new_tensor(nan), torch.full_like(w, nan)
        tol = tightest if rtol is None else max(tightest, 0.3 * rtol)
        while True:
            plan = self._solved(point, tol)
            grad = point.model.pull(plan.grad()[:, :, None])[:, 0]
            # The error of the gradient relative to itself grows as it vanishes; the marginal error must follow it down.
            needed = 0.0 if rtol is None else rtol * float(torch.linalg.vector_norm(grad)) / _sensitivity(point, plan)
            if plan.error <= needed or not plan.converged or tol <= tightest:
                return self._value(plan), grad
            tol = max(tightest, 0.5 * min(needed, tol))

    def hessian(self, w: Tensor, rtol: float | None = None) -> LinearOperator:
        """∇²L(w) to a relative accuracy of about `rtol`, 1e-8 if None.

        Up to 256 parameters (and points of up to 64 dimensions) a `MatrixOperator` on the exact matrix, whose columns
        share one block solve; above that a `PulledBackHessian`, which needs a block solve for each block of directions.
        """
        point, shape, rtol = self._at(w), (self.size, self.size), 1e-8 if rtol is None else rtol
        small = self.size <= DENSE_SIZE and self.Y.shape[1] <= DENSE_DIMENSIONS
        if not point.finite:
            if small:
                return MatrixOperator(w.new_full(shape, nan), symmetric=True)
            return FunctionOperator(shape, matmat=lambda V: V * nan, dtype=w.dtype, device=w.device, symmetric=True)
        plan, least = self._solved(point, max(TIGHTEST[self.dtype], 0.03 * rtol)), 10 * torch.finfo(self.dtype).eps
        if not small:
            operator = PulledBackHessian(plan, point.model, rtol=max(0.1 * rtol, least), spent=self._spent)
            self.hessian_error = 10 * operator.transport.rtol + 30 * plan.error
            return operator
        if point.matrix is None or (point.matrix.error > rtol and rtol < point.asked):
            # The square of the residual of its block solve is what the matrix is off by.
            found = pulled_back_matrix(plan, point.model, rtol=max(0.3 * rtol**0.5, least))
            self.passes += found.passes
            self._last = WarmStart(point.w, plan.f, plan.g, found.modes, found.dphi, found.dpsi)
            point.plan, point.matrix, point.asked = plan.with_modes(found.modes), found, rtol
        self.hessian_error = point.matrix.error
        return MatrixOperator(point.matrix.matrix, symmetric=True)

    def state(self) -> dict[str, Any]:
        """What was kept from the last points, for a checkpoint (`Resumable`)."""
        point, plan = self._point, self.plan
        return {
            "errors": (self.value_error, self.hessian_error),
            "last": self._last,
            "w": None if point is None else point.w,
            "plan": None if plan is None else {name: getattr(plan, name) for name in SOLVED},
            "matrix": None if point is None else (point.matrix, point.asked),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Keep the result of `state` in another process instead."""
        (self.value_error, self.hessian_error), self._last = state["errors"], state["last"]
        self._point = None
        if state["w"] is not None:
            point = self._at(state["w"])
            point.matrix, point.asked = state["matrix"]
            if state["plan"] is not None:
                z, cost = point.model.image, self.cost
                pairs = Pairs.of(cost.embed(z), cost.embed(self.Y), self.a, self.b, self.eps, cost.scale, self.backend)
                given = {"x": z, "y": self.Y, "a": self.a, "b": self.b, "eps": self.eps}
                point.plan = Plan(**given, cost=cost, pairs=pairs, **state["plan"])

    def _at(self, w: Tensor) -> "_Point":
        """What is known at w; forgets the last point."""
        w = self.check(w).detach()
        if self._point is None or not torch.equal(self._point.w, w):
            w = w.clone()
            model = Vectorised(self._model, w, self.chunk) if self.vectorize else ByColumns(self._model, w)
            self._point = _Point(w, model, bool(torch.isfinite(self.cost.embed(model.image)).all()))
        return self._point

    def _solved(self, point: "_Point", tol: float) -> Plan:
        """The plan at a point with marginal error at most `tol`, from the cache or warm from the last potentials."""
        if point.plan is not None and (point.plan.error <= tol or not point.plan.converged):
            return point.plan
        start = None if self._last is None else self._last.moved_to(point.w, self.eps)
        init = None if start is None else (start.f, start.g)
        modes = None if start is None else start.modes
        plan = solve_checked(
            point.model.image, self.Y, self.a, self.b, self.eps, self.cost, tol,
            init=init, modes=modes, backend=self.backend,
        )  # fmt: skip
        self.passes += plan.passes
        tangent = (None, None) if start is None else (start.dphi, start.dpsi)
        self._last = WarmStart(point.w, plan.f, plan.g, plan.modes, *tangent)
        point.plan = plan
        return plan

    def _value(self, plan: Plan) -> Tensor:
        self.value_error = 100 * self.eps * plan.error**2
        return plan.dual_value()

    def _spent(self, passes: Passes, residual: float) -> None:
        """A product of a Hessian handed out reports what it cost and how accurate it was."""
        self.passes += passes
        self.hessian_error = max(self.hessian_error, 10 * residual)


@dataclass(eq=False)
class _Point:
    """What is known at w: the model around it, whether its points are finite, and what has been computed so far."""

    w: Tensor
    model: Linearised
    finite: bool
    plan: Plan | None = None
    matrix: PulledBackMatrix | None = None
    asked: float = 0.0  # accuracy for which the matrix was computed


def _sensitivity(point: _Point, plan: Plan) -> float:
    """Estimate of |error of the gradient| per unit of marginal error: the size of terms that partly cancel.

    It is the width of both clouds times `(Σ_i a_i |J_i|²/d)^½`, and the latter is seen in Jᵀ of random directions.
    """
    z, y, cost = plan.pairs.source.points, plan.pairs.target.points, plan.cost
    width = (plan.a @ (z * z).sum(1) + plan.b @ (y * y).sum(1)).sqrt()
    rng = torch.Generator().manual_seed(0)
    U = torch.randn(*z.shape, PROBES, generator=rng, dtype=z.dtype).to(z.device) * plan.a.sqrt()[:, None, None]
    pulled = point.model.pull(cost.pull(plan.x, U))
    return 0.8 * cost.scale * float(width * torch.linalg.matrix_norm(pulled)) / (PROBES * z.shape[1]) ** 0.5
