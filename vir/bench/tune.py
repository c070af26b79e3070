"""Measure the launch settings of the kernels anew: python -m vir.bench.tune prints the tables of settings.py, or those
that are named, such as python -m vir.bench.tune WALK WIDE.

First every candidate is compiled and its numbers are checked, in processes of their own, since a bad one can take its
process down. Then each good one runs at the shapes that a setting serves, alone on the GPU; the best has the smallest
sum of times, each time as a share of the fastest at its shape.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from vir import ops
from vir.bench.gpu import recorded, relative_error, time_on_gpu
from vir.ops.triton import launch, settings
from vir.ops.triton.settings import Launch, Tile

HEADS = 12
SEQUENCES = ((197, 128), (4097, 16))  # tokens, batch
NARROW = ((14, 128),)  # patches of a side, batch
WIDE = ((32, 64), (64, 8))
HEAD_SIZES = (32, 64, 128)
DTYPES = (torch.bfloat16, torch.float32)
LARGEST_ERROR = {torch.bfloat16: 5e-3, torch.float32: 1e-4}
SCHEDULES = tuple(product((2, 4, 8), (1, 2, 3)))  # warps, stages
LAUNCHES = [Launch(chunk, *s) for chunk in (16, 32, 64) for s in SCHEDULES]
TILES = [Tile(*tile, *s) for tile in ((8, 8, 8), (8, 8, 4), (4, 8, 4)) for s in SCHEDULES]
NARROW_TILES = [Tile(*tile, *s) for tile in ((4, 16, 4), (4, 16, 2), (2, 16, 2)) for s in SCHEDULES]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there only by Triton's interpreter, to test this file

Candidate = Launch | Tile


class Group(NamedTuple):
    """One line of a table of settings."""

    table: str
    head_dim: int
    dtype: torch.dtype


CANDIDATES: dict[str, list[Any]] = {
    "WALK": LAUNCHES, "WALK_BACK": LAUNCHES, "LINES": LAUNCHES, "NARROW": NARROW_TILES, "WIDE": TILES,
}  # fmt: skip
SHAPES = {"WALK": SEQUENCES, "WALK_BACK": SEQUENCES, "LINES": SEQUENCES[1:], "NARROW": NARROW, "WIDE": WIDE}


@contextmanager
def using(table: str, candidate: Candidate) -> Iterator[None]:
    """Kernels start with this candidate in place of the setting."""
    usual = launch.sized

    def sized(of: dict, *key: int) -> Any:
        return candidate if of is getattr(settings, table) else usual(of, *key)

    with ExitStack() as changed:
        if isinstance(candidate, Tile):
            changed.enter_context(patch.object(launch, "grid_tile", lambda *_: candidate))
        else:
            changed.enter_context(patch.object(launch, "sized", sized))
        if table == "LINES":  # they make the states of segments
            changed.enter_context(patch.object(launch, "segment_length", lambda tokens, *_: -(-tokens // 4)))
        changed.callback(launch.forget)
        launch.forget()
        yield


def error_of(group: Group, candidate: Candidate) -> float:
    """Of output and gradients, the largest, against float64 on odd sizes."""
    grid = (9, 14) if group.table == "NARROW" else (19, 21)
    qkv = torch.randn(3, 2, grid[0] * grid[1] + 1, 3, group.head_dim, device=DEVICE).to(group.dtype)
    gamma, grad = ops.decay(3, device=DEVICE, dtype=torch.float64), torch.randn_like(qkv[0])

    def run(dtype: torch.dtype, decay: Tensor, form: ops.Form) -> list[Tensor]:
        q, k, v = (x.to(dtype).requires_grad_() for x in qkv)
        if group.table in ("NARROW", "WIDE"):
            out = ops.retention_2d(q, k, v, decay, grid, form=form)
        else:
            out = ops.retention_1d(q, k, v, decay, form=form)
        return [out, *torch.autograd.grad(out, (q, k, v), grad.to(dtype))]

    with using(group.table, candidate):
        got = run(group.dtype, gamma.float(), "kernel")
    return max(relative_error(a, b) for a, b in zip(got, run(torch.float64, gamma, "parallel"), strict=True))


def is_right(group: Group, candidate: Candidate) -> bool:
    """Whether it fits on a multiprocessor and gives the right numbers; compiled on the way for the timed shapes."""
    try:
        with using(group.table, candidate):
            for shape in SHAPES[group.table]:
                call(group, shape)()
        return error_of(group, candidate) <= LARGEST_ERROR[group.dtype]
    except OutOfResources:
        return False


Check = Callable[[Group, Any], bool]


def right_ones(group: Group, candidates: list[Any], check: Check = is_right) -> list[Any]:
    """The candidates that pass the check; one that ends the process, or spoils it, is left out."""
    spawn = multiprocessing.get_context("spawn")
    right, at = [], 0
    while at < len(candidates):
        answers, there = spawn.Pipe(duplex=False)
        process = spawn.Process(target=_answer, args=(there, group, candidates[at:], check))
        process.start()
        there.close()
        try:
            while at < len(candidates):
                if answers.recv():
                    right.append(candidates[at])
                at += 1
        except EOFError:
            at += 1
        process.join()
    return right


def _answer(there: Any, group: Group, candidates: list[Any], check: Check) -> None:
    for candidate in candidates:
        there.send(check(group, candidate))


def call(group: Group, shape: tuple[int, int]) -> Callable[[], Any]:
    """What is timed: the first number of a shape is tokens, or patches of a side; the second is the batch."""
    tokens = shape[0] ** 2 if group.table in ("NARROW", "WIDE") else shape[0]
    qkv = torch.randn(shape[1], tokens, 3, HEADS, group.head_dim, device="cuda", dtype=group.dtype)
    q, k, v = qkv.unbind(2)
    gamma, dtype = ops.decay(HEADS, device="cuda"), group.dtype
    if group.table in ("NARROW", "WIDE"):
        return partial(launch.grid, q, k, v, gamma, 1.0, shape[0], shape[0], dtype=dtype, out_dtype=dtype)
    if group.table == "LINES":
        return partial(launch.line_states, k, v, gamma, 1.0, 1, tokens // 4, back=False, dtype=dtype)
    if group.table == "WALK":
        return partial(launch.walk, q, k, v, gamma, 1.0, None, False, dtype=dtype, out_dtype=dtype)
    grad = torch.randn(v.shape, device="cuda", dtype=dtype)
    return partial(launch.walk_back, grad, q, k, v, gamma, 1.0, None, False, dtype=dtype)


def best(group: Group, candidates: list[Any]) -> tuple[Any, float]:
    """The candidate with the smallest mean share, and that share."""
    shapes = SHAPES[group.table]
    seconds: dict[Any, list[float]] = {}
    for candidate in candidates:
        with using(group.table, candidate):
            calls = [recorded(call(group, shape)) for shape in shapes]
            seconds[candidate] = [time_on_gpu({"": timed}, 5)[""].median for timed in calls]
    fastest = [min(times) for times in zip(*seconds.values(), strict=True)]
    shares = {c: sum(t / f for t, f in zip(times, fastest, strict=True)) / len(shapes) for c, times in seconds.items()}
    chosen = min(shares, key=lambda c: shares[c])
    return chosen, shares[chosen]


def tables(names: list[str]) -> Iterator[str]:
    groups = [Group(table, d, dtype) for table in names for dtype in DTYPES for d in HEAD_SIZES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        right = dict(zip(groups, pool.map(lambda g: right_ones(g, CANDIDATES[g.table]), groups), strict=True))
    for table in names:
        candidates = CANDIDATES[table]
        yield f"{table} = {{"
        for group in (g for g in groups if g.table == table):
            found = right[group]
            print(f"{group}: {len(found)} of {len(candidates)} candidates are right", file=sys.stderr)
            if not found:
                yield f"    # {group.head_dim}, {group.dtype}: none is right"
                continue
            chosen, share = best(group, found)
            numbers = ", ".join(str(x) for x in vars(chosen).values() if x is not None)
            key = group.head_dim, group.dtype.itemsize
            yield f"    {key}: {type(chosen).__name__}({numbers}),  # {share:.2f} times the fastest"
        yield "}"


if __name__ == "__main__":
    if DEVICE != "cuda":
        sys.exit("python -m vir.bench.tune measures a CUDA GPU and finds none here.")
    if unknown := set(sys.argv[1:]) - set(CANDIDATES):
        sys.exit(f"no table {', '.join(sorted(unknown))}: expected some of {', '.join(CANDIDATES)}.")
    for line in tables(sys.argv[1:] or list(CANDIDATES)):
        print(line, flush=True)
