"""Batches of images with boxes, masks or label maps: lists, since every image has its own size."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from vir.data.images import UnreadableImage
from vir.data.loading import Key, KeyedExamples, seeded

JointTransform = Callable[[Image.Image, Any], tuple[Tensor, Any]]
Read = Callable[[int], tuple[Image.Image, Any]]


class DenseImages(Protocol):
    """A set whose images come with something to learn from."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str: ...

    def read(self, index: int) -> tuple[Image.Image, Any]: ...


@dataclass
class DenseBatch:
    images: list[Tensor]
    targets: list[Any]  # what is known of each image; nothing where it could not be read
    sizes: list[tuple[int, int]]  # height and width of the images as they were read
    indices: Tensor
    unreadable: list[str]  # files for which another image stands in, and why

    def pin_memory(self) -> "DenseBatch":
        return self._each(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device | str) -> "DenseBatch":
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "DenseBatch":
        images, targets = [change(image) for image in self.images], [_changed(t, change) for t in self.targets]
        return replace(self, images=images, targets=targets)


def _changed(target: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(target, Tensor):
        return change(target)
    if isinstance(target, dict):
        return {name: _changed(value, change) for name, value in target.items()}
    return target


Example = tuple[Tensor, Any, tuple[int, int], int, list[str]]


class DenseExamples(KeyedExamples):
    """Images with their targets as a model takes them. For one that cannot be read the next stands in; or, to judge a
    model, a blank one of which nothing is known. What is read is what `read` gives, by itself images.read."""

    def __init__(
        self,
        images: DenseImages,
        transform: JointTransform,
        seed: int = 0,
        stand_in: bool = True,
        read: Read | None = None,
    ) -> None:
        self.images = images
        self.transform = transform
        self.seed = seed
        self.stand_in = stand_in
        self.read = read or images.read

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: Key) -> Example:
        epoch, first = key
        unreadable: list[str] = []
        for step in range(len(self.images)):
            index = (first + step) % len(self.images)
            try:
                image, known = self.read(index)
            except UnreadableImage as error:
                unreadable.append(f"{self.images.name(index)}: {error}")
                if not self.stand_in:
                    return torch.zeros(3, 32, 32), None, (32, 32), index, unreadable
                continue
            with seeded(self.seed, epoch, index):
                pixels, target = self.transform(image, known)
            return pixels, target, (image.height, image.width), index, unreadable
        raise UnreadableImage("none of the images can be read")

    def collate(self, examples: list[Example]) -> DenseBatch:
        images, targets, sizes, indices, unreadable = zip(*examples, strict=True)
        told = [file for some in unreadable for file in some]
        return DenseBatch(list(images), list(targets), list(sizes), torch.tensor(indices), told)
