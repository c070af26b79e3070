"""What one query of timm's ViT attends to: softmax of scale (q . k) over all tokens, for that query alone."""

from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from timm.layers import Attention
from timm.models import VisionTransformer
from torch import Tensor, nn

from vir.checkpoint import Card
from vir.layers.patches import Grid
from vir.ops.checks import accumulator
from vir.viz.fading import Query, check_query, token_of
from vir.viz.inside import check_classifier
from vir.viz.retained import same_place
from vir.viz.style import CannotDraw


@dataclass(frozen=True)
class Attended:
    """Of one layer and one query."""

    number: int  # of the layer, from 0
    query: Query
    weights: Tensor  # h rows cols, none below 0
    own: Tensor  # h: what goes to the class token and to registers, which stand on no patch

    @property
    def mean(self) -> Tensor:
        """Over the heads."""
        return self.weights.mean(0)  # rows cols


def check_vit(model: nn.Module, card: Card) -> VisionTransformer:
    """The model, if it is a classifier whose attention can be looked into."""
    check_classifier(card)
    if not isinstance(model, VisionTransformer):
        what = f"is a {type(model).__name__}"
    elif not all(isinstance(getattr(block, "attn", None), Attention) for block in model.blocks):
        what = "has blocks without the attention of a plain ViT"
    else:
        return model
    raise CannotDraw(
        f"{card.model} {what}, expected timm's VisionTransformer with attn.qkv in each of its blocks. Give the "
        "checkpoint of one, such as vir train --model vit_tiny_patch16_224 writes."
    )


def same_depth(number: int, layers: int, blocks: int) -> int:
    """The block of a ViT that ends after the same share of its depth as this layer: the last for the last."""
    return ceil((number + 1) * blocks / layers) - 1


def weights(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """softmax of scale (q . k) of one query `h d` over the keys of all tokens `n h d`."""
    dtype = accumulator(k.dtype)
    return torch.einsum("hd,nhd->hn", scale * q.to(dtype), k.to(dtype)).softmax(-1)  # h n


@torch.inference_mode()
def attended(
    model: VisionTransformer,
    pixels: Tensor,
    number: int = -1,
    query: Query | None = None,
    asked_in: Grid | None = None,
) -> Attended:
    """What the query attends to in one layer, on the image `1 3 height width`.

    A patch is counted in the grid `asked_in`, that of the ViT by default. By default the class token looks, or the last
    patch where there is none.
    """
    height, width = pixels.shape[-2:]
    grid: Grid = model.patch_embed.dynamic_feat_size((height, width))
    if query is None:
        query = "class" if model.has_class_token else (grid[0] - 1, grid[1] - 1)
    check_query(query, asked_in or grid, model.has_class_token)
    query = same_place(query, asked_in or grid, grid)
    number %= len(model.blocks)
    attention: Any = model.blocks[number].attn
    prefix = model.num_prefix_tokens
    at = 0 if query == "class" else prefix + token_of(query, grid)  # the class token comes first, then registers
    found: list[Tensor] = []

    def look(module: nn.Module, args: tuple, qkv: Tensor) -> None:
        q, k, _ = qkv[0].unflatten(-1, (3, attention.num_heads, -1)).unbind(1)  # n h d
        found.append(weights(attention.q_norm(q[at]), attention.k_norm(k), attention.scale).cpu())

    hook = attention.qkv.register_forward_hook(look)
    try:
        model(pixels)
    finally:
        hook.remove()
    seen = found[0]
    return Attended(number, query, seen[:, prefix:].unflatten(1, grid), seen[:, :prefix].sum(-1))
