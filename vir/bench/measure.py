"""How time and memory are measured here."""

import ctypes
import gc
import multiprocessing
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import timm
import torch

import vir

_M_MMAP_THRESHOLD = -3  # from malloc.h
SURE = 0.05  # spread between the quartiles up to which a figure stands without a mark


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median and the quartiles around it."""

    median: float
    low: float
    high: float
    repeats: int

    @property
    def spread(self) -> float:
        """Distance between the quartiles as a share of the median."""
        return (self.high - self.low) / self.median


def time_each(calls: Mapping[str, Callable[[], Any]], repeats: int = 7) -> dict[str, Timing]:
    """Time several calls in turn, so that a busy machine slows them all alike.

    Each turn starts with another call, and before a timed call the same one runs untimed: what its neighbour left
    in the caches must not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls.items())
    for turn in range(repeats):
        first = turn % len(order)
        for name, call in order[first:] + order[:first]:
            call()
            _synchronize()
            start = time.perf_counter()
            call()
            _synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: timing(values) for name, values in seconds.items()}


def timing(seconds: list[float]) -> Timing:
    if len(seconds) == 1:
        return Timing(seconds[0], seconds[0], seconds[0], 1)
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(median, low, high, len(seconds))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_memory(call: Callable[[], Any]) -> int | None:
    """Bytes that a call needs on the CPU beyond what was in use before; None where the system does not tell.

    Linux keeps the highest resident size of a process and lets it be reset. The C library is told to give memory
    back as soon as it is freed, so that resident means in use; this slows the process: take times before.
    """
    status = Path("/proc/self/status")
    gc.collect()
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, 2**16)
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return None
    before = _status_bytes(status, "VmRSS")
    call()
    return max(0, _status_bytes(status, "VmHWM") - before)


def _status_bytes(status: Path, field: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def provenance(device: str, dtype: str) -> dict[str, Any]:
    """What a number must carry to be believed."""
    hardware = torch.cuda.get_device_name() if device == "cuda" else f"{processor()}, {torch.get_num_threads()} threads"
    return {
        "hardware": hardware,
        "dtype": dtype,
        "torch": torch.__version__,
        "timm": timm.__version__,
        **({**_triton(), "cuda": str(torch.version.cuda)} if device == "cuda" else {}),
        "vir": vir.__version__,
        "commit": _commit(),
        "date": date.today().isoformat(),
    }


def _triton() -> dict[str, str]:
    """Nothing where there is none by this name: then kernels are left to PyTorch, or it comes as another package."""
    try:
        return {"triton": version("triton")}
    except PackageNotFoundError:
        return {}


def joined(origins: list[dict[str, Any]]) -> dict[str, Any]:
    """Where figures of several runs come from."""
    told: dict[str, Any] = {}
    for name in dict.fromkeys(name for origin in origins for name in origin):
        told[name] = " and ".join(dict.fromkeys(str(origin[name]) for origin in origins if name in origin))
    return told


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    return names[0].split(":", 1)[1].strip() if names else platform.processor() or platform.machine()


def _commit() -> str:
    """The commit of the checkout that runs, marked where files were changed; empty outside a checkout."""
    folder = Path(vir.__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short", "HEAD")
        return f"{commit} with changes" if commit and git("status", "--porcelain", "--", ".") else commit
    except FileNotFoundError:
        return ""


def in_a_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What others left behind, of the heap or of a compiler, would count as well."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
