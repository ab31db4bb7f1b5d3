"""Other libraries on the same problem: each does so many iterations, and its answers are put into our convention.

    library          cost        potentials                               value
    flash-sinkhorn   |x - y|²    P = a b exp((f + g - C)/eps)             <a, f> + <b, g>
    GeomLoss         |x - y|²/2  the same at blur² = eps/2: f, g halved   halved
    OTT-JAX          |x - y|²    P = exp((f + g - C)/eps)                 with the regulariser KL(P | a⊗b)
    POT              |x - y|²    P = exp(u + v - C/eps)                   made here from u and v

OTT-JAX and POT update g first: they are handed the two clouds exchanged, so that their first half-step is ours.
"""

import gc
import math
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any, Protocol

import numpy as np
import torch

from ot_newton.experiments.speed_problem import HALVINGS, Arrays, Clouds, Referee, Task


class Library(Protocol):
    """A library on one problem: `iterate` names the potentials that it evaluates at (see `Referee.expected`)."""

    iterate: str

    def tasks(self, groups: set[str]) -> Iterator[tuple[str, Task]]:
        """Names and tasks of the wanted groups, in the order in which they run."""
        ...


class FlashSinkhorn:
    """flash-sinkhorn (arXiv:2602.03067), alternating iterations; CUDA only."""

    iterate = "ahead"

    def __init__(self, clouds: Clouds, device: str, referee: Referee, *, tf32: bool = False) -> None:
        from flash_sinkhorn import SamplesLoss

        if device != "cuda":
            raise RuntimeError("flash-sinkhorn runs on CUDA only")
        self.clouds, self.referee, self.device = clouds, referee, device
        self.x, self.y = (torch.as_tensor(p, device=device) for p in clouds.points)
        options: dict[str, Any] = {
            "backend": "alternating", "use_epsilon_scaling": False, "eps": clouds.temperature,
            "n_iters": clouds.iterations, "allow_tf32": tf32, "normalize": False,
        }  # fmt: skip
        self.loss, self.potentials = SamplesLoss(**options), SamplesLoss(potentials=True, **options)

    def tasks(self, groups: set[str]) -> Iterator[tuple[str, Task]]:
        """ "solve": forward and gradient; "hvp": products with the damping it has by default, and without."""
        sweeps = 2 * self.clouds.iterations
        if "solve" in groups:
            yield "forward", Task(lambda: self.potentials(self.x, self.y), self._solved, passes=sweeps)
            yield "gradient", Task(self._gradient, lambda found: {"gradient": _array(found)}, passes=sweeps + 1)
        if "hvp" in groups:
            yield "hvp", self._product(1e-5, "damping 1e-5, its default")
            yield "hvp undamped", self._product(0.0, "damping 0")

    def _solved(self, found: tuple[torch.Tensor, torch.Tensor]) -> Arrays:
        f, g = (_array(t) for t in found)
        return {"potential": f, "value": np.array(f.mean() + g.mean())}

    def _gradient(self) -> torch.Tensor:
        x = self.x.clone().requires_grad_()
        return torch.autograd.grad(self.loss(x, self.y), x)[0]

    def _product(self, damping: float, detail: str) -> Task:
        from flash_sinkhorn import hvp_x_sqeuclid_from_potentials as product

        assert self.referee.saved is not None
        logarithm, eps = math.log(self.clouds.n), self.clouds.temperature
        f, g = (
            torch.as_tensor(self.referee.saved[name], device=self.device).float() - eps * logarithm
            for name in ("f", "before")
        )
        A = torch.as_tensor(self.clouds.direction(), device=self.device)
        run = lambda: product(self.x, self.y, f, g, A, eps=eps, tau2=damping, cg_rtol=0.0, cg_atol=0.0,  # noqa: E731
                              max_cg_iter=self.clouds.cg_iterations)[0]  # fmt: skip
        detail = f"{self.clouds.cg_iterations} CG iterations, {detail}"
        return Task(run, lambda found: {"hvp": _array(found)}, detail=detail)


class GeomLoss:
    """GeomLoss: averaged iterations under a falling temperature, on matrices ("tensorized") or by KeOps ("online")."""

    iterate = "averaged"

    def __init__(self, clouds: Clouds, device: str, referee: Referee, *, backend: str = "tensorized") -> None:
        from geomloss import SamplesLoss

        self.clouds = clouds
        self.x, self.y = (torch.as_tensor(p, device=device) for p in clouds.points)
        blur = math.sqrt(clouds.temperature / 2)
        options: dict[str, Any] = {
            "p": 2, "blur": blur, "diameter": blur * 2 ** ((HALVINGS - 0.5) / 2), "scaling": math.sqrt(0.5),
            "debias": False, "backend": backend,
        }  # fmt: skip
        self.loss = SamplesLoss("sinkhorn", **options)
        self.potentials = SamplesLoss("sinkhorn", potentials=True, **options)

    def tasks(self, groups: set[str]) -> Iterator[tuple[str, Task]]:
        """ "solve": forward and gradient."""
        if "solve" in groups:
            sweeps = 2 * len(self.clouds.averaged_temperatures) + 4
            yield "forward", Task(lambda: self.potentials(self.x, self.y), self._solved, passes=sweeps)
            yield "gradient", Task(self._gradient, lambda found: {"gradient": _array(found)}, passes=sweeps)

    def _solved(self, found: tuple[torch.Tensor, torch.Tensor]) -> Arrays:
        f, g = (2 * _array(t).reshape(-1) for t in found)
        return {"potential": f, "value": np.array(f.mean() + g.mean())}

    def _gradient(self) -> torch.Tensor:
        x = self.x.clone().requires_grad_()
        with torch.enable_grad():
            return 2 * torch.autograd.grad(self.loss(x, self.y), x)[0]


