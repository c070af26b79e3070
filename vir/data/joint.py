"""Transforms of an image together with what is known of it: boxes and masks, or a label map.

All random numbers come from torch's generator: with the same seed around the call, the same crop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor
from torchvision import tv_tensors
from torchvision.ops import masks_to_boxes
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from vir.data.scenes import VOID
from vir.data.truth import Target, areas_of, renumbered

Colours = tuple[float, float, float]
Jitter = tuple[float, float, float, float]  # of brightness, contrast, saturation, hue
NO_JITTER: Jitter = (0.0, 0.0, 0.0, 0.0)
AS_THEY_ARE: tuple[Colours, Colours] = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))  # torchvision's detectors normalise
OF_IMAGENET: tuple[Colours, Colours] = (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)

Part = Any  # a tensor of torchvision that knows what it is: image, boxes or masks
Step = Callable[[Part], Part]

LEAST_SIDE = 1.0  # pixels of a box that is worth learning
TRIES = 10  # to find a crop that is not almost all of one class


def fitted(height: int, width: int, short: int, longest: int) -> tuple[int, int]:
    """The size with this short side, or less where the long side would be too long; never less than a pixel."""
    scale = min(short / min(height, width), longest / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


@dataclass(frozen=True)
class ForDetection:
    """Flip, then one of several sizes; of every second image, if crops are wanted, only a crop at one more size.

    Without sizes images stay as they are: our detectors choose a size by themselves.

    Crowds are left out, as they are no single objects, and so is what a crop or the size leaves nothing of.
    """

    short: tuple[int, ...] = ()
    longest: int = 1333
    crop: tuple[int, int] | None = None  # its shortest and its longest side
    before_crop: tuple[int, ...] = (400, 500, 600)  # short sides
    flip: float = 0.5
    upside_down: float = 0.0
    jitter: Jitter = NO_JITTER
    colours: tuple[Colours, Colours] = AS_THEY_ARE  # mean, deviation

    def __call__(self, image: Image.Image, target: Target) -> tuple[Tensor, Target]:
        example = _Example.of(_jittered(image, self.jitter), target)
        if _chance(self.flip):
            example.apply(F.horizontal_flip)
        if _chance(self.upside_down):
            example.apply(F.vertical_flip)
        if self.crop is not None and _chance(0.5):
            example.resize(_pick(self.before_crop), 4 * max(self.before_crop))
            example.crop(_between(*self.crop), _between(*self.crop))
        if self.short:
            example.resize(_pick(self.short), self.longest)
        return _pixels(example.image, self.colours), example.target()


@dataclass
class _Example:
    """An image and its objects on the way."""

    image: tv_tensors.Image
    boxes: tv_tensors.BoundingBoxes
    masks: tv_tensors.Mask  # n h w, or the one map of all
    numbered: bool  # which of them
    labels: Tensor
    image_id: int

    @classmethod
    def of(cls, image: Image.Image, target: Target) -> "_Example":
        single = target["iscrowd"] == 0
        numbered = target["masks"].ndim == 2
        if numbered:
            masks = renumbered(target["masks"], single)[None]
        else:
            masks = _those(target["masks"], single).view(torch.uint8)  # torchvision resizes nothing smaller
        return cls(
            tv_tensors.Image(F.pil_to_tensor(image)),
            tv_tensors.BoundingBoxes(target["boxes"][single], format="XYXY", canvas_size=(image.height, image.width)),
            tv_tensors.Mask(masks),
            numbered,
            target["labels"][single],
            target["image_id"],
        )

    @property
    def size(self) -> tuple[int, int]:
        height, width = self.image.shape[-2:]
        return height, width

    def apply(self, step: Step) -> None:
        self.image, self.boxes, self.masks = step(self.image), step(self.boxes), step(self.masks)

    def resize(self, short: int, longest: int) -> None:
        size = list(fitted(*self.size, short, longest))
        self.image, self.boxes = F.resize(self.image, size), F.resize(self.boxes, size)
        self.masks = tv_tensors.Mask(_nearest(self.masks, size))

    def crop(self, height: int, width: int) -> None:
        height, width = min(height, self.size[0]), min(width, self.size[1])
        top, left = _between(0, self.size[0] - height), _between(0, self.size[1] - width)
        whole = self.boxes.as_subclass(Tensor) - torch.tensor([left, top, left, top])
        self.apply(lambda part: F.crop(part, top, left, height, width))
        self._tighten((whole != self.boxes.as_subclass(Tensor)).any(1))

    def _tighten(self, cut: Tensor) -> None:
        """Boxes around what is seen of objects that were cut; one of which nothing is seen has a box without area."""
        masks = self.masks.as_subclass(Tensor)
        masks = masks == cut.nonzero()[:, :, None] + 1 if self.numbered else masks[cut]
        tight = masks_to_boxes(masks)
        tight[:, 2:] += masks.flatten(1).any(1)[:, None]  # it gives the last pixels, and the box ends behind them
        self.boxes[cut] = tight

    def target(self) -> Target:
        """What is left of the objects, as plain tensors."""
        boxes, masks = self.boxes.as_subclass(Tensor), self.masks.as_subclass(Tensor).contiguous()
        if self.numbered:
            area = masks.flatten().bincount(minlength=len(boxes) + 1)[1:].float()
        else:
            masks = masks.view(torch.bool)
            area = areas_of(masks)
        kept = ((boxes[:, 2:] - boxes[:, :2]) >= LEAST_SIDE).all(1) & (area > 0)
        return Target(
            boxes=boxes[kept],
            labels=self.labels[kept],
            masks=renumbered(masks[0], kept) if self.numbered else _those(masks, kept),
            iscrowd=torch.zeros(int(kept.sum()), dtype=torch.int64),
            area=area[kept],
            image_id=self.image_id,
        )


def _those(masks: Tensor, wanted: Tensor) -> Tensor:
    """Masks of hundreds of objects are the most of an example: they are copied only where some are left out."""
    return masks if bool(wanted.all()) else masks[wanted]


@dataclass(frozen=True)
class ForJudgingDetection:
    """One size, or the image's own, and what is known as it was: answers are brought back to its coordinates."""

    short: int | None = None
    longest: int = 1333
    colours: tuple[Colours, Colours] = AS_THEY_ARE

    def __call__(self, image: Image.Image, truth: Any) -> tuple[Tensor, Any]:
        size = image.height, image.width
        if self.short is not None:
            size = fitted(*size, self.short, self.longest)
        return _resized_pixels(image, size, self.colours), truth


