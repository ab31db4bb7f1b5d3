"""`ot_loss`: the transport value as a torch function that can be differentiated twice.

The first derivative is the envelope formula, the second the Hessian-vector product of `hessian`; neither records the
Sinkhorn iterations, so memory stays O((n + m) d) in backward and in double backward.
"""

import warnings
from typing import Any

from torch import Tensor
from torch.autograd import Function

from ot_newton.cost import make_cost
from ot_newton.hessian import joint_product
from ot_newton.plan import Plan
from ot_newton.sinkhorn import ConvergenceWarning, Initial, solve
from ot_newton.validate import check_measures


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
        grads = _Gradient.apply(x, y, a, b, ctx.plan, ctx.rtol, ctx.needs_input_grad[:4])
        return *(None if g is None else grad_outputs[0] * g for g in grads), None, None


class _Gradient(Function):
    """Gradient in the embedded points and the weights; its derivative is the Hessian-vector product."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, a: Tensor, b: Tensor, plan: Plan, rtol: float | None, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        ctx.plan, ctx.rtol, ctx.needs = plan, rtol, needs
        grad_x = plan.embedded_grad() if needs[0] else None
        grad_y = plan.embedded_grad_y() if needs[1] else None
        # Weights move on the simplex, so a potential is a gradient up to a constant; the mean is taken out.
        grad_a = plan.f - plan.a @ plan.f if needs[2] else None
        grad_b = plan.g - plan.b @ plan.g if needs[3] else None
        return grad_x, grad_y, grad_a, grad_b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.needs[2] or ctx.needs[3]:
            raise RuntimeError(
                "second derivatives with respect to the weights are not offered; detach the weights, or differentiate "
                "twice in the points alone"
            )
        hx, hy = _Product.apply(*grads[:2], ctx.plan, ctx.rtol)
        return hx if ctx.needs[0] else None, hy if ctx.needs[1] else None, *[None] * 5


class _Product(Function):
    """Hessian-vector product in the direction (A, B); linear and symmetric in it, so it is its own derivative."""

    @staticmethod
    def forward(ctx: Any, A: Tensor | None, B: Tensor | None, plan: Plan, rtol: float | None) -> tuple[Tensor, Tensor]:
        ctx.plan, ctx.rtol = plan, rtol
        return joint_product(plan, A, B, **({} if rtol is None else {"rtol": rtol}))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hx, hy = _Product.apply(*grads, ctx.plan, ctx.rtol)
        return hx if ctx.needs_input_grad[0] else None, hy if ctx.needs_input_grad[1] else None, None, None


def ot_loss(
    x: Any,
    y: Any,
    eps: float,
    *,
    a: Any = None,
    b: Any = None,
    cost: str = "sqeuclidean",
    scale: float = 1.0,
    tol: float | None = None,
    hvp_rtol: float | None = None,
    init: Initial = None,
    **options: Any,
) -> Tensor:
    """`OT_eps(x, y) = min_P <P, C> + eps KL(P | a⊗b)` as a tensor of shape () that can be differentiated twice.

    Args:
        x, y: points (n, d) and (m, d); either or both may require gradients.
        a, b: weights with sum 1, uniform where None. Once differentiable, up to the additive constant that the
            constraint "sum 1" leaves open: parametrise them, by a softmax for example.
        tol, init, cost, scale, options: as in `solve`.
        hvp_rtol: relative residual of the response in a double backward; by default 1e-9 (float64) or 1e-5 (float32).

    The gradient is exact for the marginals that the plan reached, so its relative error is of the order of the marginal
    error. Raises what `solve` raises, and RuntimeError for second derivatives in the weights. Warns
    `ConvergenceWarning` as `solve` does.

    >>> x = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64, requires_grad=True)
    >>> y = torch.tensor([[0.5], [2.0]], dtype=torch.float64)
    >>> v = torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64)
    >>> _, Hv = torch.autograd.functional.hvp(lambda x: ot_loss(x, y, eps=1.0), x, v)
    >>> Hv.shape
    torch.Size([3, 1])
    """
    x, y, a, b = check_measures(x, y, a, b)
    kind = make_cost(cost, scale)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        plan = solve(x, y, eps, a=a, b=b, cost=cost, scale=scale, tol=tol, init=init, **options)
    for warning in caught:
        warnings.warn(warning.message, stacklevel=2)
    return _Value.apply(kind.embed(x), kind.embed(y), a, b, plan, hvp_rtol)
