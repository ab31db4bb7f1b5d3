"""A torch model as a function of one flat vector of parameters, and the test that it is a function of them alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ot_newton.problem import as_point


class FlatModule:
    """θ (size,) ↦ module(*inputs) with the trainable parameters read from θ; the module itself is not written to.

    Frozen parameters and buffers keep the values of the moment. Raises ValueError where nothing is trainable or the
    parameters lie on several devices, TypeError where they have several dtypes.
    """

    def __init__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        named = dict(module.named_parameters())
        trained = {name: p.detach() for name, p in named.items() if p.requires_grad}
        if not trained:
            raise ValueError("model: expected at least one parameter with requires_grad, got none")
        first = next(iter(trained))
        for name, p in trained.items():
            if p.dtype != trained[first].dtype:
                raise TypeError(f"model: expected parameters of one dtype, got {_pair(trained, first, name, 'dtype')}")
            if p.device != trained[first].device:
                raise ValueError(
                    f"model: expected parameters on one device, got {_pair(trained, first, name, 'device')}"
                )
        fixed = {name: p for name, p in named.items() if not p.requires_grad} | dict(module.named_buffers())
        self.module, self.inputs = module, inputs
        self.shapes = {name: p.shape for name, p in trained.items()}
        self.fixed = {name: value.detach().clone() for name, value in fixed.items()}
        self.theta0 = torch.cat([p.reshape(-1) for p in trained.values()])

    def unflatten(self, theta: Tensor) -> dict[str, Tensor]:
        """The parameters by name, as views of θ."""
        parts = theta.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def __call__(self, theta: Tensor) -> Tensor:
        return torch.func.functional_call(self.module, self.unflatten(theta) | self.fixed, self.inputs)


def flat_model(
    model: nn.Module | Callable[..., Tensor], inputs: tuple[Tensor, ...], theta0: Any
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The model as a function of flat parameters, and where these start; raises for a model that is neither."""
    if isinstance(model, nn.Module):
        if theta0 is not None:
            raise ValueError("theta0: expected None with a module, which brings its own parameters")
        flat = FlatModule(model, inputs)
        return flat, flat.theta0
    if not callable(model):
        raise TypeError(f"model: expected an nn.Module or a function, got {type(model).__name__}")
    if theta0 is None:
        raise ValueError("theta0: expected a starting point with a function, got None")
    return lambda theta: model(theta, *inputs), as_point(theta0).reshape(-1).clone()


def check_deterministic(model: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    """The image at θ of a model that is a function of θ alone, without touching torch's random state.

    Raises TypeError where the model does not return a tensor, ValueError where it draws random numbers, changes its
    buffers, or returns something that is not finite.
    """
    cuda = [theta.device.index] if theta.device.type == "cuda" else []
    fixed = model.fixed if isinstance(model, FlatModule) else {}
    held = {name: value.clone() for name, value in fixed.items()}
    with torch.no_grad(), torch.random.fork_rng(cuda):
        before = _random_state(cuda)
        z = model(theta.clone())
        after = _random_state(cuda)
    if not isinstance(z, Tensor):
        raise TypeError(f"model: expected a tensor of points (n, d), got {type(z).__name__}")
    if any(not torch.equal(s, t) for s, t in zip(before, after, strict=True)):
        raise ValueError(
            "model: expected a function of its parameters alone, got one that draws random numbers; call model.eval() "
            "or take the dropout out"
        )
    changed = [name for name, value in fixed.items() if not _same(value, held[name])]
    if changed:
        raise ValueError(
            f"model: expected buffers that stay as they are, got a change of {', '.join(changed)}; call model.eval()"
        )
    if not bool(torch.isfinite(z).all()):
        raise ValueError("model: expected finite points at the starting parameters, got NaN or infinity")
    return z.detach()


def _random_state(cuda: list[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(index) for index in cuda)]


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _pair(parameters: dict[str, Tensor], first: str, other: str, what: str) -> str:
    return f"{getattr(parameters[first], what)} for {first} and {getattr(parameters[other], what)} for {other}"
