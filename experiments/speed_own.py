"""What is timed of this library: its solver, its derivatives and its primitives, on one problem."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ot_newton.experiments.speed_problem import Arrays, Clouds, Referee, Task, errors
from ot_newton.hessian import DEFAULT_RTOL, PlanHessian
from ot_newton.plan import Plan
from ot_newton.schur import BLOCK
from ot_newton.sinkhorn import ConvergenceWarning, solve

COLUMNS = (1, 16, 32, 64)
HVP_ERROR = 1e-4
TIGHT = 1e-30  # a tolerance that is never met, so that all iterations are made
LIMIT = 300  # iterations that a product to a given error may take
RTOLS = tuple(10.0**-k for k in range(1, 9))


class Own:
    """This library on `clouds`.

    Args:
        referee: used to find the tolerance at which a Hessian product is accurate enough.
    """

    iterate = "plan"

    def __init__(self, clouds: Clouds, device: str, referee: Referee) -> None:
        self.clouds, self.device, self.referee = clouds, device, referee
        self.x, self.y = (torch.as_tensor(p, device=device) for p in clouds.points)

    def solve(self, iterations: int | None = None, **options: Any) -> Plan:
        """So many alternating iterations, whatever they reach."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return solve(
                self.x, self.y, self.clouds.temperature, tol=0.0, method="alternating", anneal=1.0,
                max_iter=iterations or self.clouds.iterations, **options,
            )  # fmt: skip

    def tasks(self, groups: set[str]) -> Iterator[tuple[str, Task]]:
        """The tasks of the wanted groups: "solve", "kernels", "hvp"; "accuracy" is one of each, as by default."""
        if "kernels" in groups:
            yield "half-step", self._half_step()
        if groups & {"solve", "accuracy"}:
            sweeps = 2 * self.clouds.iterations
            yield "forward", Task(self.solve, self._solved, passes=sweeps)
            yield "gradient", Task(self._gradient, self._differentiated, passes=sweeps + 1, columns=self.clouds.d)
        plan = self._plan()
        if "accuracy" in groups:
            yield "hvp", self._product(plan, "block", DEFAULT_RTOL[torch.float32], 200, "default tolerance")
        if "hvp" in groups:
            yield from self._products(plan)
        if "kernels" in groups:
            yield from self._kernels(plan)

    def _solved(self, plan: Plan) -> Arrays:
        return {"potential": _array(plan.f), "value": _array(plan.value()), **_potentials(plan)}

    def _differentiated(self, found: tuple[Plan, Tensor]) -> Arrays:
        return {"gradient": _array(found[1]), **_potentials(found[0])}

    def _gradient(self) -> tuple[Plan, Tensor]:
        plan = self.solve()
        return plan, plan.grad()

    def _plan(self) -> Plan:
        """The plan that the iterations end at: the referee's where it knows it."""
        saved = self.referee.saved
        if saved is None:
            return self.solve()
        f, g = (torch.as_tensor(saved[name], device=self.device).to(self.x.dtype) for name in ("f", "before"))
        return self.solve(1, init=(f, g))

    def _half_step(self) -> Task:
        plan = self._plan()
        phi, psi, pairs, sweeps = plan.phi, plan.psi, plan.pairs, self.clouds.iterations

        def run() -> Tensor:
            f, g = phi, psi
            for _ in range(sweeps):
                f = pairs.row(g, f)
                g = pairs.col(f, g)
            return pairs.row(psi, phi)

        def answer(f: Tensor) -> Arrays:
            return {"potential": _array(pairs.source.whole(f, plan.eps)), **_potentials(plan)}

        return Task(run, answer, passes=2 * sweeps + 1)

    def _products(self, plan: Plan) -> Iterator[tuple[str, Task]]:
        if self.referee.saved is None:
            yield "hvp to 1e-4", self._product(plan, "block", HVP_ERROR, 40, f"rtol {HVP_ERROR:g}")
            return
        steps = self.clouds.cg_iterations
        yield "hvp", self._product(plan, "cg", TIGHT, steps, f"{steps} CG iterations")
        for method, name in (("block", "hvp to 1e-4"), ("cg", "hvp to 1e-4, plain CG")):
            for rtol in RTOLS:
                task = self._product(plan, method, rtol, LIMIT, f"rtol {rtol:g}")
                if errors(task.answer(task.run()), self.referee, self.iterate)["hvp"] <= HVP_ERROR:
                    break
            else:
                task = replace(task, detail=f"{task.detail}, not reached")
            yield name, task

    def _product(self, plan: Plan, method: str, rtol: float, max_iter: int, detail: str) -> Task:
        constant = self.referee.saved is None  # then the right answer is known without a solve
        A = torch.as_tensor(self.clouds.direction(constant=constant), device=self.device).reshape(-1)

        def run() -> Tensor:
            fresh = replace(plan, modes=None)  # nothing remembered from an earlier product
            return PlanHessian(fresh, method=method, rtol=rtol, max_iter=max_iter) @ A

        def answer(found: Tensor) -> Arrays:
            return {"hvp": _array(found).reshape(self.clouds.n, -1)}

        columns = max(self.clouds.d + 1, BLOCK if method == "block" else 1)
        return Task(run, answer, count=lambda: plan.pairs.passes.total, columns=columns, detail=detail)

    def _kernels(self, plan: Plan) -> Iterator[tuple[str, Task]]:
        phi, psi, pairs = plan.phi, plan.psi, plan.pairs
        rng = torch.Generator(device=self.device).manual_seed(self.clouds.seed)
        V = torch.randn(self.clouds.n, max(COLUMNS), generator=rng, device=self.device)
        for k in COLUMNS:
            run = lambda k=k: pairs.apply(phi, psi, V[:, :k].contiguous())  # noqa: E731
            yield f"transport of {k}", _applied(run, "transport", plan, V[:, :k])
        A, y = torch.as_tensor(self.clouds.direction(), device=self.device), pairs.target.points
        yield "Hadamard transport", _applied(lambda: pairs.hadamard(phi, psi, A, y, y), "hadamard", plan, y)


def _applied(run: Callable[[], Tensor], kind: str, plan: Plan, V: Tensor) -> Task:
    answer = lambda found: {kind: _array(found), "V": _array(V), **_potentials(plan)}  # noqa: E731
    return Task(run, answer, passes=1, columns=V.shape[1])


def _potentials(plan: Plan) -> Arrays:
    return {"f": _array(plan.f), "g": _array(plan.g)}


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", torch.float64).numpy()
