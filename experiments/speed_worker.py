"""One measuring process: a request on its standard input, a row of JSON on its standard output for every task done.

Each library gets a process of its own, because several of them take the GPU's memory for themselves, and because what
crashes or hangs then ends as a row that says so. Rows appear as soon as they are known.
"""

import contextlib
import io
import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import numpy as np
import torch

from ot_newton.experiments.errors import one_line
from ot_newton.experiments.files import write
from ot_newton.experiments.peers import LIBRARIES, Library, compile_share
from ot_newton.experiments.speed_own import Own
from ot_newton.experiments.speed_problem import Clouds, Referee, Task, errors

OWN = "ot-newton"
AGREEMENT = {"value": 1e-3}  # of a relative error, or of a potential in units of eps; elsewhere 1e-2
REPEATS = (3, 40)
SLOW = 5.0  # seconds from which one repetition must do
Row = dict[str, Any]
Emit = Callable[[Row], None]


def main() -> int:
    """Do what the request says; 0 also where single tasks failed."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to standard error
    request = json.load(sys.stdin)
    problems, device = [Clouds(**problem) for problem in request["problems"]], request["device"]

    def emit(row: Row) -> None:
        channel.write(json.dumps(row) + "\n")
        channel.flush()

    match request["mode"]:
        case "prepare":
            _prepare(problems[0], device, Path(request["saved"]))
        case "tasks":
            for number, clouds in enumerate(problems):
                _compete(request, clouds, device, lambda row, number=number: emit({"problem": number, **row}))
        case "limits":
            _limits(emit)
        case "compile":
            compile_share(problems, request["share"], request["shares"])
        case mode:
            raise ValueError(f"mode: expected prepare, tasks, limits or compile, got {mode!r}")
    return 0


def _prepare(clouds: Clouds, device: str, path: Path) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **Referee(clouds, device).prepare())
    write(path, buffer.getvalue())


def _compete(request: Row, clouds: Clouds, device: str, emit: Emit) -> None:
    name, groups = request["library"], set(request["groups"])
    referee = Referee(clouds, device)
    if request["saved"] is not None:
        with np.load(request["saved"]) as saved:
            referee.saved = dict(saved)
    elif request["small"]:
        referee.saved = referee.prepare()
    try:
        library: Library = (Own if name == OWN else LIBRARIES[name][1])(clouds, device, referee)
    except Exception as error:
        emit(_failed("all", error))
        return
    jax = name.startswith("OTT-JAX")
    for task_name, task in library.tasks(groups):
        row: Row = {"task": task_name, "columns": task.columns, "detail": task.detail}
        try:
            row |= _measure(task, Meter(device, jax), request["seconds"], referee, library.iterate)
        except Exception as error:
            row |= _failed(task_name, error)
        emit(row)


def _measure(task: Task, meter: "Meter", budget: float, referee: Referee, iterate: str) -> Row:
    """Run once for the answer, the memory and the number of passes, then repeatedly for the time."""
    before = task.count() if task.count else 0
    meter.start()
    first, found = meter.time(task.run)
    memory = meter.peak()
    passes = task.count() - before if task.count else task.passes
    judged = errors(task.answer(found), referee, iterate)
    del found
    repeats = 1 if first > SLOW else int(min(max(budget / max(first, 1e-6), REPEATS[0]), REPEATS[1]))
    times = [meter.time(task.run)[0] for _ in range(repeats)]
    low, _, high = quantiles(times, n=4, method="inclusive") if repeats > 1 else (None, None, None)
    main = max((kind for kind in judged if kind != "value"), key=lambda kind: judged[kind], default=None)
    too_far = {kind: error for kind, error in judged.items() if error > AGREEMENT.get(kind, 1e-2)}
    return {
        "status": "disagrees" if too_far else "ok",
        "ms": 1e3 * median(times), "low_ms": low and 1e3 * low, "high_ms": high and 1e3 * high, "repeats": repeats,
        "first_ms": 1e3 * first, "passes": passes, "memory_mb": memory,
        "error": None if main is None else judged[main], "value_error": judged.get("value"),
        "detail": "; ".join(filter(None, [task.detail, *(f"{kind} off by {e:.1e}" for kind, e in too_far.items())])),
    }  # fmt: skip


def _failed(task: str, error: Exception) -> Row:
    return {"task": task, "status": "failed", "detail": f"{type(error).__name__}: {one_line(error)}"[:300]}


class Meter:
    """Time and peak memory: CUDA events and torch's allocator on a GPU, the clock and the resident set on a CPU."""

    def __init__(self, device: str, jax: bool) -> None:
        self.cuda, self.jax, self.base = device == "cuda", jax, 0.0

    def time(self, run: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds, and what was returned."""
        if self.jax or not self.cuda:
            began = perf_counter()
            found = run()
            return perf_counter() - began, found
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        found = run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, found

    def start(self) -> None:
        """Forget the peak so far."""
        if self.cuda and not self.jax:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        elif not self.cuda:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
        self.base = self._now()

    def peak(self) -> float | None:
        """Peak since the start, beyond what was held then, in MiB; None where a peak can't be told."""
        if self.cuda and not self.jax:
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() / 2**20 - self.base
        top = self._jax("peak_bytes_in_use") if self.cuda else _resident("VmHWM")
        return top - self.base if top > self.base else None

    def _now(self) -> float:
        if not self.cuda:
            return _resident("VmRSS")
        return self._jax("bytes_in_use") if self.jax else torch.cuda.memory_allocated() / 2**20

    @staticmethod
    def _jax(key: str) -> float:
        import jax

        return (jax.local_devices()[0].memory_stats() or {}).get(key, 0) / 2**20


def _resident(key: str) -> float:
    """Resident set now (VmRSS) or at its peak (VmHWM), in MiB."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 2**10
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _limits(emit: Emit) -> None:
    from ot_newton.experiments.speed_limits import exponentials_per_second, products_per_second

    emit({"task": "exponentials per second", "rate": exponentials_per_second()})
    emit({"task": "fp16 products per second", "rate": products_per_second(torch.float16)})
    emit({"task": "TF32 products per second", "rate": products_per_second(torch.float32)})


if __name__ == "__main__":
    raise SystemExit(main())
