"""COCO's average precision of boxes and masks, counted by pycocotools."""

import contextlib
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn

from vir.data import rle
from vir.data.dense import DenseBatch
from vir.data.truth import Truth
from vir.heads.targets import TooLong

Kind = Literal["box", "mask"]
KINDS: dict[Kind, tuple[str, str]] = {"box": ("bbox", "bbox"), "mask": ("segm", "segmentation")}  # COCO's names
ALL, SMALL, MEDIUM, LARGE = range(4)  # of COCO's ranges of area: all, below 32 x 32, below 96 x 96, above
PRECISION: dict[str, tuple[float | None, int]] = {  # least overlap (None: the mean over 0.5 to 0.95), area
    "ap": (None, ALL),
    "ap50": (0.5, ALL),
    "ap75": (0.75, ALL),
    "ap_small": (None, SMALL),
    "ap_medium": (None, MEDIUM),
    "ap_large": (None, LARGE),
}
RECALL = {"ar": ALL, "ar_small": SMALL, "ar_medium": MEDIUM, "ar_large": LARGE}
INSIDE = 0.5  # probability from which a pixel belongs to a mask
MOST_OBJECTS = 100  # of one class in one image that COCO counts: the rest of the answers is not looked at


@dataclass
class DetectionJudgement:
    """Truth and answers of the images seen so far; of several processes they are joined."""

    classes: tuple[str, ...]
    most: int = MOST_OBJECTS
    truths: list[Truth] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)  # as COCO has results, with our numbers of the classes
    masks: bool = False  # whether any answer had masks
    unreadable: list[str] = field(default_factory=list)

    @property
    def images(self) -> int:
        return len(self.truths)

    def add(self, truth: Truth, output: dict[str, Tensor]) -> None:
        """One image and what the model says of it, in the image's own coordinates."""
        self.truths.append(truth)
        self.masks |= "masks" in output
        self.answers += coco_results(output, truth.image_id)

    def join(self, other: "DetectionJudgement") -> None:
        """Add what another process has seen; an image seen by both counts once."""
        known = {truth.image_id for truth in self.truths}
        new = {truth.image_id for truth in other.truths} - known
        self.truths += [truth for truth in other.truths if truth.image_id in new]
        self.answers += [answer for answer in other.answers if answer["image_id"] in new]
        self.masks |= other.masks
        self.unreadable += other.unreadable

    def metrics(self) -> dict[str, float]:
        """COCO's numbers for boxes, and for masks if there are any, from 0 to 1; -1 where there is no such object."""
        kinds: tuple[Kind, ...] = ("box", "mask") if self.masks else ("box",)
        known = {"images": float(self.images)}
        for kind in kinds:
            judged = self._evaluated(kind)
            precision, recall = judged.eval["precision"], judged.eval["recall"]
            for name, (overlap, area) in PRECISION.items():
                those = [overlap is None or np.isclose(overlap, one) for one in judged.params.iouThrs]
                known[f"{kind}_{name}"] = _mean(precision[those, :, :, area, -1])
            known |= {f"{kind}_{name}": _mean(recall[:, :, area, -1]) for name, area in RECALL.items()}
        return known

    def per_class(self, kind: Kind = "box") -> dict[str, float]:
        """The average precision of every class; -1 where there is no object of it."""
        precision = self._evaluated(kind).eval["precision"]
        return {name: _mean(precision[:, :, number, ALL, -1]) for number, name in enumerate(self.classes)}

    def _evaluated(self, kind: Kind) -> Any:
        coco_kind, part = KINDS[kind]
        with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints what it does
            truth = coco_truth(self.truths, self.classes)
            # Without the other part: COCO takes the area of an answer from its box if it has one, else from its mask.
            wanted = ("image_id", "category_id", "score", part)
            answers = [{name: answer[name] for name in wanted} for answer in self.answers if part in answer]
            judged = COCOeval(truth, truth.loadRes(answers) if answers else _nothing_found(truth), coco_kind)
            judged.params.maxDets = [self.most]
            judged.evaluate()
            judged.accumulate()
        return judged


def _mean(values: np.ndarray) -> float:
    """pycocotools writes -1 where there was nothing to find."""
    found = values[values > -1]
    return round(float(found.mean()), 6) if found.size else -1.0


