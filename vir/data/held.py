"""Images decoded once and held on the device: for small sets, where decoding would take longer than learning.

They are augmented there too. Images are held as squares a little larger than the model takes them, so that crops have
something to choose from; what lies beyond the square is lost.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torchvision.transforms import v2

from vir.data.augment import Augment, augmented
from vir.data.loading import Batch, Examples, Share, judging_batches, order_of, seed_from
from vir.data.sets import LabelledImages

LARGER = 1.15  # side of the held square, in sides of what the model takes
CROPS = 3  # a kind of random numbers


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


def held_batches(
    held: Held,
    augment: Augment,
    seed: int,
    batch: int,
    epochs: int,
    share: Share,
    first_epoch: int = 0,
    first_step: int = 0,
) -> Iterator[Batch]:
    """As `training_batches`, augmented on the device."""
    count, device = len(held.targets), held.pixels.device
    part = batch // (share.processes * share.parts)
    for epoch in range(first_epoch, epochs):
        order = torch.tensor(order_of(count, seed, epoch), device=device)
        for step in range(first_step if epoch == first_epoch else 0, count // batch):
            for number in range(share.parts):
                start = step * batch + (number * share.processes + share.rank) * part
                mine = order[start : start + part]
                numbers = torch.Generator(device).manual_seed(seed_from(seed, epoch, step, number, share.rank, CROPS))
                images = augmented(held.pixels[mine], augment, numbers)
                yield Batch(images, held.targets[mine], mine, [])


def on_device(batches: list[Batch], device: torch.device) -> list[Batch]:
    return [replace(b, images=b.images.to(device)) for b in batches]
