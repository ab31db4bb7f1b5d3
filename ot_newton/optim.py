"""The methods of `minimize` as a `torch.optim.Optimizer`, for the training loops of torch.

One step of the method for each `step(closure)`, on the flat vector of all parameters. The closure may be another
function at every step (another batch): value and gradient are evaluated anew where a step begins, and only what the
method has learnt besides goes from step to step.
"""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ot_newton.checkpoint import decode, encode
from ot_newton.closure_loss import Closure, ClosureLoss
from ot_newton.counting import CountedProblem
from ot_newton.method import Method
from ot_newton.minimize import METHODS
from ot_newton.run import Options
from ot_newton.training_step import Memory, StepReport, training_step

MEMORY = "memory"
LEAST_LR = 1e-300  # what a learning rate of zero means to a method that expects a positive one


class SecondOrder(Optimizer):
    """A method of `minimize` in a training loop: Newton's method that finds minimisers, not saddles.

    `step(closure)` takes one step of the method; the closure returns the loss and does *not* call `backward`. Within a
    step it is called several times, each time with the same random numbers (dropout drops the same units); buffers that
    a forward pass updates are updated each time. Where the gradient is within tolerance the smallest eigenvalue of the
    Hessian is tested: at a minimiser nothing moves, a saddle is left by a method that can. `last` says what happened.

    Args:
        params: parameters, named parameters or groups of them, all of one dtype (float32 or float64) and device; those
            without `requires_grad` are held fixed.
        lr: for a method that has one ("adam"): the group's "lr", which schedulers may change. Other methods find their
            own lengths, and schedulers do nothing to them.
        method: a name in `METHODS` or a method with its hyperparameters, `NewtonCG(radius=1.0)`.
        gtol, gtol_abs, curvature_rtol, confidence, seed: as in `minimize`.
        vectorize: compute several Hessian columns by one vectorised backward pass.
        hyperparameters: of a method given by name.

    Attributes:
        method: the method with its hyperparameters.
        last: a `StepReport` on the last step, None before the first.

    Raises:
        TypeError, ValueError: an argument is not what is expected; parameters of several dtypes or devices, by name.

    Example:

        >>> rng = torch.Generator().manual_seed(0)
        >>> X = torch.randn(64, 2, generator=rng)
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = SecondOrder(model.parameters(), method="newton-cg")
        >>> for _ in range(10):
        ...     loss = optimizer.step(lambda: ((model(X) - X.sum(1, keepdim=True)) ** 2).mean())
        >>> optimizer.last.status.value, optimizer.last.lambda_min > 0
        ('converged', True)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        *,
        method: str | Method[Any] = "newton-cg",
        gtol: float | None = None,
        gtol_abs: float = 0.0,
        curvature_rtol: float = 1e-3,
        confidence: float = 0.99,
        seed: int = 0,
        vectorize: bool = False,
        **hyperparameters: Any,
    ) -> None:
        self.method = _method(method, lr, hyperparameters)
        self.options = Options(
            gtol=gtol, gtol_abs=gtol_abs, curvature_rtol=curvature_rtol, confidence=confidence, seed=seed
        )
        self.vectorize = bool(vectorize)
        self.last: StepReport | None = None
        self._memory: Memory | None = None
        super().__init__(params, {"lr": getattr(self.method, "lr", 1.0)})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters as in torch; raises TypeError or ValueError unless dtype and device are those of the first."""
        super().add_param_group(param_group)
        first = self.param_groups[0]["params"][:1]
        try:
            for p, name in zip(self.param_groups[-1]["params"], self._names(-1), strict=True):
                if p.dtype not in (torch.float32, torch.float64):
                    raise TypeError(f"params: expected torch.float32 or torch.float64, got {p.dtype} for {name}")
                if p.dtype != first[0].dtype:
                    raise TypeError(f"params: expected one dtype, {first[0].dtype}, got {p.dtype} for {name}")
                if p.device != first[0].device:
                    raise ValueError(f"params: expected one device, {first[0].device}, got {p.device} for {name}")
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _names(self, index: int) -> list[str]:
        group = self.param_groups[index]
        number = index % len(self.param_groups)
        return group.get("param_names", [f"parameter {i} of group {number}" for i in range(len(group["params"]))])

    def step(self, closure: Closure | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step; returns the loss where it began, shape (). A loss that is not finite leaves everything as it is.

        Raises:
            TypeError, ValueError: the closure is missing or does not return the loss with its graph, or other
                parameters require gradients than in the step before.
        """
        if not callable(closure):
            raise TypeError(f"step: expected a closure that returns the loss, got {type(closure).__name__}")
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if not parameters:
            raise ValueError("step: expected at least one parameter with requires_grad, got none")
        loss = ClosureLoss(parameters, closure, vectorize=self.vectorize)
        w = loss.read()
        if self._memory is not None and self._memory.state.grad.shape != w.shape:
            raise ValueError(
                f"step: expected {self._memory.state.grad.numel()} trainable entries as in the step before, got "
                f"{loss.size}; make a new optimizer after freezing, thawing or adding parameters"
            )
        moved = w
        try:
            moved, self._memory, self.last = training_step(
                self._scheduled(), self.options, CountedProblem(loss), w, self._memory
            )
        finally:
            loss.write(moved)
            loss.release()
        return w.new_tensor(self.last.fun)

    def _scheduled(self) -> Method[Any]:
        """The method with the learning rate that the groups have now, if it has one."""
        method: Any = self.method
        if not hasattr(method, "lr"):
            return method
        rates = sorted({float(group["lr"]) for group in self.param_groups})
        if len(rates) > 1:
            raise ValueError(f"lr: expected one for all groups, got {', '.join(map(str, rates))}")
        return replace(method, lr=max(rates[0], LEAST_LR))

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, besides the parameters and torch's random state, in plain data.

        It survives `torch.save` and `torch.load(weights_only=True)` bit for bit. Raises TypeError for a method of one's
        own whose state is no frozen dataclass of tensors, numbers and words.
        """
        kept: dict[str, Any] = {"memory": self._memory, "options": self.options}
        kept |= {"method": self.method} if is_dataclass(self.method) else {}
        state: Any = self.state  # torch keeps what does not belong to a parameter as it is
        state[MEMORY] = encode(kept)
        try:
            return super().state_dict()
        finally:
            del state[MEMORY]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the optimizer that `state_dict` came from stood, with its method and its options.

        Raises ValueError for the state of another kind of optimizer, or of one with other parameters.
        """
        stored = state_dict["state"].get(MEMORY)
        if stored is None:
            raise ValueError("state_dict: expected the state of a SecondOrder, got that of another optimizer")
        here = self.param_groups[0]["params"][0]
        size = sum(p.numel() for group in self.param_groups for p in group["params"] if p.requires_grad)
        kept = decode(_following(stored, size), here.device)
        memory: Memory | None = kept["memory"]
        if memory is not None and (memory.state.grad.numel(), memory.state.grad.dtype) != (size, here.dtype):
            got = f"{memory.state.grad.numel()} in {memory.state.grad.dtype}"
            raise ValueError(f"state_dict: expected {size} trainable entries in {here.dtype}, got {got}")
        super().load_state_dict(state_dict)
        dict.pop(self.state, MEMORY)
        self._memory, self.options, self.last = memory, kept["options"], None
        self.method = kept.get("method", self.method)

    def __getstate__(self) -> dict[str, Any]:
        own = ("method", "options", "vectorize", "last", "_memory")
        return super().__getstate__() | {name: getattr(self, name) for name in own}


def _method(method: Any, lr: float | None, hyperparameters: dict[str, Any]) -> Method[Any]:
    """The method with its hyperparameters."""
    if isinstance(method, str):
        if method not in METHODS:
            raise ValueError(f"expected method as one of {', '.join(METHODS)}, got {method!r}")
        names = [f.name for f in fields(METHODS[method])]
        unknown = [name for name in hyperparameters if name not in names]
        if unknown:
            raise ValueError(f"expected hyperparameters among {', '.join(names)}, got {', '.join(map(repr, unknown))}")
        method = METHODS[method](**hyperparameters)
    elif isinstance(method, type) or not (hasattr(method, "init") and hasattr(method, "step")):
        raise TypeError(f"expected method as a name or an object with init and step, got {method!r}")
    elif hyperparameters:
        raise ValueError(f"expected hyperparameters in the method itself, got {', '.join(hyperparameters)}")
    if lr is None:
        return method
    if not hasattr(method, "lr"):
        raise ValueError(f"lr: expected none with {type(method).__name__}, which finds its own lengths, got {lr}")
    return replace(method, lr=float(lr))


def _following(stored: Any, size: int) -> Any:
    """Encoded state whose vectors of parameters (size,) follow these to another device."""
    if type(stored) in (list, tuple):
        return type(stored)(_following(item, size) for item in stored)
    if not isinstance(stored, dict):
        return stored
    if stored.get("kind") == "tensor":
        return stored | {"on_cpu": stored["on_cpu"] and stored["tensor"].shape != (size,)}
    return {key: _following(value, size) for key, value in stored.items()}
