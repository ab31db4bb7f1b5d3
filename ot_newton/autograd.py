"""`ot_loss`: the transport value as a torch function that can be differentiated twice.

The first derivative is the envelope formula, the second the Hessian-vector product of `hessian`; neither records the
Sinkhorn iterations, so memory stays O((n + m) d) in backward and in double backward. What is not offered, a third
derivative or a second one in the weights, raises where it is asked for, and nowhere else.
"""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ot_newton.batch import solve_items
from ot_newton.cost import Cost, make_cost
from ot_newton.hessian import joint_product
from ot_newton.plan import Plan
from ot_newton.sinkhorn import ConvergenceWarning, solve
from ot_newton.validate import POINTS, as_real, check_batch, check_measures, check_positive

NO_WEIGHTS = (
    "second derivatives with respect to the weights are not offered; detach the weights, or differentiate twice in the "
    "points alone"
)
NO_THIRD = "third derivatives are not offered; create_graph is of use in the first derivative only"


class _Refusal(Function):
    """The identity, whose derivative raises: autograd comes here only where the derivative is needed."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, message: str) -> Tensor:
        ctx.message = message
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, None]:
        raise RuntimeError(ctx.message)


class _Value(Function):
    """Value of a solved plan as a function of the embedded points and the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, a: Tensor, b: Tensor, plan: Plan, rtol: float | None) -> Tensor:
        ctx.save_for_backward(x, y, a, b)
        ctx.plan, ctx.rtol = plan, rtol
        return plan.value()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, y, a, b = ctx.saved_tensors
        a, b = (_Refusal.apply(w, NO_WEIGHTS) for w in (a, b))
        grads = _Gradient.apply(x, y, a, b, ctx.plan, ctx.rtol, ctx.needs_input_grad[:4])
        return *(None if g is None else grad_outputs[0] * g for g in grads), None, None


class _Gradient(Function):
    """Gradient in the embedded points and the weights; its derivative is the Hessian-vector product."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, a: Tensor, b: Tensor, plan: Plan, rtol: float | None, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        ctx.plan, ctx.rtol, ctx.needs = plan, rtol, needs
        grad_x = plan.embedded_grad() if needs[0] else None
        grad_y = plan.embedded_grad_y() if needs[1] else None
        # Weights move on the simplex, so a potential is a gradient up to a constant; the mean is taken out.
        grad_a = plan.f - plan.a @ plan.f if needs[2] else None
        grad_b = plan.g - plan.b @ plan.g if needs[3] else None
        return grad_x, grad_y, grad_a, grad_b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads[2] is not None or grads[3] is not None:
            raise RuntimeError(NO_WEIGHTS)
        x, y = (_Refusal.apply(points, NO_THIRD) for points in ctx.saved_tensors)
        hx, hy = _Product.apply(*grads[:2], x, y, ctx.plan, ctx.rtol)
        asked = ctx.needs
        ha, hb = (
            torch.zeros_like(w) if need else None for w, need in zip((ctx.plan.a, ctx.plan.b), asked[2:], strict=True)
        )
        return hx if asked[0] else None, hy if asked[1] else None, ha, hb, None, None, None


class _Product(Function):
    """Hessian-vector product in the direction (A, B); linear and symmetric in it, so it is its own derivative."""

    @staticmethod
    def forward(
        ctx: Any, A: Tensor | None, B: Tensor | None, x: Tensor, y: Tensor, plan: Plan, rtol: float | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        ctx.plan, ctx.rtol = plan, rtol
        return joint_product(plan, A, B, **({} if rtol is None else {"rtol": rtol}))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        hx, hy = _Product.apply(*grads, x, y, ctx.plan, ctx.rtol)
        asked = ctx.needs_input_grad
        tx, ty = (torch.zeros_like(t) if need else None for t, need in zip((x, y), asked[2:4], strict=True))
        return hx if asked[0] else None, hy if asked[1] else None, tx, ty, None, None


def ot_loss(
    x: Any,
    y: Any,
    eps: Any,
    *,
    a: Any = None,
    b: Any = None,
    cost: str = "sqeuclidean",
    scale: float = 1.0,
    tol: float | None = None,
    hvp_rtol: float | None = None,
    init: Any = None,
    **options: Any,
) -> Tensor:
    """`OT_eps(x, y) = min_P <P, C> + eps KL(P | a⊗b)` as a tensor of shape () that can be differentiated twice.

    Args:
        x, y: points (n, d) and (m, d); either or both may require gradients. Batches (B, n, d) and (B, m, d) give B
            values, (B,), as a loop over B would; `eps`, weights and `init` are then as in `solve_batch`.
        a, b: weights with sum 1, uniform where None. Once differentiable, up to the additive constant that the
            constraint "sum 1" leaves open: parametrise them, by a softmax for example.
        tol, init, cost, scale, options: as in `solve`.
        hvp_rtol: relative residual of the response in a double backward; by default 1e-9 (float64) or 1e-5 (float32).

    The gradient is exact for the marginals that the plan reached, so its relative error is of the order of the marginal
    error. Without debiasing the value at x = y is not 0. Raises what `solve` raises, and RuntimeError for second
    derivatives in the weights and third derivatives. Warns `ConvergenceWarning` as `solve` does.

    >>> x = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64, requires_grad=True)
    >>> y = torch.tensor([[0.5], [2.0]], dtype=torch.float64)
    >>> v = torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64)
    >>> _, Hv = torch.autograd.functional.hvp(lambda x: ot_loss(x, y, eps=1.0), x, v)
    >>> Hv.shape
    torch.Size([3, 1])
    """
    kind = make_cost(cost, check_positive(scale, "scale"))
    hvp_rtol = None if hvp_rtol is None else check_positive(hvp_rtol, "hvp_rtol")
    options |= {"cost": cost, "scale": scale, "tol": tol}
    x, y = as_real(x, "x", *POINTS), as_real(y, "y", *POINTS)
    if x.ndim == 3 or y.ndim == 3:
        items = check_batch(x, y, a, b, eps)
        plans = solve_items(items, init, stacklevel=3, **options)
        return torch.stack([_loss(plan, kind, *item[:4], hvp_rtol) for plan, item in zip(plans, items, strict=True)])
    x, y, a, b = check_measures(x, y, a, b)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        plan = solve(x, y, eps, a=a, b=b, init=init, **options)
    for warning in caught:
        warnings.warn(warning.message, stacklevel=2)
    return _loss(plan, kind, x, y, a, b, hvp_rtol)


def _loss(plan: Plan, cost: Cost, x: Tensor, y: Tensor, a: Tensor, b: Tensor, rtol: float | None) -> Tensor:
    return _Value.apply(cost.embed(x), cost.embed(y), a, b, plan, rtol)
