"""What is known of the objects in an image: as COCO's evaluation wants it, and as tensors to learn from."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypedDict

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vir.data import rle
from vir.data.images import Header, UnreadableImage, turned


class Target(TypedDict):
    """The objects of one image as torchvision's detectors take them, in pixels of that image."""

    boxes: Tensor  # n 4: left, top, right, bottom
    labels: Tensor  # n: 1 is the first class
    masks: Tensor  # n h w, bool; or h w, where objects do not overlap: the pixels of object i have the number i + 1
    iscrowd: Tensor  # n
    area: Tensor  # n
    image_id: int


class TrueObject(TypedDict):
    bbox: list[float]  # left, top, width, height, as annotated
    label: int  # 1 is the first class
    area: float
    iscrowd: int
    segmentation: rle.Rle


@dataclass(frozen=True)
class Truth:
    """All objects of an upright image, with the numbers that their annotation gives."""

    image_id: int
    width: int
    height: int
    objects: tuple[TrueObject, ...]

    def target(self) -> Target:
        """As tensors, with boxes that end where the image ends."""
        boxes = torch.tensor([o["bbox"] for o in self.objects], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        boxes[:, 0::2] = boxes[:, 0::2].clamp(0, self.width)
        boxes[:, 1::2] = boxes[:, 1::2].clamp(0, self.height)
        masks = rle.decode_all([o["segmentation"] for o in self.objects], self.height, self.width)
        return Target(
            boxes=boxes,
            labels=torch.tensor([o["label"] for o in self.objects], dtype=torch.int64),
            masks=torch.from_numpy(masks),
            iscrowd=torch.tensor([o["iscrowd"] for o in self.objects], dtype=torch.int64),
            area=torch.tensor([o["area"] for o in self.objects], dtype=torch.float32),
            image_id=self.image_id,
        )

    def turned(self, orientation: int) -> "Truth":
        """The same objects in an image that was turned as EXIF says."""
        if orientation == 1:
            return self
        width, height = (self.height, self.width) if orientation > 4 else (self.width, self.height)
        objects = tuple(_turned(o, orientation, width, height) for o in self.objects)
        return replace(self, width=width, height=height, objects=objects)


def _turned(one: TrueObject, orientation: int, width: int, height: int) -> TrueObject:
    x, y, w, h = one["bbox"]
    if orientation > 4:
        x, y, w, h = y, x, h, w
    if orientation in (2, 3, 6, 7):
        x = width - x - w
    if orientation in (3, 4, 7, 8):
        y = height - y - h
    mask = turned(rle.decode(one["segmentation"]), orientation)
    return TrueObject(
        bbox=[x, y, w, h],
        label=one["label"],
        area=one["area"],
        iscrowd=one["iscrowd"],
        segmentation=rle.encode(mask),
    )


def turn_to_fit(annotated: tuple[int, int], header: Header, image: Path, where: str) -> int:
    """How an annotation of this width and height is to be turned to lie on the upright image.

    Annotations are made on what a viewer shows, which is upright; where only the stored image has their size, on that.
    """
    if annotated == header.upright:
        return 1
    if annotated == (header.width, header.height):
        return header.orientation
    raise UnreadableImage(
        f"{where} is {annotated[0]} x {annotated[1]} pixels, expected {header.upright[0]} x {header.upright[1]} as "
        f"{image} has. Annotate the image in its own size, or leave it out."
    )


class ObjectImages(Protocol):
    """Images with objects, by index."""

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def category_ids(self) -> tuple[int, ...]:
        """The numbers of the classes where the data came from."""
        ...

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the user should know about this data."""
        ...

    def __len__(self) -> int: ...

    def name(self, index: int) -> str: ...

    def read(self, index: int) -> tuple[Image.Image, Target]: ...

    def read_truth(self, index: int) -> tuple[Image.Image, Truth]: ...

    def truth(self, index: int) -> Truth: ...


def truth_of_numbers(numbers: np.ndarray, image_id: int) -> Truth:
    """The objects of one class in a map of object numbers; 0 is none of them."""
    height, width = numbers.shape
    objects = []
    for value, (top, bottom, left, right) in extents(numbers):
        mask = np.zeros((height, width), np.uint8)
        mask[top:bottom, left:right] = numbers[top:bottom, left:right] == value
        objects.append(
            TrueObject(
                bbox=[float(left), float(top), float(right - left), float(bottom - top)],
                label=1,
                area=float(mask.sum()),
                iscrowd=0,
                segmentation=rle.encode(mask),
            )
        )
    return Truth(image_id, width, height, tuple(objects))


def masks_of(target: Target) -> Tensor:
    """A mask for every object, n h w. On the way to a model one map of numbers is enough, and far less to move."""
    masks = target["masks"]
    if masks.ndim == 3:
        return masks
    return masks == torch.arange(1, len(target["labels"]) + 1, device=masks.device)[:, None, None]


def renumbered(numbers: Tensor, kept: Tensor) -> Tensor:
    """A map of numbered objects with some of them left out, the others numbered without gaps."""
    if bool(kept.all()):
        return numbers
    new = torch.cat([kept.new_zeros(1), kept]).cumsum(0, dtype=numbers.dtype)
    new[1:][~kept] = 0
    return new[numbers.long()]


def areas_of(masks: Tensor) -> Tensor:
    """Pixels of each. NumPy counts one mask after the other twenty times as fast as PyTorch sums them all."""
    return torch.tensor([np.count_nonzero(mask) for mask in masks.numpy()], dtype=torch.float32)


def extents(numbers: np.ndarray) -> list[tuple[int, tuple[int, int, int, int]]]:
    """Every number above 0 with the rows and columns between which it lies: top, bottom, left, right."""
    rows, columns = numbers.nonzero()
    values, which = np.unique(numbers[rows, columns], return_inverse=True)
    ends: dict[str, Any] = {}
    for name, places in (("rows", rows), ("columns", columns)):
        first, last = np.full(len(values), max(numbers.shape)), np.full(len(values), -1)
        np.minimum.at(first, which, places)
        np.maximum.at(last, which, places)
        ends[name] = zip(first.tolist(), (last + 1).tolist(), strict=True)
    both = zip(values.tolist(), ends["rows"], ends["columns"], strict=True)
    return [(value, (*down, *across)) for value, down, across in both]
