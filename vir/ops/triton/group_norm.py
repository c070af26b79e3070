"""GroupNorm of many small maps that lie channels last, as convolutions like them: a program takes some groups whole.

PyTorch's turns each map round before and leaves the next convolution to turn it back.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from vir.ops.triton.runner import Looks, Step, looks_of

NUMBERS = 2**12  # of a program: four warps with 32 to a thread
LARGEST_GROUP = 2**13  # numbers, filled up to a power of two: more do not fit into registers


@triton.jit
def mean_of_groups(x, count, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of sums over places, one for each channel: the mean of its group, again for each channel."""
    sums = tl.sum(tl.reshape(x, (x.shape[0] // GROUP, GROUP)), 1)
    return tl.reshape(tl.broadcast_to((sums / count)[:, None], (x.shape[0] // GROUP, GROUP)), (x.shape[0],))


@triton.jit
def group_norm_of_maps(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, out_ptr, eps,
    PLACES: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place, dims = tl.arange(0, ROWS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = dims < CHANNELS
    ok = (place < PLACES)[:, None] & known[None, :]
    places = tl.cast(tl.program_id(0), tl.int64) * (PLACES * CHANNELS) + place[:, None] * CHANNELS + dims[None, :]
    x = tl.load(x_ptr + places, mask=ok, other=0.0).to(tl.float32)
    mean = mean_of_groups(tl.sum(x, 0), PLACES * GROUP, GROUP)
    centred = tl.where(ok, x - mean[None, :], 0.0)
    variance = mean_of_groups(tl.sum(centred * centred, 0), PLACES * GROUP, GROUP)
    weight = tl.load(weight_ptr + dims, mask=known, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + dims, mask=known, other=0.0).to(tl.float32)
    out = centred * (tl.rsqrt(variance + eps) * weight)[None, :] + bias[None, :]
    tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=ok)


def serves(channels: int, places: int, groups: int) -> bool:
    """Groups are split off by reshaping, which knows powers of two."""
    group = channels // groups
    return group & (group - 1) == 0 and group * triton.next_power_of_2(places) <= LARGEST_GROUP


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    """Of maps `m c y x`, in float32 inside; without gradients."""
    x = x.contiguous(memory_format=torch.channels_last)
    out = torch.empty_like(x, memory_format=torch.channels_last)
    if x.numel():
        _plan(x.shape, groups, eps, x.device, looks_of(x, weight, bias)).run(x, weight, bias, out)
    return out


@lru_cache(maxsize=4096)
def _plan(shape: torch.Size, groups: int, eps: float, device: torch.device, looks: Looks) -> Step:
    """One for each look of the tensors, as a step asks for."""
    maps, channels, places = shape[0], shape[1], shape[2] * shape[3]
    rows, group = triton.next_power_of_2(places), channels // groups
    block = min(triton.next_power_of_2(channels), max(group, NUMBERS // rows))
    constants = {"PLACES": places, "CHANNELS": channels, "GROUP": group, "ROWS": rows, "BLOCK": block}
    return Step(group_norm_of_maps, (maps, -(-channels // block)), (eps,), constants, (4, 1, None))
