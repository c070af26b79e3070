"""LayerNorm of tokens and its gradients, several tokens to a program: PyTorch's has one, which a few hundred channels
do not fill."""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vir.ops.triton.operators import differentiable
from vir.ops.triton.runner import Looks, Step, looks_of
from vir.ops.triton.settings import processors

NUMBERS = 2048  # of a program: two warps with 32 to a thread
NUMBERS_BACK = 4096  # of its gradients, which take all registers of a multiprocessor with two programs
PROGRAMS_BACK = 2  # each leaves a sum to be added up


@triton.jit
def centre(x, known, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows less their means, their variances, by two sums, since a large mean would hide the variance from one, and
    their means."""
    mean = tl.sum(x, 1) / WIDTH
    centred = tl.where(known[None, :], x - mean[:, None], 0.0)
    return centred, tl.sum(centred * centred, 1) / WIDTH, mean


@triton.jit
def norm(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, out_ptr, tokens, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    row, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    known = dims < WIDTH
    ok = (row < tokens)[:, None] & known[None, :]
    places = tl.cast(row, tl.int64)[:, None] * WIDTH + dims[None, :]
    x = tl.load(x_ptr + places, mask=ok, other=0.0).to(tl.float32)
    centred, variance, _ = centre(x, known, WIDTH)
    weight = tl.load(weight_ptr + dims, mask=known, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + dims, mask=known, other=0.0).to(tl.float32)
    out = centred * tl.rsqrt(variance + eps)[:, None] * weight[None, :] + bias[None, :]
    tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def norm_back(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, grad_ptr, dx_ptr, sums_ptr, tokens, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of x, and this program's part of those of weight and bias: two rows of `sums`.

    What the forward pass knew of x is made again: x has to be read anyway.
    """
    dims = tl.arange(0, BLOCK)
    known = dims < WIDTH
    weight = tl.load(weight_ptr + dims, mask=known, other=0.0).to(tl.float32)
    dweight, dbias = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, tokens, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        ok = (row < tokens)[:, None] & known[None, :]
        places = tl.cast(row, tl.int64)[:, None] * WIDTH + dims[None, :]
        x = tl.load(x_ptr + places, mask=ok, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + places, mask=ok, other=0.0).to(tl.float32)
        centred, variance, _ = centre(x, known, WIDTH)
        shrink = tl.rsqrt(variance + eps)[:, None]
        normed = centred * shrink
        dweight += grad * normed
        dbias += grad
        pull = grad * weight[None, :]
        along = tl.sum(pull * normed, 1) / WIDTH
        dx = shrink * (pull - (tl.sum(pull, 1) / WIDTH)[:, None] - normed * along[:, None])
        tl.store(dx_ptr + places, dx.to(dx_ptr.dtype.element_ty), mask=ok)
    sums_ptr += tl.program_id(0) * 2 * WIDTH + dims
    tl.store(sums_ptr, tl.sum(dweight, 0), mask=known)
    tl.store(sums_ptr + WIDTH, tl.sum(dbias, 0), mask=known)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Of the last axis, in float32 inside; without gradients."""
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    out = torch.empty_like(x, dtype=dtype)
    if x.numel():
        _plan(x.shape, eps, x.device, dtype, looks_of(x, weight, bias)).run(x, weight, bias, out)
    return out


def layer_norm_back(x: Tensor, weight: Tensor, grad: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias. Their sums are added up in one order: the same bits every time."""
    x, weight, grad = x.contiguous(), weight.contiguous(), grad.contiguous()
    width = x.shape[-1]
    if not x.numel():
        return torch.zeros_like(x), torch.zeros_like(weight), torch.zeros_like(weight)
    step = _plan_back(x.shape, eps, x.device, looks_of(x, weight, grad))
    dx, sums = torch.empty_like(x), torch.empty(step.grid[0], 2, width, device=x.device, dtype=torch.float32)
    step.run(x, weight, grad, dx, sums)
    dweight, dbias = sums.sum(0).to(weight.dtype)
    return dx, dweight, dbias


def blocks(width: int, numbers: int, least_warps: int) -> tuple[dict[str, int], int]:
    """The constants of a kernel, and how many warps it takes: rows of more numbers get more of them."""
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "BLOCK": block, "ROWS": max(1, numbers // block)}, min(16, max(least_warps, block // 512))


@lru_cache(maxsize=4096)
def _plan(shape: torch.Size, eps: float, device: torch.device, dtype: torch.dtype, looks: Looks) -> Step:
    """One for each look of the tensors, as a step asks for."""
    tokens, width = shape[:-1].numel(), shape[-1]
    constants, warps = blocks(width, NUMBERS, 2)
    return Step(norm, (-(-tokens // constants["ROWS"]), 1), (tokens, eps), constants, (warps, 1, None))


@lru_cache(maxsize=4096)
def _plan_back(shape: torch.Size, eps: float, device: torch.device, looks: Looks) -> Step:
    tokens, width = shape[:-1].numel(), shape[-1]
    constants, warps = blocks(width, NUMBERS_BACK, 4)
    constants["STAGES"] = 3 if constants["BLOCK"] <= NUMBERS_BACK else 1  # of loads: shared memory is small
    programs = min(-(-tokens // constants["ROWS"]), PROGRAMS_BACK * processors(device))
    return Step(norm_back, (programs, 1), (tokens, eps), constants, (warps, 1, None))


def _saves(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, _, ctx.eps, _ = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, grad: Tensor) -> tuple:
    x, weight = ctx.saved_tensors
    back = _back_in_pytorch if torch.is_grad_enabled() else layer_norm_back
    return *back(x, weight, grad, ctx.eps), None, None


def _back_in_pytorch(x: Tensor, weight: Tensor, grad: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """As `norm_back`, for whoever asks for gradients of gradients."""
    centred = x.float() - x.float().mean(-1, keepdim=True)
    shrink = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed, grad = centred * shrink, grad.float()
    pull = grad * weight
    dx = shrink * (pull - pull.mean(-1, keepdim=True) - normed * (pull * normed).mean(-1, keepdim=True))
    tokens = tuple(range(x.ndim - 1))
    return dx.to(x.dtype), (grad * normed).sum(tokens).to(weight.dtype), grad.sum(tokens).to(weight.dtype)


layer_norm_eager = differentiable(layer_norm, _saves, _gradients)
