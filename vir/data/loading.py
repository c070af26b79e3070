"""Batches of images. Every random number of an example comes from its seed, epoch and index and nothing else: a run
that was killed goes on with the very batches that it would have seen."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vir.data.images import UnreadableImage, open_image
from vir.data.sets import LabelledImages

Key = tuple[int, int]  # epoch, index
Transform = Callable[[Image.Image], Tensor]


@dataclass
class Batch:
    images: Tensor
    targets: Tensor
    indices: Tensor
    unreadable: list[str]  # files for which another image stands in, and why

    def pin_memory(self) -> "Batch":
        return Batch(self.images.pin_memory(), self.targets.pin_memory(), self.indices, self.unreadable)


def seed_from(*parts: int) -> int:
    """One number out of several, all bits of which depend on all of them."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


@contextmanager
def seeded(*parts: int) -> Iterator[None]:
    """Random numbers that depend on these numbers alone; those of the rest of the program go on undisturbed."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002  (timm draws from them)
    seed = seed_from(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])


NO_CLASS = -1


class KeyedExamples(Dataset):
    """Whatever is read by epoch and index, and put together to batches in its own way."""

    seed: int

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, key: Key) -> Any:
        raise NotImplementedError

    def collate(self, examples: list[Any]) -> Any:
        raise NotImplementedError


class Examples(KeyedExamples):
    """Images as a model takes them. For one that cannot be read the next stands in; or, to judge a model, a blank one
    without a class."""

    def __init__(self, images: LabelledImages, transform: Transform, seed: int = 0, stand_in: bool = True) -> None:
        self.images = images
        self.transform = transform
        self.seed = seed
        self.stand_in = stand_in

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: Key) -> tuple[Tensor, int, int, list[str]]:
        epoch, first = key
        unreadable: list[str] = []
        for step in range(len(self.images)):
            index = (first + step) % len(self.images)
            file, target = self.images.read(index)
            try:
                with file:
                    image = open_image(file)
            except UnreadableImage as error:
                unreadable.append(f"{self.images.name(index)}: {error}")
                if not self.stand_in:
                    return self.transform(Image.new("RGB", (8, 8))), NO_CLASS, index, unreadable
                continue
            with seeded(self.seed, epoch, index):
                return self.transform(image), target, index, unreadable
        raise UnreadableImage(f"none of the {len(self.images)} images can be read; {unreadable[0]}")

    def collate(self, examples: list[tuple[Tensor, int, int, list[str]]]) -> Batch:
        images, targets, indices, unreadable = zip(*examples, strict=True)
        return Batch(
            torch.stack(images), torch.tensor(targets), torch.tensor(indices), [u for some in unreadable for u in some]
        )


@dataclass(frozen=True)
class Share:
    """What one process of several takes of every batch, in how many parts."""

    rank: int = 0
    processes: int = 1
    parts: int = 1


def order_of(count: int, seed: int, epoch: int) -> list[int]:
    """The order in which an epoch sees its images."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed_from(seed, epoch))).tolist()


def training_batches(
    examples: KeyedExamples,
    batch: int,
    epochs: int,
    share: Share,
    workers: int,
    first_epoch: int = 0,
    first_step: int = 0,
) -> Iterator[Any]:
    """The batches of all epochs from some step on, one after the other: workers run ahead over their borders."""
    count = len(examples)
    part = batch // (share.processes * share.parts)

    def keys() -> Iterator[list[Key]]:
        for epoch in range(first_epoch, epochs):
            order = order_of(count, examples.seed, epoch)
            for step in range(first_step if epoch == first_epoch else 0, count // batch):
                for number in range(share.parts):
                    start = step * batch + (number * share.processes + share.rank) * part
                    yield [(epoch, index) for index in order[start : start + part]]

    return _in_words(_loader(examples, _Again(keys), workers))


def judging_batches(examples: KeyedExamples, batch: int, share: Share, workers: int) -> DataLoader:
    """All images once, in order, shared among the processes."""
    mine = range(share.rank, len(examples), share.processes)
    keys = [[(0, i) for i in mine[start : start + batch]] for start in range(0, len(mine), batch)]
    return _loader(examples, keys, workers)


def _in_words(batches: Iterable[Any]) -> Iterator[Any]:
    """An error that a worker found comes with the worker's traceback: what it says stands at the end."""
    try:
        yield from batches
    except UnreadableImage as error:
        raise UnreadableImage(str(error).rstrip().split(f"{UnreadableImage.__name__}: ")[-1]) from None


@dataclass(frozen=True)
class _Again:
    """An iterable out of a generator: the orders of all epochs at once would fill the memory."""

    make: Callable[[], Iterator[list[Key]]]

    def __iter__(self) -> Iterator[list[Key]]:
        return self.make()


def _loader(examples: KeyedExamples, keys: Iterable[list[Key]], workers: int) -> DataLoader:
    pin = torch.cuda.is_available()
    return DataLoader(examples, batch_sampler=keys, num_workers=workers, collate_fn=examples.collate, pin_memory=pin)
