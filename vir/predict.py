"""The path of an image: read, transform, model, answer."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from timm.models import get_pretrained_cfg
from torch import nn

from vir.answers import Classes, Detections, Segmentation
from vir.checkpoint import BadCheckpoint, Card, Task, load_model
from vir.data.images import MOST_PIXELS, UnreadableImage, open_image
from vir.data.joint import AS_THEY_ARE, ForJudgingDetection, ForJudgingSegmentation
from vir.evaluate.segmentation import labels_of
from vir.heads.targets import TooLong

TOP = 5
LEAST = 0.5  # how sure a model must be of an object
Answer = Classes | Detections | Segmentation


def predict(
    images: Sequence[Path],
    checkpoint: Path | str,
    *,
    top: int = TOP,
    least: float = LEAST,
    size: int | None = None,
    device: str | None = None,
) -> Iterator[Answer | UnreadableImage]:
    """The answer for every image, in order; an image that cannot be read, or that the model cannot take, gives its
    error instead."""
    model, card = load_model(checkpoint, device or best_device())
    check_size(card, size)
    for path in images:
        try:
            yield answer_to(model, card, open_image(path), str(path), top=top, least=least, size=size)
        except UnreadableImage as error:
            yield error
        except TooLong as error:
            yield UnreadableImage(f"{path} {error.why}")


def check_size(card: Card, size: int | None) -> None:
    """Some models of timm take images of one size alone."""
    config: Any = get_pretrained_cfg(card.model) if card.task == "classification" else None
    if size not in (None, card.size) and config is not None and config.fixed_input_size:
        raise BadCheckpoint(
            f"{card.model} takes images of the {card.size} px it was trained with, and --size is {size}: leave it out, "
            "or train it for that size by vir finetune."
        )


@torch.inference_mode()
def answer_to(
    model: nn.Module,
    card: Card,
    image: Image.Image,
    name: str,
    *,
    top: int = TOP,
    least: float = LEAST,
    size: int | None = None,
) -> Answer:
    """What a trained model says of an upright RGB image."""
    device = next(model.parameters()).device

    def classes() -> Classes:
        _check_length(image, name, size or card.size)
        pixels = create_transform(**card.preprocessing(size))(image)
        shares = model(pixels[None].to(device)).float().softmax(1)[0]
        best = shares.topk(min(top, len(card.classes)))
        return Classes(name, tuple(card.classes[i] for i in best.indices.tolist()), tuple(best.values.tolist()))

    def objects() -> Detections:
        if size is not None:
            model.set_size(size)  # type: ignore[operator]
        pixels, _ = ForJudgingDetection()(image, None)
        output = model([pixels.to(device)])[0]
        return Detections.from_output(name, (image.height, image.width), output, card.classes, least=least)

    def scene() -> Segmentation:
        resize = ForJudgingSegmentation(short=size or card.size, colours=AS_THEY_ARE)
        pixels, _ = resize(image, np.zeros((1, 1), np.uint8))
        labels = labels_of(model(pixels[None].to(device)), (image.height, image.width))[0]
        return Segmentation(name, labels.to(torch.uint8).cpu().numpy(), card.classes)

    answers: dict[Task, Callable[[], Answer]] = {
        "classification": classes,
        "detection": objects,
        "segmentation": scene,
    }
    return answers[card.task]()


def _check_length(image: Image.Image, name: str, side: int) -> None:
    """A classifier's images are brought to their shorter side, however long the other one becomes."""
    if side * side * max(image.size) > MOST_PIXELS * min(image.size):
        raise UnreadableImage(
            f"{name} has {image.height} x {image.width} pixels: with {side} of its shorter side it would have more "
            f"than {MOST_PIXELS:,}. Cut it into parts."
        )


def best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
