"""x + scale * part of tokens, with a scale for each channel: PyTorch's reads number by number where one is spread."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from vir.ops.triton.runner import Looks, Step, looks_of

NUMBERS = 4096  # of a program: four warps with 32 to a thread
LEAST_BLOCK, LARGEST_BLOCK = 16, 1024  # channels of a program, side by side


@triton.jit
def plus(  # type: ignore[no-untyped-def]
    x_ptr, part_ptr, scale_ptr, out_ptr, tokens, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    row, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places, ok = tl.cast(row, tl.int64)[:, None] * WIDTH + dims[None, :], (row < tokens)[:, None]
    x = tl.load(x_ptr + places, mask=ok, other=0.0).to(tl.float32)
    part = tl.load(part_ptr + places, mask=ok, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + dims).to(tl.float32)
    tl.store(out_ptr + places, (x + scale[None, :] * part).to(out_ptr.dtype.element_ty), mask=ok)


def serves(width: int) -> bool:
    """Whether blocks of two to some power fill so many channels."""
    return width % LEAST_BLOCK == 0


def scaled_sum(x: Tensor, part: Tensor, scale: Tensor) -> Tensor:
    """Of numbers of one dtype; without gradients."""
    x, part, scale = x.contiguous(), part.contiguous(), scale.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _plan(x.shape, x.device, looks_of(x, part, scale)).run(x, part, scale, out)
    return out


@lru_cache(maxsize=4096)
def _plan(shape: torch.Size, device: torch.device, looks: Looks) -> Step:
    """One for each look of the tensors, as a step asks for."""
    tokens, width = shape[:-1].numel(), shape[-1]
    block = min(width & -width, LARGEST_BLOCK)  # the largest power of two that divides the width
    rows = NUMBERS // block
    constants = {"WIDTH": width, "BLOCK": block, "ROWS": rows}
    return Step(plus, (-(-tokens // rows), width // block), (tokens,), constants, (4, 1, None))
