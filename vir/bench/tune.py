"""Measure the launch settings of the kernels anew: python -m vir.bench.tune prints the tables of settings.py.

Each candidate runs at the shapes that a setting serves; the best has the smallest sum of times, each time as a share of
the fastest at its shape. Candidates that do not fit on a multiprocessor are left out.
"""

from collections.abc import Callable, Iterator
from functools import partial
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
SEQUENCES = ((197, 128), (1025, 64), (4097, 16), (16385, 2))  # tokens, batch
NARROW = ((14, 128), (7, 128))  # patches of a side, batch
WIDE = ((32, 64), (64, 16), (128, 4))
HEAD_SIZES = (32, 64, 128)
DTYPES = (torch.bfloat16, torch.float32)
LAUNCHES = [
    Launch(chunk, warps, stages) for chunk in (16, 32, 64) for warps in (4, 8) for stages in (1, 2, 3, 4)
]  # fmt: skip
TILES = [
    Tile(rows, cols, warps, stages, registers)
    for rows, cols in ((8, 8), (4, 8))
    for warps in (4, 8)
    for stages in (1, 2, 3)
    for registers in (None, 128)
]
NARROW_TILES = [
    Tile(rows, 16, warps, stages, registers)
    for rows in (2, 4, 8)
    for warps in (4, 8)
    for stages in (1, 2, 3)
    for registers in (None, 128)
]


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


KERNELS = {
    "WALK": (walk, LAUNCHES, SEQUENCES),
    "WALK_BACK": (walk_back, LAUNCHES, SEQUENCES),
    "LINES": (line_states, LAUNCHES, SEQUENCES[2:]),
    "NARROW": (grid, NARROW_TILES, NARROW),
    "WIDE": (grid, TILES, WIDE),
}


def best(make: Any, candidates: Any, shapes: Any, head_dim: int, dtype: torch.dtype) -> tuple[Any, dict[Any, float]]:
    """The candidate with the smallest sum of shares, and the sums of all that fit."""
    seconds: dict[Any, list[float]] = {}
    for candidate in candidates:
        with patch.object(launch, "sized", lambda *_, candidate=candidate: candidate):
            try:
                calls = [recorded(make(candidate, shape, head_dim, dtype)) for shape in shapes]
            except OutOfResources:
                continue
            seconds[candidate] = [time_on_gpu({"": call}, 7)[""].median for call in calls]
    fastest = [min(times) for times in zip(*seconds.values(), strict=True)]
    sums = {c: sum(t / f for t, f in zip(times, fastest, strict=True)) for c, times in seconds.items()}
    return min(sums, key=lambda c: sums[c]), sums


def tables() -> Iterator[str]:
    for name, (make, candidates, shapes) in KERNELS.items():
        yield f"{name} = {{"
        for dtype in DTYPES:
            for head_dim in HEAD_SIZES:
                chosen, sums = best(make, candidates, shapes, head_dim, dtype)
                key = head_dim, 2 if dtype == torch.bfloat16 else 4
                yield f"    {key}: {chosen},  # {sums[chosen] / len(shapes):.2f} times the fastest"
        yield "}"


if __name__ == "__main__":
    for line in tables():
        print(line, flush=True)
