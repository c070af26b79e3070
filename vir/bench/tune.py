"""Measure the launch settings of the kernels anew: python -m vir.bench.tune prints the tables of settings.py.

Each candidate runs at the shapes that a setting serves; the best has the smallest sum of times, each time as a share of
the fastest at its shape. Candidates that do not fit on a multiprocessor are left out.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from vir import ops
from vir.bench.gpu import recorded, time_on_gpu
from vir.ops.triton import launch
from vir.ops.triton.settings import Launch, Tile

HEADS = 12
SEQUENCES = ((197, 128), (4097, 16))  # tokens, batch
NARROW = ((14, 128),)  # patches of a side, batch
WIDE = ((32, 64), (64, 8))
HEAD_SIZES = (32, 64, 128)
DTYPES = (torch.bfloat16, torch.float32)
SCHEDULES = tuple(product((4, 8), (1, 2, 3)))  # warps, stages
LAUNCHES = [Launch(chunk, *s) for chunk in (16, 32, 64) for s in SCHEDULES]
TILES = [Tile(*tile, *s) for tile in ((8, 8, 8), (8, 8, 4), (4, 8, 4)) for s in SCHEDULES]
NARROW_TILES = [Tile(*tile, *s) for tile in ((4, 16, 4), (4, 16, 2), (2, 16, 2)) for s in SCHEDULES]


def inputs(tokens: int, batch: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    q, k, v = torch.randn(batch, tokens, 3, HEADS, head_dim, device="cuda", dtype=dtype).unbind(2)
    return q, k, v, torch.randn_like(v, memory_format=torch.contiguous_format), ops.decay(HEADS, device="cuda")


def walk(candidate: Launch, shape: tuple[int, int], head_dim: int, dtype: torch.dtype) -> Callable[[], Any]:
    q, k, v, _, gamma = inputs(*shape, head_dim, dtype)
    return partial(launch.walk, q, k, v, gamma, 1.0, None, False, dtype=dtype, out_dtype=dtype)


def walk_back(candidate: Launch, shape: tuple[int, int], head_dim: int, dtype: torch.dtype) -> Callable[[], Any]:
    q, k, v, grad, gamma = inputs(*shape, head_dim, dtype)
    return partial(launch.walk_back, grad, q, k, v, gamma, 1.0, None, False, dtype=dtype)


def line_states(candidate: Launch, shape: tuple[int, int], head_dim: int, dtype: torch.dtype) -> Callable[[], Any]:
    _, k, v, _, gamma = inputs(*shape, head_dim, dtype)
    return partial(launch.line_states, k, v, gamma, 1.0, 1, shape[0] // 4, back=False, dtype=dtype)


def grid(candidate: Tile, shape: tuple[int, int], head_dim: int, dtype: torch.dtype) -> Callable[[], Any]:
    side, batch = shape
    q, k, v, _, gamma = inputs(side * side, batch, head_dim, dtype)
    return partial(launch.grid, q, k, v, gamma, 1.0, side, side, dtype=dtype, out_dtype=dtype, tile=candidate)


TABLES: dict[str, tuple[Any, list, tuple]] = {
    "WALK": (walk, LAUNCHES, SEQUENCES),
    "WALK_BACK": (walk_back, LAUNCHES, SEQUENCES),
    "LINES": (line_states, LAUNCHES, SEQUENCES[1:]),
    "NARROW": (grid, NARROW_TILES, NARROW),
    "WIDE": (grid, TILES, WIDE),
}


def compile_all(jobs: list[tuple[str, int, torch.dtype, Any]]) -> None:
    """Run each once, so that Triton keeps the binaries: in many processes, because that takes longer than timing."""
    for name, head_dim, dtype, candidate in jobs:
        make, _, shapes = TABLES[name]
        with patch.object(launch, "sized", lambda *_, candidate=candidate: candidate):
            try:
                for shape in shapes:
                    make(candidate, shape, head_dim, dtype)()
            except OutOfResources:
                continue


def best(name: str, head_dim: int, dtype: torch.dtype) -> tuple[Any, float]:
    """The candidate with the smallest mean share, and that share."""
    make, candidates, shapes = TABLES[name]
    seconds: dict[Any, list[float]] = {}
    for candidate in candidates:
        with patch.object(launch, "sized", lambda *_, candidate=candidate: candidate):
            try:
                calls = [recorded(make(candidate, shape, head_dim, dtype)) for shape in shapes]
            except OutOfResources:
                continue
            seconds[candidate] = [time_on_gpu({"": call}, 5)[""].median for call in calls]
    fastest = [min(times) for times in zip(*seconds.values(), strict=True)]
    shares = {c: sum(t / f for t, f in zip(times, fastest, strict=True)) / len(shapes) for c, times in seconds.items()}
    chosen = min(shares, key=lambda c: shares[c])
    return chosen, shares[chosen]


def tables() -> Iterator[str]:
    keys = [(d, dtype) for dtype in DTYPES for d in HEAD_SIZES]
    jobs = [
        (name, *key, candidate)
        for name, (_, candidates, _) in TABLES.items()
        for key in keys
        for candidate in candidates
    ]
    workers = os.cpu_count() or 1
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_all, [jobs[i::workers] for i in range(workers)]))
    print(f"{len(jobs)} candidates compiled", file=sys.stderr)
    for name in TABLES:
        yield f"{name} = {{"
        for head_dim, dtype in keys:
            chosen, share = best(name, head_dim, dtype)
            settings = ", ".join(str(x) for x in vars(chosen).values() if x is not None)
            key = head_dim, dtype.itemsize
            yield f"    {key}: {type(chosen).__name__}({settings}),  # {share:.2f} times the fastest"
        yield "}"


if __name__ == "__main__":
    for line in tables():
        print(line, flush=True)
