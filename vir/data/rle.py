"""Masks as run lengths, COCO's way, with counts as text that JSON can hold."""

from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
from pycocotools import mask as coco

FARTHEST = 16  # times the longer side: outlines beyond that are mistakes, and would fill the memory


class Rle(TypedDict):
    """A mask: height and width, and the lengths of its runs, packed into letters."""

    size: list[int]
    counts: str


class BadOutline(ValueError):
    """An outline that describes no mask of this image."""


def encode(mask: np.ndarray) -> Rle:
    """One mask, rows by columns."""
    packed = coco.encode(np.asfortranarray(mask, dtype=np.uint8))
    return Rle(size=[int(side) for side in packed["size"]], counts=packed["counts"].decode("ascii"))


def decode(rle: Rle) -> np.ndarray:
    """The mask as true and false."""
    return coco.decode(rle).astype(bool)


def decode_all(rles: Sequence[Rle], height: int, width: int) -> np.ndarray:
    """Masks one after the other; none of them is an array as well."""
    masks = np.zeros((len(rles), height, width), bool)
    for mask, rle in zip(masks, rles, strict=True):
        mask[:] = decode(rle)
    return masks


def area(rle: Rle) -> float:
    return float(coco.area(rle))


def box(rle: Rle) -> list[float]:
    """The rectangle around a mask: left, top, width, height; all zero where the mask is empty."""
    return [float(side) for side in coco.toBbox(rle)]


def from_coco(outline: Any, height: int, width: int) -> Rle | None:
    """A mask out of whatever COCO's JSON has for it: polygons, counts as numbers, counts as text; None for nothing."""
    if not outline:
        return None
    if isinstance(outline, list):
        return _from_polygons(outline, height, width)
    if isinstance(outline, dict) and {"counts", "size"} <= outline.keys():
        return _from_counts(outline, height, width)
    raise BadOutline(f"an outline of type {type(outline).__name__}, expected polygons, or counts with a size")


def _from_polygons(polygons: list[Any], height: int, width: int) -> Rle | None:
    usable = []
    for polygon in polygons:
        try:
            points = np.asarray(polygon, dtype=np.float64)
        except (TypeError, ValueError):
            raise BadOutline("a polygon that is no list of numbers, expected x, y, x, y, ...") from None
        if points.ndim != 1 or len(points) % 2:
            raise BadOutline(f"a polygon of shape {points.shape}, expected x, y, x, y, ... in one list")
        if not np.isfinite(points).all() or np.abs(points).max(initial=0) > FARTHEST * max(height, width, 64):
            raise BadOutline(f"a polygon far outside its image of {width} x {height} pixels")
        if len(points) >= 6:  # a point or a line encloses nothing, and pycocotools would take two points for a box
            usable.append(points.tolist())
    if not usable:
        return None
    return _text(coco.merge(coco.frPyObjects(usable, height, width)))


def _from_counts(outline: dict[str, Any], height: int, width: int) -> Rle:
    if list(outline["size"]) != [height, width]:
        raise BadOutline(f"counts for {outline['size']} (height, width), expected [{height}, {width}] as the image")
    counts = outline["counts"]
    if isinstance(counts, list):
        if not all(isinstance(run, int) and run >= 0 for run in counts) or sum(counts) != height * width:
            raise BadOutline(f"counts that are not whole numbers with the sum {height * width}, the image's pixels")
        return _text(coco.frPyObjects(outline, height, width))
    text = counts if isinstance(counts, str) else bytes(counts).decode("ascii", errors="replace")
    # pycocotools reads beyond text that is too short and fills the mask with whatever lies in memory.
    runs = _unpacked(text)
    if min(runs, default=-1) < 0 or sum(runs) != height * width:
        raise BadOutline("counts that are no packed runs for the pixels of the image")
    return Rle(size=[height, width], counts=text)


def _unpacked(text: str) -> list[int]:
    """The runs in COCO's letters: five bits each, lowest first, the sixth says that more follow, the last fifth bit is
    the sign; from the fourth on, a run is told by its difference from the last but one."""
    runs: list[int] = []
    number = shift = 0
    for letter in text:
        bits = ord(letter) - 48
        if not 0 <= bits < 64 or shift > 60:
            return []
        number |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            number -= 1 << shift
        runs.append(number + runs[-2] if len(runs) > 2 else number)
        number = shift = 0
    return runs if not shift else []


def _text(packed: dict[str, Any]) -> Rle:
    return Rle(size=[int(side) for side in packed["size"]], counts=packed["counts"].decode("ascii"))
