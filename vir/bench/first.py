"""How long a first call takes, compilation and all: python -m vir.bench.first [HEAD_DIM] prints a table.

Each call is the first of its process, with an empty cache of binaries; only Triton itself, which makes its own tools on
a machine's first kernel, was started before, and told apart. bf16.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch

from vir import ops
from vir.bench.measure import in_a_fresh_process
from vir.ops.triton.plus import scaled_sum

HEADS = 12
SHAPES = (  # images, and tokens or the sides of a grid
    (128, (196,)),
    (4, (16384,)),
    (128, (14, 14)),
    (64, (32, 32)),
    (16, (64, 64)),
    (8, (50, 80)),
)


def seconds_of(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = perf_counter()
    call()
    torch.cuda.synchronize()
    return perf_counter() - start


def first_call(batch: int, shape: tuple[int, ...], head_dim: int) -> tuple[float, float, float]:
    """Seconds of Triton's start, of the first call forward, and of the first backward."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        x = torch.ones(16, 64, device="cuda", dtype=torch.bfloat16)
        start = seconds_of(lambda: scaled_sum(x, x, x[0]))
        tokens = shape[0] * shape[-1] if len(shape) == 2 else shape[0]
        qkv = torch.randn(batch, tokens, 3, HEADS, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        q, k, v = qkv.unbind(2)
        gamma = ops.decay(HEADS, device="cuda")
        call = partial(ops.retention_1d, q, k, v, gamma, form="kernel")
        if len(shape) == 2:
            call = partial(ops.retention_2d, q, k, v, gamma, shape, form="kernel")
        made = []
        forward = seconds_of(lambda: made.append(call()))
        gradient = torch.ones_like(made[0])
        return start, forward, seconds_of(lambda: made[0].backward(gradient))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m vir.bench.first", description=__doc__.splitlines()[0])
    parser.add_argument("head_dim", nargs="?", default=64, type=int, help="channels of a head (default: 64)")
    head_dim = parser.parse_args().head_dim
    if not torch.cuda.is_available():
        sys.exit("python -m vir.bench.first measures a CUDA GPU and finds none here.")
    print("| retention | tokens | batch | Triton's start, s | forward, s | backward, s |", "| --- " * 6 + "|", sep="\n")
    for batch, shape in SHAPES:
        told = " | ".join(f"{seconds:.2f}" for seconds in in_a_fresh_process(first_call, batch, shape, head_dim))
        size = " x ".join(f"{side:,}" for side in shape)
        print(f"| {len(shape)}D | {size} | {batch} | {told} |", flush=True)


if __name__ == "__main__":
    main()
