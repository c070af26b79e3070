"""What the kernels take of a GPU, compiled without one: python -m vir.bench.offline prints a table.

Triton's interpreter tests numbers, and accepts what its compiler refuses. This compiles every kernel as it would be
started on an H200: for bf16 and heads of 64, or as said by python -m vir.bench.offline float32 40 --capability 80.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from vir import ops
from vir.ops.triton import folded, group_norm, launch, norm, plus, settings
from vir.ops.triton.runner import Call, Step

MULTIPROCESSORS = 132
HEADS = 12
ENOUGH = 128  # images: no sequence of theirs is cut, and a program has several tiles
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32"}
ALIGNED = 16  # what Triton looks for in pointers, in bytes, and in numbers


class Taken(NamedTuple):
    """By a program. The compiler lets each product of a kernel wait for the one before it, where it cannot see that it
    need not: that is right, and much slower. Only products of Hopper's kind tell."""

    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    in_turn: bool


def operators(dtype: torch.dtype, head_dim: int) -> dict[str, Callable[[], Any]]:
    """Every way to start kernels. Their tensors are never filled, nor is memory taken for them."""

    def of(call: Callable, batch: int, tokens: int, *given: Any, **options: Any) -> Callable[[], Any]:
        q, k, v = torch.empty(batch, tokens, 3, HEADS, head_dim, dtype=dtype).unbind(2)
        return partial(call, q, k, v, gamma, 1.0, *given, dtype=dtype, **options)

    gamma, to = ops.decay(HEADS), {"out_dtype": dtype}
    grad = torch.empty(ENOUGH, 197, HEADS, head_dim, dtype=dtype)
    of_segments = torch.empty(1, 4096, HEADS, head_dim, dtype=dtype)
    state = torch.empty(1, HEADS, head_dim, head_dim)
    columns = torch.empty(1, HEADS, 64, head_dim, head_dim)
    x, weight = torch.empty(64, HEADS * head_dim, dtype=dtype), torch.empty(HEADS * head_dim)
    some, square = weight.to(dtype), torch.empty(HEADS * head_dim, HEADS * head_dim, dtype=dtype)
    maps = torch.empty(2, 256, 7, 7, dtype=dtype).contiguous(memory_format=torch.channels_last)
    return {
        "1D": of(launch.walk, ENOUGH, 197, None, False, **to),
        "1D, few segments": of(launch.walk, 1, 4096, None, False, **to),
        "1D, few segments in pieces": of(launch.walk, 4, 16384, None, False, **to),
        "1D, segments, states": of(launch.walk, 1, 16384, state, True, **to),
        "1D, gradients": of(partial(launch.walk_back, grad), ENOUGH, 197, None, False),
        "1D, gradients, few segments": of(partial(launch.walk_back, of_segments), 1, 4096, None, False),
        "2D, 14 x 14": of(launch.grid, ENOUGH, 197, 14, 14, **to),
        "2D, 32 x 32": of(launch.grid, ENOUGH, 1024, 32, 32, **to),
        "2D, 64 x 64": of(launch.grid, 1, 4096, 64, 64, **to),
        "2D, gradients of k, v": of(launch.grid, ENOUGH, 1025, 32, 32, back=True, **to),
        "2D, a band": of(launch.rows, 1, 512, 64, columns),
        "LayerNorm": lambda: norm.layer_norm(x, weight, weight, 1e-6, dtype),
        "LayerNorm, gradients": lambda: norm.layer_norm_back(x, weight, x, 1e-6),
        "sum with a scaled part": lambda: plus.scaled_sum(x, x, some),
        "sum with a layer after a norm": lambda: folded.normed_sum(x, x, square, some, some, some, some, 1e-6),
        "GroupNorm": lambda: group_norm.group_norm(maps, weight[:256], weight[:256], 32, 1e-5),
    }


def started(call: Callable[[], Any], capability: int) -> list[Call]:
    """The launches of a call on such a GPU, none of which runs."""
    calls: list[Call] = []
    with (
        patch.object(Step, "run", lambda step, *tensors: calls.append((step, tensors))),
        patch.object(Step, "compile", lambda step, *tensors: None),
        patch.object(settings, "processors", lambda device: MULTIPROCESSORS),
        patch.object(settings, "like_hopper", lambda device: capability // 10 in settings.LIKE_HOPPER),
    ):
        launch.forget()
        call()
    launch.forget()
    return calls


def compiled(step: Step, tensors: tuple[Tensor, ...], capability: int) -> Any:
    """What Triton would make of a launch on such a GPU: numbers that are 1 become constants, multiples are told."""
    signature, constants, multiples = {}, dict(step.constants), {}
    for i, (name, given) in enumerate(zip(step.kernel.arg_names, (*tensors, *step.numbers), strict=False)):
        if isinstance(given, TensorDescriptor):
            signature[name] = f"tensordesc<{POINTERS[given.base.dtype][1:]}{given.block_shape}>"
            continue
        if isinstance(given, Tensor):
            signature[name] = POINTERS[given.dtype]
        elif isinstance(given, float):
            signature[name] = "fp32"
        elif given == 1:
            constants[name] = 1
        else:
            signature[name] = "i32" if given < 2**31 else "i64"
        if isinstance(given, Tensor) or given % ALIGNED == 0:
            multiples[i,] = [["tt.divisibility", ALIGNED]]
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=step.kernel, signature=signature, constexprs=constants, attrs=multiples)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=step.options)


def taken(step: Step, tensors: tuple[Tensor, ...], capability: int) -> Taken:
    binary = compiled(step, tensors, capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path  # comes with Triton
        command = [tool, "-res-usage", "-sass", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", said)[1]) for word in ("REG", "STACK"))  # type: ignore[index]
    in_turn = said.count("WARPGROUP.DEPBAR") >= said.count("HGMMA") > 1
    return Taken(step.kernel.fn.__name__, registers, stack, binary.metadata.shared, in_turn)


def table(dtype: torch.dtype, head_dim: int, capability: int) -> list[str]:
    launches = [(name, *one) for name, call in operators(dtype, head_dim).items() for one in started(call, capability)]
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda one: taken(one[1], one[2], capability), launches)
    lines = ["| operator | kernel | warps | registers | spilled bytes | shared KB | products |", "| --- " * 7 + "|"]
    for (name, step, _), one in zip(launches, found, strict=True):
        numbers = f"{step.schedule[0]} | {one.registers} | {one.spilled_bytes} | {one.shared_bytes / 1024:.1f}"
        lines.append(f"| {name} | `{one.kernel}` | {numbers} | {'wait for each other' if one.in_turn else ''} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m vir.bench.offline", description=__doc__.splitlines()[0])
    parser.add_argument("dtype", nargs="?", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("head_dim", nargs="?", default=64, type=int, help="channels of a head (default: 64)")
    parser.add_argument("--capability", default=90, type=int, help="of the GPU: 80 an A100, 90 an H100 or H200")
    asked = parser.parse_args()
    if launch.INTERPRETED:
        sys.exit("TRITON_INTERPRET is set: kernels are not compiled then. Run it without.")
    print("\n".join(table(getattr(torch, asked.dtype), asked.head_dim, asked.capability)))


if __name__ == "__main__":
    main()
