"""Decay masks and the receptive field of a patch, 1D and 2D side by side: the paper's figures 1b and 6."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vir.layers.patches import Grid
from vir.layers.retention import Retention
from vir.ops.decay import mask_1d, mask_2d
from vir.viz.fading import KINDS, Query, check_query, fading, token_of
from vir.viz.style import SEEN, VERMILION, CannotDraw, bare, caption, figure_to

MOST_TOKENS = 4096  # of a mask that can be drawn: it has a pixel for each pair of them
FEW_CELLS = 24  # of a side: beyond these, lines between the cells would hide them


def draw_masks(file: Path, grid: Grid, query: Query, gamma: float, class_token: bool = True) -> None:
    """For 1D and 2D: what the query sees on the grid, and the mask of all queries with its row marked."""
    if min(grid) < 1:
        raise CannotDraw(f"the grid has {grid[0]} x {grid[1]} patches, expected at least 1 x 1.")
    if not 0 <= gamma <= 1:
        raise CannotDraw(f"gamma={gamma}, expected a number from 0 (forgets at once) to 1 (never forgets).")
    tokens = grid[0] * grid[1] + class_token
    if tokens > MOST_TOKENS:
        raise CannotDraw(f"a mask of {tokens} tokens, expected at most {MOST_TOKENS} to draw: take a smaller grid.")
    check_query(query, grid, class_token)
    higher = min(2.0, max(1.0, (grid[0] + class_token) / (grid[1] + 1)))
    with figure_to(file, 12, 1.2 + 2.5 * higher) as figure:
        panels = figure.subplots(1, 4)
        picture: Any = None
        for number, kind in enumerate(KINDS):
            field, mask = panels[2 * number : 2 * number + 2]
            picture = _field(field, grid, query, gamma, kind, class_token)
            _mask(mask, grid, query, gamma, kind, class_token)
        bar = figure.colorbar(picture, ax=list(panels), shrink=0.75, pad=0.01)
        bar.set_label("decay")
        bar.outline.set_visible(False)
        _words(figure, grid, query, gamma, class_token)


def _field(panel: Any, grid: Grid, query: Query, gamma: float, kind: Retention, class_token: bool) -> Any:
    rows, cols = grid
    seen = fading(torch.tensor([gamma], dtype=torch.float64), grid, query, kind)[0].numpy()
    token = token_of(query, grid)
    # A patch seen with a weight of zero, since it is too far, is still seen.
    unseen = np.ones(grid, bool)
    if kind == "1d":
        unseen.reshape(-1)[: token + 1] = False
    else:
        row, col = (rows, cols - 1) if query == "class" else query
        unseen[: row + 1, : col + 1] = False
    picture = panel.imshow(np.ma.masked_array(seen, unseen), SEEN, vmin=0, vmax=1, interpolation="nearest")
    if max(grid) <= FEW_CELLS:
        panel.hlines(np.arange(rows + 1) - 0.5, -0.5, cols - 0.5, color="white", linewidth=0.8)
        panel.vlines(np.arange(cols + 1) - 0.5, -0.5, rows - 0.5, color="white", linewidth=0.8)
    if class_token:
        x, y = (0, rows) if kind == "1d" else (cols - 1, rows)  # after the last patch, or below it
        face = SEEN(1.0) if query == "class" else SEEN.get_bad()
        panel.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=face, edgecolor="#888888", linewidth=0.8))
        at, align = (x + 0.8, "left") if kind == "1d" and cols > 1 else (x - 0.8, "right")
        panel.text(at, y, "class token", ha=align, va="center", fontsize=9, color="#444444")
        place = (x, y) if query == "class" else (query[1], query[0])
        panel.set_ylim(rows + 0.6, -0.6)
    else:
        place = (query[1], query[0])  # type: ignore[assignment]
        panel.set_ylim(rows - 0.4, -0.6)
    panel.set_xlim(-0.6, cols - 0.4)
    panel.add_patch(
        Rectangle(
            (place[0] - 0.5, place[1] - 0.5), 1, 1, facecolor="none", edgecolor=VERMILION, linewidth=2.5, zorder=5
        )
    )
    bare(panel)
    panel.set_title(f"{kind.upper()}: what it sees")
    return picture


def _mask(panel: Any, grid: Grid, query: Query, gamma: float, kind: Retention, class_token: bool) -> None:
    gammas, n = torch.tensor([gamma], dtype=torch.float64), grid[0] * grid[1]
    if kind == "1d":
        mask, seen = mask_1d(gammas, n + class_token), mask_1d(torch.ones(1), n + class_token)
    else:
        mask, seen = mask_2d(gammas, grid, class_token), mask_2d(torch.ones(1), grid, class_token)
    panel.imshow(np.ma.masked_array(mask[0].numpy(), seen[0].numpy() == 0), SEEN, vmin=0, vmax=1)
    bare(panel)
    token, last = token_of(query, grid), n + class_token
    panel.annotate(
        "", (-0.5, token), (-0.5 - 0.06 * last, token), annotation_clip=False,
        arrowprops={"arrowstyle": "-|>", "color": VERMILION, "linewidth": 2, "shrinkA": 0, "shrinkB": 0},
    )  # fmt: skip
    panel.set(title=f"{kind.upper()}: mask, {last} x {last}", xlabel="key", ylabel="query")
    panel.yaxis.labelpad = 10


def _words(figure: Figure, grid: Grid, query: Query, gamma: float, class_token: bool) -> None:
    who = "the class token" if query == "class" else f"the patch in row {query[0]}, column {query[1]}"
    caption(
        figure,
        f"Decay from {who} (framed) to every patch of a grid of {grid[0]} x {grid[1]}, gamma = {gamma:.4f}. "
        "Grey is never seen. In 1D a step up is a whole row of steps; in 2D it is one step, as is one to the left.",
    )