class OttJax:
    """OTT-JAX: alternating iterations, with the cost in blocks ("online") or as a matrix."""

    iterate = "pair"

    def __init__(self, clouds: Clouds, device: str, referee: Referee, *, batch: int | None = 1024) -> None:
        import jax
        from jax._src.interpreters import batching as moved
        from jax.interpreters import batching
        from ott.geometry.pointcloud import PointCloud
        from ott.problems.linear.linear_problem import LinearProblem
        from ott.solvers.linear.sinkhorn import Sinkhorn

        if not hasattr(batching, "is_vmappable"):  # OTT-JAX 0.6 looks for it where jax before 0.9 had it
            batching.is_vmappable = moved.is_vmappable
        self.clouds = clouds
        x, y = (jax.device_put(p, jax.devices("gpu" if device == "cuda" else "cpu")[0]) for p in clouds.points)
        # A threshold below zero is never met, and one check of it is made at the end.
        solver = Sinkhorn(threshold=-1.0, max_iterations=clouds.iterations, inner_iterations=clouds.iterations)
        size = None if batch is None else min(batch, clouds.n)

        def solve(x: Any, y: Any) -> tuple[Any, ...]:
            out = solver(LinearProblem(PointCloud(y, x, epsilon=clouds.temperature, batch_size=size)))
            return out.kl_reg_cost, out.g, out.f

        compiled, differentiated = jax.jit(solve), jax.jit(jax.grad(lambda x, y: solve(x, y)[0]))
        self.solve = lambda: jax.block_until_ready(compiled(x, y))
        self.gradient = lambda: jax.block_until_ready(differentiated(x, y))

    def tasks(self, groups: set[str]) -> Iterator[tuple[str, Task]]:
        """ "solve": forward and gradient."""
        if "solve" in groups:
            sweeps = 2 * self.clouds.iterations
            yield "forward", Task(self.solve, self._solved, passes=sweeps + 1)
            yield "gradient", Task(self.gradient, lambda found: {"gradient": np.asarray(found)}, passes=sweeps + 2)

    def _solved(self, found: tuple[Any, ...]) -> Arrays:
        value, f, _ = (np.asarray(part, dtype=float) for part in found)
        return {"potential": f, "value": value}


class PythonOT:
    """POT: `sinkhorn_log` on torch tensors, with the cost matrix made anew for each solve."""

    iterate = "pair"

    def __init__(self, clouds: Clouds, device: str, referee: Referee) -> None:
        self.clouds = clouds
        self.x, self.y = (torch.as_tensor(p, device=device) for p in clouds.points)
        self.weights = torch.full_like(self.x[:, 0], 1 / clouds.n)

    def tasks(self, groups: set[str]) -> Iterator[tuple[str, Task]]:
        """ "solve": forward."""
        if "solve" in groups:
            yield "forward", Task(self._solve, self._solved, passes=2 * self.clouds.iterations + 1)

    def _solve(self) -> dict[str, Any]:
        import ot

        cost = ot.dist(self.y, self.x)
        return ot.bregman.sinkhorn_log(
            self.weights, self.weights, cost, self.clouds.temperature,
            numItermax=self.clouds.iterations, stopThr=0.0, log=True, warn=False,
        )[1]  # fmt: skip

    def _solved(self, found: dict[str, Any]) -> Arrays:
        g, f = (
            self.clouds.temperature * (_array(found[name]) + math.log(self.clouds.n)) for name in ("log_u", "log_v")
        )
        return {"potential": f, "value": np.array(f.mean() + g.mean())}


LIBRARIES: dict[str, tuple[str, Callable[..., Library]]] = {
    "flash-sinkhorn": ("flash-sinkhorn", FlashSinkhorn),
    "flash-sinkhorn-tf32": ("flash-sinkhorn", lambda *args: FlashSinkhorn(*args, tf32=True)),
    "GeomLoss": ("geomloss", GeomLoss),
    "GeomLoss-online": ("geomloss", lambda *args: GeomLoss(*args, backend="online")),
    "OTT-JAX": ("ott-jax", OttJax),
    "OTT-JAX-dense": ("ott-jax", lambda *args: OttJax(*args, batch=None)),
    "POT": ("pot", PythonOT),
}
"""Name in the tables → package that it is installed as, and what makes it from (clouds, device, referee)."""


def installed(library: str) -> str | None:
    """The version of a library, None where it is not installed."""
    try:
        return metadata.version(LIBRARIES[library][0])
    except metadata.PackageNotFoundError:
        return None


def compile_share(problems: list[Clouds], share: int, shares: int) -> None:
    """Compile one share of flash-sinkhorn's candidate kernels into Triton's cache on disk.

    It tries up to 44 candidates for each kernel and compiles them one after the other, for minutes; several processes
    that take a share each fill the cache in a fraction of that, and the runs that are timed then find it full.
    """
    import flash_sinkhorn  # noqa: F401 - its tuners must exist before they are sought
    from triton.runtime.autotuner import Autotuner

    for tuner in [found for found in gc.get_objects() if isinstance(found, Autotuner)]:
        tuner.configs = tuner.configs[share::shares] or tuner.configs[:1]
    for clouds in problems:
        referee = Referee(clouds, "cuda")
        referee.saved = referee.prepare(product=False)
        for tf32, groups in ((True, {"solve"}), (False, {"solve", "hvp"})):
            for _, task in FlashSinkhorn(clouds, "cuda", referee, tf32=tf32).tasks(groups):
                try:
                    task.run()
                except Exception as error:  # a candidate that this device cannot hold: the others still compile
                    warnings.warn(f"{type(error).__name__}: {error}", stacklevel=2)


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", torch.float64).numpy()
