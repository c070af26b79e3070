"""Images with objects as COCO writes them down: one JSON file and one folder of images per split."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from vir.data import rle
from vir.data.images import UnreadableImage, open_image, read_header
from vir.data.sets import NoImages
from vir.data.truth import Target, TrueObject, Truth, turn_to_fit


@dataclass(frozen=True)
class CocoImages:
    """Images of one JSON file, each with its objects; classes are numbered 1, 2, 3, ... whatever their ids."""

    file: Path
    folder: Path
    images: tuple[tuple[int, str, int, int], ...]  # id, file, width, height
    objects: tuple[bytes, ...]  # of every image, as JSON: forked workers would copy millions of small objects
    classes: tuple[str, ...]
    category_ids: tuple[int, ...]
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        return self.images[index][1]

    def read(self, index: int) -> tuple[Image.Image, Target]:
        image, truth = self.read_truth(index)
        return image, truth.target()

    def read_truth(self, index: int) -> tuple[Image.Image, Truth]:
        return open_image(self._path(index)), self.truth(index)

    def truth(self, index: int) -> Truth:
        number, _, width, height = self.images[index]
        path = self._path(index)
        where = f"image {number} in {self.file}"
        orientation = turn_to_fit((width, height), read_header(path), path, where)
        try:
            objects = [_true_object(o, width, height) for o in json.loads(self.objects[index])]
        except rle.BadOutline as error:
            raise UnreadableImage(f"{where} has {error}. Correct the file, or leave the image out.") from None
        return Truth(number, width, height, tuple(objects)).turned(orientation)

    def _path(self, index: int) -> Path:
        return self.folder / self.name(index)


def _true_object(found: dict[str, Any], width: int, height: int) -> TrueObject:
    x, y, w, h = found["bbox"]
    mask = rle.from_coco(found["segmentation"], height, width)
    if mask is None:  # its box stands for it
        mask = rle.from_coco([[x, y, x + w, y, x + w, y + h, x, y + h]], height, width)
    assert mask is not None
    return TrueObject(
        bbox=[float(side) for side in found["bbox"]],
        label=found["label"],
        area=float(found["area"]) if found["area"] is not None else rle.area(mask),
        iscrowd=found["iscrowd"],
        segmentation=mask,
    )


def open_coco(file: Path, folder: Path, classes: Sequence[str] | None = None) -> CocoImages:
    """The images of a JSON file; given classes fix their numbers."""
    content = _load(file)
    category_ids, names = _categories(content["categories"], file)
    if classes is not None:
        ids = dict(zip(names, category_ids, strict=True))
        names, category_ids = tuple(classes), tuple(ids.get(name, -1) for name in classes)
    labels = {number: label for label, number in enumerate(category_ids, 1) if number != -1}
    images = _images(content["images"], file)
    present = {number: image for number, image in images.items() if (folder / image[0]).is_file()}
    if not present:
        first = next(iter(images.values()))[0]
        raise NoImages(
            f"none of the {len(images)} images that {file} names is in {folder}, the first is {first}. "
            "Put the images there."
        )
    remarks = []
    if missing := [image[0] for number, image in images.items() if number not in present]:
        remarks.append(f"{len(missing)} of {len(images)} images of {file} are not in {folder}: left out ({missing[0]})")
    known = {number for number in _ids(content["categories"])}
    objects, more = _objects(content["annotations"], present, set(images), labels, known, file)
    return CocoImages(
        file,
        folder,
        tuple((number, *image) for number, image in present.items()),
        tuple(json.dumps(objects[number]).encode() for number in present),
        names,
        category_ids,
        (*remarks, *more),
    )


def _load(file: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, or no text
        raise NoImages(f"{file} is no JSON ({error}): it may be cut short. Fetch it again.") from None
    parts = ("images", "annotations", "categories")
    lists = isinstance(content, dict) and all(isinstance(content.get(part), list) for part in parts)
    if not lists or not all(isinstance(entry, dict) for part in parts for entry in content[part]):
        raise NoImages(f"{file} is not as COCO writes it: expected lists of objects called {', '.join(parts)}.")
    if not content["images"] or not content["categories"]:
        raise NoImages(f"{file} names no images or no categories: there is nothing to learn from.")
    return content


def _ids(entries: list[dict[str, Any]]) -> list[Any]:
    return [entry.get("id") for entry in entries]


def _check_ids(entries: list[dict[str, Any]], what: str, file: Path) -> None:
    seen: set[int] = set()
    for number in _ids(entries):
        if type(number) is not int or number < 0:
            raise NoImages(f"{file} has {what} with the id {number!r}, expected a whole number. Number them anew.")
        if number in seen:
            raise NoImages(f"{file} has two {what} with the id {number}, expected every id once. Number them anew.")
        seen.add(number)


def _categories(entries: list[dict[str, Any]], file: Path) -> tuple[tuple[int, ...], tuple[str, ...]]:
    _check_ids(entries, "categories", file)
    named = {entry["id"]: str(entry.get("name", entry["id"])) for entry in entries}
    ids = tuple(sorted(named))
    names = tuple(named[number] for number in ids)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise NoImages(f"{file} has several categories called {twice[0]!r}: give each its own name.")
    return ids, names


def _images(entries: list[dict[str, Any]], file: Path) -> dict[int, tuple[str, int, int]]:
    _check_ids(entries, "images", file)
    images: dict[int, tuple[str, int, int]] = {}
    for entry in entries:
        width: Any
        height: Any
        name, width, height = entry.get("file_name"), entry.get("width"), entry.get("height")
        whole = isinstance(width, int) and isinstance(height, int)
        if not isinstance(name, str) or not name or not whole or min(width, height) < 1:
            raise NoImages(
                f"image {entry['id']} in {file} has file_name {name!r}, width {width!r}, height {height!r}: expected a "
                "name and two whole numbers above 0."
            )
        images[entry["id"]] = name, width, height
    return images


def _objects(
    annotations: list[dict[str, Any]],
    images: dict[int, tuple[str, int, int]],
    named: set[int],
    labels: dict[int, int],
    known: set[int],
    file: Path,
) -> tuple[dict[int, list[dict[str, Any]]], list[str]]:
    """The usable objects of every image, and what was left out."""
    objects: dict[int, list[dict[str, Any]]] = {number: [] for number in images}
    lost = flat = bare = 0
    for place, found in enumerate(annotations):
        where = f"annotation {found.get('id', f'number {place}')} in {file}"
        number, category = found.get("image_id"), found.get("category_id")
        if number not in named:
            lost += 1
            continue
        if category not in labels:
            expected = "one of this file's categories" if category not in known else "one of the classes of the model"
            raise NoImages(f"{where} has the category_id {category!r}, expected {expected}.")
        if number not in images:  # its file is missing, which was said already
            continue
        _, width, height = images[number]
        box = _box(found, width, height, where)
        if min(box[0] + box[2], width) <= max(box[0], 0) or min(box[1] + box[3], height) <= max(box[1], 0):
            flat += 1
            continue
        bare += not found.get("segmentation")
        objects[number].append(
            {
                "bbox": box,
                "label": labels[category],
                "area": found.get("area"),
                "iscrowd": int(bool(found.get("iscrowd", 0))),
                "segmentation": found.get("segmentation"),
            }
        )
    remarks = [
        f"{count} objects of {file} {words}"
        for count, words in (
            (lost, "belong to images that it does not name: left out"),
            (flat, "have boxes without area inside their image: left out"),
            (bare, "have no outline: their box stands for it"),
        )
        if count
    ]
    return objects, remarks


def _box(found: dict[str, Any], width: int, height: int, where: str) -> list[float]:
    box = found.get("bbox")
    if box is None:
        try:
            mask = rle.from_coco(found.get("segmentation"), height, width)
        except rle.BadOutline as error:
            raise NoImages(f"{where} has no box, and {error}. Correct the file.") from None
        return rle.box(mask) if mask else [0.0, 0.0, 0.0, 0.0]
    numbers = isinstance(box, list) and len(box) == 4 and all(isinstance(side, int | float) for side in box)
    if not numbers or not all(abs(side) < 1e9 for side in box):  # not so either where one is no number at all
        raise NoImages(f"{where} has the box {box!r}, expected four numbers: left, top, width, height.")
    return box
