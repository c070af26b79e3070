"""What one query of a trained layer retains from every patch: scale (q . k) decay, for that query alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from vir.layers.patches import Grid
from vir.layers.retention import Retention
from vir.ops.checks import accumulator
from vir.viz.fading import Query, check_query, fading, token_of
from vir.viz.inside import Layer

CHUNK = 16_384  # keys at a time


@dataclass(frozen=True)
class Retained:
    """Of one layer and one query."""

    layer: Layer
    query: Query
    weights: Tensor  # h rows cols, signed
    own: Tensor | None  # h: what the class token retains of itself, which stands on no patch

    @property
    def mean(self) -> Tensor:
        """Over the heads."""
        return self.weights.mean(0)  # rows cols


def weights(
    q: Tensor, k: Tensor, gamma: Tensor, grid: Grid, query: Query, retention: Retention, scale: float
) -> Tensor:
    """scale (q . k) decay of one query `h d` over the keys of all patches `n h d`, some thousand of them at a time."""
    dtype = accumulator(k.dtype)
    q = scale * q.to(dtype)
    scores = torch.cat([torch.einsum("hd,nhd->hn", q, part.to(dtype)) for part in k.split(CHUNK)], dim=1)
    return scores.unflatten(1, grid) * fading(gamma.to(dtype), grid, query, retention)  # h rows cols


def same_place(query: Query, asked_in: Grid, grid: Grid) -> Query:
    """A query of one grid in another of the same image: of a patch its lower right part, which sees all of it."""
    if query == "class":
        return "class"
    (row, col), (rows, cols) = query, asked_in
    return ceil((row + 1) * grid[0] / rows) - 1, ceil((col + 1) * grid[1] / cols) - 1


@torch.inference_mode()
def retained(model: nn.Module, pixels: Tensor, layers: Sequence[Layer], query: Query | None = None) -> list[Retained]:
    """What the query retains in each of the layers, on the image `1 3 height width`.

    A patch is counted in the grid of the last of the layers; in a finer grid its lower right part looks, which sees all
    of it. By default the class token looks, or the last patch where there is none.
    """
    last = layers[-1].grid(*pixels.shape[-2:])
    if query not in (None, "class"):
        check_query(query, last, class_token=True)
    found: list[Retained] = []
    hooks = []
    for layer in layers:
        look = _Look(layer, query, last, found)
        hooks.append(layer.module.register_forward_pre_hook(look.remember_grid, with_kwargs=True))
        hooks.append(layer.module.qkv.register_forward_hook(look))
    try:
        model(pixels)
    finally:
        for hook in hooks:
            hook.remove()
    return found


class _Look:
    """Hooks on one layer: they take its q and k while these are there, and keep the weights of one query."""

    def __init__(self, layer: Layer, query: Query | None, asked_in: Grid, found: list[Retained]) -> None:
        self.layer, self.query, self.asked_in, self.found = layer, query, asked_in, found
        self.grid: Grid = (0, 0)

    def remember_grid(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.grid = kwargs["grid"] if "grid" in kwargs else args[1]

    def __call__(self, module: nn.Module, args: tuple, qkv: Tensor) -> None:
        heads, n = self.layer.module.heads, self.grid[0] * self.grid[1]
        q, k, _ = qkv[0].unflatten(-1, (3, heads, -1)).unbind(1)  # n h d
        class_token = len(k) > n
        query = self._here(class_token)
        at, scale = (
            token_of(query, self.grid),
            q.shape[-1] ** -0.5,
        )  # of the query or of the key: the product is the same
        gamma = self.layer.gamma.to(k.device)
        seen = weights(q[at], k[:n], gamma, self.grid, query, self.layer.module.retention, scale)
        own = scale * (q[at].to(seen.dtype) * k[at].to(seen.dtype)).sum(-1).cpu() if query == "class" else None
        self.found.append(Retained(self.layer, query, seen.cpu(), own))

    def _here(self, class_token: bool) -> Query:
        """The query in this layer's grid."""
        if self.query is None:
            return "class" if class_token else (self.grid[0] - 1, self.grid[1] - 1)
        check_query(self.query, self.asked_in, class_token)
        return same_place(self.query, self.asked_in, self.grid)
