"""What a model says about an image."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from vir.data import rle
from vir.evaluate.detection import coco_results


@dataclass(frozen=True)
class Classes:
    """Class names with their probabilities, the most probable first."""

    image: str
    names: tuple[str, ...]
    probabilities: tuple[float, ...]

    @property
    def best(self) -> str:
        return self.names[0]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Detections:
    """Objects in an image's own pixels, the surest first."""

    image: str
    width: int
    height: int
    boxes: tuple[tuple[float, float, float, float], ...]  # left, top, right, bottom
    names: tuple[str, ...]
    category_ids: tuple[int, ...]
    scores: tuple[float, ...]
    masks: tuple[rle.Rle, ...] | None = None  # None: the model draws no masks

    @classmethod
    def from_output(
        cls,
        image: str,
        size: tuple[int, int],
        output: dict[str, Tensor],
        classes: Sequence[str],
        category_ids: Sequence[int] | None = None,
        least: float = 0.0,
    ) -> "Detections":
        """A detector's output for an image of this size (height, width), without what it is less sure of than `least`.

        Labels count from 1; category_ids are the numbers that the classes have elsewhere, such as COCO's.
        """
        sure = [one for one in coco_results(output, 0) if one["score"] >= least]
        ids = category_ids or range(1, len(classes) + 1)
        return cls(
            image,
            size[1],
            size[0],
            tuple((x, y, x + w, y + h) for x, y, w, h in (one["bbox"] for one in sure)),
            tuple(classes[one["category_id"] - 1] for one in sure),
            tuple(ids[one["category_id"] - 1] for one in sure),
            tuple(one["score"] for one in sure),
            tuple(one["segmentation"] for one in sure) if "masks" in output else None,
        )

    def __len__(self) -> int:
        return len(self.boxes)

    def mask(self, number: int) -> np.ndarray:
        """One of the masks, rows by columns, true and false."""
        if self.masks is None:
            raise ValueError("these objects have boxes but no masks: the model draws none.")
        return rle.decode(self.masks[number])

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with objects as COCO has results."""
        objects: list[dict[str, Any]] = [
            {
                "bbox": [x0, y0, x1 - x0, y1 - y0],
                "category_id": category,
                "category_name": name,
                "score": score,
            }
            for (x0, y0, x1, y1), category, name, score in zip(
                self.boxes, self.category_ids, self.names, self.scores, strict=True
            )
        ]
        for number, mask in enumerate(self.masks or ()):
            objects[number]["segmentation"] = dict(mask)
        return {"image": self.image, "width": self.width, "height": self.height, "objects": objects}


@dataclass(frozen=True, eq=False)
class Segmentation:
    """The class of every pixel of an image."""

    image: str
    labels: np.ndarray  # rows by columns; a number that is no class, such as 255, means none
    classes: tuple[str, ...]

    @property
    def shares(self) -> dict[str, float]:
        """How much of the image each class that occurs covers, the largest first."""
        counts = np.bincount(self.labels[self.labels < len(self.classes)].ravel(), minlength=len(self.classes))
        order = np.argsort(-counts, kind="stable")
        return {self.classes[i]: int(counts[i]) / self.labels.size for i in order if counts[i]}

    def mask(self, name: str) -> np.ndarray:
        """Where a class is, true and false."""
        return self.labels == self.classes.index(name)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the classes that occur, each with its share of the image and its mask."""
        height, width = self.labels.shape
        classes = [
            {
                "category_id": self.classes.index(name),
                "category_name": name,
                "share": share,
                "segmentation": dict(rle.encode(self.mask(name))),
            }
            for name, share in self.shares.items()
        ]
        return {"image": self.image, "width": width, "height": height, "classes": classes}
