"""Retention maps laid over the photograph: what a query retains from every patch, head by head, layer by layer."""

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from torch import Tensor, nn

from vir.checkpoint import Card
from vir.layers.patches import Grid
from vir.viz.fading import Query
from vir.viz.inside import check_classifier, check_side, chosen, device_of, pixels_of, retention_layers, whole
from vir.viz.retained import Retained, retained
from vir.viz.style import SIGNED, VERMILION, bare, caption, check_file, figure_to

MOST_COLUMNS = 5
DRAWN_SIDE = 640  # pixels of the photograph under a map: more would only make the file larger
GREY = 0.75  # of the photograph under a map: colours must be those of the map
INCHES = 2.3


def draw_maps(
    file: Path,
    model: nn.Module,
    card: Card,
    image: Image.Image,
    *,
    query: Query | None = None,
    layers: Sequence[int] | None = (-1,),
    size: int | None = None,
) -> list[Retained]:
    """Draw the maps of the heads of these layers, of all if None; returns the numbers that were drawn."""
    check_file(file)
    check_classifier(card)
    there = retention_layers(model)
    wanted = there if layers is None else chosen(there, layers)
    side = size or card.size
    fitted = whole(image, side, check_side(side, there))
    maps = retained(model, pixels_of(fitted, card).to(device_of(model)), wanted, query)
    draw_sheet(file, fitted, maps, card.model)
    return maps


def draw_sheet(file: Path, image: Image.Image, maps: Sequence[Retained], model: str) -> None:
    """One layer: the photograph, the mean of its heads, each head. Several: a row for each of them."""
    under = image.copy()
    under.thumbnail((DRAWN_SIDE, DRAWN_SIDE))
    shape = min(2.5, max(0.4, under.height / under.width))
    if len(maps) == 1:
        panels = 2 + len(maps[0].weights)
        cols = panels if panels <= MOST_COLUMNS else ceil(panels / ceil(panels / MOST_COLUMNS))
        rows = ceil(panels / cols)
    else:
        rows, cols = len(maps), 2 + max(len(one.weights) for one in maps)
    inches = INCHES if len(maps) == 1 else INCHES * 0.8
    with figure_to(file, inches * cols + 0.9, (inches * shape + 0.3) * rows + 0.9) as figure:
        grid = figure.subplots(rows, cols, squeeze=False)
        for panel in grid.flat:
            bare(panel)
        lines = [list(grid.flat)] if len(maps) == 1 else [list(line) for line in grid]
        for number, (one, line) in enumerate(zip(maps, lines, strict=True)):
            _layer(figure, line, grid if len(maps) == 1 else line, under, one, photograph=number == 0)
        if len(maps) > 1:
            for panel, alike in zip(grid[1:, 0], _on_one_grid(maps), strict=False):
                weights = torch.stack([one.mean for one in alike]).mean(0)
                _overlay_by_itself(panel, under, weights, f"{_numbers(alike)}, mean")
                _frame(panel, alike[-1])
        for panel in grid.flat:
            panel.set_visible(panel.has_data())
        _words(figure, image, maps, model)


def _layer(figure: Figure, line: list[Any], beside: Any, under: Image.Image, one: Retained, photograph: bool) -> None:
    first, mean, *heads = line
    if photograph:
        first.imshow(under, extent=(0, 1, 1, 0), aspect=under.height / under.width)
        first.set_title("photograph", fontsize=10)
        _frame(first, one)
    most = float(one.weights.abs().max()) or 1.0  # of all heads: they can be compared
    _overlay_by_itself(mean, under, one.mean, f"layer {one.layer.number}, mean")
    picture: Any = None
    for head, (panel, weights) in enumerate(zip(heads, one.weights, strict=False)):
        picture = _overlay(panel, under, weights, most)
        panel.set_title(f"head {head}, $\\gamma$ = {one.layer.gamma[head]:.3f}", fontsize=10)
    for panel in [mean, *heads[: len(one.weights)]]:
        _frame(panel, one)
    bar = figure.colorbar(picture, ax=beside, shrink=0.8, pad=0.01, aspect=30)
    bar.ax.tick_params(labelsize=9)
    bar.ax.set_facecolor("#C0C0C0")  # as grey as a photograph: what is clear in the map is clear here
    bar.outline.set_visible(False)


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


def _frame(panel: Any, one: Retained) -> None:
    """Where the query stands; the class token stands nowhere on the photograph."""
    if one.query != "class":
        (row, col), (rows, cols) = one.query, _grid(one)
        panel.add_patch(
            Rectangle(
                (col / cols, row / rows), 1 / cols, 1 / rows, facecolor="none", edgecolor=VERMILION, linewidth=1.6
            )
        )


def _grid(one: Retained) -> Grid:
    return one.weights.shape[1], one.weights.shape[2]


def _words(figure: Figure, image: Image.Image, maps: Sequence[Retained], model: str) -> None:
    last = maps[-1]
    rows, cols = _grid(last)
    who = "the class token" if last.query == "class" else f"the framed patch ({last.query[0]}, {last.query[1]})"
    own = "" if last.own is None else f" Of itself it retains {last.own.mean():.3g} (mean of heads)."
    caption(
        figure,
        f"What {who} of {model} ({last.layer.module.retention.upper()}) retains from every patch: scale (q · k) decay, "
        f"as it is. Orange adds, blue subtracts, clear is nothing; one scale for all heads of a layer, a mean has its "
        f"own. {image.width} x {image.height} px, {rows} x {cols} patches of {last.layer.stride} px in layer "
        f"{last.layer.number}.{own}",
    )
