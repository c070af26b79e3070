"""Boxes of all images of a batch at once: asked about image by image, a GPU waits for its host most of the time."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vir.heads.boxes import SMALLEST_SIDE, match, sample

Size = tuple[int, int]  # height, width


@dataclass(frozen=True)
class Filled:
    """Boxes of some images, filled up to one length by boxes without area."""

    boxes: Tensor  # b n 4
    there: Tensor  # b n, false where a box only fills up

    @classmethod
    def up(cls, boxes: Sequence[Tensor]) -> "Filled":
        """By one box at least, so that even the batch without any has one to point at."""
        filled = pad_sequence([torch.cat([b, b.new_zeros(1, 4)]) for b in boxes], batch_first=True)
        counts = torch.tensor([len(b) for b in boxes], device=filled.device)
        return cls(filled, torch.arange(filled.shape[1], device=filled.device) < counts[:, None])


@dataclass(frozen=True)
class Truth:
    """What is known of the objects of a batch."""

    filled: Filled
    labels: Tensor  # b n

    @classmethod
    def of(cls, targets: Sequence[dict[str, Tensor]]) -> "Truth":
        filled = Filled.up([t["boxes"] for t in targets])
        labels = torch.zeros(filled.there.shape, dtype=torch.int64, device=filled.there.device)
        labels[filled.there] = torch.cat([t["labels"] for t in targets])
        return cls(filled, labels)


@dataclass(frozen=True)
class Samples:
    """The boxes of a batch that a stage learns from, image after image, in each the matched ones first."""

    boxes: Tensor  # m 4
    place: tuple[Tensor, Tensor]  # image and column of each, in
    frame: tuple[int, int]  # so many images and columns
    labels: Tensor  # m, 0 for background
    own: Tensor  # m, whether a box is a proposal, and not a truth that was put among them
    positive: Tensor  # indices of the matched ones
    matched: Tensor  # of each of these, the index of its truth in its image
    truth: Tensor  # and its box

    @property
    def image(self) -> Tensor:
        return self.place[0]

    def by_image(self, *of_positive: Tensor) -> tuple[list[Tensor], ...]:
        """What belongs to the matched boxes, image by image."""
        counts = self.image[self.positive].bincount(minlength=self.frame[0]).tolist()
        return tuple(list(values.split(counts)) for values in of_positive)

    def proposals(self, moved: Tensor) -> Filled:
        """The boxes as a stage has moved them, for the next one: without truths, and those of which nothing is left."""
        boxes = moved.new_zeros(*self.frame, 4)
        boxes[self.place] = moved
        there = torch.zeros(self.frame, dtype=torch.bool, device=moved.device)
        there[self.place] = self.own & (moved[:, 2:] - moved[:, :2] >= SMALLEST_SIDE).all(1)
        return Filled(boxes, there)


def choose(proposals: Filled, truth: Truth, iou: float, count: int, positive_fraction: float) -> Samples:
    """Some of the proposals and the truth itself, without which a first stage that knows nothing had no match."""
    boxes = torch.cat([proposals.boxes, truth.filled.boxes], 1)
    there = torch.cat([proposals.there, truth.filled.there], 1)
    matched = match(boxes, truth.filled.boxes, iou)
    index, taken = sample(matched, there, count, positive_fraction)
    image, column = taken.nonzero(as_tuple=True)
    index = index[image, column]
    matched = matched[image, index]
    positive = (matched >= 0).nonzero()[:, 0]
    met = image[positive], matched[positive]
    labels = torch.zeros_like(matched)
    labels[positive] = truth.labels[met]
    own = index < proposals.boxes.shape[1]
    return Samples(
        boxes[image, index], (image, column), (taken.shape[0], taken.shape[1]), labels, own,
        positive, met[1], truth.filled.boxes[met],
    )  # fmt: skip


def joined(boxes: Sequence[Tensor]) -> tuple[Tensor, Tensor, list[int]]:
    """Boxes of several images one after the other, the image of each, and how many every image has."""
    counts = [len(b) for b in boxes]
    every = torch.cat(list(boxes))
    images = torch.arange(len(counts), device=every.device)
    image = images.repeat_interleave(torch.tensor(counts, device=every.device), output_size=len(every))
    return every, image, counts


def borders(sizes: Sequence[Size], like: Tensor) -> Tensor:
    """For each image the largest coordinates of a box: b 4."""
    return like.new_tensor([[width, height, width, height] for height, width in sizes])
