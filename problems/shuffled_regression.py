"""Regression when the correspondence is lost: `L(W) = OT_eps(X W + b, Y)` for sources X (n, p) and targets Y (m, q).

For Gaussian noise of variance σ² the loss at `eps = 2 s σ²` is the likelihood of the unmatched targets (entropic
transport is maximum-likelihood deconvolution, Rigollet & Weed 2018, C. R. Math. 356:1228); a larger eps shrinks W.
"""

from typing import Any

import torch
from torch import Tensor

from ot_newton.cost import SquaredEuclidean
from ot_newton.linear_model import LinearModelHessian, linear_model_grad, linear_model_hessian
from ot_newton.operators import MatrixOperator
from ot_newton.plan import Plan
from ot_newton.problem import Problem
from ot_newton.problems.simulation import RegressionData
from ot_newton.sinkhorn import _solve
from ot_newton.validate import check_measures, check_points, check_positive

LAWS = ("random", "monge", "identity")
TIGHTEST = {torch.float64: 1e-10, torch.float32: 2e-6}
FARTHEST = 5.0


def eps_from_noise(sigma: float, scale: float = 1.0) -> float:
    """The temperature `eps = 2 s σ²` at which the loss is the likelihood for noise of standard deviation σ."""
    return 2 * check_positive(scale, "scale") * check_positive(sigma, "sigma") ** 2


