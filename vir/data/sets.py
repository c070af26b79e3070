"""Sets of labelled images: a folder per class, a tar file of such folders, a dataset of the Hugging Face hub."""

import os
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal

from timm.data import add_img_extensions, create_reader, get_img_extensions

from vir.data import hub

Split = Literal["train", "val"]
FOLDERS: dict[Split, tuple[str, ...]] = {"train": ("train", "training"), "val": ("val", "validation", "valid", "test")}
EXTENSIONS = (".webp", ".tif", ".tiff", ".bmp", ".gif", ".jp2", ".avif")  # besides timm's PNG and JPEG
SHARDS = "wds/"  # of data in shards: vir.data.streams
TOLD = 5  # names in a remark
HELD_OUT = 10  # one image in so many is kept for validation where the data has no split of its own


class NoImages(ValueError):
    """The data cannot be used: what was found, what was expected, what to do."""


@dataclass(frozen=True)
class LabelledImages:
    """Images by index, each with the number of its class."""

    reader: Any  # timm's: gives an open file and a class
    indices: Sequence[int]
    classes: tuple[str, ...]
    targets: Sequence[int] = ()  # of all that the reader has, where it tells them beforehand
    remarks: tuple[str, ...] = ()  # what the user should know about this data

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> tuple[BinaryIO, int]:
        file, target = self.reader[self.indices[index]]
        return file, target

    def name(self, index: int) -> str:
        return self.reader.filename(self.indices[index])

    def per_class(self) -> list[int]:
        counts = [0] * len(self.classes)
        for index in self.indices:
            counts[self.targets[index]] += 1
        return counts


def open_sets(data: str | Path, classes: Sequence[str] | None = None) -> dict[Split, LabelledImages]:
    """The images to learn from and those to judge by, with the same numbers for the same classes.

    `data` is a folder or tar file with train/ and val/, or of class folders alone, or hfds/NAME. Given classes fix the
    numbers, as a checkpoint needs it.
    """
    if str(data).startswith(hub.PREFIX):
        return _open_hub(str(data), classes)
    root = Path(data)
    if not root.exists():
        raise NoImages(f"{root} does not exist. Give a folder that has one folder of images per class.")
    if root.is_file():
        whole = _open(root, classes)
        parts = {split: _part(whole, names) for split, names in FOLDERS.items()}
        if parts["train"] and parts["val"]:
            return {"train": parts["train"], "val": parts["val"]}
        return _split(parts["train"] or whole)
    folders = {split: _find(root, names) for split, names in FOLDERS.items()}
    if folders["train"] and folders["val"]:
        train = _open(folders["train"], classes)
        return {"train": train, "val": _open(folders["val"], train.classes)}
    return _split(_open(folders["train"] or root, classes))


def open_images(data: str | Path, classes: Sequence[str], split: str = "val") -> LabelledImages:
    """The images to judge by: the val/ of a folder if it has one, else all that it holds; or another split by name."""
    if str(data).startswith(hub.PREFIX):
        sets = {str(name): images for name, images in _open_hub(str(data), classes).items()}
        if split not in sets:
            raise NoImages(f"{data} is judged by its val or train images, not by {split!r}.")
        return sets[split]
    if str(data).startswith(SHARDS):
        raise NoImages(f"{data} is read from the first image to the last: expected a folder, a .tar or hfds/NAME here.")
    root = Path(data)
    if not root.exists():
        raise NoImages(f"{root} does not exist. Give a folder that has one folder of images per class.")
    names = next((names for known, names in FOLDERS.items() if known == split), (split,))
    if root.is_file():
        whole = _open(root, classes)
        part = _part(whole, names)
        if part is None and split != "val":
            raise NoImages(f"{root} has no folder {split!r}: expected it to hold one folder per class.")
        return part or whole
    place = _find(root, names)
    if place is None and split != "val":
        raise NoImages(f"{root} has no folder {split!r}: expected it to hold one folder per class.")
    return _open(place or root, classes)


def _open_hub(data: str, classes: Sequence[str] | None) -> dict[Split, LabelledImages]:
    try:
        readers, names = hub.open_splits(data.removeprefix(hub.PREFIX))
    except hub.CannotOpen as error:
        raise NoImages(str(error)) from None
    if classes is not None and tuple(classes) != names:
        raise NoImages(f"{data} has the classes {', '.join(names)}, expected {', '.join(classes)}, in this order.")
    opened = {
        split: LabelledImages(reader, range(len(reader)), names, list(reader.dataset[reader.label]))
        for split, reader in readers.items()
    }
    found = {split: next((opened[name] for name in FOLDERS[split] if name in opened), None) for split in FOLDERS}
    if found["train"] is None:
        raise NoImages(f"{data} has the splits {', '.join(readers)}: expected one called train.")
    if found["val"] is None:
        return _split(found["train"])
    return {"train": found["train"], "val": found["val"]}


