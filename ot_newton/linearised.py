"""A torch model z(θ) around one θ, as the products that a Hessian needs: J v, Jᵀ u, and d/dv [Jᵀ] g for a fixed g.

Forward mode gives the first, reverse mode the second, forward over reverse the third (Pearlmutter 1994, Neural
Computation 6:147; Griewank and Walther 2008, Evaluating Derivatives, ch. 3 and 5).
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

Model = Callable[[Tensor], Tensor]


class Linearised(Protocol):
    """A model θ (p,) ↦ z (n, d) around one θ; `size` is p, `image` is z."""

    size: int
    image: Tensor

    def push(self, V: Tensor) -> Tensor:
        """J V, (p, k) to (n, d, k)."""
        ...

    def pull(self, U: Tensor) -> Tensor:
        """Jᵀ U, (n, d, k) to (p, k)."""
        ...

    def bend(self, g: Tensor, V: Tensor) -> Tensor:
        """`Σ_i ∇²<g_i, z_i> V` for g (n, d), (p, k) to (p, k): the model's own curvature."""
        ...


class Vectorised:
    """`chunk` columns at a time by `torch.func`."""

    def __init__(self, model: Model, w: Tensor, chunk: int = 64) -> None:
        self.model, self.w, self.chunk, self.size = model, w, chunk, len(w)
        with _hint():
            image, self._vjp = torch.func.vjp(model, w)[:2]
        self.image = image.detach()

    def push(self, V: Tensor) -> Tensor:
        return self._columns(lambda v: torch.func.jvp(self.model, (self.w,), (v,))[1], V, 1, 2)

    def pull(self, U: Tensor) -> Tensor:
        return self._columns(lambda u: self._vjp(u)[0], U, 2, 1)

    def bend(self, g: Tensor, V: Tensor) -> Tensor:
        slope = torch.func.grad(lambda w: (self.model(w) * g).sum())
        return self._columns(lambda v: torch.func.jvp(slope, (self.w,), (v,))[1], V, 1, 1)

    def _columns(self, product: Model, V: Tensor, come: int, go: int) -> Tensor:
        with _hint(), warnings.catch_warnings():
            # torch reads its rules for forward mode on first use, through a function that it has deprecated itself
            warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)
            return torch.func.vmap(product, in_dims=come, out_dims=go, chunk_size=self.chunk)(V).detach()


class ByColumns:
    """Column by column and by backward passes alone, for models that `torch.func` cannot treat; J v by two of them."""

    def __init__(self, model: Model, w: Tensor) -> None:
        self.w, self.size = w.detach().clone().requires_grad_(), len(w)
        with torch.enable_grad():
            self._z = model(self.w)
        self.image = self._z.detach()

    @cached_property
    def _transposed(self) -> tuple[Tensor, Tensor]:
        """u and Jᵀ u as a function of u, whose own transpose is J."""
        u = torch.zeros_like(self.image, requires_grad=True)
        return u, _pulled(self._z, self.w, u, create_graph=True)

    def push(self, V: Tensor) -> Tensor:
        u, slope = self._transposed
        return torch.stack([_pulled(slope, u, v) for v in V.unbind(1)], 2)

    def pull(self, U: Tensor) -> Tensor:
        return torch.stack([_pulled(self._z, self.w, u) for u in U.unbind(2)], 1)

    def bend(self, g: Tensor, V: Tensor) -> Tensor:
        slope = _pulled(self._z, self.w, g, create_graph=True)
        return torch.stack([_pulled(slope, self.w, v) for v in V.unbind(1)], 1)


@contextmanager
def _hint() -> Iterator[None]:
    """Say in an error of `torch.func` what may help."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        error.add_note("If the model does not support torch.func, vectorize=False may work: it needs backward only.")
        raise


def _pulled(out: Tensor, at: Tensor, u: Tensor, create_graph: bool = False) -> Tensor:
    """The gradient of <out, u> in `at`, zero where `out` does not depend on it."""
    if not out.requires_grad:
        return torch.zeros_like(at)
    with torch.enable_grad():
        (g,) = torch.autograd.grad(out, at, u, retain_graph=True, create_graph=create_graph, materialize_grads=True)
    return g
