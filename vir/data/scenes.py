"""Sets of images with label maps: the number of a class in every pixel."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from vir.data.images import UnreadableImage, open_image, open_numbers, read_header, turned
from vir.data.pairs import Pairs, Part, find_pairs
from vir.data.sets import NoImages
from vir.data.truth import turn_to_fit

VOID = 255  # a pixel that is neither learned from nor judged
NO_CLASS = 256  # in the table from numbers to classes: a mistake
MOST_CLASSES = 255
NAMES = "classes.txt"  # one name in a line, the first is that of number 0
ADE_NAMES = "objectInfo150.txt"  # comes with ADE20K, whose masks have 0 for what has no class


@dataclass(frozen=True, eq=False)
class SceneImages:
    """Images by index, each with its label map; classes are numbered 0, 1, 2, ... and 255 is none."""

    pairs: Pairs
    classes: tuple[str, ...]
    class_of: np.ndarray  # the class of every number that a mask may hold
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.pairs)

    def name(self, index: int) -> str:
        return self.pairs.files[index][0].name

    def read(self, index: int) -> tuple[Image.Image, np.ndarray]:
        image, mask = self.pairs.files[index]
        numbers = open_numbers(mask)
        height, width = numbers.shape
        orientation = turn_to_fit((width, height), read_header(image), image, f"the mask {mask}")
        return open_image(image), turned(self._labels(numbers, mask), orientation)

    def _labels(self, numbers: np.ndarray, mask: Path) -> np.ndarray:
        low, high = int(numbers.min()), int(numbers.max())
        labels = self.class_of[numbers] if low >= 0 and high < len(self.class_of) else np.full(1, NO_CLASS)
        if (labels == NO_CLASS).any():
            raise UnreadableImage(
                f"{mask} has numbers from {low} to {high}, and {self._stranger(numbers)} is none of the "
                f"{len(self.classes)} classes nor void. Name all classes in {NAMES}, or say which numbers are void, by "
                "--void NUMBER for each."
            )
        return labels.astype(np.uint8)

    def _stranger(self, numbers: np.ndarray) -> int:
        """The first number that is neither a class nor void."""
        known = np.flatnonzero(self.class_of != NO_CLASS)
        return int(np.setdiff1d(numbers, known)[0])


def open_scenes(
    root: str | Path, classes: Sequence[str] | None = None, void: Sequence[int] = ()
) -> dict[Part, SceneImages]:
    """The images to learn from and those to judge by.

    `root` has images/ and annotations/ with training/ and validation/ in both as ADE20K, or train/ and val/ with
    images/ and masks/ in both. Names of the classes come from classes.txt, else they are called by their numbers;
    numbers that are void, besides 255, are no class and their lines are passed over. Given classes must be those found.
    """
    folder = Path(root)
    pairs = find_pairs(folder)
    naming = _read_names(folder, void) or _number(folder, pairs, classes, void)
    if classes is not None and tuple(classes) != naming.classes:
        there = ", ".join(naming.classes)
        raise NoImages(
            f"{folder} has the classes {there}, expected {', '.join(classes)}, in this order.{naming.hint(classes)}"
        )
    if not 0 < len(naming.classes) <= MOST_CLASSES:
        raise NoImages(f"{folder} has {len(naming.classes)} classes, expected 1 to {MOST_CLASSES}.")
    return {
        part: SceneImages(found, naming.classes, naming.table(), (*found.remarks, *naming.remarks))
        for part, found in pairs.items()
    }


@dataclass(frozen=True)
class _Naming:
    """Which numbers of the masks are classes, and what these are called."""

    numbers: tuple[int, ...]
    classes: tuple[str, ...]
    void: tuple[int, ...]
    remarks: tuple[str, ...] = ()

    def hint(self, classes: Sequence[str]) -> str:
        """What to do, where there are only more classes than expected."""
        named = list(zip(self.numbers, self.classes, strict=True))
        if tuple(name for _, name in named if name in classes) != tuple(classes):
            return ""
        more = (f"--void {number}" for number, name in named if name not in classes)
        return f" If the others are to be left out: {' '.join(more)}."

    def table(self) -> np.ndarray:
        class_of = np.full(max(VOID, *self.numbers, *self.void) + 1, NO_CLASS)
        class_of[[VOID, *self.void]] = VOID
        class_of[list(self.numbers)] = range(len(self.numbers))
        return class_of


def _read_names(root: Path, void: Sequence[int]) -> _Naming | None:
    file, of_ade = root / NAMES, root / ADE_NAMES
    if file.is_file():
        names = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        void = tuple(void)
    elif of_ade.is_file():
        rows = of_ade.read_text(encoding="utf-8").splitlines()[1:]  # the first says what the columns are
        names = ["void", *(row.split("\t")[-1].split(",")[0].strip() for row in rows if row.strip())]
        void = (0, *void)
    else:
        return None
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise NoImages(f"the names of the classes in {root} are not all different: {twice[0]!r} comes twice.")
    numbers = tuple(number for number in range(len(names)) if number not in void)
    return _Naming(numbers, tuple(names[number] for number in numbers), void)


def _number(root: Path, pairs: dict[Part, Pairs], classes: Sequence[str] | None, void: Sequence[int]) -> _Naming:
    """Without names, the numbers in the masks to learn from tell how many classes there are."""
    if classes is None:
        masks = [mask for _, mask in pairs.get("train", next(iter(pairs.values()))).files]
        highest = max((_highest(mask, void) for mask in masks), default=-1)
        numbers = tuple(number for number in range(highest + 1) if number not in void)
        remark = f"no {NAMES} in {root}: classes are called by their numbers, {len(numbers)} of them"
        return _Naming(numbers, tuple(str(number) for number in numbers), tuple(void), (remark,))
    possible = (number for number in range(len(classes) + len(void)) if number not in void)
    numbers = tuple(number for number, _ in zip(possible, classes, strict=False))
    return _Naming(numbers, tuple(classes), tuple(void))


def _highest(mask: Path, void: Sequence[int]) -> int:
    try:
        found = np.unique(open_numbers(mask))
    except UnreadableImage:  # it will be said when it is its turn
        return -1
    return max((int(number) for number in found if number != VOID and number not in void), default=-1)
