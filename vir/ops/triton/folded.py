"""A LayerNorm folded into the linear layer after it, and into the sum after that: x + scale * linear(norm(rows)).

What is subtracted from each row, and the norm's weights, go into the weights of the layer, so that it takes the rows as
they are; 1 / deviation of each row comes in with the sum. That reads the rows once more, and spares to write and read
all that a norm would make.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from vir.ops.triton.norm import blocks, centre
from vir.ops.triton.runner import Looks, Step, looks_of

NUMBERS = 2048  # of a program: two warps with 32 to a thread


@triton.jit
def fold(  # type: ignore[no-untyped-def]
    weight_ptr, bias_ptr, norm_weight_ptr, norm_bias_ptr, scale_ptr, folded_ptr, shift_ptr, outputs,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Weights whose rows have no mean take none from what they meet: (x - mean(x)) W = x (W - mean(W))."""
    row, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    known, there = dims < WIDTH, row < outputs
    places, ok = row[:, None] * WIDTH + dims[None, :], there[:, None] & known[None, :]
    weight = tl.load(weight_ptr + places, mask=ok, other=0.0).to(tl.float32)
    of_norm = tl.load(norm_weight_ptr + dims, mask=known, other=0.0).to(tl.float32)
    of_zero = tl.load(norm_bias_ptr + dims, mask=known, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + row, mask=there, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + row, mask=there, other=0.0).to(tl.float32)
    folded, _ = centre(weight * of_norm[None, :], known, WIDTH)
    tl.store(folded_ptr + places, (folded * scale[:, None]).to(folded_ptr.dtype.element_ty), mask=ok)
    tl.store(shift_ptr + row, (tl.sum(weight * of_zero[None, :], 1) + bias) * scale, mask=there)


@triton.jit
def plus_rescaled(  # type: ignore[no-untyped-def]
    x_ptr, part_ptr, rows_ptr, shift_ptr, out_ptr, tokens, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """x + part / deviation of rows + shift."""
    row, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    known = dims < WIDTH
    ok = (row < tokens)[:, None] & known[None, :]
    places = tl.cast(row, tl.int64)[:, None] * WIDTH + dims[None, :]
    rows = tl.load(rows_ptr + places, mask=ok, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + places, mask=ok, other=0.0).to(tl.float32)
    part = tl.load(part_ptr + places, mask=ok, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + dims, mask=known, other=0.0)
    _, variance = centre(rows, known, WIDTH)
    out = x + part * tl.rsqrt(variance + eps)[:, None] + shift[None, :]
    tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=ok)


def normed_sum(
    x: Tensor,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    scale: Tensor,
    eps: float,
) -> Tensor:
    """Of numbers of one dtype and as many channels everywhere; without gradients."""
    x, rows, *weights = (given.contiguous() for given in (x, rows, weight, bias, norm_weight, norm_bias, scale))
    folded, shift = torch.empty_like(weights[0]), torch.empty_like(bias, dtype=torch.float32)
    looks = looks_of(*weights[:3]), looks_of(*weights[2:])
    _plan_of_weights(weight.shape, x.device, looks).run(*weights, folded, shift)
    part, out = F.linear(rows, folded), torch.empty_like(x)
    if x.numel():
        _plan(x.shape, eps, x.device, looks_of(x, part, rows)).run(x, part, rows, shift, out)
    return out


@lru_cache(maxsize=4096)
def _plan_of_weights(shape: torch.Size, device: torch.device, looks: tuple[Looks, Looks]) -> Step:
    """One for each look of the tensors, as a step asks for."""
    outputs, width = shape
    constants, warps = blocks(width, NUMBERS, 2)
    return Step(fold, (-(-outputs // constants["ROWS"]), 1), (outputs,), constants, (warps, 1, None))


@lru_cache(maxsize=4096)
def _plan(shape: torch.Size, eps: float, device: torch.device, looks: Looks) -> Step:
    tokens, width = shape[:-1].numel(), shape[-1]
    constants, warps = blocks(width, NUMBERS, 2)
    return Step(plus_rescaled, (-(-tokens // constants["ROWS"]), 1), (tokens, eps), constants, (warps, 1, None))
