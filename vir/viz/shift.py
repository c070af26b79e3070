"""1D against 2D under shifts of the content: the change of every patch as a picture, and of all as numbers."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

from vir.checkpoint import Card
from vir.layers.retention import Retention
from vir.viz.equivariance import MOVES, Change, Move, change, check_shift, qkv_of
from vir.viz.fading import KINDS
from vir.viz.inside import (
    Layer,
    check_classifier,
    check_side,
    chosen,
    device_of,
    pixels_of,
    retention_layers,
    whole,
)
from vir.viz.style import COLOUR_OF, SEEN, bare, caption, check_file, figure_to

TITLES: dict[Move, str] = {
    "right": "content moved right",
    "down": "content moved down",
    "wider": "columns added on the right",
    "window": "window moved right",
}
MARKERS: dict[Retention, dict[str, Any]] = {  # both can be seen where they are at the same place
    "1d": {"marker": "o", "markersize": 9, "fillstyle": "none"},
    "2d": {"marker": "s", "markersize": 4},
}
Changes = dict[Move, dict[Retention, list[Change]]]  # for shifts by 0, 1, 2, ...
DRAWN_SIDE = 480  # pixels
EXACT = 1e-12


def draw_shifts(
    file: Path, model: nn.Module, card: Card, image: Image.Image, *, layer: int = -1, size: int = 448, by: int = 3
) -> Changes:
    """Draw the change of every patch at a shift to the right, and of all patches against shifts of four kinds."""
    check_file(file)
    check_classifier(card)
    layers = retention_layers(model)
    (one,) = chosen(layers, [layer])
    fitted = whole(image, size, check_side(size, layers))
    qkv = qkv_of(model, pixels_of(fitted, card).to(device_of(model)), one)
    most = check_shift(by, (qkv[0].shape[0], qkv[0].shape[1]), least=1)
    changes: Changes = {
        move: {kind: [change(qkv, one.gamma, kind, move, step) for step in range(most + 1)] for kind in KINDS}
        for move in MOVES
    }
    with figure_to(file, 12, 6) as figure:
        panels = figure.subplots(2, 4, height_ratios=[1, 1.1])
        _pictures(figure, panels[0], fitted, changes, one, by)
        _curves(panels[1], changes)
        _words(figure, card.model, one)
    return changes


def _pictures(figure: Figure, line: Any, image: Image.Image, changes: Changes, layer: Layer, by: int) -> None:
    small = image.copy()
    small.thumbnail((DRAWN_SIDE, DRAWN_SIDE))
    moved = Image.new("RGB", small.size, "#F2F2F2")
    moved.paste(small, (round(by * layer.stride * small.width / image.width), 0))
    for panel, picture, title in zip(line, (small, moved), ("photograph", f"moved by {by} patches"), strict=False):
        panel.imshow(picture)
        panel.set_title(title)
        bare(panel)
    found = {kind: 100 * changes["right"][kind][by].patches.numpy() for kind in KINDS}
    most = max(float(patches.max()) for patches in found.values()) or 1.0
    shown: Any = None
    for panel, kind in zip(line[2:], KINDS, strict=True):
        lost = np.full((found[kind].shape[0], by), np.nan)
        shown = panel.imshow(np.hstack([lost, found[kind]]), SEEN, vmin=0, vmax=most, interpolation="nearest")
        panel.set_title(f"{kind.upper()}: {_in_words(changes['right'][kind][by].relative)}")
        bare(panel)
    bar = figure.colorbar(shown, ax=list(line[2:]), shrink=0.6, pad=0.02)
    bar.set_label("% of a patch")
    bar.outline.set_visible(False)


def _curves(line: Any, changes: Changes) -> None:
    highest = max(one.relative for kinds in changes.values() for steps in kinds.values() for one in steps)
    for panel, (move, kinds) in zip(line, changes.items(), strict=True):
        for kind, steps in kinds.items():
            values = [100 * step.relative for step in steps]
            panel.plot(range(len(steps)), values, color=COLOUR_OF[kind], **MARKERS[kind], label=kind.upper())
        panel.set(title=TITLES[move], xlabel="patches", ylim=(-4 * highest, 108 * highest or 1))
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(True)
    line[0].set_ylabel("features change by, %")
    line[0].legend()


def _in_words(relative: float) -> str:
    """Rounding in float64 is no change."""
    return "no change" if relative < EXACT else f"changes by {relative:.1%}"


def _words(figure: Figure, model: str, layer: Layer) -> None:
    caption(
        figure,
        f"Sums of retention in layer {layer.number} of {model} (a {layer.module.retention.upper()} model), by 1D and "
        "2D on the same q, k, v of the photograph, moved by whole patches on an empty ground: ||after - before|| / "
        "||before|| over the patches that stay. A 2D patch sees only what moves along with it, above and to its left; "
        "a 1D patch loses what leaves over the right edge, and on a wider grid a row is more steps. Moved down, both "
        "are exact. A window that moves over the photograph leaves some behind: there both change.",
    )
