"""A LayerNorm folded into the linear layer after it, and into the sum after that: x + scale * linear(norm(rows)).

What is subtracted from each row, and the norm's weights, go into the weights of the layer, so that it takes the rows as
they are; 1 / deviation of each row comes in with the sum, and what a row's mean meets in weights that are rounded goes
out there. That reads the rows once more, and spares to write and read all that a norm would make.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from vir.ops.triton.norm import NUMBERS, blocks, centre
from vir.ops.triton.runner import Looks, Step, looks_of


@triton.jit
def fold(  # type: ignore[no-untyped-def]
    weight_ptr, bias_ptr, norm_weight_ptr, norm_bias_ptr, scale_ptr, folded_ptr, sums_ptr, outputs,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Weights whose rows have no mean take none from what they meet: (x - mean(x)) W = x (W - mean(W)). For each output
    two sums: what it is at least, and what rounding leaves of that mean."""
    row, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    known, there = dims < WIDTH, row < outputs
    places, ok = tl.cast(row, tl.int64)[:, None] * WIDTH + dims[None, :], there[:, None] & known[None, :]
    weight = tl.load(weight_ptr + places, mask=ok, other=0.0).to(tl.float32)
    of_norm = tl.load(norm_weight_ptr + dims, mask=known, other=0.0).to(tl.float32)
    of_zero = tl.load(norm_bias_ptr + dims, mask=known, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + row, mask=there, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + row, mask=there, other=0.0).to(tl.float32)
    centred, _, _ = centre(weight * of_norm[None, :], known, WIDTH)
    folded = (centred * scale[:, None]).to(folded_ptr.dtype.element_ty)
    tl.store(folded_ptr + places, folded, mask=ok)
    tl.store(sums_ptr + row, (tl.sum(weight * of_zero[None, :], 1) + bias) * scale, mask=there)
    tl.store(sums_ptr + outputs + row, tl.sum(folded.to(tl.float32), 1), mask=there)


@triton.jit
def plus_rescaled(  # type: ignore[no-untyped-def]
    x_ptr, part_ptr, rows_ptr, sums_ptr, out_ptr, tokens, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """x + what part is without the means of rows / deviation of rows + what it is at least."""
    row, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    known = dims < WIDTH
    ok = (row < tokens)[:, None] & known[None, :]
    places = tl.cast(row, tl.int64)[:, None] * WIDTH + dims[None, :]
    rows = tl.load(rows_ptr + places, mask=ok, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + places, mask=ok, other=0.0).to(tl.float32)
    part = tl.load(part_ptr + places, mask=ok, other=0.0).to(tl.float32)
    shift = tl.load(sums_ptr + dims, mask=known, other=0.0)
    left = tl.load(sums_ptr + WIDTH + dims, mask=known, other=0.0)
    _, variance, mean = centre(rows, known, WIDTH)
    part -= mean[:, None] * left[None, :]
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
    folded, sums = torch.empty_like(weights[0]), torch.empty(2, len(bias), device=x.device, dtype=torch.float32)
    looks = looks_of(*weights[:3]), looks_of(*weights[2:])
    _plan_of_weights(weight.shape, x.device, looks).run(*weights, folded, sums)
    part, out = F.linear(rows, folded), torch.empty_like(x)
    if x.numel():
        _plan(x.shape, eps, x.device, looks_of(x, part, rows)).run(x, part, rows, sums, out)
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
