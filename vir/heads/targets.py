"""What a detector is given, checked before it is believed: errors in words, boxes of no area left out."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.ops import clip_boxes_to_image

from vir.heads.batch import borders, joined
from vir.heads.boxes import SMALLEST_SIDE

Target = dict[str, Tensor]


class TooLong(ValueError):
    """An image of whose shorter side nothing would be left."""

    def __init__(self, image: int, height: int, width: int, max_size: int) -> None:
        self.why = (
            f"has {height} x {width} pixels: with its longer side at most {max_size} nothing is left of the shorter "
            "one. Cut it into parts, or give a larger max_size."
        )
        super().__init__(f"image {image} {self.why}")


def check_images(images: Sequence[Tensor], max_size: int) -> None:
    if not len(images):
        raise ValueError("the list of images is empty: give at least one image.")
    for i, image in enumerate(images):
        if image.ndim != 3 or image.shape[0] != 3 or not image.is_floating_point():
            raise ValueError(
                f"image {i} is {image.dtype} of shape {tuple(image.shape)}, expected floats in 0..1 of shape "
                "3 height width: scale bytes by 1 / 255 and give a list of images, not a batch."
            )
        short, long = sorted(image.shape[1:])
        if not short or short * max_size < long:
            raise TooLong(i, image.shape[1], image.shape[2], max_size)


def check_targets(images: Sequence[Tensor], targets: Sequence[Target] | None, classes: int) -> list[Target]:
    """The targets with boxes cut at the border of their images, without those that have no area there."""
    if targets is None or len(targets) != len(images):
        given = "no targets" if targets is None else f"{len(targets)} targets"
        raise ValueError(
            f"{given} for {len(images)} images: in training give one for each, a dict of boxes, labels, masks."
        )
    for i, (image, target) in enumerate(zip(images, targets, strict=True)):
        _check_shapes(i, image, target)
    boxes, image_of, counts = joined([t["boxes"].float() for t in targets])
    labels = torch.cat([t["labels"] for t in targets])
    cut = boxes.clamp(min=0).minimum(borders([(x.shape[1], x.shape[2]) for x in images], boxes)[image_of])
    usual = boxes.isfinite().all() & (boxes[:, 2:] >= boxes[:, :2]).all() & ((labels >= 1) & (labels <= classes)).all()
    if bool(usual & _large_enough(cut).all()):  # one question to a GPU for all images
        parts = zip(cut.split(counts), labels.long().split(counts), targets, strict=True)
        return [{"boxes": b, "labels": label, "masks": t["masks"]} for b, label, t in parts]
    return [_checked(i, image, target, classes) for i, (image, target) in enumerate(zip(images, targets, strict=True))]


def _check_shapes(i: int, image: Tensor, target: Target) -> None:
    lacking = [name for name in ("boxes", "labels", "masks") if name not in target]
    if lacking:
        raise ValueError(f"target {i} has no {', '.join(lacking)}: it needs boxes, labels and masks.")
    height, width = image.shape[-2:]
    count = len(target["labels"])
    expected = {"boxes": (count, 4), "labels": (count,), "masks": (count, height, width)}
    for name, shape in expected.items():
        if target[name].shape != shape:
            raise ValueError(
                f"target {i}: {name} have shape {tuple(target[name].shape)}, expected {shape} for {count} labels and "
                f"an image of {height} x {width} pixels."
            )


def _checked(i: int, image: Tensor, target: Target, classes: int) -> Target:
    boxes, labels = target["boxes"].float(), target["labels"]
    if not bool(torch.isfinite(boxes).all()):
        raise ValueError(f"target {i} has a box that is not finite: leave it out.")
    turned = (boxes[:, 2:] < boxes[:, :2]).any(1)
    if bool(turned.any()):
        raise ValueError(
            f"target {i} has the box {boxes[turned][0].tolist()}, which ends before it begins: "
            "expected x1 y1 x2 y2, not x y width height."
        )
    if bool(((labels < 1) | (labels > classes)).any()):
        raise ValueError(f"target {i} has labels {labels.unique().tolist()}, expected 1 to {classes}; 0 is background.")
    boxes = clip_boxes_to_image(boxes, (image.shape[1], image.shape[2]))
    kept = _large_enough(boxes)
    return {"boxes": boxes[kept], "labels": labels[kept].long(), "masks": target["masks"][kept]}


def _large_enough(boxes: Tensor) -> Tensor:
    return (boxes[:, 2:] - boxes[:, :2] >= SMALLEST_SIDE).all(1)
