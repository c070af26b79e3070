"""LayerNorm of the joined heads, several tokens to a program: PyTorch's has one, which a few hundred channels do not
fill."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from vir.ops.triton.runner import Step

NUMBERS = 2048  # of a program: four warps with sixteen to a thread


@triton.jit
def norm(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, out_ptr, tokens, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    row, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    known = dims < WIDTH
    ok = (row < tokens)[:, None] & known[None, :]
    places = tl.cast(row, tl.int64)[:, None] * WIDTH + dims[None, :]
    x = tl.load(x_ptr + places, mask=ok, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / WIDTH
    centred = tl.where(known[None, :], x - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, 1) / WIDTH
    weight = tl.load(weight_ptr + dims, mask=known, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + dims, mask=known, other=0.0).to(tl.float32)
    out = centred * tl.rsqrt(variance + eps)[:, None] * weight[None, :] + bias[None, :]
    tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=ok)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Of the last axis, in float32 inside; without gradients."""
    x = x.contiguous()
    width = x.shape[-1]
    look = x.dtype, weight.dtype, bias.dtype, dtype, x.data_ptr() % 16, weight.data_ptr() % 16, bias.data_ptr() % 16
    out = torch.empty(x.shape, device=x.device, dtype=dtype)
    if x.numel():
        _plan(x.numel() // width, width, eps, x.device, look).run(x, weight, bias, out)
    return out


@lru_cache(maxsize=4096)
def _plan(tokens: int, width: int, eps: float, device: torch.device, look: tuple) -> Step:
    """One for each look of the tensors, as a step asks for."""
    block = triton.next_power_of_2(width)
    rows = max(1, NUMBERS // block)
    constants = {"WIDTH": width, "BLOCK": block, "ROWS": rows}
    return Step(norm, (-(-tokens // rows), 1), (tokens, eps), constants, (4, 1, None))
