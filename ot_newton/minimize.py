"""`minimize`: one driver for every method of descent, which demands the second-order test before it says success."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ot_newton.adam import Adam
from ot_newton.counting import CountedProblem
from ot_newton.cubic import Cubic
from ot_newton.method import Method
from ot_newton.newton_cg import NewtonCG
from ot_newton.problem import FunctionProblem, Problem, as_point
from ot_newton.result import OptimizeResult
from ot_newton.run import Callback, Options, Run
from ot_newton.saddle_free import SaddleFree
from ot_newton.saddle_switch import SaddleSwitch
from ot_newton.trust_region import TrustNCG, TrustRegion

METHODS: dict[str, type] = {
    "newton-cg": NewtonCG,
    "trust-ncg": TrustNCG,
    "trust-krylov": TrustRegion,
    "arc": Cubic,
    "saddle-free": SaddleFree,
    "adam": Adam,
    "adam-newton": SaddleSwitch,
}
Objective = Problem | Callable[[torch.Tensor], torch.Tensor]


def minimize(
    problem: Objective,
    x0: Any = None,
    *,
    method: str | Method[Any] = "newton-cg",
    callback: Callback | None = None,
    options: Mapping[str, Any] | None = None,
    checkpoint: str | PathLike[str] | None = None,
) -> OptimizeResult:
    """Minimise a smooth function, and say what kind of point the run ended at.

    Args:
        problem: a `Problem`, or a torch function of a tensor of the shape of `x0` that returns a tensor of shape ().
        x0: starting point, of any shape, which `x` and `jac` keep; for a `Problem` it may be left out.
        method: "newton-cg", "trust-ncg", "trust-krylov", "arc", "saddle-free", "adam", "adam-newton", or a method with
            its hyperparameters, `NewtonCG(radius=1.0)`.
        callback: called after every step as `callback(intermediate_result=OptimizeResult)`; raising StopIteration, or
            returning True, stops the run.
        options: fields of `Options`; with a method given by name its hyperparameters too.
        checkpoint: a file for the run, written at the start, every `checkpoint_every` steps, and where a limit or the
            callback ends it. If it exists the run goes on from there, bit for bit as if it had not been interrupted
            (on the CPU; for a problem with a cache if it is `Resumable`). Limits may differ, all else must not.

    Returns:
        An `OptimizeResult`. `success` is True only where the gradient is within tolerance and the Hessian has no
        negative eigenvalue (to `curvature_rtol`). A method that can, leaves a saddle and goes on; otherwise the status
        is SADDLE.

    Raises:
        TypeError, ValueError: an argument is not what is expected, an option is unknown or out of range, the checkpoint
            is damaged or belongs to another run.
        OSError: the checkpoint cannot be read or written; what was there before is kept.

    Example:

        >>> result = minimize(lambda x: x[0] ** 2 - x[1] ** 2 + x[1] ** 4, [0.0, 0.0])
        >>> result.success, round(result.lambda_min, 3)
        (True, 2.0)
    """
    chosen, settings = _configure(method, options)
    if isinstance(problem, Problem):
        start = problem.start(torch.Generator().manual_seed(settings.seed)) if x0 is None else as_point(x0)
    elif callable(problem):
        if x0 is None:
            raise ValueError("expected x0 with a function, got None")
        start = as_point(x0)
        problem = FunctionProblem(problem, start)
    else:
        raise TypeError(f"expected a Problem or a function, got {type(problem).__name__}")
    if start.numel() != problem.size:
        raise ValueError(f"expected x0 with {problem.size} entries, got shape {tuple(start.shape)}")
    if callback is not None and not callable(callback):
        raise TypeError(f"expected callback to be callable, got {type(callback).__name__}")
    path = None if checkpoint is None else _checkpoint_path(checkpoint)
    w = problem.check(start.reshape(-1)).clone()
    return Run(CountedProblem(problem), chosen, settings, tuple(start.shape), w).to_the_end(callback, path)


def _configure(method: str | Method[Any], options: Mapping[str, Any] | None) -> tuple[Method[Any], Options]:
    """Sort the options between the driver and a method given by name; neither argument is modified."""
    given = dict(options or {})
    names = [f.name for f in fields(Options)]
    own: list[str] = []
    if isinstance(method, str):
        if method not in METHODS:
            raise ValueError(f"expected method as one of {', '.join(METHODS)}, got {method!r}")
        own = [f.name for f in fields(METHODS[method])]
    elif isinstance(method, type) or not (hasattr(method, "init") and hasattr(method, "step")):
        raise TypeError(f"expected method as a name or an object with init and step, got {method!r}")
    unknown = [name for name in given if name not in names + own]
    if unknown:
        raise ValueError(f"expected options among {', '.join(names + own)}, got {', '.join(map(repr, unknown))}")
    settings = Options(**{name: value for name, value in given.items() if name in names})
    if isinstance(method, str):
        return METHODS[method](**{name: value for name, value in given.items() if name in own}), settings
    return method, settings


def _checkpoint_path(checkpoint: str | PathLike[str]) -> Path:
    if not isinstance(checkpoint, str | PathLike):
        raise TypeError(f"expected checkpoint as a path, got {type(checkpoint).__name__}")
    path = Path(checkpoint)
    if not path.parent.is_dir():
        raise ValueError(f"expected checkpoint in a folder that exists, got {path}")
    return path
