"""`ot_loss`: the transport value as a torch function that can be differentiated twice.

The first derivative is the envelope formula, `2s (r∘x - P y)` in the points and the potentials in the weights, the
second the Hessian-vector product of `hessian`; neither records the Sinkhorn iterations (see `envelope`), so memory
stays O((n + m) d) in backward and in double backward.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ot_newton.envelope import loss
from ot_newton.hessian import joint_product
from ot_newton.plan import Plan
from ot_newton.sinkhorn import solve
from ot_newton.validate import check_measures


@dataclass(frozen=True, eq=False)
class _Term:
    """A plan as a function of (x, y, a, b) to be differentiated."""

    plan: Plan
    rtol: float | None

    def value(self) -> Tensor:
        return self.plan.value()

    def gradient(self, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        plan = self.plan
        # Weights move on the simplex, so a potential is a gradient up to a constant; the mean is taken out.
        parts = (
            plan.embedded_grad,
            plan.embedded_grad_y,
            lambda: plan.f - plan.a @ plan.f,
            lambda: plan.g - plan.b @ plan.g,
        )
        return tuple(part() if need else None for part, need in zip(parts, needs, strict=True))

    def product(self, *directions: Tensor | None) -> tuple[Tensor, ...]:
        return joint_product(self.plan, *directions, rtol=self.rtol)


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
    derivatives in the weights and third derivatives. Warns `ConvergenceWarning` as `solve` does, and where the response
    of the potentials was not found in a double backward.

    >>> x = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64, requires_grad=True)
    >>> y = torch.tensor([[0.5], [2.0]], dtype=torch.float64)
    >>> v = torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64)
    >>> _, Hv = torch.autograd.functional.hvp(lambda x: ot_loss(x, y, eps=1.0), x, v)
    >>> Hv.shape
    torch.Size([3, 1])
    """
    return loss(
        x, y, eps, a, b, check=check_measures, solver=solve, term=_Term,
        cost=cost, scale=scale, hvp_rtol=hvp_rtol, init=init, tol=tol, **options,
    )  # fmt: skip
