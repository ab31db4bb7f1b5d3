"""The loss of a training step as a problem: a closure that reads the parameters of a model, seen as f(w).

w is the flat vector of all parameters; the closure is called with w written into them. H v = ∇⟨∇f, v⟩ by a second
backward pass (Pearlmutter 1994, Neural Computation 6:147).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ot_newton.operators import FunctionOperator, LinearOperator
from ot_newton.problem import Problem

Closure = Callable[[], Any]


class ClosureLoss(Problem):
    """f(w) of a closure that returns the loss without calling backward, for one training step.

    Every call of the closure meets the random state of the first one, so that dropout draws the same units wherever
    f is evaluated; afterwards torch's random state is as if the closure had been called once.

    Args:
        parameters: what the closure reads; one dtype and device.
        closure: returns the loss, one number.
        vectorize: compute several Hessian columns by one vectorised backward pass.

    Raises, when it is evaluated, TypeError or ValueError for a closure that does not return a loss with a graph.

    >>> x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    >>> loss = ClosureLoss([x], lambda: (x**3).sum())
    >>> loss.hessian(loss.read()).to_dense()
    tensor([[6., 0.],
            [0., 6.]], dtype=torch.float64)
    """

    def __init__(self, parameters: Sequence[Tensor], closure: Closure, *, vectorize: bool = False) -> None:
        self.parameters, self.closure, self.vectorize = list(parameters), closure, vectorize
        self.size = sum(p.numel() for p in self.parameters)
        self.dtype, self.device = self.parameters[0].dtype, self.parameters[0].device
        self._cuda = [self.device.index] if self.device.type == "cuda" else []
        self._random: list[Tensor] | None = None
        self._here = self.read()
        self._graph: Tensor | None = None

    def read(self) -> Tensor:
        """The parameters as they are, (size,)."""
        return _flat([p.detach() for p in self.parameters])

    def write(self, w: Tensor) -> None:
        """Set the parameters to w (size,)."""
        if torch.equal(w, self._here):
            return
        with torch.no_grad():
            for p, part in zip(self.parameters, self._parts(w), strict=True):
                p.copy_(part)
        self._here = w.detach().clone()
        self.release()

    def release(self) -> None:
        """Free the graph of the gradient; a later product builds it again."""
        self._graph = None

    def start(self, rng: torch.Generator) -> Tensor:
        """The parameters as they are; nothing is drawn."""
        return self.read()

    def value(self, w: Tensor) -> Tensor:
        """f(w), without building a graph."""
        self.write(self.check(w))
        with torch.no_grad():
            return self._call().to(self.dtype)

    def value_and_grad(self, w: Tensor, rtol: float | None = None) -> tuple[Tensor, Tensor]:
        """f(w) and ∇f(w) by one backward pass; `rtol` has no effect, and no `.grad` is touched."""
        self.write(self.check(w))
        f, g = self._slope(create_graph=False)
        return f.detach().to(self.dtype), g

    def hessian(self, w: Tensor, rtol: float | None = None) -> LinearOperator:
        """∇²f(w) as an operator that runs one backward pass through the gradient's graph per column.

        The graph is built by the first product, and again where the parameters have been moved since.
        """
        w = self.check(w).detach().clone()

        def product(v: Tensor) -> Tensor:  # (size,) or, vectorised, (k, size)
            self.write(w)
            g, many = self._recorded(), v.ndim == 2
            if not g.requires_grad or v.numel() == 0:
                return torch.zeros_like(v)
            columns = torch.autograd.grad(
                g, self.parameters, v.contiguous(), retain_graph=True, is_grads_batched=many, materialize_grads=True
            )
            return torch.cat([c.flatten(1) for c in columns], 1) if many else _flat(columns)

        return FunctionOperator(
            (self.size, self.size),
            matvec=None if self.vectorize else product,
            matmat=(lambda V: product(V.T).T) if self.vectorize else None,
            dtype=self.dtype,
            device=self.device,
            symmetric=True,
        )

    def _recorded(self) -> Tensor:
        """∇f (size,) at the parameters as they are, with its graph."""
        if self._graph is None:
            self._graph = self._slope(create_graph=True)[1]
        return self._graph

    def _parts(self, w: Tensor) -> list[Tensor]:
        parts = w.split([p.numel() for p in self.parameters])
        return [part.view(p.shape) for p, part in zip(self.parameters, parts, strict=True)]

    def _slope(self, *, create_graph: bool) -> tuple[Tensor, Tensor]:
        """f and ∇f (size,) at the parameters as they are."""
        with torch.enable_grad():
            f = self._call()
            if not f.requires_grad:
                raise ValueError(
                    "closure: expected a loss that depends on the parameters, got one without a graph; return the "
                    "loss itself, neither loss.item() nor a loss made under torch.no_grad()"
                )
            try:
                grads = torch.autograd.grad(f, self.parameters, create_graph=create_graph, materialize_grads=True)
            except RuntimeError as error:
                if "second time" not in str(error):
                    raise
                raise ValueError(
                    "closure: expected the loss without a backward pass, got one whose graph is freed; leave "
                    "loss.backward() out"
                ) from error
            return f, _flat(grads)

    def _call(self) -> Tensor:
        """The loss at the parameters as they are, shape ()."""
        if self._random is None:
            self._random = [torch.get_rng_state(), *(torch.cuda.get_rng_state(index) for index in self._cuda)]
            f = self.closure()
        else:
            with torch.random.fork_rng(self._cuda):
                torch.set_rng_state(self._random[0])
                for index, state in zip(self._cuda, self._random[1:], strict=True):
                    torch.cuda.set_rng_state(state, index)
                f = self.closure()
        if not isinstance(f, Tensor):
            raise TypeError(f"closure: expected it to return the loss as a tensor, got {type(f).__name__}")
        if f.numel() != 1 or not f.dtype.is_floating_point:
            raise ValueError(f"closure: expected one real number, got shape {tuple(f.shape)} in {f.dtype}")
        return f.reshape(())


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])
