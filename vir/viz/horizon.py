"""How far the heads see: by their decay, in patches and pixels, against resolution; and as measured on images."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vir.layers.retention import Retention
from vir.streaming.horizon import FAINT
from vir.viz.fading import KINDS
from vir.viz.inside import Layer
from vir.viz.receptive import Field
from vir.viz.style import BLUE, COLOUR_OF, GREEN, GREY, ORANGE, SEEN, VERMILION, bare, caption, figure_to

SHARES = {"a half": (0.5, GREEN, "o"), "1/e": (1 / math.e, BLUE, "s"), "1 %": (FAINT, ORANGE, "^")}
FAINTEST = 1e-4  # of the strongest pixel: what the colours of a measured field still tell apart


@dataclass(frozen=True)
class Reach:
    """Of one head: after how many steps a patch counts so much of the nearest."""

    head: int
    gamma: float
    stride: int  # pixels of a patch

    def steps(self, share: float) -> float:
        return math.log(share) / math.log(self.gamma) if 0 < self.gamma < 1 else math.inf

    def upwards(self, share: float, retention: Retention, width: int) -> float:
        """Pixels, on an image so many pixels wide: in 1D a row up is as many steps as it has patches."""
        cols = math.ceil(width / self.stride)
        return self.steps(share) * self.stride / (cols if retention == "1d" else 1)


def reaches(layers: Sequence[Layer]) -> list[list[Reach]]:
    """One list for each kind of layer that differs in its heads, their decays or its patches."""
    kinds: dict[tuple, list[Reach]] = {}
    for layer in layers:
        gammas = tuple(layer.gamma.tolist())
        kinds.setdefault(
            (gammas, layer.stride), [Reach(head, gamma, layer.stride) for head, gamma in enumerate(gammas)]
        )
    return list(kinds.values())


def draw_horizon(
    file: Path, kinds: Sequence[Sequence[Reach]], sizes: Sequence[int], name: str, field: Field | None = None
) -> None:
    """A row for each kind of layer: steps of each head, pixels against resolution; a last row for what was measured."""
    rows = len(kinds) + (field is not None)
    with figure_to(file, 10, 3.5 * rows + 0.6 + 0.7 * (field is not None)) as figure:
        ratios = [1.0] * len(kinds) + [1.25] * (field is not None)
        panels = figure.subplots(rows, 2, squeeze=False, height_ratios=ratios)
        for heads, (left, right) in zip(kinds, panels, strict=False):
            _heads(left, heads)
            _sizes(right, heads, sizes)
        words = (
            f"{name}: how far a patch sees by the decay of its heads, in every layer of a kind; several layers see "
            "farther. In 1D a row of patches lies between a patch and the one above it."
        )
        if field is not None:
            words += _measured(figure, panels[-1], field)
        caption(figure, words)


def _heads(panel: Any, heads: Sequence[Reach]) -> None:
    numbers = [reach.head for reach in heads]
    for label, (share, colour, marker) in SHARES.items():
        panel.plot(numbers, [reach.steps(share) for reach in heads], color=colour, marker=marker, label=label)
    stride = heads[0].stride
    panel.set(xlabel="head", ylabel="patches", yscale="log", title=f"until a patch counts (patches of {stride} px)")
    panel.set_xticks(numbers, [f"{reach.head}\n{reach.gamma:.3f}" for reach in heads] if len(heads) <= 8 else numbers)
    pixels = panel.secondary_yaxis("right", functions=(lambda x: x * stride, lambda x: x / stride))
    pixels.set_ylabel("pixels, in 2D")
    panel.grid(True)
    panel.legend(loc="upper left")


def _sizes(panel: Any, heads: Sequence[Reach], sizes: Sequence[int]) -> None:
    for kind in KINDS:
        for reach in heads:
            far = [reach.upwards(FAINT, kind, size) for size in sizes]
            label = kind.upper() if reach is heads[-1] else None
            share = 1.0 if reach in (heads[0], heads[-1]) else 0.35
            marker = "." if len(sizes) < 20 else None
            panel.plot(sizes, far, color=COLOUR_OF[kind], alpha=share, marker=marker, linewidth=1.3, label=label)
    panel.plot(sizes, sizes, color="black", linestyle="--", linewidth=1, label="the whole image")
    panel.set(xscale="log", yscale="log", xlabel="pixels of a side", ylabel="pixels")
    panel.set_title(f"how far up a patch counts {FAINT:.0%}, each head")
    panel.set_xticks(sizes, [str(size) for size in sizes])
    panel.minorticks_off()
    panel.grid(True)
    panel.legend(loc="upper left", ncols=3, fontsize=9, columnspacing=1, handlelength=1.4)
    low, high = panel.get_ylim()
    panel.set_ylim(low, high * 4)  # room for the legend


def _measured(figure: Figure, line: Any, field: Field) -> str:
    """Draws the field and how it gathers with distance; returns what to say of it."""
    left, right = line
    strength = field.strength.numpy() / float(field.strength.max())
    norm = LogNorm(FAINTEST, 1, clip=True)
    picture = left.imshow(np.ma.masked_equal(strength, 0), SEEN, norm=norm)
    bare(left)
    left.set_title("measured: gradient, of its largest")
    if field.query != "class":
        row, col = (place * field.stride - 0.5 for place in field.query)
        left.add_patch(
            Rectangle((col, row), field.stride, field.stride, facecolor="none", edgecolor=VERMILION, linewidth=2)
        )
    bar = figure.colorbar(picture, ax=left, shrink=0.85, pad=0.02)
    bar.outline.set_visible(False)
    far = np.linspace(0, math.hypot(*field.strength.shape), 200)
    right.plot(far, [100 * field.within(pixels) for pixels in far], color=VERMILION)
    for share in (0.5, 0.95):
        radius = field.radius(share)
        right.plot([0, radius, radius], [100 * share, 100 * share, 0], color=GREY, linewidth=1, linestyle="--")
        right.annotate(f"{share:.0%}: {radius:.0f} px", (radius, 100 * share), (6, -12), textcoords="offset points")
    right.set(xlabel="pixels from the patch", ylabel="% of the gradient", title="how it gathers", ylim=(0, 102), xlim=0)
    right.grid(True)
    return (
        f" Measured: the gradient of what the last block says of the {_who(field)} by the pixels, summed over features "
        f"and, in its size, over colours; mean of {field.images} image{'s' * (field.images != 1)} of "
        f"{field.strength.shape[1]} x {field.strength.shape[0]} px. {field.ahead():.1%} of it lies below or to the "
        "right of the patch."
    )


def _who(field: Field) -> str:
    return "class token" if field.query == "class" else "framed patch"
