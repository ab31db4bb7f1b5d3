"""How fast: solves, derivatives and primitives of this library, beside the other libraries that are installed.

Every library does the same iterations on the same points; its answers are compared with a float64 referee before its
time counts (see `speed_problem`), and each has a process of its own (see `speed_worker`). A library that is missing,
crashes, hangs or disagrees has a row that says so.
"""

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

import ot_newton
from ot_newton.experiments.errors import checking_input
from ot_newton.experiments.figures import render
from ot_newton.experiments.files import load_table, write
from ot_newton.experiments.peers import LIBRARIES, installed
from ot_newton.experiments.report import Column, format_table
from ot_newton.experiments.run import Case, Context, Outcome, Results, Row, RunConfig, run_cases, tabulate
from ot_newton.experiments.speed_figure import NUMERIC, TEXT, draw_speed, figure_size
from ot_newton.experiments.speed_process import measure, reason, start
from ot_newton.experiments.speed_worker import OWN

VARIANTS: dict[str, Row] = {
    "plain": {},
    "moved by 1000": {"shift": 1000.0},
    "×2^14": {"scale": 2.0**14},
    "×2^-14": {"scale": 2.0**-14},
}
COMPILERS = 14
LibraryName = Literal[
    "ot-newton", "flash-sinkhorn", "flash-sinkhorn-tf32", "GeomLoss", "GeomLoss-online", "OTT-JAX", "OTT-JAX-dense",
    "POT",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Times, memory and errors of this library and of the others that are installed, over n and d."""

    name: ClassVar[str] = "speed"
    _not_settings: ClassVar[frozenset[str]] = RunConfig._not_settings | {
        "copy_to", "timeout", "libraries", "sizes", "large", "accuracy"  # which cases there are, not what is in one
    }  # fmt: skip

    preset: Literal["quick", "cpu", "h200"] = "cpu"
    """Which settings the options start from."""
    sizes: tuple[str, ...] = ("5000x5", "5000x64")
    """Problems NxD: so many points on both sides, in so many dimensions."""
    large: tuple[str, ...] = ()
    """Problems too large for the referee to repeat; this library alone, in one or two iterations."""
    accuracy: tuple[int, ...] = ()
    """Dimensions at which this library's errors are looked at more closely."""
    accuracy_n: int = 4096
    """Points on each side there."""
    first_n: int = 5000
    """Points on each side for the first product of a fresh process, in 5 dimensions; 0 for none."""
    libraries: tuple[LibraryName, ...] = (OWN, *LIBRARIES)  # type: ignore[assignment]
    """Who takes part."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where; "auto" is the GPU if there is one."""
    eps: float = 0.1
    """Temperature, for points uniform in the unit cube."""
    iterations: int = 10
    """Iterations of a solve, two half-steps each."""
    cg_iterations: int = 50
    """Conjugate-gradient iterations of a Hessian product."""
    seconds: float = 5.0
    """How long one task is repeated (three times at least)."""
    timeout: float = 900.0
    """Seconds after which a process is given up."""
    seed: int = 0
    """Seed of the points."""
    copy_to: Path | None = None
    """Also copy the table, the environment and the figure to this folder."""

    def __post_init__(self) -> None:
        for size in (*self.sizes, *self.large):
            if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", size):
                raise ValueError(f"expected sizes like 5000x64, got {size!r}")
        if not (self.eps > 0 and self.seconds >= 0 and self.timeout > 0):
            raise ValueError("expected eps > 0, seconds ≥ 0 and timeout > 0")
        if min(self.iterations, self.cg_iterations, self.accuracy_n, *self.accuracy) < 1 or self.first_n < 0:
            raise ValueError("expected iterations, cg_iterations, dimensions and numbers of points ≥ 1")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("expected device cpu: there is no CUDA device here")

    @property
    def where(self) -> str:
        """The device that is used."""
        return ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device


PRESETS = {
    "quick": Config(
        preset="quick", sizes=("300x5",), accuracy=(17,), accuracy_n=256, first_n=300, seconds=0.2, timeout=120.0
    ),
    "cpu": Config(),
    "h200": Config(
        preset="h200", sizes=("40000x5", "10000x64", "50000x64"), large=("1000000x5",),
        accuracy=(5, 64, 65, 80, 96, 128, 256, 300, 512), seconds=0.4, timeout=150.0,
    ),
}  # fmt: skip

_COLUMNS = (
    Column("library", "library"),
    Column("n", "n", "d"),
    Column("d", "d", "d"),
    Column("eps", "eps", "g"),
    Column("variant", "points"),
    Column("task", "task"),
    Column("ms", "ms", ".3f"),
    Column("ms_per_pass", "per pass", ".3f"),
    Column("exp_fraction", "of exp limit", ".0%"),
    Column("times_ours", "× ours", ".1f"),
    Column("memory_mb", "MiB", ".1f"),
    Column("error", "error", ".1e"),
    Column("status", "status"),
)


def main(config: Config) -> int:
    """Measure what is missing, print the table, draw the figure."""
    folder = config.folder()
    if not config.redraw:
        results = run_cases(config, _cases(config), tables=partial(compare, device=config.where))
        print(format_table(results.table[results.table["status"] != "not installed"], _COLUMNS))
        for _, row in results.table[~results.table["status"].isin(["ok", "limit", "not installed"])].iterrows():
            print(f"{row['status']}: {row['library']} {row['n']}×{row['d']} {row['task']}: {row['detail']}")
        absent = results.table[results.table["status"] == "not installed"]["library"].unique()
        if len(absent):
            print(f"not installed: {', '.join(absent)}")
    table = load_table(folder / "table.csv", numeric=NUMERIC, text=TEXT)
    write(folder / "figure.png", render(partial(draw_speed, table=table), figure_size(table)))
    if config.copy_to is not None:
        for name in ("table.csv", "environment.json", "figure.png"):
            with checking_input():
                write(config.copy_to / f"{folder.name}-{name}", (folder / name).read_bytes())
    print(f"table and figure: {folder}")
    return 0


def compare(outcomes: Mapping[str, Outcome], *, device: str) -> Results:
    """The tables, with times set against the chip's limits and against this library's."""
    results = tabulate(outcomes)
    table = results.table
    if "ms" not in table:
        return results
    rates = {row["task"]: row["rate"] for o in outcomes.values() for row in o.steps if row.get("status") == "limit"}
    table["ms_per_pass"] = table["ms"] / table["passes"]
    pairs = table["n"].astype(float) ** 2
    if "exponentials per second" in rates:
        table["exp_fraction"] = 1e3 * pairs / rates["exponentials per second"] / table["ms_per_pass"]
        products = 6 * pairs * table["d"]  # three fp16 products make one of float32 accuracy
        share = 1e3 * products / rates["fp16 products per second"] / table["ms_per_pass"]
        table["product_fraction"] = share.where(table["library"] == OWN)
    table["memory_bound_mb"] = 128 * table["n"] * (table["d"] + table["columns"]) / 2**20
    key = ["n", "d", "eps", "task", "variant"]
    ours = table[table["library"] == OWN].drop_duplicates(key).set_index(key)["ms"]
    table["times_ours"] = [row["ms"] / ours.get(tuple(row[key]), float("nan")) for _, row in table.iterrows()]
    return results


def _cases(config: Config) -> dict[str, Case]:
    """Our own measurements first, then the closest rival's, then the rest: a run cut short has what matters most."""
    cases: dict[str, Case] = {}
    cuda, ours = config.where == "cuda", OWN in config.libraries
    rivals = [name for name in config.libraries if name.startswith("flash") and cuda]  # it runs nowhere else
    others = [name for name in config.libraries if name != OWN and not name.startswith("flash")]
    if cuda:
        cases["limits"] = partial(_limits, config)
    if ours:
        for size in config.sizes:
            cases[f"{size}-{OWN}"] = partial(_compete, config, OWN, size, ("kernels", "solve", "hvp"))
        if config.first_n:
            cases["first"] = partial(_first, config)
    if rivals and installed(rivals[0]):
        cases["compile"] = partial(_compile, config)
    for size in config.sizes:
        cases |= {f"{size}-{name}": partial(_compete, config, name, size, ("solve",)) for name in rivals}
        if "flash-sinkhorn" in rivals:
            cases[f"{size}-flash-sinkhorn-hvp"] = partial(_compete, config, "flash-sinkhorn", size, ("hvp",))
    if ours:
        for size in config.large:
            cases[f"{size}-{OWN}"] = partial(_compete_large, config, size)
        cases |= {f"accuracy-{d}": partial(_accuracy, config, d) for d in config.accuracy}
    for size in config.sizes:
        cases |= {f"{size}-{name}": partial(_compete, config, name, size, ("solve",)) for name in others}
    return cases


def _compete(config: Config, library: str, size: str, groups: tuple[str, ...], context: Context) -> Outcome:
    clouds = _clouds(config, size)
    saved = (config.folder() / "references" / f"{size}.npz").absolute()
    if not saved.is_file():
        _, failure = _measure(config, {"mode": "prepare", "problems": [clouds], "saved": str(saved)})
        if failure is not None:
            return _outcome(config, library, clouds, groups, ([], failure | {"task": "referee"}))
    return _outcome(config, library, clouds, groups, _ask(config, library, [clouds], groups, saved=str(saved)))


def _compete_large(config: Config, size: str, context: Context) -> Outcome:
    clouds, groups = _clouds(config, size) | {"iterations": 1}, ("kernels", "solve", "hvp")
    return _outcome(config, OWN, clouds, groups, _ask(config, OWN, [clouds], groups, seconds=0.0))


def _accuracy(config: Config, d: int, context: Context) -> Outcome:
    """Errors at a moderate n: at eps and a tenth of it, and with the points moved or scaled."""
    settings = [
        (variant, _clouds(config, f"{config.accuracy_n}x{d}") | {"eps": eps} | VARIANTS[variant])
        for variant, eps in [*((variant, config.eps) for variant in VARIANTS), ("plain", config.eps / 10)]
    ]
    problems = [clouds for _, clouds in settings]
    rows, failure = _ask(config, OWN, problems, ("accuracy",), small=True, seconds=0.0)
    steps: list[Row] = []
    for row in [*rows, *filter(None, [failure])]:
        variant, clouds = settings[row.pop("problem", len(settings) - 1)]
        steps += _outcome(config, OWN, clouds, ("accuracy",), ([row], None), variant).steps
    worst = next((row["status"] for row in steps if row["status"] != "ok"), "ok")
    return Outcome({"library": OWN, "n": config.accuracy_n, "d": d, "groups": "accuracy", "status": worst}, steps)


def _clouds(config: Config, size: str) -> Row:
    n, d = map(int, size.split("x"))
    return {
        "n": n, "d": d, "eps": config.eps, "iterations": config.iterations, "cg_iterations": config.cg_iterations,
        "seed": config.seed,
    }  # fmt: skip


def _measure(config: Config, request: Row) -> tuple[list[Row], Row | None]:
    return measure({**request, "device": config.where}, config.timeout)


def _ask(
    config: Config, library: str, problems: list[Row], groups: tuple[str, ...], **more: Any
) -> tuple[list[Row], Row | None]:
    """The rows of one library on these problems, and why there are no more."""
    if library != OWN and installed(library) is None:
        return [], {"task": "all", "status": "not installed", "detail": ""}
    request = {"mode": "tasks", "library": library, "groups": groups, "saved": None, "small": False}
    return _measure(config, request | {"problems": problems, "seconds": config.seconds} | more)


def _outcome(
    config: Config, library: str, clouds: Row, groups: tuple[str, ...], found: tuple[list[Row], Row | None],
    variant: str = "plain",
) -> Outcome:  # fmt: skip
    rows = [*found[0], *filter(None, [found[1]])]
    for row in rows:
        row.pop("problem", None)
    labels = _labels(library) | {key: clouds[key] for key in ("n", "d", "eps")}
    worst = next((row["status"] for row in rows if row["status"] != "ok"), "ok")
    steps = [{**labels, "variant": variant, **row} for row in rows]
    return Outcome({**labels, "groups": " ".join(groups), "status": worst}, steps)


def _labels(library: str) -> Row:
    return {"library": library, "version": ot_newton.__version__ if library == OWN else installed(library)}


def _limits(config: Config, context: Context) -> Outcome:
    rows, failure = _measure(config, {"mode": "limits", "problems": []})
    steps = [{"library": "the chip", "variant": "plain", "status": "limit", "detail": "", **row} for row in rows]
    if failure is not None:
        steps.append({"library": "the chip", "variant": "plain", **failure})
    return Outcome({"library": "the chip", "groups": "limits", "status": steps[-1]["status"]}, steps)


def _first(config: Config, context: Context) -> Outcome:
    """A product in a fresh process: with nothing compiled, and again from the cache on disk."""
    labels = _labels(OWN) | {"n": config.first_n, "d": 5, "eps": config.eps, "variant": "plain"}
    arguments = [str(labels["n"]), str(labels["d"]), str(config.eps), config.where]
    steps: list[Row] = []
    with tempfile.TemporaryDirectory() as cache:
        for task in ("first product, nothing compiled", "first product, from the cache"):
            try:
                output = start("speed_first", *arguments, timeout=config.timeout, variables={"TRITON_CACHE_DIR": cache})
                found = json.loads(output)
                row = {
                    "status": "ok" if found["finite"] else "failed", "ms": 1e3 * found["first_s"], "repeats": 1,
                    "detail": f"after {found['framework_s']:.1f} s for torch and the device",
                }  # fmt: skip
            except (subprocess.SubprocessError, ValueError) as error:
                row = {"status": "failed", "detail": reason(error)}
            steps.append({**labels, "task": task, "columns": 6, **row})
    return Outcome({**labels, "groups": "first", "status": steps[-1]["status"]}, steps)


def _compile(config: Config, context: Context) -> Outcome:
    """Fill the cache of compiled candidates, each process a share, for every dimension that is timed."""
    shares = min(os.cpu_count() or 1, COMPILERS)
    dimensions = sorted({size.split("x")[1] for size in config.sizes})
    problems = [_clouds(config, f"320x{d}") for d in dimensions]
    requests = [{"mode": "compile", "problems": problems, "share": k, "shares": shares} for k in range(shares)]
    with ThreadPoolExecutor(shares) as pool:
        failures = [failure["detail"] for _, failure in pool.map(partial(_measure, config), requests) if failure]
    return Outcome({"library": "flash-sinkhorn", "groups": "compile", "status": (failures or ["ok"])[0]}, [])
