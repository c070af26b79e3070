"""Memory of one call inside a server, where what the process holds says little: other clients come and go."""

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would tell the terminal of every start and stop

from torch.profiler import ProfilerActivity, profile


def start_watching() -> None:
    """Once, from the main thread: the profiler complains in the terminal if another one is its first."""
    peak_of_tensors(lambda: None)


def peak_of_tensors(call: Callable[[], Any]) -> int:
    """Most bytes in tensors that the call made and had not yet freed, on any device; the weights are not among them."""
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True) as watched:
        call()
    results = watched.profiler.kineto_results
    changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
