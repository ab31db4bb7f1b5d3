"""A solved problem as a torch function that can be differentiated twice.

The envelope theorem gives the first derivative without the iterations, the implicit function theorem the second;
nothing of the solve is recorded (Blondel et al. 2022, arXiv:2105.15183). What is not offered, a third derivative or a
second one in the weights, raises where it is asked for.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from ot_newton.batch import Solved, passed_on, solve_items
from ot_newton.cost import Cost, make_cost
from ot_newton.validate import POINTS, as_real, check_batch, check_positive

NO_WEIGHTS = (
    "second derivatives with respect to the weights are not offered; detach the weights, or differentiate twice in the "
    "points alone"
)
NO_THIRD = "third derivatives are not offered; create_graph is of use in the first derivative only"


class Term(Protocol):
    """A value of points and weights, solved for already."""

    def value(self) -> Tensor:
        """The value, of shape (), in float64 or in the dtype of the points."""
        ...

    def gradient(self, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        """The gradient in each of the points and weights, None where it is not needed."""
        ...

    def product(self, *directions: Tensor | None) -> tuple[Tensor, ...]:
        """The Hessian-vector product in all points for a direction of each, None for 0."""
        ...


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
    """The value; its derivative is the gradient."""

    @staticmethod
    def forward(ctx: Any, term: Term, n_points: int, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.term, ctx.n_points = term, n_points
        return term.value()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        points, weights = ctx.saved_tensors[: ctx.n_points], ctx.saved_tensors[ctx.n_points :]
        weights = (_Refusal.apply(w, NO_WEIGHTS) for w in weights)
        grads = _Gradient.apply(ctx.term, ctx.n_points, ctx.needs_input_grad[2:], *points, *weights)
        return None, None, *(None if g is None else grad_outputs[0].to(g.dtype) * g for g in grads)


class _Gradient(Function):
    """The gradient; its derivative is the Hessian-vector product, in the points alone."""

    @staticmethod
    def forward(
        ctx: Any, term: Term, n_points: int, needs: tuple[bool, ...], *inputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        ctx.term, ctx.n_points, ctx.needs = term, n_points, needs
        return term.gradient(needs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if any(g is not None for g in grads[ctx.n_points :]):
            raise RuntimeError(NO_WEIGHTS)
        points = (_Refusal.apply(p, NO_THIRD) for p in ctx.saved_tensors[: ctx.n_points])
        products = _Product.apply(ctx.term, *grads[: ctx.n_points], *points)
        parts = (*products, *map(torch.zeros_like, ctx.saved_tensors[ctx.n_points :]))
        return None, None, None, *(part if need else None for part, need in zip(parts, ctx.needs, strict=True))


class _Product(Function):
    """Hessian-vector product; linear and symmetric in its direction, so it is its own derivative."""

    @staticmethod
    def forward(ctx: Any, term: Term, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        directions, points = inputs[: len(inputs) // 2], inputs[len(inputs) // 2 :]
        ctx.save_for_backward(*points)
        ctx.term = term
        return term.product(*directions)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        parts = (*_Product.apply(ctx.term, *grads, *ctx.saved_tensors), *map(torch.zeros_like, ctx.saved_tensors))
        return None, *(part if need else None for part, need in zip(parts, ctx.needs_input_grad[1:], strict=True))


def differentiable(term: Term, points: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> Tensor:
    """The value of a term, of shape (), differentiable twice in the points and once in the weights."""
    return _Value.apply(term, len(points), *points, *weights)


def loss(
    x: Any,
    y: Any,
    eps: Any,
    a: Any,
    b: Any,
    *,
    check: Callable[..., tuple[Tensor, ...]],
    solver: Callable[..., Solved],
    term: Callable[[Any, float | None], Term],
    cost: str,
    scale: float,
    hvp_rtol: float | None,
    init: Any = None,
    **options: Any,
) -> Tensor:
    """The differentiable value of what `solver` solves, or B of them for batches; shared by the public losses.

    Args:
        check: one problem (x, y, a, b), checked.
        term: of what the solver returns and `hvp_rtol`.
        options: for the solver, as all others are.
    """
    kind = make_cost(cost, check_positive(scale, "scale"))
    rtol = None if hvp_rtol is None else check_positive(hvp_rtol, "hvp_rtol")
    options |= {"cost": cost, "scale": scale}
    x, y = as_real(x, "x", *POINTS), as_real(y, "y", *POINTS)
    if x.ndim == 3 or y.ndim == 3:
        items = check_batch(x, y, a, b, eps, check=check)
        solved = solve_items(items, init, solver=solver, stacklevel=4, **options)
        pairs = zip(items, solved, strict=True)
        return torch.stack([_value(term(one, rtol), kind, *item[:4]) for item, one in pairs])
    x, y, a, b = check(x, y, a, b)
    with passed_on(stacklevel=3):
        one = solver(x, y, eps, a=a, b=b, init=init, **options)
    return _value(term(one, rtol), kind, x, y, a, b)


def _value(term: Term, cost: Cost, x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return differentiable(term, (cost.embed(x), cost.embed(y)), (a, b)).to(x.dtype)
