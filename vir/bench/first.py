"""How long a first call takes, compilation and all: python -m vir.bench.first prints a table.

For bf16 and 12 heads of 64, or as said by python -m vir.bench.first 49 float32 --heads 16. Each call is the first of
its process, with an empty cache of binaries; only Triton itself, which makes its own tools on a machine's first kernel,
was started before, and told apart. The last row is a band of rows that sees those above it, as in a stream: its
time forward is that of all its kernels.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from math import prod
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from vir import ops
from vir.bench.measure import in_a_fresh_process
from vir.ops.triton.plus import scaled_sum

SHAPES = (  # images, and tokens or the sides of a grid
    (128, (196,)),
    (4, (16384,)),
    (128, (14, 14)),
    (64, (32, 32)),
    (16, (64, 64)),
    (8, (50, 80)),
)
BAND = (1, (8, 64))


def seconds_of(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = perf_counter()
    call()
    torch.cuda.synchronize()
    return perf_counter() - start


def first_call(
    batch: int, shape: tuple[int, ...], heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[float, float, float]:
    """Seconds of Triton's start, of the first call forward, and of the first backward."""
    with tempfile.TemporaryDirectory() as cache:
        start = _started(cache)
        q, k, v, gamma = _tensors(batch, prod(shape), heads, head_dim, dtype)
        call = partial(ops.retention_1d, q, k, v, gamma, form="kernel")
        if len(shape) == 2:
            call = partial(ops.retention_2d, q, k, v, gamma, shape, form="kernel")
        made = []
        forward = seconds_of(lambda: made.append(call()))
        gradient = torch.ones_like(made[0])
        return start, forward, seconds_of(lambda: made[0].backward(gradient))


def first_band(
    batch: int, shape: tuple[int, ...], heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[float, float]:
    """Seconds of Triton's start, and of the first band of rows with others above it."""
    with tempfile.TemporaryDirectory() as cache, torch.inference_mode():
        start = _started(cache)
        q, k, v, gamma = _tensors(batch, prod(shape), heads, head_dim, dtype)
        above = torch.zeros(batch, heads, shape[1], head_dim, head_dim, device="cuda")
        call = partial(ops.retention_2d_stream, q, k, v, gamma, shape[1], above)
        return start, seconds_of(call)


def _started(cache: str) -> float:
    """Seconds until Triton has run a kernel, with an empty cache."""
    os.environ["TRITON_CACHE_DIR"] = cache
    x = torch.ones(16, 64, device="cuda", dtype=torch.bfloat16)
    return seconds_of(lambda: scaled_sum(x, x, x[0]))


def _tensors(
    batch: int, tokens: int, heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    qkv = torch.randn(batch, tokens, 3, heads, head_dim, device="cuda", dtype=dtype, requires_grad=True)
    q, k, v = qkv.unbind(2)
    return q, k, v, ops.decay(heads, device="cuda")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m vir.bench.first", description=__doc__.splitlines()[0])
    parser.add_argument("head_dim", nargs="?", default=64, type=int, help="channels of a head (default: 64)")
    parser.add_argument("dtype", nargs="?", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--heads", default=12, type=int, help="heads (default: 12)")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("python -m vir.bench.first measures a CUDA GPU and finds none here.")
    print("| retention | tokens | batch | Triton's start, s | forward, s | backward, s |", "| --- " * 6 + "|", sep="\n")
    dtype = getattr(torch, asked.dtype)
    rows = [(f"{len(shape)}D", first_call, batch, shape) for batch, shape in SHAPES]
    for name, measured, batch, shape in (*rows, ("2D, a band", first_band, *BAND)):
        seconds = in_a_fresh_process(measured, batch, shape, asked.heads, asked.head_dim, dtype)
        told = [f"{one:.2f}" for one in seconds] + [""] * (3 - len(seconds))
        print(f"| {name} | {' x '.join(f'{side:,}' for side in shape)} | {batch} | {' | '.join(told)} |", flush=True)


if __name__ == "__main__":
    main()
