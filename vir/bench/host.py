"""What calls cost the host: python -m vir.bench.host prints a table of parts and one of models.

A call returns when its kernels are queued, long before they ran. The queue holds more of them than any call here has,
so that the time until it returns is the host's alone: Python, PyTorch and the driver. Where that is more than the
kernels take, a GPU waits. Microseconds, in bf16, without gradients.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.convnext import ConvNeXtBlock
from timm.models.vision_transformer import Block
from torch import Tensor

from vir import ops
from vir.bench import models
from vir.bench.limits import HIERARCHICAL
from vir.bench.measure import processor
from vir.layers.blocks import RetentionBlock
from vir.layers.patches import to_map
from vir.ops import kernels

REPEATS = 40
IN_A_ROW = 10  # of parts: less than the queue holds
HVIR = ("hvir_0", "hvir_1", "hvir_2")
PEERS = ("convnext_tiny", "swin_tiny_patch4_window7_224")


def microseconds(call: Callable[[], Any], in_a_row: int = 1) -> float:
    """Of one call until it returns, the GPU having nothing else to do: the least, as all that disturbs a host adds."""
    spent = []
    with torch.inference_mode():
        for _ in range(REPEATS):
            call()
            torch.cuda.synchronize()
            start = perf_counter()
            for _ in range(in_a_row):
                call()
            spent.append(perf_counter() - start)
    torch.cuda.synchronize()
    return 1e6 * min(spent) / in_a_row


def views(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.unbind(2)
    return q, k, v


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def of_parts() -> Iterator[str]:
    """Those of a block, as HViR-1 has it at 224 px, and beside them what PyTorch and timm have for the same."""
    batch, side, heads, dim = 128, 14, 8, 320
    grid = side, side
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    random = partial(torch.randn, **made)
    x, weights, weight, bias = random(batch, side * side, dim), random(dim, dim), random(dim), random(dim)
    qkv, gamma = random(batch, side * side, 3, heads, dim // heads), ops.decay(heads, device="cuda")
    large = random(32, 32 * 32, 3, heads, dim // heads)
    block = RetentionBlock(dim, heads, "2d", **made).eval()
    unmixed = models.ceiling(RetentionBlock(dim, heads, "2d", **made)).eval()
    vit = Block(dim, heads, qkv_bias=True, init_values=1e-5, **made).eval()
    convnext = ConvNeXtBlock(dim, **made).eval().to(memory_format=torch.channels_last)
    patches = to_map(x, grid)
    calls: dict[str, Callable[[], Tensor]] = {
        "linear layer, PyTorch": lambda: F.linear(x, weights, bias),
        "LayerNorm, PyTorch": lambda: F.layer_norm(x, (dim,), weight, bias),
        "LayerNorm, ours": lambda: kernels.layer_norm(x, weight, bias, 1e-6, x.dtype),
        "x + scale * part, PyTorch": lambda: torch.addcmul(x, x, weight),
        "x + scale * part, ours": lambda: kernels.scaled_sum(x, x, weight),
        "attention of q, k, v in one tensor, PyTorch": lambda: attention(*views(qkv.transpose(1, 3))),
        "retention of the same, 1D": lambda: ops.retention_1d(*views(qkv), gamma),
        "retention of the same, 2D": lambda: ops.retention_2d(*views(qkv), gamma, grid),
        "retention, 2D, 32 x 32, in boxes": lambda: ops.retention_2d(*views(large), gamma, (32, 32)),
        "a block of ours": lambda: block(x, grid),
        "a block without mixing": lambda: unmixed(x, grid),
        "a block of timm's ViT": lambda: vit(x),
        "a block of ConvNeXt": lambda: convnext(patches),
    }
    yield "| part | microseconds |\n| --- | --- |"
    for name, call in calls.items():
        yield f"| {name} | {microseconds(call, IN_A_ROW):.1f} |"


def of_models() -> Iterator[str]:
    yield "| model | px | batch | microseconds | without mixing |\n| --- | --- | --- | --- | --- |"
    for rows, cols, batch in HIERARCHICAL:
        makers = models.hierarchical_models(list(HVIR), list(PEERS), (rows, cols))
        spent = {}
        for name, make in makers.items():
            spent[name] = f"{microseconds(models.inference(make, (rows, cols), batch, 'eager')):,.0f}"
        for name in (*HVIR, *PEERS):
            yield f"| {name} | {rows} x {cols} | {batch} | {spent[name]} | {spent.get(f'{name} ceiling', '')} |"


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("python -m vir.bench.host measures the host of a CUDA GPU and finds none here.")
    print(f"{processor()}, {torch.cuda.get_device_name()}\n")
    for line in chain(of_parts(), [""], of_models()):
        print(line, flush=True)
