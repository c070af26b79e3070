"""Augmentation of a whole batch on its device, every image by random numbers of its own."""

import math
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

ASPECT = (3 / 4, 4 / 3)  # of a crop
ERASED = (0.02, 1 / 3)  # share of the image
ERASED_ASPECT = (0.3, 1 / 0.3)


@dataclass(frozen=True)
class Augment:
    """How images are cropped, turned and coloured; shares and strengths of 0 leave them as they are."""

    size: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    crop_scale: tuple[float, float] = (1.0, 1.0)  # share of the area
    flip: float = 0.0  # share of the images
    upside_down: float = 0.0
    quarter_turns: float = 0.0  # share of the images turned by 90 degrees: with the flips, all ways to lay a square
    tilt: float = 0.0  # degrees, either way
    colour_jitter: float = 0.0  # of brightness, contrast and saturation
    erasing: float = 0.0  # share of the images that lose a rectangle to noise


def augmented(pixels: Tensor, augment: Augment, generator: torch.Generator) -> Tensor:
    """Images of 0..255 to what the model takes: parts of them, at its size, scaled by mean and deviation."""
    images = _cropped(pixels.float() / 255, augment, generator)
    if augment.colour_jitter:
        images = _coloured(images, augment.colour_jitter, generator)
    images = (images - _by_channel(augment.mean, images.device)) / _by_channel(augment.std, images.device)
    return _erased(images, augment.erasing, generator) if augment.erasing else images


@cache
def _by_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Made once: a copy to a GPU in every step would make the host wait for it."""
    return torch.tensor(values, device=device)[:, None, None]


def _draw(images: Tensor, low: float, high: float, generator: torch.Generator) -> Tensor:
    """A number for each image."""
    return torch.empty(len(images), device=images.device).uniform_(low, high, generator=generator)


def _sides(images: Tensor, area: Tensor, aspects: tuple[float, float], generator: torch.Generator) -> list[Tensor]:
    """Width and height of rectangles of a given area and random shape, in sides of the image."""
    aspect = _draw(images, math.log(aspects[0]), math.log(aspects[1]), generator).exp()
    return [(area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)]


def _cropped(images: Tensor, augment: Augment, generator: torch.Generator) -> Tensor:
    """A random part of every image, of random shape, tilted; some of them mirrored or upside down."""
    width, height = _sides(images, _draw(images, *augment.crop_scale, generator), ASPECT, generator)
    left, top = (_draw(images, 0, 1, generator) * (1 - side) for side in (width, height))
    mirrored, turned = (
        torch.where(_draw(images, 0, 1, generator) < share, -1.0, 1.0) for share in (augment.flip, augment.upside_down)
    )
    angle = _draw(images, -augment.tilt, augment.tilt, generator).deg2rad()
    if augment.quarter_turns:
        angle = torch.where(_draw(images, 0, 1, generator) < augment.quarter_turns, angle + math.pi / 2, angle)
    # The corners of an image are at -1 and 1 here.
    across = torch.stack([width * mirrored * angle.cos(), -width * turned * angle.sin(), 2 * left + width - 1], 1)
    down = torch.stack([height * mirrored * angle.sin(), height * turned * angle.cos(), 2 * top + height - 1], 1)
    shape = [len(images), 3, augment.size, augment.size]
    places = F.affine_grid(torch.stack([across, down], 1), shape, align_corners=False)
    return F.grid_sample(images, places, padding_mode="reflection", align_corners=False)


def _coloured(images: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Lighter or darker, with more or less contrast and colour."""
    light, contrast, colour = (
        _draw(images, 1 - strength, 1 + strength, generator)[:, None, None, None] for _ in range(3)
    )
    images = images * light
    mean = images.mean((1, 2, 3), keepdim=True)
    images = mean + (images - mean) * contrast
    grey = images.mean(1, keepdim=True)
    return (grey + (images - grey) * colour).clamp(0, 1)


def _erased(images: Tensor, share: float, generator: torch.Generator) -> Tensor:
    width, height = _sides(images, _draw(images, *ERASED, generator), ERASED_ASPECT, generator)
    left, top = (_draw(images, 0, 1, generator) * (1 - side) for side in (width, height))
    chosen = _draw(images, 0, 1, generator) < share
    rows, cols = ((torch.arange(n, device=images.device) + 0.5) / n for n in images.shape[2:])
    in_rows = (rows >= top[:, None]) & (rows < (top + height)[:, None])
    in_cols = (cols >= left[:, None]) & (cols < (left + width)[:, None])
    gone = (chosen[:, None, None] & in_rows[:, :, None] & in_cols[:, None, :])[:, None]
    noise = torch.empty_like(images).normal_(generator=generator)
    return torch.where(gone, noise, images)
