"""Models whose parameters no random state decides, `ModuleProblem`s around them, and a dense referee of those."""

from itertools import pairwise

import torch
from referee import Referee, pts, wts
from torch import nn

from ot_newton.problems.module import ModuleProblem

EPS = 0.8


def mlp(*widths: int, dtype=torch.float64) -> nn.Sequential:
    """A tanh network with the given widths and parameters that no random state decides."""
    layers = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), nn.Tanh())]
    net = nn.Sequential(*layers[:-1]).to(dtype)
    with torch.no_grad():
        for k, p in enumerate(net.parameters()):
            p.copy_(0.7 * torch.sin(3.0 * torch.arange(p.numel()) + k).reshape(p.shape))
    return net


def make(model=None, *, n=14, m=11, p=3, q=2, dtype=torch.float64, **options) -> ModuleProblem:
    X, Y, a, b = (t.to(dtype) for t in (pts(n, p), pts(m, q, 1), wts(n), wts(m, 2)))
    return ModuleProblem(
        mlp(p, 4, q, dtype=dtype) if model is None else model, X, Y, EPS, **({"a": a, "b": b} | options)
    )


def linear(p: int, q: int):
    return lambda w, X: X @ w.reshape(p, q)


def image(problem: ModuleProblem, w: torch.Tensor) -> torch.Tensor:
    """The points by torch alone, as a differentiable function of w."""
    return problem._model(w)


class Dense:
    """Value, gradient and Hessian at w by double backward through the dense referee's formulas."""

    def __init__(self, problem: ModuleProblem, w: torch.Tensor, *, cost="sqeuclidean", scale=1.0) -> None:
        z = image(problem, w)
        self.ot = Referee(z, problem.Y, problem.eps, a=problem.a, b=problem.b, cost=cost, scale=scale)
        self.value, g = self.ot.value, self.ot.grad_x
        J = torch.autograd.functional.jacobian(lambda w: image(problem, w), w).reshape(-1, len(w)).double()
        self.grad = J.T @ g.reshape(-1)
        bend = torch.autograd.functional.hessian(lambda w: (image(problem, w) * g.to(w)).sum(), w).double()
        self.curvature = bend
        self.hessian = J.T @ self.ot.hessian_x @ J + bend
