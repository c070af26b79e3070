"""What is known of a launch before it: the looks of the tensors decide how kernels are started on them.

It is worked out once and kept, as a plan: small images wait for the host, not for the GPU, so that its microseconds
count.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from vir.ops.triton import runner, sequence
from vir.ops.triton.runner import Numbers, Step
from vir.ops.triton.settings import WIDE_LOAD, Schedule

INTERPRETED = not isinstance(sequence.walk, triton.JITFunction)
JOIN: Schedule = (1, 3, None)
JOINED = {"SOME": 16, "PART": 64}  # states at a time, and numbers of each
MOST_PLANS = 4096

Strides = tuple[int, ...]
Look = tuple[torch.Size, Strides, torch.dtype, int, torch.device]
Plan = TypeVar("Plan", bound=Callable)
_forgetting: list[Callable[[], None]] = []


def kept(make: Plan) -> Plan:
    """Every plan is made once for tensors that look alike."""
    remembered: Any = lru_cache(maxsize=MOST_PLANS)(make)
    _forgetting.append(remembered.cache_clear)
    return remembered


def forget() -> None:
    """Drop all plans: for whoever changes the settings."""
    for forget_one in _forgetting:
        forget_one()


def look(x: Tensor) -> Look:
    """All of a tensor that decides how kernels are started on it."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() % 16, x.device


def look_if(x: Tensor | None) -> Look | None:
    return None if x is None else look(x)


def strides_of(*looks: Look) -> list[Strides]:
    """Of batch, token and head: channels lie side by side."""
    return [strides[:3] for _, strides, *_ in looks]


def rows_whole(x: Tensor) -> Tensor:
    """Channels must lie side by side; they do in views of a qkv tensor. Only expanded gradients are copied."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def whole(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def empty_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous room for as many numbers: made so, it takes the host half as long as by `torch.empty`."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def contiguous(n: int, h: int, d: int) -> Strides:
    return n * h * d, h * d, d


@cache
def block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def key(dk: int, dv: int, dtype: torch.dtype, device: torch.device) -> tuple[int, int, torch.device, bool]:
    """Where to look in the tables of settings."""
    wide = dk % WIDE_LOAD == dv % WIDE_LOAD == 0
    return block(max(dk, dv)), 2 if dtype == torch.bfloat16 else 4, device, wide


def precision(dtype: torch.dtype) -> dict[str, Any]:
    """How products are taken: bf16 as it is; fp16 as tf32, which holds it exactly and has float32's range; float32
    by three tf32 products, which give its precision."""
    if dtype == torch.bfloat16 and not INTERPRETED:  # the interpreter has no products of bf16
        return {"OPERAND": tl.bfloat16, "PRECISION": "tf32"}
    return {"OPERAND": tl.float32, "PRECISION": "tf32" if dtype == torch.float16 else "tf32x3"}


def wide_loads(strides: list[Strides]) -> bool:
    """Whether all heads begin where loads of 16 bytes can begin, in half precision."""
    return all(of_head % WIDE_LOAD == 0 for _, _, of_head in strides)


def prepared(
    kernel: Any,
    grid: tuple[int, int],
    strides: list[Strides],
    numbers: Numbers,
    dk: int,
    dv: int,
    dtype: torch.dtype,
    schedule: Schedule,
    **constants: Any,
) -> Step:
    """Of a kernel that takes products. Blocks of channels are square, because Triton 3.6 gets products of 64 by 16
    wrong on Hopper; and Triton sees by itself only strides that are multiples of 16, not of 8."""
    side = block(max(dk, dv))
    sizes = {"DK": dk, "DV": dv, "BK": side, "BV": side}
    align = {"ALIGN": WIDE_LOAD if wide_loads(strides) else 1}
    flat = tuple(stride for some in strides for stride in some)
    return runner.Step(kernel, grid, (*flat, *numbers), {**sizes, **precision(dtype), **align, **constants}, schedule)
