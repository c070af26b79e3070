"""Datasets of the Hugging Face hub, or in its format on the disk: hfds/NAME or hfds/FOLDER."""

import io
from typing import Any, BinaryIO

PREFIX = "hfds/"


class CannotOpen(ValueError):
    """What is wrong with the dataset, and what to do."""


class HubReader:
    """One split, as timm's readers are: an open file and a class for each index."""

    def __init__(self, dataset: Any, image: str, label: str) -> None:
        self.dataset, self.image, self.label = dataset, image, label

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[BinaryIO, int]:
        row = self.dataset[index]
        content = row[self.image]
        file = io.BytesIO(content["bytes"]) if content["bytes"] else open(content["path"], "rb")  # noqa: SIM115
        return file, row[self.label]

    def filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        return self.dataset[index][self.image]["path"] or f"row {index}"


def open_splits(name: str) -> tuple[dict[str, HubReader], tuple[str, ...]]:
    """All splits by their names, and the names of the classes."""
    try:
        from datasets import ClassLabel, Image, load_dataset
    except ImportError:
        raise CannotOpen(f"{PREFIX}{name} needs Hugging Face datasets: pip install datasets.") from None
    try:
        found = load_dataset(name)
    except (
        Exception
    ) as error:  # of many kinds, for a name that is unknown, a network that is down, files that are not data
        raise CannotOpen(f"{name} cannot be opened as a Hugging Face dataset: {error}") from None
    features = next(iter(found.values())).features
    images = [column for column, kind in features.items() if isinstance(kind, Image)]
    labels = [column for column, kind in features.items() if isinstance(kind, ClassLabel)]
    if len(images) != 1 or len(labels) != 1:
        columns = ", ".join(f"{column}: {kind}" for column, kind in features.items())
        raise CannotOpen(f"{name} has the columns {columns}: expected one of images and one of class labels.")
    whole = found.cast_column(images[0], Image(decode=False))  # by our own decoder, as all images are
    readers = {split: HubReader(rows, images[0], labels[0]) for split, rows in whole.items()}
    return readers, tuple(features[labels[0]].names)
