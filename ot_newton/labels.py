"""A cost between the classes of the points, `W[l_i, l_j]`, on top of the cost between the points themselves.

Transport between labelled data sets compares classes too (Alvarez-Melis & Fusi 2020, "Geometric dataset distances via
optimal transport", arXiv:2002.02923). A class is a unit vector appended to the key of a point, and its row of the cost
to the query of the other: the lookup becomes part of the score's dot product.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Labels:
    """Classes of the sources and the targets, and the cost between two classes in units of the cost."""

    source: Tensor  # (n,), int64
    target: Tensor  # (m,), int64
    cost: Tensor  # (classes of the source, classes of the target)

    @classmethod
    def checked(cls, labels: Any, x: Tensor, y: Tensor) -> "Labels | None":
        """From `(l_x, l_y, W)`, for points x (n, d) and y (m, d); None stays None.

        Raises:
            TypeError: not three, or classes that are not integers.
            ValueError: a wrong shape, a class that W has no row or column for, a cost that is not finite.
        """
        if labels is None:
            return None
        if not isinstance(labels, tuple | list) or len(labels) != 3:
            raise TypeError(f"labels: expected (l_x, l_y, W), got {type(labels).__name__}")
        cost = torch.as_tensor(labels[2]).detach().to(dtype=x.dtype, device=x.device)
        if cost.ndim != 2 or not bool(torch.isfinite(cost).all()):
            raise ValueError(f"labels: expected W as a finite matrix, got shape {tuple(cost.shape)}")
        classes = []
        for name, given, points, k in (("l_x", labels[0], x, cost.shape[0]), ("l_y", labels[1], y, cost.shape[1])):
            found = torch.as_tensor(given)
            if found.dtype.is_floating_point or found.dtype == torch.bool or found.dtype.is_complex:
                raise TypeError(f"labels: expected {name} as integers, got {found.dtype}")
            if found.shape != (len(points),):
                raise ValueError(f"labels: expected {name} of shape ({len(points)},), got {tuple(found.shape)}")
            if not bool(((found >= 0) & (found < k)).all()):
                raise ValueError(f"labels: expected {name} from 0 to {k - 1}, as W has it, got {found.aminmax()}")
            classes.append(found.to(dtype=torch.int64, device=x.device))
        return cls(classes[0], classes[1], cost)

    def columns(self, eps: float) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """What is appended to query and key, of the source and of the target."""
        score = -self.cost / eps
        rows, columns = (torch.eye(k, dtype=score.dtype, device=score.device) for k in score.shape)
        return (score[self.source], rows[self.source]), (score.T[self.target], columns[self.target])

    def swapped(self) -> "Labels":
        """The same with sources and targets exchanged."""
        return Labels(self.target, self.source, self.cost.T)
