"""What changes when content moves by whole patches: one layer's retention, in 1D and in 2D, on the same q, k and v.

Norm, projection and MLP work on every patch by itself: what holds for the sums of retention holds for the layer.
Positions and the borders of convolutions are left out, since q, k and v are computed once and moved.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vir import ops
from vir.layers.patches import Grid
from vir.layers.retention import Retention
from vir.viz.inside import Layer
from vir.viz.style import CannotDraw

Move = Literal["right", "down", "wider", "window"]
Cut = tuple[slice, slice]  # rows, columns
ALL = slice(None)


@dataclass(frozen=True)
class Moved:
    """Tokens before and after, `rows cols h d`, and where in both the patches stand that are compared."""

    before: list[Tensor]
    after: list[Tensor]
    compared_before: Cut
    compared_after: Cut


def moved_right(qkv: list[Tensor], by: int) -> Moved:
    """On a ground that is empty elsewhere; what leaves over the right edge is lost."""
    cols = qkv[0].shape[1]
    after = [F.pad(x, (0, 0, 0, 0, by, 0))[:, :cols] for x in qkv]
    return Moved(qkv, after, (ALL, slice(0, cols - by)), (ALL, slice(by, cols)))


def moved_down(qkv: list[Tensor], by: int) -> Moved:
    """On a ground that is empty elsewhere; what leaves over the lower edge is lost."""
    rows = qkv[0].shape[0]
    after = [F.pad(x, (0, 0, 0, 0, 0, 0, by, 0))[:rows] for x in qkv]
    return Moved(qkv, after, (slice(0, rows - by), ALL), (slice(by, rows), ALL))


def on_wider_grid(qkv: list[Tensor], by: int) -> Moved:
    """At the same place of a ground that is wider by empty columns on the right."""
    cols = qkv[0].shape[1]
    after = [F.pad(x, (0, 0, 0, 0, 0, by)) for x in qkv]
    return Moved(qkv, after, (ALL, ALL), (ALL, slice(0, cols)))


def in_moved_window(qkv: list[Tensor], by: int) -> Moved:
    """Seen through a window of two thirds of the columns that moves right: it leaves behind what lies to the left."""
    width = qkv[0].shape[1] - most_shift(qkv[0].shape[1])
    before, after = [x[:, :width] for x in qkv], [x[:, by : by + width] for x in qkv]
    return Moved(before, after, (ALL, slice(by, width)), (ALL, slice(0, width - by)))


MOVES: dict[Move, Callable[[list[Tensor], int], Moved]] = {
    "right": moved_right,
    "down": moved_down,
    "wider": on_wider_grid,
    "window": in_moved_window,
}


def most_shift(side: int) -> int:
    """A third of the patches of a side."""
    return side // 3


def check_shift(by: int, grid: Grid, least: int = 0) -> int:
    """The largest shift on a grid, if this one is not larger."""
    most = min(most_shift(side) for side in grid)
    if most < least:
        raise CannotDraw(
            f"a grid of {grid[0]} x {grid[1]} patches, expected at least {3 * least} of a side: content moves by up to "
            "a third of it. Take a larger size."
        )
    if not least <= by <= most:
        raise CannotDraw(
            f"a shift by {by} patches, expected {least} to {most}, a third of a side of {grid[0]} x {grid[1]} patches. "
            "Take another shift, or a larger size."
        )
    return most


@dataclass(frozen=True)
class Change:
    """How much the output of retention differs on the patches that are compared."""

    relative: float  # ||after - before|| / ||before||, over all of them
    patches: Tensor  # rows cols: the same of each, over the root mean square of ||before||


def change(qkv: list[Tensor], gamma: Tensor, retention: Retention, move: Move, by: int) -> Change:
    """Of one layer, in float64: what is left of an exact equality is rounding."""
    check_shift(by, (qkv[0].shape[0], qkv[0].shape[1]))
    moved = MOVES[move]([x.double() for x in qkv], by)
    before = _retention(moved.before, gamma.double(), retention)[moved.compared_before]
    after = _retention(moved.after, gamma.double(), retention)[moved.compared_after]
    difference, norms = (after - before).flatten(2).norm(dim=2), before.flatten(2).norm(dim=2)
    return Change(float(difference.norm() / norms.norm()), difference / norms.square().mean().sqrt())


def _retention(qkv: list[Tensor], gamma: Tensor, retention: Retention) -> Tensor:
    rows, cols = qkv[0].shape[:2]
    q, k, v = (x.flatten(0, 1)[None] for x in qkv)
    out = ops.retention_1d(q, k, v, gamma) if retention == "1d" else ops.retention_2d(q, k, v, gamma, (rows, cols))
    return out[0].unflatten(0, (rows, cols))  # rows cols h d


@torch.inference_mode()
def qkv_of(model: nn.Module, pixels: Tensor, layer: Layer) -> list[Tensor]:
    """q, k and v of one layer for every patch of an image, `rows cols h d`; a class token is left out."""
    kept: list[Tensor] = []
    hook = layer.module.qkv.register_forward_hook(lambda module, args, out: kept.append(out))
    try:
        model(pixels)
    finally:
        hook.remove()
    rows, cols = layer.grid(*pixels.shape[-2:])
    tokens = kept[0][0, : rows * cols].unflatten(-1, (3, layer.module.heads, -1))
    return [x.unflatten(0, (rows, cols)).cpu() for x in tokens.unbind(1)]
