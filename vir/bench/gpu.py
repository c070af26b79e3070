"""Time and memory on a GPU."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from vir.bench.measure import Timing, timing

CACHE_BYTES = 2**28  # more than any GPU's cache: read between timed calls, so that none finds its inputs there
WARM_UP = 3


def recorded(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a CUDA graph: its replay has no Python and no launch gaps, so that kernels are compared, not hosts.

    The graph's memory, and what the call reads, live as long as what this returns.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(_read: Callable[[], Any] = call) -> None:
        graph.replay()

    return replay


def recorded_later(call: Callable[[], Any]) -> Callable[[], Any]:
    """The same, recorded by its second call: the first runs as it is, as with models that torch.compile records."""
    calls, way = 0, call

    def run() -> None:
        nonlocal calls, way
        calls += 1
        if calls == 2:
            way = recorded(call)
        else:
            way()

    return run


def time_on_gpu(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, Timing]:
    """Seconds of each call by the GPU's own clock, in turn, each with an empty cache.

    It is emptied by reading: what writing leaves there would be written back on the time of the call.
    """
    if not calls:
        return {}
    cache = torch.zeros(CACHE_BYTES // 4, device="cuda")
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    for turn in range(repeats):
        order = list(calls.items())
        first = turn % len(order)
        for name, call in order[first:] + order[:first]:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            cache.sum()
            start.record()
            call()
            end.record()
            marks[name].append((start, end))
    torch.cuda.synchronize()
    return {name: timing([1e-3 * a.elapsed_time(b) for a, b in pairs]) for name, pairs in marks.items()}


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a large copy: no kernel moves more."""
    source = torch.empty(2**30, dtype=torch.int8, device="cuda").random_(0, 100)
    target = torch.empty_like(source)
    seconds = time_on_gpu({"copy": lambda: target.copy_(source)}, 11)["copy"].median
    return 2 * source.numel() / seconds


def peak_gpu_memory(call: Callable[[], Any]) -> int:
    """Bytes that a call needs beyond what was in use before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()
