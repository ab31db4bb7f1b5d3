"""A test function for minimisers with what is known about it: where to start, and the values to end at."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ot_newton.problem import FunctionProblem


@dataclass(frozen=True)
class Benchmark:
    """A smooth function with its standard start and its known minimal values.

    Attributes:
        name: of the function; unique in a collection.
        fun: maps a tensor (n,) to a tensor () by differentiable torch operations.
        start: the standard starting point, n numbers.
        minima: the values at its known local minimisers, the global one first. A minimum at infinity is left out.
        number: of the function in the source.
        source: where it is from.

    Example:

        >>> bowl = Benchmark("bowl", lambda x: (x**2).sum(), (1.0, 2.0), (0.0,), 0, "")
        >>> float(bowl.problem().value(torch.ones(2, dtype=torch.float64)))
        2.0
    """

    name: str
    fun: Callable[[torch.Tensor], torch.Tensor]
    start: tuple[float, ...]
    minima: tuple[float, ...]
    number: int
    source: str

    @property
    def size(self) -> int:
        """The number of parameters."""
        return len(self.start)

    def problem(self) -> FunctionProblem:
        """The function as a float64 `Problem` that begins at the standard start."""
        return FunctionProblem(self.fun, torch.tensor(self.start, dtype=torch.float64))
