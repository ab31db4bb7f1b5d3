"""Costs that are squared distances of embedded points: `C_ij = s |T(x_i) - T(y_j)|²`.

The embedding T is the identity for "sqeuclidean" and `x/|x|` for "cosine", whose cost is `scale·(1 - cos)`, that is
`s = scale/2` on unit vectors. Everything else in the library sees embedded points only; derivatives in the original
points follow by the chain rule `∇ = Jᵀ g` and `∇² v = Jᵀ H (J v) + d/dv[Jᵀ] g`.
"""

from typing import Protocol

import torch
from torch import Tensor

from ot_newton.validate import check_choice, check_positive


class Cost(Protocol):
    """What the library needs of a cost. Rows are points; `scale` is s in `C = s|T(x) - T(y)|²`."""

    scale: float

    def embed(self, points: Tensor) -> Tensor:
        """T of each row, (n, d) to (n, d)."""
        ...

    def push(self, points: Tensor, V: Tensor) -> Tensor:
        """J V: how the embedded points move when the points move along V, (n, d, k) to (n, d, k)."""
        ...

    def pull(self, points: Tensor, G: Tensor) -> Tensor:
        """Jᵀ G: gradients in the points from gradients in the embedded points, (n, d, k) to (n, d, k)."""
        ...

    def curvature(self, points: Tensor, g: Tensor, V: Tensor) -> Tensor | None:
        """d/dV [Jᵀ] g for a fixed gradient g (n, d) in the embedded points, (n, d, k); None where T is linear."""
        ...


class SquaredEuclidean:
    """`C_ij = scale·|x_i - y_j|²`."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def embed(self, points: Tensor) -> Tensor:
        return points

    def push(self, points: Tensor, V: Tensor) -> Tensor:
        return V

    def pull(self, points: Tensor, G: Tensor) -> Tensor:
        return G

    def curvature(self, points: Tensor, g: Tensor, V: Tensor) -> Tensor | None:
        return None


class Cosine:
    """`C_ij = scale·(1 - cos(x_i, y_j))`; J is the projector `(I - u uᵀ)/|x|` with `u = x/|x|`."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale / 2

    def embed(self, points: Tensor) -> Tensor:
        return points / torch.linalg.vector_norm(points, dim=1, keepdim=True)

    def push(self, points: Tensor, V: Tensor) -> Tensor:
        u = self.embed(points)[:, :, None]  # (n, d, 1)
        return (V - u * (u * V).sum(1, keepdim=True)) / torch.linalg.vector_norm(points, dim=1)[:, None, None]

    def pull(self, points: Tensor, G: Tensor) -> Tensor:
        return self.push(points, G)

    def curvature(self, points: Tensor, g: Tensor, V: Tensor) -> Tensor | None:
        length = torch.linalg.vector_norm(points, dim=1)[:, None, None]
        u, g = self.embed(points)[:, :, None], g[:, :, None]
        du, ug = self.push(points, V), (u * g).sum(1, keepdim=True)
        pulled = (g - u * ug) / length
        return -(du * ug + u * (du * g).sum(1, keepdim=True)) / length - pulled * (u * V).sum(1, keepdim=True) / length


COSTS = {"sqeuclidean": SquaredEuclidean, "cosine": Cosine}


def make_cost(name: str, scale: float) -> Cost:
    """The cost of this name and scale. Raises ValueError naming the known ones, TypeError for a scale of no number."""
    return COSTS[check_choice(name, "cost", COSTS)](check_positive(scale, "scale"))