def image_files(place: Path) -> list[Path]:
    """An image itself, or all that lie in a folder and below it, in the order of their names."""
    add_img_extensions(EXTENSIONS)
    endings = tuple(get_img_extensions())
    if place.is_file():
        return [place]
    return sorted(f for f in place.rglob("*") if f.name.lower().endswith(endings) and not f.name.startswith("."))


def _find(root: Path, names: Sequence[str]) -> Path | None:
    return next((root / name for name in names if (root / name).is_dir()), None)


def _part(whole: LabelledImages, names: Sequence[str]) -> LabelledImages | None:
    """The images of a tar file whose folders of classes stand in a folder of one of these names."""
    above = [PurePosixPath(whole.name(index)).parts[-3:-2] for index in whole.indices]
    for name in names:
        if found := [index for index, folder in zip(whole.indices, above, strict=True) if folder == (name,)]:
            return replace(whole, indices=found)
    return None


def _open(root: Path, classes: Sequence[str] | None) -> LabelledImages:
    numbers = None if classes is None else {c: i for i, c in enumerate(classes)}
    if root.is_file() and root.suffix != ".tar":
        raise NoImages(f"{root} is a file, expected a folder of class folders or a .tar of them.")
    add_img_extensions(EXTENSIONS)
    try:
        reader = create_reader("", root=str(root), class_map=numbers)
    except tarfile.TarError as error:
        raise NoImages(f"{root} is not a whole tar file ({error}): make or fetch it again.") from None
    except (RuntimeError, ValueError):  # the latter of a tar file
        known = ", ".join(get_img_extensions())
        raise NoImages(
            f"{root} holds no images{' of the known classes' if classes else ''}: expected one folder per class, with "
            f"files that end in {known}."
        ) from None
    in_tar = root.is_file()
    found = _by_number(reader.class_name_to_idx if in_tar else reader.class_to_idx)
    targets = list(reader.targets) if in_tar else [target for _, target in reader.samples]
    if found == ("",):
        raise NoImages(
            f"{root} holds images but no class folders: put the images of each class into a folder of its name, "
            f"such as {root / 'cats'}."
        )
    return LabelledImages(reader, range(len(reader)), found, targets, tuple(_remarks(root, targets, found)))


def _by_number(class_to_idx: dict[str, int]) -> tuple[str, ...]:
    return tuple(sorted(class_to_idx, key=lambda name: class_to_idx[name]))


def _remarks(root: Path, targets: Sequence[int], classes: Sequence[str]) -> list[str]:
    present, remarks = set(targets), []
    if empty := [name for i, name in enumerate(classes) if i not in present]:
        remarks.append(f"{len(empty)} of {len(classes)} classes have no images in {root}: {_some_of(empty)}")
    folders = {entry.name for entry in os.scandir(root) if entry.is_dir()} if root.is_dir() else set()
    if unknown := sorted(folders - set(classes)):
        remarks.append(f"{len(unknown)} folders in {root} are no class or empty, and left out: {_some_of(unknown)}")
    return remarks


def _some_of(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:TOLD])) + (", .." if len(names) > TOLD else "")


def _split(whole: LabelledImages) -> dict[Split, LabelledImages]:
    """By a sum over the name of each file: the same images stay held out when others are added."""
    if len(whole) < 5 * HELD_OUT:
        raise NoImages(
            f"{len(whole)} images are too few to hold some of them out for validation: expected at least "
            f"{5 * HELD_OUT}, or folders train/ and val/."
        )
    held = [zlib.crc32(whole.name(i).encode()) % HELD_OUT == 0 for i in range(len(whole))]
    parts = {
        "train": [index for index, out in zip(whole.indices, held, strict=True) if not out],
        "val": [index for index, out in zip(whole.indices, held, strict=True) if out],
    }
    remark = f"no val/ folder: {len(parts['val'])} of {len(whole)} images are held out for validation"
    return {
        "train": replace(whole, indices=parts["train"], remarks=(*whole.remarks, remark)),
        "val": replace(whole, indices=parts["val"], remarks=()),
    }
