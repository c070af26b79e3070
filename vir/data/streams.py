"""Sets too large for folders: WebDataset shards, read in order by timm and shuffled as they come.

The order depends on seed, epoch and number of workers; a run that was killed reads again what it had seen of its epoch.
"""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from timm.data import IterableImageDataset
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from vir.data.loading import Batch, Share, Transform, seed_from, seeded
from vir.data.sets import FOLDERS, SHARDS, NoImages, Split

NAMES = "classes.txt"


@dataclass(frozen=True)
class StreamedImages:
    """Images of some shards, with as many as they are."""

    shards: tuple[Path, ...]
    count: int
    classes: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.count

    def read(self, transform: Transform, training: bool, batch: int, seed: int) -> IterableImageDataset:
        return IterableImageDataset(
            "", reader="wds/", split="::".join(map(str, self.shards)) + f"|{self.count}", is_training=training,
            batch_size=batch, seed=seed % 2**31, transform=transform,
        )  # fmt: skip


def open_streams(data: str) -> dict[Split, StreamedImages]:
    """wds/FOLDER: shards whose names begin with train and val, and a classes.txt with a name on each line."""
    root = Path(data.removeprefix(SHARDS))
    names = root / NAMES
    if not names.is_file():
        raise NoImages(f"{names} does not exist: expected the names of the classes there, one on each line, by number.")
    classes = tuple(names.read_text().split("\n"))
    classes = tuple(name for name in classes if name)
    return {split: _open(root, split, classes) for split in FOLDERS}


def _open(root: Path, split: Split, classes: tuple[str, ...]) -> StreamedImages:
    shards = tuple(sorted(file for name in FOLDERS[split] for file in root.glob(f"{name}*.tar")))
    count = sum(_count(shard) for shard in shards)
    if not count:
        raise NoImages(f"{root} holds no shards named {FOLDERS[split][0]}*.tar with images and their .cls files.")
    return StreamedImages(shards, count, classes)


def _count(shard: Path) -> int:
    try:
        with tarfile.open(shard) as archive:
            return sum(member.name.endswith(".cls") for member in archive)
    except tarfile.TarError as error:
        raise NoImages(f"{shard} is not a whole tar file ({error}): fetch it again or leave it out.") from None


class _Seeded:
    """A transform whose random numbers come from seed, epoch, worker and place in the stream."""

    def __init__(self, transform: Transform, seed: int, epoch: int) -> None:
        self.transform, self.numbers, self.place = transform, (seed, epoch), 0

    def __call__(self, image: Image.Image) -> Tensor:
        worker = get_worker_info()
        self.place += 1
        with seeded(*self.numbers, worker.id if worker else 0, self.place):
            return self.transform(image)


def _collate(examples: list[tuple[Tensor, int]]) -> Batch:
    images, targets = zip(*examples, strict=True)
    return Batch(torch.stack(images), torch.tensor(targets), torch.full((len(targets),), -1), [])


def streamed_batches(
    images: StreamedImages,
    transform: Transform,
    seed: int,
    batch: int,
    epochs: int,
    share: Share,
    workers: int,
    first_epoch: int = 0,
    first_step: int = 0,
) -> Iterator[Batch]:
    """As `training_batches`, from a stream."""
    part = batch // (share.processes * share.parts)
    for epoch in range(first_epoch, epochs):
        dataset = images.read(_Seeded(transform, seed, epoch), True, part, seed_from(seed, epoch))
        dataset.set_epoch(epoch)
        generator = torch.Generator().manual_seed(seed_from(seed, epoch))
        loader = DataLoader(
            dataset, part, num_workers=workers, drop_last=True, collate_fn=_collate, generator=generator
        )  # fmt: skip
        wanted = len(images) // batch * share.parts
        skipped = first_step * share.parts if epoch == first_epoch else 0
        for number, some in zip(range(wanted), loader, strict=False):
            if number >= skipped:
                yield some


def streamed_judging(images: StreamedImages, transform: Transform, batch: int) -> DataLoader:
    """All images once, in order: by one reader, because shards cannot be shared evenly."""
    return DataLoader(images.read(transform, False, batch, 0), batch, collate_fn=_collate)
