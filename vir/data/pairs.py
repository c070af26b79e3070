"""Images with a mask beside each, in folders as people have them, and how they are split."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from timm.data import add_img_extensions, get_img_extensions

from vir.data.sets import EXTENSIONS, HELD_OUT, NoImages

Part = Literal["train", "val", "test"]
SPLITS: dict[Part, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid"),
    "test": ("test", "testing"),
}
IMAGES = ("images", "PNGImages")
MASKS = ("masks", "labels", "annotations", "PedMasks")
MASK_ENDINGS = (".png", ".tif", ".tiff", ".bmp", ".gif")  # formats that keep every number
MASK_SUFFIXES = ("", "_mask")  # what follows the name of the image in that of its mask
SPLIT_FILE = "split.txt"


@dataclass(frozen=True)
class Pairs:
    """Images and masks that belong together, in the order of their names."""

    files: tuple[tuple[Path, Path], ...]  # image, mask
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.files)


def find_pairs(root: Path) -> dict[Part, Pairs]:
    """Folders of images and masks within folders of a split, or the other way round, or without a split.

    A file split.txt says for each name train, val or test; without one, some are held out by a sum over their names.
    """
    if not root.is_dir():
        raise NoImages(f"{root} is no folder. Give one that has folders {IMAGES[0]} and {MASKS[0]}.")
    split = {part: _split_folders(root, names) for part, names in SPLITS.items()}
    found = {part: _pair(*folders) for part, folders in split.items() if folders is not None}
    if not found:
        folders = _folders(root)
        if folders is None:
            raise NoImages(
                f"{root} has no images with masks: expected folders images/ and masks/ there, or train/images, "
                "train/masks, val/images, val/masks, or images/training, annotations/training, images/validation, "
                "annotations/validation."
            )
        whole = _pair(*folders)
        file = root / SPLIT_FILE
        return _split_by_file(whole, file) if file.is_file() else _split_by_names(whole)
    if "train" in found and "val" not in found:
        if "test" not in found:
            return _split_by_names(found["train"])
        test = found.pop("test")
        found["val"] = replace(test, remarks=(*test.remarks, f"no val/ in {root}: its test images are judged"))
    return found


def _first(root: Path, names: Sequence[str]) -> Path | None:
    return next((root / name for name in names if (root / name).is_dir()), None)


def _folders(root: Path) -> tuple[Path, Path] | None:
    images, masks = _first(root, IMAGES), _first(root, MASKS)
    return (images, masks) if images and masks else None


def _split_folders(root: Path, names: Sequence[str]) -> tuple[Path, Path] | None:
    inside = _first(root, names)
    if inside and (folders := _folders(inside)):
        return folders
    if not (outside := _folders(root)):
        return None
    images, masks = (_first(folder, names) for folder in outside)
    return (images, masks) if images and masks else None


def _pair(images: Path, masks: Path) -> Pairs:
    add_img_extensions(EXTENSIONS)
    pictures, numbers = _by_stem(images, tuple(get_img_extensions())), _by_stem(masks, MASK_ENDINGS)
    if not pictures:
        raise NoImages(f"{images} holds no images: expected files that end in {', '.join(get_img_extensions())}.")
    together, used, alone = [], set(), []
    for stem, picture in sorted(pictures.items()):
        mask = next((stem + suffix for suffix in MASK_SUFFIXES if stem + suffix in numbers), None)
        if mask is None:
            alone.append(picture.name)
            continue
        together.append((picture, numbers[mask]))
        used.add(mask)
    if not together:
        raise NoImages(
            f"no image in {images} has a mask in {masks}: expected {masks / (min(pictures) + '.png')} for "
            f"{pictures[min(pictures)].name}, and so on."
        )
    spare = sorted(numbers.keys() - used)
    remarks = [f"{len(alone)} images in {images} have no mask in {masks}: left out ({alone[0]})"] if alone else []
    remarks += [f"{len(spare)} masks in {masks} have no image in {images}: left out ({spare[0]})"] if spare else []
    return Pairs(tuple(together), tuple(remarks))


def _by_stem(folder: Path, endings: tuple[str, ...]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for file in sorted(folder.rglob("*")):
        if not file.name.lower().endswith(endings) or file.name.startswith(".") or not file.is_file():
            continue
        stem = str(file.relative_to(folder).with_suffix("").as_posix())
        if stem in found:
            raise NoImages(f"{found[stem]} and {file} have the same name: expected one of them. Remove the other.")
        found[stem] = file
    return found


def _split_by_file(whole: Pairs, file: Path) -> dict[Part, Pairs]:
    parts = {name: part for part, names in SPLITS.items() for name in names}
    told: dict[str, Part] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        name, _, part = line.strip().rpartition(" ")
        if part not in parts or not name.strip():
            raise NoImages(f"line {number} of {file} is {line!r}, expected an image's name and train, val or test.")
        told[name.strip()] = parts[part]
    files: dict[Part, list[tuple[Path, Path]]] = {part: [] for part in SPLITS}
    silent = []
    for pair in whole.files:
        where = told.get(pair[0].stem, told.get(pair[0].name))
        if where is None:
            silent.append(pair[0].name)
        else:
            files[where].append(pair)
    remarks = whole.remarks
    if silent:
        remarks = (*remarks, f"{len(silent)} images are not in {file}: left out ({silent[0]})")
    used = {part: Pairs(tuple(pairs)) for part, pairs in files.items() if pairs}
    if not used:
        raise NoImages(f"{file} names none of the images beside it: expected a name and train, val or test in a line.")
    first = next(iter(used))
    return used | {first: replace(used[first], remarks=remarks)}


def _split_by_names(whole: Pairs) -> dict[Part, Pairs]:
    out = held_out([image.stem for image, _ in whole.files])
    train, val = (tuple(p for p, o in zip(whole.files, out, strict=True) if o is wanted) for wanted in (False, True))
    remark = f"no split: {len(val)} of {len(whole)} images are held out for validation"
    return {"train": Pairs(train, (*whole.remarks, remark)), "val": Pairs(val)}


def held_out(names: Sequence[str]) -> list[bool]:
    """Which images are for validation, by a sum over their names: the same stay held out when others are added."""
    out = [zlib.crc32(name.encode()) % HELD_OUT == 0 for name in names]
    if len(names) < 5 * HELD_OUT or not any(out):
        raise NoImages(
            f"{len(names)} images are too few to hold some of them out for validation: expected at least "
            f"{5 * HELD_OUT}, or a split of your own: folders train/ and val/, a {SPLIT_FILE} (a name and its part on "
            "each line), or COCO's instances_train.json and instances_val.json."
        )
    return out
