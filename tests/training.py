"""A small network, a loss to train it on, and what a `SecondOrder` optimizer remembers."""

import torch
from torch import nn

from ot_newton.optim import SecondOrder
from ot_newton.training_step import Memory, StepReport


def data(dtype=torch.float64, n=40) -> tuple[torch.Tensor, torch.Tensor]:
    X = torch.randn(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return X.to(dtype), torch.sin(X[:, :1] + 2 * X[:, 1:2] * X[:, 2:]).to(dtype)


def network(*widths: int, dtype=torch.float64, middle: nn.Module | None = None) -> nn.Sequential:
    """A small tanh network with parameters that no random state decides."""
    first, last = widths or (3, 4)
    net = nn.Sequential(nn.Linear(first, last), nn.Tanh(), *([] if middle is None else [middle]), nn.Linear(last, 1))
    net = net.to(dtype)
    with torch.no_grad():
        for k, p in enumerate(net.parameters()):
            p.copy_(0.5 * torch.sin(3.0 * torch.arange(p.numel()) + k).reshape(p.shape))
    return net


def training(net: nn.Module, dtype=torch.float64, decay=1e-3):
    X, Y = data(dtype)
    return lambda: ((net(X) - Y) ** 2).mean() + decay * sum((p**2).sum() for p in net.parameters())


def flat(net: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(net.parameters()).detach().clone()


def last(optimizer: SecondOrder) -> StepReport:
    assert optimizer.last is not None
    return optimizer.last


def memory(optimizer: SecondOrder) -> Memory:
    assert optimizer._memory is not None
    return optimizer._memory
