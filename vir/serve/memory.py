"""Memory of one call inside a server, where what the process holds says little: other clients come and go."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would tell the terminal of every start and stop

from torch.profiler import ProfilerActivity, profile


def start_watching() -> None:
    """Once, from the main thread: the profiler complains in the terminal if another one is its first."""
    peak_of_tensors(lambda: None)


def peak_of_tensors(call: Callable[[], Any]) -> int:
    """Most bytes in tensors that the call made and had not yet freed, on any device; the weights are not among them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        call()
    with TemporaryDirectory() as folder:  # the profiler tells its events to a file alone; no pixel is among them
        file = Path(folder) / "events.json"
        watched.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    made = [event for event in events if event.get("name") == "[memory]"]
    now = most = 0
    for event in sorted(made, key=lambda event: event["ts"]):
        now += event["args"]["Bytes"]
        most = max(most, now)
    return most