def coco_truth(truths: Sequence[Truth], classes: Sequence[str]) -> COCO:
    """What is known as pycocotools has it after reading a file, whatever kind of data it comes from."""
    truth = COCO()
    annotations = [
        {
            "id": number,  # from 1: pycocotools takes 0 for no match
            "image_id": image_id,
            "category_id": one["label"],
            "bbox": one["bbox"],
            "area": one["area"],
            "iscrowd": one["iscrowd"],
            "segmentation": one["segmentation"],
        }
        for number, (image_id, one) in enumerate(((t.image_id, one) for t in truths for one in t.objects), 1)
    ]
    truth.dataset = {
        "info": {},
        "images": [{"id": t.image_id, "width": t.width, "height": t.height} for t in truths],
        "annotations": annotations,
        "categories": [{"id": number, "name": name} for number, name in enumerate(classes, 1)],
    }
    truth.createIndex()
    return truth


def _nothing_found(truth: COCO) -> COCO:
    """pycocotools does not load an empty list."""
    found = COCO()
    found.dataset = truth.dataset | {"annotations": []}
    found.createIndex()
    return found


def coco_results(output: dict[str, Tensor], image_id: int) -> list[dict[str, Any]]:
    """A detector's output for one image as COCO has results, the surest first."""
    scores = output["scores"].float().cpu()
    best = scores.argsort(descending=True, stable=True)
    boxes = output["boxes"].float().cpu()[best]
    boxes = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1)
    labels = output["labels"].cpu()[best]
    results: list[dict[str, Any]] = [
        {"image_id": image_id, "category_id": label, "bbox": box, "score": score}
        for label, box, score in zip(labels.tolist(), boxes.tolist(), scores[best].tolist(), strict=True)
    ]
    if "masks" in output:
        for result, mask in zip(results, output["masks"][best.to(output["masks"].device)], strict=True):
            result["segmentation"] = rle.encode(_inside(mask).cpu().numpy())
    return results


def _inside(mask: Tensor) -> Tensor:
    """A mask of true and false, with or without torchvision's axis of one channel."""
    mask = mask.reshape(mask.shape[-2:])
    return mask if mask.dtype == torch.bool else mask >= INSIDE if mask.is_floating_point() else mask > 0


def in_own_size(output: dict[str, Tensor], seen: tuple[int, int], own: tuple[int, int]) -> dict[str, Tensor]:
    """What was said of an image of another size (height, width), in the image's own coordinates."""
    if seen == own:
        return output
    down, across = own[0] / seen[0], own[1] / seen[1]
    boxes = output["boxes"] * torch.tensor([across, down, across, down], device=output["boxes"].device)
    changed = output | {"boxes": boxes}
    if "masks" in output:
        # One after the other: all at once, in floating point and in full size, they may not fit into memory.
        masks = [_resized(mask, own) for mask in output["masks"]]
        changed["masks"] = torch.stack(masks) if masks else torch.zeros(0, *own, dtype=torch.bool)
    return changed


def _resized(mask: Tensor, size: tuple[int, int]) -> Tensor:
    values = mask.reshape(1, 1, *mask.shape[-2:]).float()
    return F.interpolate(values, size, mode="bilinear", align_corners=False)[0, 0] >= INSIDE


@torch.inference_mode()
def judge_detection(
    model: nn.Module,
    batches: Iterable[DenseBatch],
    classes: Sequence[str],
    device: torch.device,
    say: Callable[[int], None] = lambda images: None,
    most: int = MOST_OBJECTS,
) -> DetectionJudgement:
    """Ask the model about every image; targets are what read_truth gives."""
    model.eval()
    seen = DetectionJudgement(tuple(classes), most)
    for batch in batches:
        seen.unreadable += batch.unreadable
        known = [i for i, truth in enumerate(batch.targets) if truth is not None]
        images = [batch.images[i].to(device, non_blocking=True) for i in known]
        for i, image, output in zip(known, images, _answers(model, images), strict=True):
            if isinstance(output, TooLong):
                seen.unreadable.append(f"image {batch.targets[i].image_id} {output.why}")
                continue
            height, width = image.shape[-2:]
            seen.add(batch.targets[i], in_own_size(output, (height, width), batch.sizes[i]))
        say(len(batch.images))
    return seen


def _answers(model: nn.Module, images: list[Tensor]) -> list[dict[str, Tensor] | TooLong]:
    """An image that the model refuses does not take the others of its batch along."""
    try:
        return model(images) if images else []
    except TooLong as error:
        return [error] if len(images) == 1 else [answer for one in images for answer in _answers(model, [one])]
