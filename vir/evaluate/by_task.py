"""A trained model judged on a whole set of images, whatever its task."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from timm.data import create_transform
from torch import nn

from vir.checkpoint import Card
from vir.data.dense import DenseExamples
from vir.data.joint import AS_THEY_ARE, ForJudgingDetection, ForJudgingSegmentation
from vir.data.loading import Share, judging_batches
from vir.data.objects import open_objects
from vir.data.scenes import open_scenes
from vir.data.sets import SHARDS, NoImages, open_images
from vir.data.streams import open_streams, streamed_judging
from vir.evaluate.classification import Judgement, judge, judge_set
from vir.evaluate.detection import DetectionJudgement, judge_detection
from vir.evaluate.segmentation import SegmentationJudgement, judge_segmentation

Verdict = TypeVar("Verdict", Judgement, DetectionJudgement, SegmentationJudgement)


def judge_data(
    model: Any,
    card: Card,
    data: str,
    *,
    split: str = "val",
    size: int | None = None,
    batch: int = 64,
    workers: int = 4,
    device: str = "cpu",
    void: tuple[int, ...] = (),
    mirrored: bool = False,
    say: Callable[[str], None] = lambda remark: None,
) -> Judgement | DetectionJudgement | SegmentationJudgement:
    """In full precision. Images of dense tasks come one at a time, each in its own size. What is remarkable about the
    data is said."""
    if card.task == "classification":
        if str(data).startswith(SHARDS):
            return _judge_stream(model, card, data, split, size, batch, device)
        images = open_images(data, card.classes, split)
        _say(images.remarks, say)
        return _of_some(judge_set(model, card, images, size, batch, workers, device), data, len(images))
    if card.task == "detection":
        objects: Any = _part(open_objects(data, card.classes), split, data)
        _say(objects.remarks, say)
        if size is not None:
            model.set_size(size)
        examples = DenseExamples(objects, ForJudgingDetection(), stand_in=False, read=objects.read_truth)
        batches = judging_batches(examples, 1, Share(), workers)
        found = judge_detection(model, batches, card.classes, torch.device(device), most=most_objects(model))
        return _of_some(found, data, len(objects))
    scenes = _part(open_scenes(data, card.classes, void), split, data)
    _say(scenes.remarks, say)
    as_judged = ForJudgingSegmentation(short=size or card.size, colours=AS_THEY_ARE)
    batches = judging_batches(DenseExamples(scenes, as_judged, stand_in=False), 1, Share(), workers)
    seen = judge_segmentation(model, batches, card.classes, torch.device(device), mirrored=mirrored)
    return _of_some(seen, data, len(scenes))


def _judge_stream(
    model: Any, card: Card, data: str, split: str, size: int | None, batch: int, device: str
) -> Judgement:
    images = _part(open_streams(data), split, data)
    if images.classes != card.classes:
        raise NoImages(f"{data} has the classes {', '.join(images.classes)}, expected {', '.join(card.classes)}.")
    batches = streamed_judging(images, create_transform(**card.preprocessing(size)), batch)
    return _of_some(judge(model, batches, len(card.classes), torch.device(device)), data, len(images))


def most_objects(model: nn.Module) -> int:
    """As many answers of an image are judged as the detector gives."""
    return int(model.roi_heads.detections_per_img)  # type: ignore[arg-type, union-attr]


def _of_some(verdict: Verdict, data: str, given: int) -> Verdict:
    """A verdict on no image at all would be read as one on a bad model."""
    if not verdict.images:
        why = f" The first: {verdict.unreadable[0]}" if verdict.unreadable else ""
        raise NoImages(f"none of the {given:,} images to judge by in {data} could be used.{why}")
    return verdict


def _say(remarks: Sequence[str], say: Callable[[str], None]) -> None:
    for remark in remarks:
        say(remark)


def _part(sets: Any, split: str, data: str) -> Any:
    if split not in sets:
        raise NoImages(f"{data} has no images to judge by under {split!r}: expected one of {', '.join(sets)}.")
    return sets[split]
