"""Sets of images with objects: COCO's JSON, or folders of masks in which every object has its number."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vir.data.coco import CocoImages, open_coco
from vir.data.images import open_image, open_numbers, read_header, turned
from vir.data.pairs import SPLITS, Pairs, Part, find_pairs, held_out
from vir.data.sets import NoImages
from vir.data.truth import ObjectImages, Target, Truth, extents, truth_of_numbers, turn_to_fit

ONE_CLASS = ("object",)  # what numbered objects are called where nobody says


@dataclass(frozen=True)
class NumberedImages:
    """Images with a mask beside each, whose pixels say to which object they belong; all objects are of one class."""

    pairs: Pairs
    classes: tuple[str, ...] = ONE_CLASS
    category_ids: tuple[int, ...] = (1,)

    @property
    def remarks(self) -> tuple[str, ...]:
        return self.pairs.remarks

    def __len__(self) -> int:
        return len(self.pairs)

    def name(self, index: int) -> str:
        return self.pairs.files[index][0].name

    def read(self, index: int) -> tuple[Image.Image, Target]:
        return open_image(self.pairs.files[index][0]), _target(self._numbers(index), index)

    def read_truth(self, index: int) -> tuple[Image.Image, Truth]:
        return open_image(self.pairs.files[index][0]), self.truth(index)

    def truth(self, index: int) -> Truth:
        return truth_of_numbers(self._numbers(index), index)

    def _numbers(self, index: int) -> np.ndarray:
        image, mask = self.pairs.files[index]
        numbers = open_numbers(mask)
        height, width = numbers.shape
        return turned(numbers, turn_to_fit((width, height), read_header(image), image, f"the mask {mask}"))


def _target(numbers: np.ndarray, index: int) -> Target:
    """As Truth.target() has it, with one map for all masks."""
    found = extents(numbers)
    there = numbers != 0
    masks = np.zeros(numbers.shape, np.int32)
    masks[there] = np.searchsorted([value for value, _ in found], numbers[there]) + 1
    boxes = [(left, top, right, bottom) for _, (top, bottom, left, right) in found]
    return Target(
        boxes=torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        labels=torch.ones(len(found), dtype=torch.int64),
        masks=torch.from_numpy(masks),
        iscrowd=torch.zeros(len(found), dtype=torch.int64),
        area=torch.from_numpy(np.bincount(masks[there], minlength=len(found) + 1)[1:]).float(),
        image_id=index,
    )


def open_objects(root: str | Path, classes: Sequence[str] | None = None) -> dict[Part, ObjectImages]:
    """The images to learn from and those to judge by, with the same numbers for the same classes.

    `root` has annotations/instances_train*.json and instances_val*.json as COCO, or images and masks of numbered
    objects. Given classes fix the numbers, and name the one class of numbered objects. Where only val is there, only
    val is given.
    """
    folder = Path(root)
    if not folder.is_dir():
        raise NoImages(f"{folder} is no folder. Give one as COCO has it, or one with images/ and masks/.")
    if any(folder.glob("annotations/instances_*.json")):
        return _open_coco_folder(folder, classes)
    if classes is not None and len(classes) != 1:
        raise NoImages(f"{folder} has masks of numbered objects, which are of one class, not of {len(classes)}.")
    one = tuple(classes) if classes is not None else ONE_CLASS
    return {part: NumberedImages(pairs, one) for part, pairs in find_pairs(folder).items()}


def _open_coco_folder(root: Path, classes: Sequence[str] | None) -> dict[Part, ObjectImages]:
    found: dict[Part, CocoImages] = {}
    for part in SPLITS:
        if file := _json_file(root, part):
            known = found["train"].classes if "train" in found else classes
            found[part] = open_coco(file, _image_folder(root, file), known)
    if not found:
        raise NoImages(f"{root / 'annotations'} has neither instances_train*.json nor instances_val*.json.")
    if "train" in found and "val" not in found:
        return _split(found["train"])
    return {part: images for part, images in found.items()}


def _json_file(root: Path, part: Part) -> Path | None:
    files = sorted(root.glob(f"annotations/instances_{part}*.json"))
    if len(files) > 1:
        names = " and ".join(file.name for file in files)
        raise NoImages(f"{root / 'annotations'} has {names}: expected one of them. Move the rest.")
    return files[0] if files else None


def _image_folder(root: Path, file: Path) -> Path:
    name = file.stem.removeprefix("instances_")
    places = [root / name, root / "images" / name, root / "images"]
    if place := next((place for place in places if place.is_dir()), None):
        return place
    raise NoImages(f"the images of {file} are missing: expected a folder {' or '.join(str(p) for p in places)}.")


def _split(whole: CocoImages) -> dict[Part, ObjectImages]:
    out = held_out([Path(whole.name(i)).stem for i in range(len(whole))])
    train, val = (_those(whole, [i for i, o in enumerate(out) if o is wanted]) for wanted in (False, True))
    remark = f"no instances_val*.json: {len(val)} of {len(whole)} images are held out for validation"
    return {"train": replace(train, remarks=(*whole.remarks, remark)), "val": replace(val, remarks=())}


def _those(whole: CocoImages, indices: list[int]) -> CocoImages:
    images, objects = tuple(whole.images[i] for i in indices), tuple(whole.objects[i] for i in indices)
    return replace(whole, images=images, objects=objects)
