"""Retention maps laid over the photograph: what a query retains from every patch, head by head, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from PIL import Image
from torch import Tensor, nn

from vir.checkpoint import Card
from vir.layers.patches import Grid
from vir.viz.attention import Attended, attended, check_vit, same_depth
from vir.viz.fading import Query
from vir.viz.inside import check_classifier, check_side, chosen, device_of, pixels_of, retention_layers, whole
from vir.viz.retained import Retained, retained
from vir.viz.style import SIGNED, VERMILION, CannotDraw, bare, caption, check_file, figure_to

MOST_COLUMNS = 5
DRAWN_SIDE = 640  # pixels of the photograph under a map: more would only make the file larger
GREY = 0.75  # of the photograph under a map: colours must be those of the map
INCHES = 2.3


@dataclass(frozen=True)
class Beside:
    """Attention to the same photograph, for comparison."""

    attended: Attended
    image: Image.Image  # as the ViT got it
    model: str


def draw_maps(
    file: Path,
    model: nn.Module,
    card: Card,
    image: Image.Image,
    *,
    query: Query | None = None,
    layers: Sequence[int] | None = (-1,),
    size: int | None = None,
    beside: tuple[nn.Module, Card] | None = None,
) -> list[Retained | Attended]:
    """Draw the maps of the heads of these layers, of all if None; returns the numbers that were drawn.

    Beside one layer, the attention of a ViT can be drawn, at the same depth and of the same place.
    """
    check_file(file)
    check_classifier(card)
    there = retention_layers(model)
    wanted = there if layers is None else chosen(there, layers)
    if beside is not None:
        check_vit(*beside)
        if len(wanted) != 1:
            raise CannotDraw(
                f"{len(wanted)} layers beside a ViT, expected one: choose a single layer, or leave the ViT out."
            )
    side = size or card.size
    fitted = whole(image, side, check_side(side, there))
    maps = retained(model, pixels_of(fitted, card).to(device_of(model)), wanted, query)
    if beside is None:
        draw_sheet(file, fitted, maps, card.model)
        return [*maps]
    other = _attention(beside, image, maps[0], len(there), query)
    draw_sheet(file, fitted, maps, card.model, other)
    return [*maps, other.attended]


def _attention(
    beside: tuple[nn.Module, Card], image: Image.Image, one: Retained, layers: int, query: Query | None
) -> Beside:
    """Where the class token looked without being asked for, the ViT may have none and takes its last patch."""
    vit, card = check_vit(*beside), beside[1]
    height, width = vit.patch_embed.img_size  # a ViT has learned positions for this size alone
    seen = image.resize((width, height), Image.Resampling.BICUBIC)
    number = same_depth(one.layer.number, layers, len(vit.blocks))
    place = None if query is None and one.query == "class" else one.query
    found = attended(vit, pixels_of(seen, card).to(device_of(vit)), number, place, _grid(one))
    return Beside(found, seen, card.model)


def draw_sheet(
    file: Path, image: Image.Image, maps: Sequence[Retained], model: str, beside: Beside | None = None
) -> None:
    """One layer: the photograph, the mean of its heads, each head; attention below. Several: a row for each of them."""
    under = image.copy()
    under.thumbnail((DRAWN_SIDE, DRAWN_SIDE))
    shape = min(2.5, max(0.4, under.height / under.width))
    shown: list[Retained | Attended] = [*maps] if beside is None else [*maps, beside.attended]
    photographs = [under, *[None] * (len(maps) - 1)] + ([] if beside is None else [beside.image])
    panels = [2 + len(one.weights) for one in shown]
    cols = max(map(_columns, panels)) if len(maps) == 1 else max(panels)
    heights = [ceil(count / cols) for count in panels]
    inches = INCHES if len(maps) == 1 else INCHES * 0.8
    with figure_to(file, inches * cols + 0.9, (inches * shape + 0.3) * sum(heights) + 0.9) as figure:
        grid = figure.subplots(sum(heights), cols, squeeze=False)
        for panel in grid.flat:
            bare(panel)
        for one, lines, photograph in zip(shown, np.split(grid, np.cumsum(heights)[:-1]), photographs, strict=True):
            _layer(figure, lines, under, one, photograph)
        if len(maps) > 1:
            for panel, alike in zip(grid[1:, 0], _on_one_grid(maps), strict=False):
                weights = torch.stack([one.mean for one in alike]).mean(0)
                _overlay_by_itself(panel, under, weights, f"{_numbers(alike)}, mean")
                _frame(panel, alike[-1])
        for panel in grid.flat:
            panel.set_visible(panel.has_data())
        _words(figure, image, maps, model, beside)


def _columns(panels: int) -> int:
    return ceil(panels / ceil(panels / MOST_COLUMNS))


def _layer(
    figure: Figure, lines: Any, under: Image.Image, one: Retained | Attended, photograph: Image.Image | None
) -> None:
    first, mean, *heads = lines.flat
    if photograph is not None:
        first.imshow(photograph, extent=(0, 1, 1, 0), aspect=under.height / under.width)  # of the ViT too: not squeezed
        first.set_title("photograph" if photograph is under else f"the same, {_pixels(photograph)}", fontsize=10)
        _frame(first, one)
    most = float(one.weights.abs().max()) or 1.0  # of all heads: they can be compared
    if isinstance(one, Retained):
        _overlay_by_itself(mean, under, one.mean, f"layer {one.layer.number}, mean")
        names = [f"head {head}, $\\gamma$ = {gamma:.3f}" for head, gamma in enumerate(one.layer.gamma)]
    else:
        _overlay(mean, under, one.mean, most)  # nothing cancels out: on the scale of the heads it is seen as well
        mean.set_title(f"attention, layer {one.number}, mean", fontsize=10)
        names = [f"attention, layer {one.number}, head {head}" for head in range(len(one.weights))]
    picture: Any = None
    for panel, weights, name in zip(heads, one.weights, names, strict=False):
        picture = _overlay(panel, under, weights, most)
        panel.set_title(name, fontsize=10)
    for panel in [mean, *heads[: len(one.weights)]]:
        _frame(panel, one)
    bar = figure.colorbar(picture, ax=lines, shrink=0.8, pad=0.01, aspect=30)
    bar.ax.tick_params(labelsize=9)
    bar.ax.set_facecolor("#C0C0C0")  # as grey as a photograph: what is clear in the map is clear here
    bar.outline.set_visible(False)
    if isinstance(one, Attended):
        bar.ax.set_ylim(0, most)  # a share is never below 0


def _overlay(panel: Any, under: Image.Image, weights: Tensor, most: float) -> Any:
    """A patch is a cell of one colour: nothing is smoothed."""
    grey = np.asarray(under.convert("L")) / 255 * GREY + (1 - GREY)
    place = {"extent": (0, 1, 1, 0), "aspect": under.height / under.width}
    panel.imshow(grey, "gray", vmin=0, vmax=1, **place)
    return panel.imshow(weights.float().numpy(), SIGNED, vmin=-most, vmax=most, interpolation="nearest", **place)


def _overlay_by_itself(panel: Any, under: Image.Image, weights: Tensor, name: str) -> None:
    """A mean is far smaller than the heads, whose signs differ: it has its own scale, told in the title."""
    most = float(weights.abs().max()) or 1.0
    _overlay(panel, under, weights, most)
    panel.set_title(f"{name} (±{most:.3g})", fontsize=10)


def _on_one_grid(maps: Sequence[Retained]) -> list[list[Retained]]:
    """Layers whose maps can be averaged, where there are several."""
    groups: dict[Grid, list[Retained]] = {}
    for one in maps:
        groups.setdefault(_grid(one), []).append(one)
    return [group for group in groups.values() if len(group) > 1]


def _numbers(maps: Sequence[Retained]) -> str:
    numbers = [one.layer.number for one in maps]
    in_a_row = numbers == list(range(numbers[0], numbers[-1] + 1))
    return "layers " + (f"{numbers[0]}-{numbers[-1]}" if in_a_row else ", ".join(map(str, numbers)))


def _frame(panel: Any, one: Retained | Attended) -> None:
    """Where the query stands; the class token stands nowhere on the photograph."""
    if one.query != "class":
        (row, col), (rows, cols) = one.query, _grid(one)
        frame = Rectangle(
            (col / cols, row / rows), 1 / cols, 1 / rows, facecolor="none", edgecolor=VERMILION, linewidth=1.6
        )
        if isinstance(one, Attended):  # orange all over
            frame.set_path_effects([withStroke(linewidth=3.2, foreground="white")])
        panel.add_patch(frame)


def _grid(one: Retained | Attended) -> Grid:
    return one.weights.shape[1], one.weights.shape[2]


def _words(figure: Figure, image: Image.Image, maps: Sequence[Retained], model: str, beside: Beside | None) -> None:
    last = maps[-1]
    rows, cols = _grid(last)
    own = "" if last.own is None else f" Of itself it retains {last.own.mean():.3g} (mean of heads)."
    caption(
        figure,
        f"What {_who(last)} of {model} ({last.layer.module.retention.upper()}) retains from every patch: scale (q · k) "
        f"decay, as it is. Orange adds, blue subtracts, clear is nothing; one scale for all heads of a layer, a mean "
        f"has its own. {_pixels(image)}, {rows} x {cols} patches of {last.layer.stride} px in layer "
        f"{last.layer.number}.{own}" + ("" if beside is None else _words_beside(beside)),
    )


def _words_beside(beside: Beside) -> str:
    one, (rows, cols) = beside.attended, _grid(beside.attended)
    share = f" {one.own.mean():.1%} of its attention goes to tokens that are no patches (mean of heads)."
    return (
        f" Below, what {_who(one)} of {beside.model} attends to in layer {one.number}: softmax of scale (q · k), one "
        f"scale for its mean and heads. It gets the whole photograph as {_pixels(beside.image)}, {rows} x {cols} "
        f"patches.{share if one.own.any() else ''}"
    )


def _pixels(image: Image.Image) -> str:
    return f"{image.width} x {image.height} px"


def _who(one: Retained | Attended) -> str:
    return "the class token" if one.query == "class" else f"the framed patch ({one.query[0]}, {one.query[1]})"
