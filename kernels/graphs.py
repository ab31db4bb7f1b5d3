"""Repeat a step without launching its kernels one by one: at small n the launches would take most of the time.

The step is recorded once into a CUDA graph, which replays the same kernels on the same memory. A step therefore reads
its state from tensors that exist before, writes it back in place, and does not wait for the device.

Reference: CUDA C++ Programming Guide, "CUDA Graphs".
"""

from collections.abc import Callable

import torch


def record(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A function that does what `step()` does, by one launch.

    Recording runs `step` twice on a stream of its own (to compile and to allocate), so the state must bear it. On a CPU
    the step itself is returned.
    """
    if device.type != "cuda":
        return step
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
