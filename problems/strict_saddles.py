"""Functions with strict saddles, started where descent along the gradient ends at one or never leaves it.

A saddle is strict if its Hessian has a negative eigenvalue (Lee, Simchowitz, Jordan and Recht 2016, COLT). A start on a
stable manifold is led into the saddle by every method that moves only along gradients; a start at the saddle has
gradient zero. Some saddles and minimisers here are degenerate besides: their Hessian is singular.
"""

import torch

from ot_newton.problems import toys
from ot_newton.problems.benchmark import Benchmark
from ot_newton.problems.closed_form import Toy

SOURCE = "strict saddles"


def quartic_well(w: torch.Tensor) -> torch.Tensor:
    """x² − y² + y⁴ + z⁴: the Hessian is singular at the saddle 0 and at the minimisers (0, ±√½, 0) of value −1/4."""
    x, y, z = w
    return x**2 - y**2 + y**4 + z**4


def two_layers(w: torch.Tensor) -> torch.Tensor:
    """½(ab − 1)², a linear network: saddle 0, minimisers ab = 1 of value 0; the line a = −b leads into the saddle."""
    return 0.5 * (w[0] * w[1] - 1) ** 2


def top_eigenvector(w: torch.Tensor) -> torch.Tensor:
    """−½ wᵀAw + ¼|w|⁴, A = diag(1, …, n): stationary at ±√i e_i, minimal at ±√n e_n with value −n²/4."""
    A = torch.arange(1, len(w) + 1, dtype=w.dtype, device=w.device)
    return -0.5 * (A * w) @ w + 0.25 * (w @ w) ** 2


def low_rank(w: torch.Tensor) -> torch.Tensor:
    """¼|UUᵀ − M|² for U (4, 2), M = diag(3, 2, 1, 0): minimal, with value ¼, where UUᵀ keeps the eigenvalues 3, 2."""
    U = w.reshape(4, 2)
    return 0.25 * ((U @ U.T - torch.diag(w.new_tensor([3.0, 2.0, 1.0, 0.0]))) ** 2).sum()


def twin_neurons(w: torch.Tensor) -> torch.Tensor:
    """Two tanh neurons (slopes, offsets, weights) learn two others on a grid: minimal value 0, but not as twins."""
    t = torch.linspace(-2, 2, 21, dtype=w.dtype, device=w.device)[:, None]

    def network(slopes: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.tanh(t * slopes + offsets) @ weights

    teacher = w.new_tensor([[2.0, 1.0], [-1.0, 1.0], [1.0, 0.5]])
    return ((network(*w.reshape(3, 2)) - network(*teacher)) ** 2).mean()


def _toy(number: int, name: str, toy: Toy) -> Benchmark:
    assert toy.minimum is not None
    start = tuple(toy.start(torch.Generator()).tolist())
    return Benchmark(name, toy.value, start, (toy.minimum,), number, SOURCE)


STRICT_SADDLES: tuple[Benchmark, ...] = (
    _toy(1, "saddle_from_itself", toys.StrictSaddle((0.0, 0.0))),
    _toy(2, "saddle_from_its_manifold", toys.StrictSaddle((1.0, 0.0))),
    _toy(3, "shallow_saddle", toys.StrictSaddle((0.0, 0.0), b=1e-3)),
    _toy(4, "chain_from_the_top", toys.SaddleChain(20)),
    _toy(5, "chain_antisymmetric", toys.SaddleChain(2, coupling=0.4, x0=(1.0, -1.0))),
    Benchmark("quartic_well", quartic_well, (1.0, 0.0, 1.0), (-0.25,), 6, SOURCE),
    Benchmark("two_layers", two_layers, (1.0, -1.0), (0.0,), 7, SOURCE),
    Benchmark("top_eigenvector", top_eigenvector, (0.1, *(0.0,) * 9), (-25.0,), 8, SOURCE),
    Benchmark("low_rank_from_zero", low_rank, (0.0,) * 8, (0.25,), 9, SOURCE),
    Benchmark("low_rank_from_others", low_rank, (0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0), (0.25,), 10, SOURCE),
    Benchmark("twin_neurons", twin_neurons, (1.0, 1.0, 0.0, 0.0, 0.5, 0.5), (0.0,), 11, SOURCE),
)
