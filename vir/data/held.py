"""Images decoded once and held on the device: for small sets, where decoding would take longer than learning.

Crops and flips are drawn there too, for every image of a batch on its own. Images are held as squares a little larger
than the model takes them, so that crops have something to choose from; what lies beyond the square is lost.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2

from vir.data.loading import Batch, Examples, Share, judging_batches, order_of, seed_from
from vir.data.sets import LabelledImages

LARGER = 1.15  # side of the held square, in sides of what the model takes
CROPS = 3  # a kind of random numbers
ASPECT = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class Held:
    pixels: Tensor  # n 3 side side, 0..255
    targets: Tensor
    unreadable: list[str]


def hold(images: LabelledImages, size: int, workers: int, device: torch.device) -> Held:
    """Decode all images once; those that cannot be read are left out and listed."""
    side = math.ceil(LARGER * size)
    square = v2.Compose(
        [
            v2.PILToTensor(),
            v2.Resize(side, interpolation=v2.InterpolationMode.BICUBIC, antialias=True),
            v2.CenterCrop(side),
        ]
    )
    parts = list(judging_batches(Examples(images, square, stand_in=False), 64, Share(), workers))
    pixels, targets = torch.cat([b.images for b in parts]), torch.cat([b.targets for b in parts])
    readable = targets >= 0
    return Held(pixels[readable].to(device), targets[readable].to(device), [u for b in parts for u in b.unreadable])


@dataclass(frozen=True)
class Augment:
    """How crops are drawn and pixels scaled."""

    size: int
    crop_scale: tuple[float, float]
    flip: float
    upside_down: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    seed: int


def held_batches(
    held: Held, augment: Augment, batch: int, epochs: int, share: Share, first_epoch: int = 0, first_step: int = 0
) -> Iterator[Batch]:
    """As `training_batches`, with crops drawn on the device."""
    count, device = len(held.targets), held.pixels.device
    part = batch // (share.processes * share.parts)
    for epoch in range(first_epoch, epochs):
        order = torch.tensor(order_of(count, augment.seed, epoch), device=device)
        for step in range(first_step if epoch == first_epoch else 0, count // batch):
            for number in range(share.parts):
                start = step * batch + (number * share.processes + share.rank) * part
                mine = order[start : start + part]
                seed = seed_from(augment.seed, epoch, step, number, share.rank, CROPS)
                images = cropped(held.pixels[mine], augment, torch.Generator(device).manual_seed(seed))
                yield Batch(images, held.targets[mine], mine, [])


def cropped(pixels: Tensor, augment: Augment, generator: torch.Generator) -> Tensor:
    """A random part of every image, of random shape, at the model's size, some of them mirrored."""
    n, device = len(pixels), pixels.device

    def draw(low: float, high: float) -> Tensor:
        return torch.empty(n, device=device).uniform_(low, high, generator=generator)

    area, aspect = draw(*augment.crop_scale), draw(math.log(ASPECT[0]), math.log(ASPECT[1])).exp()
    width, height = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)
    left, top = (draw(0, 1) * (1 - side) for side in (width, height))
    mirrored, turned = (torch.where(draw(0, 1) < share, -1.0, 1.0) for share in (augment.flip, augment.upside_down))
    zero = torch.zeros_like(width)
    # The corners of an image are at -1 and 1 here.
    across = torch.stack([width * mirrored, zero, 2 * left + width - 1], 1)
    down = torch.stack([zero, height * turned, 2 * top + height - 1], 1)
    places = F.affine_grid(torch.stack([across, down], 1), [n, 3, augment.size, augment.size], align_corners=False)
    images = F.grid_sample(pixels.float() / 255, places, padding_mode="reflection", align_corners=False)
    return (images - _by_channel(augment.mean, device)) / _by_channel(augment.std, device)


@cache
def _by_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Made once: a copy to a GPU in every step would make the host wait for it."""
    return torch.tensor(values, device=device)[:, None, None]


def on_device(batches: list[Batch], device: torch.device) -> list[Batch]:
    return [replace(b, images=b.images.to(device)) for b in batches]
