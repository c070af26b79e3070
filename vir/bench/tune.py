"""Measure the launch settings of the kernels anew: python -m vir.bench.tune prints the tables of settings.py, or those
that are named, such as python -m vir.bench.tune WALK WIDE.

First every candidate is compiled and its numbers are checked at the shapes that a setting serves, in processes of
their own, since a bad one can take its process down. Then each good one runs there, alone on the GPU; the best has the
smallest sum of times, each time as a share of the fastest at its shape.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, fields, replace
from functools import cache, partial
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
LINES = ((384, 11), (3328, 20), (3072, 22))  # the segments of 4,096, 4 times 16,384 and 65,536 tokens
NARROW = ((14, 128),)  # patches of a side, batch
WIDE = ((32, 64), (64, 8))
DTYPES = {2: torch.bfloat16, 4: torch.float32}  # by their bytes
LARGEST_ERROR = {torch.bfloat16: 5e-3, torch.float32: 1e-4}
SIZES = {  # of a chunk; of a tile and the height of its blocks
    "WALK": ((16,), (32,), (64,)),
    "NARROW": ((2, 16, 2), (4, 16, 2), (4, 16, 4)),
    "WIDE": ((4, 8, 4), (8, 8, 4), (8, 8, 8)),
    "QUADRANT": ((64,),),
}
TILES = ("NARROW", "WIDE")
GRIDS = (*TILES, "QUADRANT")
CHECKED = [0, -1]  # images: the last may come after others in its program
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there only by Triton's interpreter, to test this file

Candidate = Launch | Tile


class Group(NamedTuple):
    """One line of a table of settings."""

    table: str
    head_dim: int
    dtype: torch.dtype


def groups_of(table: str) -> list[Group]:
    return [Group(table, head_dim, DTYPES[size]) for head_dim, size in settings.TABLES[table]]


SHAPES = {
    "WALK": SEQUENCES,
    "WALK_BACK": SEQUENCES,
    "LINES": LINES,
    "NARROW": NARROW,
    "WIDE": WIDE,
    "QUADRANT": NARROW,
}


def candidates(group: Group) -> list[Any]:
    """Chunks or tiles, warps and stages that can be of use, how many programs run at once, and the registers that this
    leaves them: float32 has room for the smaller ones alone."""
    narrow = group.dtype.itemsize == 2
    sizes = SIZES.get(group.table, SIZES["WALK"])
    stages = (1, 2, 3, 4) if narrow and group.table == "LINES" else (1, 2, 3) if narrow else (1, 2)
    schedules = product((4, 8), stages)
    kind: Any = Tile if group.table in TILES else Launch
    made = [kind(*size, *schedule) for schedule in schedules for size in (sizes[-2:] if narrow else sizes)]
    if group.table == "QUADRANT":
        at_once = ((2, None), (2, 168), (3, 168), (4, 128))
        return [replace(one, registers=limit, programs=n) for one in made for n, limit in at_once]
    if group.table == "WALK":
        return made + [replace(one, programs=n) for one in made for n in (1, 2, 3)]
    limits = (128,) if group.head_dim > 32 else (96, 128)  # so that four programs fit, or five
    return made + [replace(one, registers=n) for one in made for n in limits if narrow and group.table in TILES]


@contextmanager
def using(table: str, candidate: Candidate) -> Iterator[None]:
    """Kernels start with this candidate in place of the setting."""
    usual = settings.sized

    def sized(of: str, *key: Any) -> Any:
        return candidate if of == table else usual(of, *key)

    with ExitStack() as changed:
        if isinstance(candidate, Tile):
            changed.enter_context(patch.object(settings, "grid_tile", lambda *_: candidate))
            changed.enter_context(patch.object(settings, "MOST_TILES", 0))
        else:
            changed.enter_context(patch.object(settings, "sized", sized))
        changed.callback(launch.forget)
        launch.forget()
        yield


def error_of(group: Group, candidate: Candidate, shape: tuple[int, int]) -> float:
    """Of what the kernel makes for two images, the largest, against plain PyTorch in float64 on the same numbers."""
    with using(group.table, candidate):
        got = call(group, shape)()
    made = got if isinstance(got, tuple) else (got,)
    return max(relative_error(a[CHECKED], b) for a, b in zip(made, exact(group, shape), strict=False))


@cache
def exact(group: Group, shape: tuple[int, int]) -> tuple[Tensor, ...]:
    grad, q, k, v = (x[CHECKED].double().requires_grad_() for x in tensors(group, shape))
    gamma = ops.decay(HEADS, device=DEVICE, dtype=torch.float64)
    if group.table == "LINES":
        return (ops.retention_1d_stream(q, k, v, gamma)[1].detach()[:, :, None],)
    if group.table in GRIDS:
        return (ops.retention_2d(q, k, v, gamma, (shape[0], shape[0]), form="chunkwise", scale=1.0).detach(),)
    out = ops.retention_1d(q, k, v, gamma, form="chunkwise", scale=1.0)
    return (out.detach(),) if group.table == "WALK" else torch.autograd.grad(out, (k, v), grad)


def is_right(group: Group, candidate: Candidate) -> bool:
    """Whether it fits on a multiprocessor and gives the right numbers; compiled on the way."""
    try:
        errors = [error_of(group, candidate, shape) for shape in SHAPES[group.table]]
    except OutOfResources:
        return False
    return max(errors) <= LARGEST_ERROR[group.dtype]


Check = Callable[[Group, Any], bool]


def right_ones(group: Group, tried: list[Any], check: Check = is_right) -> list[Any]:
    """Those candidates that pass the check; one that ends the process, or spoils it, is left out."""
    spawn = multiprocessing.get_context("spawn")
    right, at = [], 0
    while at < len(tried):
        answers, there = spawn.Pipe(duplex=False)
        process = spawn.Process(target=_answer, args=(there, group, tried[at:], check))
        process.start()
        there.close()
        try:
            while at < len(tried):
                if answers.recv():
                    right.append(tried[at])
                at += 1
        except EOFError:
            at += 1
        process.join()
    return right


def _answer(there: Any, group: Group, tried: list[Any], check: Check) -> None:
    for candidate in tried:
        there.send(check(group, candidate))


def tensors(group: Group, shape: tuple[int, int]) -> tuple[Tensor, ...]:
    """The gradient of the output, then q, k, v as views: always the same numbers.

    The first number of a shape is tokens, or patches of a side; the second is the batch.
    """
    tokens = shape[0] ** 2 if group.table in GRIDS else shape[0]
    torch.manual_seed(0)
    qkv = torch.randn(shape[1], tokens, 3, HEADS, group.head_dim, device=DEVICE, dtype=group.dtype)
    q, k, v = qkv.unbind(2)
    return torch.randn(v.shape, device=DEVICE, dtype=v.dtype), q, k, v


def call(group: Group, shape: tuple[int, int]) -> Callable[[], Any]:
    """What is timed."""
    grad, q, k, v = tensors(group, shape)
    gamma, dtype = ops.decay(HEADS, device=DEVICE), group.dtype
    if group.table in GRIDS:
        return partial(launch.grid, q, k, v, gamma, 1.0, shape[0], shape[0], dtype=dtype, out_dtype=dtype)
    if group.table == "LINES":
        return partial(launch.line_states, k, v, gamma, 1.0, 1, shape[0], back=False, dtype=dtype)
    if group.table == "WALK":
        return partial(launch.walk, q, k, v, gamma, 1.0, None, False, dtype=dtype, out_dtype=dtype)
    return partial(launch.walk_back, grad, q, k, v, gamma, 1.0, None, False, dtype=dtype)


def best(group: Group, right: list[Any]) -> tuple[Any, float]:
    """The candidate with the smallest mean share, and that share."""
    shapes = SHAPES[group.table]
    seconds: dict[Any, list[float]] = {}
    for candidate in right:
        with using(group.table, candidate):
            calls = [recorded(call(group, shape)) for shape in shapes]
            seconds[candidate] = [time_on_gpu({"": timed}, 5)[""].median for timed in calls]
    fastest = [min(times) for times in zip(*seconds.values(), strict=True)]
    shares = {c: sum(t / f for t, f in zip(times, fastest, strict=True)) / len(shapes) for c, times in seconds.items()}
    chosen = min(shares, key=lambda c: shares[c])
    return chosen, shares[chosen]


def written(chosen: Candidate) -> str:
    """As it stands in the settings: what has a default is named."""
    given = {field: value for field in fields(chosen) if (value := getattr(chosen, field.name)) is not None}
    words = (f"{value}" if field.default is MISSING else f"{field.name}={value}" for field, value in given.items())
    return f"{type(chosen).__name__}({', '.join(words)})"


def tables(names: list[str]) -> Iterator[str]:
    groups = [group for table in names for group in groups_of(table)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        right = dict(zip(groups, pool.map(lambda g: right_ones(g, candidates(g)), groups), strict=True))
    for table in names:
        yield f"{table} = {{"
        for group in (g for g in groups if g.table == table):
            found = right[group]
            print(f"{group}: {len(found)} of {len(candidates(group))} candidates are right", file=sys.stderr)
            if not found:
                yield f"    # {group.head_dim}, {group.dtype}: none is right"
                continue
            chosen, share = best(group, found)
            key = group.head_dim, group.dtype.itemsize
            yield f"    {key}: {written(chosen)},  # {share:.2f} times the fastest"
        yield "}"


if __name__ == "__main__":
    if DEVICE != "cuda":
        sys.exit("python -m vir.bench.tune measures a CUDA GPU and finds none here.")
    if unknown := set(sys.argv[1:]) - set(SHAPES):
        sys.exit(f"no table {', '.join(sorted(unknown))}: expected some of {', '.join(SHAPES)}.")
    for line in tables(sys.argv[1:] or list(SHAPES)):
        print(line, flush=True)