@dataclass(frozen=True)
class ForSegmentation:
    """A random scale, a crop of fixed size with what is missing filled up as void, flip, jitter."""

    crop: tuple[int, int] = (512, 512)  # height, width
    short: int | None = 512  # side at scale 1; None: every image at its own size
    longest: int = 2048
    scales: tuple[float, float] = (0.5, 2.0)
    most_of_one: float = 0.75  # of a crop that one class may fill, where some other crop has less
    flip: float = 0.5
    jitter: Jitter = NO_JITTER
    colours: tuple[Colours, Colours] = OF_IMAGENET

    def __call__(self, image: Image.Image, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        pixels = tv_tensors.Image(F.pil_to_tensor(_jittered(image, self.jitter)))
        numbers = tv_tensors.Mask(torch.from_numpy(labels))
        size = self._size(image.height, image.width)
        pixels, numbers = F.resize(pixels, size), tv_tensors.Mask(_nearest(numbers[None], size)[0])
        place = self._place(numbers)
        pixels, numbers = F.crop(pixels, *place), F.crop(numbers, *place)
        if _chance(self.flip):
            pixels, numbers = F.horizontal_flip(pixels), F.horizontal_flip(numbers)
        missing = [0, 0, self.crop[1] - pixels.shape[-1], self.crop[0] - pixels.shape[-2]]
        filled = F.pad(_pixels(pixels, self.colours), missing, fill=0.0)  # the mean colour
        return filled, F.pad(numbers, missing, fill=VOID).as_subclass(Tensor).long()

    def _size(self, height: int, width: int) -> list[int]:
        if self.short is not None:
            height, width = fitted(height, width, self.short, self.longest)
        low, high = self.scales
        scale = low + (high - low) * torch.rand(()).item()
        return [max(1, round(height * scale)), max(1, round(width * scale))]

    def _place(self, labels: Tensor) -> tuple[int, int, int, int]:
        """Top, left, height and width of a crop that shows more than one class, if some such is found soon."""
        height, width = min(self.crop[0], labels.shape[0]), min(self.crop[1], labels.shape[1])
        for _ in range(TRIES):
            top, left = _between(0, labels.shape[0] - height), _between(0, labels.shape[1] - width)
            counts = labels[top : top + height, left : left + width].flatten().bincount(minlength=VOID + 1)
            counts[VOID] = 0
            if counts.max() < self.most_of_one * counts.sum():
                break
        return top, left, height, width


@dataclass(frozen=True)
class ForJudgingSegmentation:
    """One size, and the label map as it was: answers are brought back to the image's own size."""

    short: int | None = 512  # None: every image at its own size
    longest: int = 2048
    colours: tuple[Colours, Colours] = OF_IMAGENET

    def __call__(self, image: Image.Image, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        size = image.height, image.width
        if self.short is not None:
            size = fitted(*size, self.short, self.longest)
        return _resized_pixels(image, size, self.colours), torch.from_numpy(labels).long()


def _resized_pixels(image: Image.Image, size: tuple[int, int], colours: tuple[Colours, Colours]) -> Tensor:
    return _pixels(F.resize(tv_tensors.Image(F.pil_to_tensor(image)), list(size)), colours)


def _nearest(masks: Tensor, size: list[int]) -> Tensor:
    """Numbers keep their values, and their places as exactly as boxes do: torchvision's own way for masks is half a
    pixel off."""
    return F.resize(masks.as_subclass(Tensor), size, InterpolationMode.NEAREST_EXACT)


def _jittered(image: Image.Image, jitter: Jitter) -> Image.Image:
    """Before it becomes a tensor: Pillow is several times as fast."""
    return v2.ColorJitter(*jitter)(image) if jitter != NO_JITTER else image


def _pixels(image: tv_tensors.Image, colours: tuple[Colours, Colours]) -> Tensor:
    values = F.to_dtype(image.as_subclass(Tensor), torch.float32, scale=True)
    return values if colours == AS_THEY_ARE else F.normalize(values, list(colours[0]), list(colours[1]))


def _chance(share: float) -> bool:
    return torch.rand(()).item() < share


def _between(low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, ()))


def _pick(choices: tuple[int, ...]) -> int:
    return choices[_between(0, len(choices) - 1)]
