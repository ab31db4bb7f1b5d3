"""Regression when the correspondence is lost: `L(W) = OT_eps(X W + b, Y)` for sources X (n, p) and targets Y (m, q).

For Gaussian noise of variance σ² the loss at `eps = 2 s σ²` is the likelihood of the unmatched targets (entropic
transport is maximum-likelihood deconvolution, Rigollet & Weed 2018, C. R. Math. 356:1228); a larger eps shrinks W.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ot_newton.cost import SquaredEuclidean
from ot_newton.galerkin import BracketedMatrix
from ot_newton.kernels import dispatch
from ot_newton.linear_model import LinearModelHessian, linear_model_grad, linear_model_hessian
from ot_newton.one_shot import OneShot, one_shot
from ot_newton.operators import LinearOperator
from ot_newton.pairs import Pairs, Passes
from ot_newton.plan import Plan
from ot_newton.problem import Problem
from ot_newton.problems.simulation import RegressionData
from ot_newton.problems.warm_start import WarmStart
from ot_newton.pullback import PulledBackHessian
from ot_newton.sinkhorn import solve_checked
from ot_newton.validate import check_measures, check_points, check_positive

LAWS = ("random", "monge", "identity")
TIGHTEST = {torch.float64: 1e-10, torch.float32: 2e-6}
COARSE = 0.02
KEPT = ("_plan_w", "_shot", "_hessian", "_last", "_coarse", "_compared", "value_error", "hessian_error")
SOLVED = ("phi", "psi", "row_sums", "col_sums", "error", "status", "n_iter", "passes", "modes")  # the rest is data
COLD = 0.2  # tighter at the first point, where the marginal error is not only that of a small step
DENSE_SIZE = 256
T = TypeVar("T")


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
        passes, n_passes: passes over the n×m pairs so far, by kind and in all.

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
        self.eps, self.backend = check_positive(eps, "eps"), dispatch.resolve(backend, X.device, X.dtype)
        self.cost = SquaredEuclidean(check_positive(scale, "scale"))
        self.size = self.design.shape[1] * Y.shape[1]
        self.dtype, self.device = X.dtype, X.device
        self.plan: Plan | None = None
        self._plan_w: Tensor | None = None
        self._shot: _At[OneShot] | None = None
        self._hessian: _At[tuple[LinearModelHessian, float]] | None = None  # with the marginal error of its plan
        self._last: WarmStart | None = None
        self._coarse: float | None = None  # marginal error of the last gradient, if it came from unconverged potentials
        self._compared = 0.0  # error of the value that came with the last gradient, with which others are compared

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
            return self.join(torch.randn(p, q, generator=rng, dtype=torch.float64, device=rng.device) / p**0.5)
        if law == "identity":
            return self.join(torch.eye(p, q, dtype=torch.float64, device=self.device))
        if law == "monge":
            return self.join(gaussian_monge_map(self.X, self.Y, self.a, self.b))
        raise ValueError(f"law: expected one of {', '.join(LAWS)}, got {law!r}")

    def value(self, w: Tensor) -> Tensor:
        """L(w), shape (): the dual value, whose error is quadratic in the marginal error.

        After a gradient from unconverged potentials it is the value that goes with such a gradient: a search that
        compares the two loses nothing, and finds gradient and Hessian at hand where it ends. NaN where X W overflows.
        """
        w = self.check(w)
        if not self._finite(w):
            return w.new_tensor(nan)
        if self._coarse is not None and _here(self._plan_at, w) is None:
            return self._rough(w, self._coarse).value
        return self._value(self.solve_plan(w, self._tightest**0.5))

    def value_and_grad(self, w: Tensor, rtol: float | None = None) -> tuple[Tensor, Tensor]:
        """L(w), shape (), and ∇L(w), (size,), to a relative accuracy of about `rtol`.

        From `rtol` = 0.02 on they come with the Hessian out of one block solve at unconverged potentials. NaN where X W
        overflows.
        """
        w = self.check(w)
        if not self._finite(w):
            return w.new_tensor(nan), torch.full_like(w, nan)
        if rtol is not None and rtol >= COARSE and self.size <= DENSE_SIZE and _here(self._plan_at, w) is None:
            self._coarse, self._compared = 2 * rtol, 0.0
            shot = self._rough(w, self._coarse)
            self._compared = shot.value_error
            return shot.value, shot.grad.reshape(-1)
        self._coarse, self._compared = None, 0.0
        tol = self._tightest if rtol is None else max(self._tightest, 0.3 * rtol)
        while True:
            plan = self.solve_plan(w, tol)
            before = plan.pairs.passes
            grad = linear_model_grad(plan, self.design)
            self.passes += plan.pairs.passes - before
            # The error of the gradient relative to itself grows as it vanishes; the marginal error must follow it down.
            allowed = 0.0 if rtol is None else rtol * float(torch.linalg.vector_norm(grad))
            needed = allowed / max(self._sensitivity(plan), torch.finfo(torch.float64).tiny)
            if plan.error <= needed or not plan.converged or tol <= self._tightest:
                value = self._value(plan)
                self._compared = self.value_error
                return value, grad.reshape(-1)
            tol = max(self._tightest, 0.5 * needed)

    def hessian(self, w: Tensor, rtol: float | None = None) -> LinearOperator:
        """∇²L(w) to a relative accuracy of about `rtol`, 1e-8 if None.

        Up to 256 parameters a `BracketedMatrix` on the exact matrix, which costs nothing where the last gradient at w
        came with a Hessian of that accuracy; above that a `PulledBackHessian`, which shares the passes of a product
        with many columns between them.
        """
        w = self.check(w)
        rtol = 1e-8 if rtol is None else rtol
        known = self.hessian_at_hand(w)
        if known is not None and self.hessian_error <= rtol:
            return known
        tol, least = max(self._tightest, 0.1 * rtol), 10 * torch.finfo(self.dtype).eps
        plan = self.solve_plan(w, tol)
        if self.size > DENSE_SIZE:
            operator = PulledBackHessian(
                plan, _LinearMap(self.design, plan.x), rtol=max(0.3 * rtol, least), spent=self._spent
            )
            self.hessian_error = operator.transport.rtol + 10 * plan.error
            return operator
        matrix, marginal_error = _here(self._hessian, w) or (None, plan.error)
        if matrix is None or matrix.error > rtol or marginal_error > max(tol, plan.error):
            # The matrix is off by the square of the residual of its block solve.
            matrix = linear_model_hessian(plan, self.design, rtol=max(0.3 * rtol**0.5, least), modes=plan.modes)
            self.passes += matrix.passes
            self._hessian = _At(w.clone(), (matrix, plan.error))
            self._last = WarmStart(w.clone(), plan.f, plan.g, matrix.modes, matrix.dphi, matrix.dpsi)
            self.plan = plan.with_modes(matrix.modes)
        self.hessian_error = matrix.error
        return matrix.known.operator

    def hessian_at_hand(self, w: Tensor) -> BracketedMatrix | None:
        """The most accurate matrix that has been computed at w, or None; no pass."""
        shot, exact = _here(self._shot, w), _here(self._hessian, w)
        known = [each for each in (shot and shot.known, exact and exact[0].known) if each is not None]
        if not known:
            return None
        best = min(known, key=lambda each: each.error)
        self.hessian_error = best.error
        return best.operator

    def _spent(self, passes: Passes, error: float) -> None:
        """A product of a Hessian handed out reports what it cost and how accurate it was."""
        self.passes += passes
        self.hessian_error = max(self.hessian_error, error)

    def state(self) -> dict[str, Any]:
        """What was kept from the last points, for a checkpoint (`Resumable`)."""
        known = {name: getattr(self, name) for name in KEPT}
        plan = self.plan
        return known | {"plan": None if plan is None else {name: getattr(plan, name) for name in SOLVED}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Keep the result of `state` in another process instead."""
        for name in KEPT:
            setattr(self, name, state[name])
        self.plan = None
        if self._plan_w is not None:
            z = self._image(self._plan_w)
            pairs = Pairs.of(z, self.Y, self.a, self.b, self.eps, self.cost.scale, self.backend)
            given = {"x": z, "y": self.Y, "a": self.a, "b": self.b, "eps": self.eps}
            self.plan = Plan(**given, cost=self.cost, pairs=pairs, **state["plan"])

    @property
    def _tightest(self) -> float:
        return TIGHTEST[self.dtype]

    @property
    def _plan_at(self) -> "_At[Plan] | None":
        return None if self.plan is None or self._plan_w is None else _At(self._plan_w, self.plan)

    def solve_plan(self, w: Tensor, tol: float) -> Plan:
        """The plan at w with marginal error at most `tol`, from the cache or warm from the last potentials."""
        plan = _here(self._plan_at, w)
        if plan is not None and (plan.error <= tol or not plan.converged):
            return plan
        start = self._predicted(w)
        init = None if start is None else (start.f, start.g)
        plan = solve_checked(
            self._image(w), self.Y, self.a, self.b, self.eps, self.cost, tol,
            init=init, modes=None if start is None else start.modes, backend=self.backend,
        )  # fmt: skip
        self.passes += plan.passes
        self.plan, self._plan_w = plan, w.clone()
        tangent = (None, None) if start is None else (start.dphi, start.dpsi)
        self._last = WarmStart(w.clone(), plan.f, plan.g, plan.modes, *tangent)
        return plan

    def _rough(self, w: Tensor, coarse: float) -> OneShot:
        shot = self._one_shot(w, coarse)
        self.value_error = max(shot.value_error, self._compared)
        return shot

    def _one_shot(self, w: Tensor, coarse: float) -> OneShot:
        known = _here(self._shot, w)
        if known is not None and known.error <= coarse:
            return known
        pairs = Pairs.of(self._image(w), self.Y, self.a, self.b, self.eps, self.cost.scale, self.backend)
        start = self._predicted(w)
        if start is None:
            shot = one_shot(pairs, self.design, torch.zeros_like(self.b), coarse=COLD * coarse)
        else:
            shot = one_shot(pairs, self.design, start.g, guess=start.f, modes=start.modes, coarse=coarse)
        self.passes += pairs.passes
        self._shot = _At(w.clone(), shot)
        self._last = WarmStart(w.clone(), shot.f, shot.g, shot.modes, shot.dphi, shot.dpsi)
        return shot

    def _finite(self, w: Tensor) -> bool:
        return bool(torch.isfinite(self._image(w)).all())

    def _image(self, w: Tensor) -> Tensor:
        return self.design @ w.reshape(self.shape)

    def _predicted(self, w: Tensor) -> WarmStart | None:
        return None if self._last is None else self._last.moved_to(w, self.eps)

    def _value(self, plan: Plan) -> Tensor:
        self.value_error = max(100 * self.eps * plan.error**2, self._compared)
        return plan.dual_value()

    def _sensitivity(self, plan: Plan) -> float:
        """Estimate of |error of the gradient| per unit of marginal error: the size of terms that partly cancel."""
        z, y = plan.pairs.source.points, plan.pairs.target.points
        width = (plan.a @ (z * z).sum(1) + plan.b @ (y * y).sum(1)).sqrt()
        return 0.8 * self.cost.scale * float(width * (plan.a @ (self.design**2).sum(1)).sqrt())

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


class _LinearMap:
    """W ↦ X W, flat and row-major, as a `Linearised`; `image` (n, q) tells where."""

    def __init__(self, X: Tensor, image: Tensor) -> None:
        self.X, self.image, self.size = X, image, X.shape[1] * image.shape[1]

    def push(self, V: Tensor) -> Tensor:
        return torch.einsum("np,pqk->nqk", self.X, V.reshape(self.X.shape[1], self.image.shape[1], -1))

    def pull(self, U: Tensor) -> Tensor:
        return torch.einsum("np,nqk->pqk", self.X, U).reshape(self.size, -1)

    def bend(self, g: Tensor, V: Tensor) -> Tensor:
        return torch.zeros_like(V)


@dataclass(frozen=True, eq=False)
class _At(Generic[T]):
    """Something known at the point w."""

    w: Tensor
    what: T


def _here(known: _At[T] | None, w: Tensor) -> T | None:
    return known.what if known is not None and torch.equal(known.w, w) else None


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