class ShuffledRegression(Problem):
    """`L(W) = OT_eps(X W + b, Y)` as a `Problem` in the flat row-major W (p, q), followed by b (q,) if there is one.

    Value, gradient and Hessian at one point share one transport plan, and the next plan starts from the last one, moved
    along the response of its potentials where the Hessian has been computed. That cache is the only state.

    Args:
        X, Y: (n, p) and (m, q), one floating dtype and device.
        eps: temperature in units of the cost `scale·|x - y|²`.
        intercept: whether b is estimated too.
        a, b: weights (n,) and (m,) with sum 1; uniform where None.
        backend: as in `solve`.

    Attributes:
        plan: the transport plan at the last point, or None.
        n_passes: passes over the n×m pairs so far.

    Raises ValueError and TypeError for inputs that are not what is said above.

    >>> X = torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> problem = ShuffledRegression(X, X.flip(0), eps=0.5)
    >>> value, grad = problem.value_and_grad(torch.zeros(4, dtype=torch.float64))
    >>> grad.shape
    torch.Size([4])
    """

    def __init__(
        self,
        X: Any,
        Y: Any,
        eps: float,
        *,
        intercept: bool = False,
        scale: float = 1.0,
        a: Any = None,
        b: Any = None,
        backend: str = "auto",
    ) -> None:
        X, Y = check_points(X, "X"), check_points(Y, "Y")
        _, Y, self.a, self.b = check_measures(Y[:1].expand(len(X), -1), Y, a, b)
        if X.dtype != Y.dtype or X.device != Y.device:
            raise ValueError(
                f"X and Y: expected one dtype and device, got {X.dtype} on {X.device}, {Y.dtype} on {Y.device}"
            )
        self.X, self.Y, self.intercept = X, Y, bool(intercept)
        self.design = torch.cat([X, torch.ones_like(X[:, :1])], 1) if intercept else X  # (n, p) or (n, p + 1)
        self.eps, self.backend = check_positive(eps, "eps"), backend
        self.cost = SquaredEuclidean(check_positive(scale, "scale"))
        self.size = self.design.shape[1] * Y.shape[1]
        self.dtype, self.device = X.dtype, X.device
        self.n_passes = 0
        self.plan: Plan | None = None
        self._w: Tensor | None = None
        self._response: LinearModelHessian | None = None
        self._response_w: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(p, q), or (p + 1, q) with an intercept: the shape of W with b below it."""
        return self.design.shape[1], self.Y.shape[1]

    def split(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """W (p, q) and b (q,), zero without an intercept, from the flat parameters."""
        W = w.reshape(self.shape)
        return (W[:-1], W[-1]) if self.intercept else (W, W.new_zeros(W.shape[1]))

    def join(self, W: Tensor, b: Tensor | None = None) -> Tensor:
        """Flat parameters from W (p, q) and b (q,); by default b brings the two means together."""
        W = W.to(dtype=self.dtype, device=self.device)
        if not self.intercept:
            return W.reshape(-1)
        shift = self.b @ self.Y - (self.a @ self.X) @ W if b is None else b.to(W)
        return torch.cat([W, shift[None]], 0).reshape(-1)

    def start(self, rng: torch.Generator, law: str = "random") -> Tensor:
        """A starting point (size,).

        "random": independent normal entries of variance 1/p, so that X W is about as wide as standardised targets.
        "monge": the optimal map between Gaussians with the covariances of X and Y, the right basin for a calibration
        (Y close to X); needs p = q. "identity": ones on the diagonal. Raises ValueError for another law.
        """
        p, q = self.X.shape[1], self.Y.shape[1]
        if law == "random":
            return self.join(torch.randn(p, q, generator=rng, dtype=torch.float64) / p**0.5)
        if law == "identity":
            return self.join(torch.eye(p, q, dtype=torch.float64))
        if law == "monge":
            return self.join(gaussian_monge_map(self.X, self.Y, self.a, self.b))
        raise ValueError(f"law: expected one of {', '.join(LAWS)}, got {law!r}")

    def solve_plan(self, w: Tensor, tol: float) -> Plan:
        """The plan at w with marginal error at most `tol`, from the cache or warm from it."""
        if self.plan is not None and self._w is not None and torch.equal(w, self._w):
            if self.plan.error <= tol or not self.plan.converged:
                return self.plan
            init = self.plan
        else:
            init = self._predicted(w)
        plan = _solve(self.design @ w.reshape(self.shape), self.Y, self.a, self.b, self.eps, self.cost, tol, init=init,
                      backend=self.backend)  # fmt: skip
        self._enter(w, plan)
        return plan

    def _enter(self, w: Tensor, plan: Plan) -> None:
        self.n_passes += plan.n_passes
        self.plan, self._w = plan, w.clone()
        self._counted = plan.pairs.passes.total

    def _count(self) -> None:
        """Add what has been asked of the plan since it was last counted."""
        assert self.plan is not None
        total = self.plan.pairs.passes.total
        self.n_passes += total - self._counted
        self._counted = total

    def _predicted(self, w: Tensor) -> Plan | tuple[Tensor, Tensor] | None:
        """Potentials to start from at w: the last ones, moved along their response where that is a small move."""
        if self.plan is None or self._response is None or self._w is None:
            return self.plan
        step = w - self._w
        dphi, dpsi = self._response.dphi @ step, self._response.dpsi @ step
        if not float(torch.maximum(dphi.abs().max(), dpsi.abs().max())) < FARTHEST:
            return self.plan
        return self.plan.moved(dphi, dpsi)

    def value(self, w: Tensor) -> Tensor:
        """L(w), shape (): the dual value, whose error is quadratic in the marginal error."""
        plan = self.solve_plan(self.check(w), 1e-2 * TIGHTEST[self.dtype] ** 0.5)
        return self._value(plan)

    def _value(self, plan: Plan) -> Tensor:
        self.value_error = 100 * self.eps * plan.error**2
        return plan.dual_value()

    def value_and_grad(self, w: Tensor, rtol: float | None = None) -> tuple[Tensor, Tensor]:
        """L(w), shape (), and ∇L(w), (size,), to a relative accuracy of about `rtol`."""
        w = self.check(w)
        tol = TIGHTEST[self.dtype] if rtol is None else max(TIGHTEST[self.dtype], 0.3 * rtol)
        while True:
            plan = self.solve_plan(w, tol)
            grad = linear_model_grad(plan, self.design)
            # The error of the gradient relative to itself grows as it vanishes; the marginal error must follow it down.
            needed = 0.0 if rtol is None else rtol * float(torch.linalg.vector_norm(grad)) / self._sensitivity(plan)
            if rtol is None or plan.error <= needed or not plan.converged or tol <= TIGHTEST[self.dtype]:
                break
            tol = max(TIGHTEST[self.dtype], 0.5 * needed)
        self._count()
        return self._value(plan), grad.reshape(-1)

    def _sensitivity(self, plan: Plan) -> float:
        """Estimate of |error of the gradient| per unit of marginal error: the size of terms that partly cancel."""
        z, y = plan.pairs.source.points, plan.pairs.target.points
        width = (plan.a @ (z * z).sum(1) + plan.b @ (y * y).sum(1)).sqrt()
        return 0.8 * self.cost.scale * float(width * (plan.a @ (self.design**2).sum(1)).sqrt())

    def hessian(self, w: Tensor, rtol: float | None = None) -> MatrixOperator:
        """∇²L(w) as a `MatrixOperator` on the exact matrix; `rtol` is the relative accuracy that is needed of it."""
        w = self.check(w)
        # The matrix is off by the square of the residual of its block solve, and by the marginal error of the plan.
        rtol = 1e-8 if rtol is None else rtol
        plan = self.solve_plan(w, max(TIGHTEST[self.dtype], 0.1 * rtol))
        response = self._response if self._response_w is not None and torch.equal(w, self._response_w) else None
        if response is None or response.error > rtol:
            residual = max(0.3 * rtol**0.5, 10 * torch.finfo(self.dtype).eps)
            response = linear_model_hessian(plan, self.design, rtol=residual, modes=plan.modes)
            self._response, self._response_w = response, w.clone()
            self.plan = plan.with_modes(response.modes)
            self._count()
        self.hessian_error = response.error + 10 * plan.error
        return MatrixOperator(response.matrix, symmetric=True)

    def metrics(self, w: Tensor, data: RegressionData, *, reference: float | None = None) -> dict[str, float]:
        """How good the map is: `rel_W`, `r2_held_out` on true test pairs, `loss_above_reference` if there is one.

        rel_W is `|W - W*|/|W*|` in the Frobenius norm; R² is pooled over the coordinates.
        """
        W, b = self.split(w)
        residual = data.Y_test - data.X_test @ W - b
        total = data.Y_test - data.Y_test.mean(0)
        out = {
            "rel_W": float((W - data.W_star).norm() / data.W_star.norm()),
            "r2_held_out": float(1 - (residual**2).sum() / (total**2).sum()),
        }
        if reference is not None:
            out["loss_above_reference"] = float(self.value(w)) - reference
        return out


def gaussian_monge_map(X: Tensor, Y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`Σx^-½ (Σx^½ Σy Σx^½)^½ Σx^-½`, (p, p): the optimal map between centred Gaussians with these covariances.

    Raises ValueError unless X and Y have as many columns (Knott & Smith 1984, J. Optim. Theory Appl. 43:39).
    """
    if X.shape[1] != Y.shape[1]:
        raise ValueError(f"law 'monge': expected as many columns in X as in Y, got {X.shape[1]} and {Y.shape[1]}")
    cov_x, cov_y = _covariance(X, a), _covariance(Y, b)
    root, inverse_root = _power(cov_x, 0.5), _power(cov_x, -0.5)
    return inverse_root @ _power(root @ cov_y @ root, 0.5) @ inverse_root


def _covariance(points: Tensor, weights: Tensor) -> Tensor:
    points, weights = points.double(), weights.double()
    centred = points - weights @ points
    return (weights[:, None] * centred).T @ centred


def _power(S: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh((S + S.T) / 2)
    values = values.clamp_min(1e-12 * values[-1])
    return (vectors * values**exponent) @ vectors.T
