"""Small images of one class each, laid side by side as one large image: a map of which the truth is known."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from vir.checkpoint import Card
from vir.data.images import open_image
from vir.data.loading import order_of
from vir.data.sets import LabelledImages
from vir.streaming import Band, stream
from vir.streaming.maps import PALETTE

LONGEST = 900  # pixels of the side of the small image
DPI = 110
SMOOTH = 3.0  # images: how far hills of a landscape reach


@dataclass
class Mosaic:
    """A reader of rows of pixels, which decodes a row of images at a time."""

    images: LabelledImages
    side: int  # pixels of an image
    columns: int
    seed: int = 0
    regions: bool = False  # images of a class lie together, as land does; else at random
    _row: tuple[int, np.ndarray] = field(default=(-1, np.zeros(0)), repr=False)

    def __post_init__(self) -> None:
        self.rows = len(self.images) // self.columns
        if not self.rows:
            raise ValueError(f"{len(self.images)} images do not fill one row of {self.columns}: choose fewer columns.")
        order = np.array(order_of(len(self.images), self.seed, 0)[: self.rows * self.columns])
        targets = np.array([self.images.targets[self.images.indices[i]] for i in order])
        if self.regions:
            places = in_regions(targets, self.rows, self.columns, self.seed)
            order, targets = order[places], targets[places]
        self.order = order.tolist()
        self.truth = targets.reshape(self.rows, self.columns)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.rows * self.side, self.columns * self.side, 3

    def image(self, row: int, column: int) -> np.ndarray:
        file, _ = self.images.read(self.order[row * self.columns + column])
        with file:
            picture = open_image(file)
        return np.asarray(picture.resize((self.side, self.side), Image.Resampling.BICUBIC))

    def row(self, number: int) -> np.ndarray:
        if self._row[0] != number:
            self._row = number, np.concatenate([self.image(number, x) for x in range(self.columns)], 1)
        return self._row[1]

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        first, last = start // self.side, (stop - 1) // self.side
        whole = np.concatenate([self.row(number) for number in range(first, last + 1)])
        return whole[start - first * self.side : stop - first * self.side]


def in_regions(targets: np.ndarray, rows: int, columns: int, seed: int) -> np.ndarray:
    """Which image lies at each place of a grid, so that those of a class lie together: a class has a random smooth
    landscape, and goes where it is highest until its images are used up."""
    rng = np.random.default_rng(seed)
    left = {int(target): list(np.flatnonzero(targets == target)) for target in np.unique(targets)}
    noise = np.fft.fft2(rng.standard_normal((len(left), rows, columns)))
    waves = np.add.outer(np.fft.fftfreq(rows) ** 2, np.fft.fftfreq(columns) ** 2)
    height = np.fft.ifft2(noise * np.exp(-2 * (np.pi * SMOOTH) ** 2 * waves)).real.reshape(len(left), -1)
    height /= height.std(1, keepdims=True) + 1e-12
    known, found = list(left), np.full(rows * columns, -1)
    for number, place in zip(*np.unravel_index(np.argsort(-height, axis=None), height.shape), strict=True):
        if found[place] < 0 and left[known[number]]:
            found[place] = left[known[number]].pop()
    return found


@dataclass(frozen=True)
class MapJudgement:
    """Shares that are right, and the maps themselves."""

    patches: float  # of the streamed map
    images: float  # of the streamed map, by the mean of an image's patches
    alone: float  # every image asked about by itself
    map: np.ndarray  # class of every patch
    map_alone: np.ndarray  # class of every image


@torch.inference_mode()
def judge_map(
    model: nn.Module, card: Card, mosaic: Mosaic, say: Callable[[str], None] = lambda step: None
) -> MapJudgement:
    """Stream the mosaic, and ask about every image alone."""
    scores = []
    for band in stream(model, mosaic, mean=card.mean, std=card.std):
        if isinstance(band, Band):
            scores.append(band.scores.float().cpu())
            say(f"row {band.top + band.rows} of patches")
    found = torch.cat(scores).numpy()
    patch = found.shape[1] // mosaic.columns
    by_image = found.reshape(mosaic.rows, patch, mosaic.columns, patch, -1)
    best = found.argmax(-1)
    truth = mosaic.truth.repeat(patch, 0).repeat(patch, 1)
    alone = []
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (card.mean, card.std))
    device = next(model.parameters()).device
    for number in range(mosaic.rows):
        say(f"images of row {number + 1} of {mosaic.rows} alone")
        row = torch.from_numpy(mosaic.row(number).reshape(mosaic.side, mosaic.columns, mosaic.side, 3).copy())
        pixels = (row.permute(1, 3, 0, 2).float() / 255 - mean) / std
        alone.append(model(pixels.to(device)).argmax(1).cpu().numpy())
    separate = np.stack(alone)
    return MapJudgement(
        float((best == truth).mean()),
        float((by_image.mean((1, 3)).argmax(-1) == mosaic.truth).mean()),
        float((separate == mosaic.truth).mean()),
        best,
        separate,
    )


def draw(mosaic: Mosaic, judged: MapJudgement, classes: Sequence[str], file: Path) -> None:
    """The image, the truth, the streamed map and that of images asked about alone, with what the colours mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    colours = np.array([to_rgb(PALETTE[number % len(PALETTE)]) for number in range(len(classes))])
    pictures: dict[str, Any] = {
        "image": _small(mosaic),
        "truth": colours[mosaic.truth],
        f"streamed: {100 * judged.images:.1f} % of images right": colours[judged.map],
        f"images alone: {100 * judged.alone:.1f} % right": colours[judged.map_alone],
    }
    height = 4.2 * mosaic.rows / mosaic.columns
    figure, panels = plt.subplots(1, 4, figsize=(17, height + 1.2), layout="constrained")
    for panel, (title, picture) in zip(panels, pictures.items(), strict=True):
        panel.imshow(picture, interpolation="nearest", extent=(0, mosaic.columns, mosaic.rows, 0))
        panel.set_title(title)
        panel.set_axis_off()
    handles: list[Any] = [Patch(color=colours[number], label=name) for number, name in enumerate(classes)]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(classes), 10), frameon=False, fontsize=9)
    figure.savefig(file, dpi=DPI, metadata={"Software": None})
    plt.close(figure)


def _small(mosaic: Mosaic) -> np.ndarray:
    """The image at the size of its panel, row by row: the whole need not fit into memory."""
    side = max(1, min(mosaic.side, LONGEST // max(mosaic.rows, mosaic.columns)))
    size = side * mosaic.columns, side
    strips = (Image.fromarray(mosaic.row(number)) for number in range(mosaic.rows))
    return np.concatenate([np.asarray(strip.resize(size, Image.Resampling.BOX)) for strip in strips])
