"""Repeat a step without launching its kernels one by one: at small n the launches would take most of the time.

The step is recorded into a CUDA graph, which replays the same kernels on the same memory. A step therefore reads its
state from tensors that exist before, writes it back in place, and does not wait for the device.

Reference: CUDA C++ Programming Guide, "CUDA Graphs".
"""

from collections.abc import Callable

import torch


def repeated(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A function that does what `step()` does, from its second call on by one launch.

    On a CPU, and where the step is part of a recording already, it is the step itself.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return step
    first, replay = True, None

    def call() -> None:
        nonlocal first, replay
        if first:  # as it is, which compiles and loads the kernels
            first = False
            step()
            return
        replay = replay or _record(step, device)
        replay()

    return call


def _record(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            step()
        finally:
            graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph.replay
