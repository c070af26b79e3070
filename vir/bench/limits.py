"""Where the time goes: python -m vir.bench.limits prints a table of operators and one of HViR models.

Of an operator: each of its kernels with its time, registers, and how many of its programs fit on a multiprocessor. Of a
model and of the same without its token mixing: the time as called, the time as a CUDA graph, which has no gaps between
its kernels, and the time of our kernels alone, retention and norms, with the sums that these are folded into. All
milliseconds, in bf16.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import timm
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from vir import ops
from vir.bench import models
from vir.bench.gpu import recorded, time_on_gpu
from vir.ops.triton.runner import Step

HEADS, HEAD_DIM = 12, 64
OPERATORS = (("1D", 192, 128), ("1D", 196, 128), ("1D", 16384, 4), ("2D", 14, 128), ("2D", 32, 64))
HIERARCHICAL = ((224, 224, 128), (512, 512, 32), (800, 1280, 8))  # rows, columns, batch
REPEATS = 11
REGISTERS = 65536  # of a multiprocessor of today's GPUs, as are the next two
SHARED_BYTES = 227 * 1024
WARPS = 64
OURS = ("walk", "grid", "line_states", "join_segments", "quadrant", "norm", "fold", "plus_rescaled")


def milliseconds(call: Callable[[], Any]) -> float:
    return 1e3 * time_on_gpu({"": call}, REPEATS)[""].median


def kernel_times(call: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of each of our kernels in one call."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPEATS):
            call()
        torch.cuda.synchronize()
    spent = {event.key: event.self_device_time_total for event in profiler.key_averages()}
    return {name: 1e-3 * time / REPEATS for name, time in spent.items() if name in OURS}


def binaries(call: Callable[[], Any]) -> dict[str, Any]:
    """What Triton compiled for each kernel of a call."""
    usual, found = Step.run, {}

    def run(step: Step, *tensors: Tensor) -> None:
        usual(step, *tensors)
        found[step.kernel.fn.__name__] = step.binary

    with patch.object(Step, "run", run):
        call()
    return found


def programs_at_once(binary: Any) -> int:
    """On one multiprocessor: what registers, shared memory and warps leave room for."""
    warps = binary.metadata.num_warps
    by_registers = REGISTERS // (32 * warps * max(binary.n_regs, 1))
    return min(by_registers, SHARED_BYTES // max(binary.metadata.shared, 1), WARPS // warps)


def operators() -> Iterator[str]:
    yield "| retention | tokens or side | batch | kernel | ms | registers | spilled | shared KB | programs at once |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    gamma = ops.decay(HEADS, device="cuda")
    for kind, size, batch in OPERATORS:
        tokens = size if kind == "1D" else size**2
        qkv = torch.randn(batch, tokens, 3, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        q, k, v = qkv.unbind(2)
        call: Callable[[], Tensor] = partial(ops.retention_1d, q, k, v, gamma, form="kernel")
        if kind == "2D":
            call = partial(ops.retention_2d, q, k, v, gamma, (size, size), form="kernel")
        compiled, times = binaries(call), kernel_times(call)
        yield f"| {kind} | {size:,} | {batch} | all, as a graph | {milliseconds(recorded(call)):.4f} | | | | |"
        for name, binary in compiled.items():
            looks = binary.n_regs, binary.n_spills, binary.metadata.shared // 1024, programs_at_once(binary)
            told = " | ".join(str(x) for x in looks)
            yield f"| {kind} | {size:,} | {batch} | `{name}` | {times.get(name, float('nan')):.4f} | {told} |"


def hierarchical() -> Iterator[str]:
    times = "as called | as a graph | unmixed, as called | unmixed, as a graph"
    yield f"| model | px | batch | {times} | share as called | share of graphs | our kernels |"
    yield "| --- " * 10 + "|"
    for rows, cols, batch in HIERARCHICAL:
        for name in ("hvir_0", "hvir_1", "hvir_2"):
            make = partial(timm.create_model, name, retention="2d")
            spent = []
            for maker in (make, lambda make=make: models.ceiling(make())):
                call = models.inference(maker, (rows, cols), batch, "eager")
                call()
                spent += [milliseconds(call), milliseconds(recorded(call))]
                if maker is make:
                    mixing = sum(kernel_times(call).values())
            called, graph, bare, bare_graph = spent
            shares = f"{bare / called:.2f} | {bare_graph / graph:.2f}"
            told = " | ".join(f"{t:.2f}" for t in spent)
            yield f"| {name} | {rows} x {cols} | {batch} | {told} | {shares} | {mixing:.2f} |"


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("python -m vir.bench.limits measures a CUDA GPU and finds none here.")
    for line in chain(operators(), [""], hierarchical()):
        print(line, flush=True)
