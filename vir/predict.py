"""The path of an image: read, transform, model, answer."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from timm.data import create_transform
from torch import nn

from vir.answers import Classes
from vir.checkpoint import Card, load_model
from vir.data.images import UnreadableImage, open_image

TOP = 5


def predict(
    images: Sequence[Path],
    checkpoint: Path | str,
    *,
    top: int = TOP,
    size: int | None = None,
    device: str | None = None,
) -> Iterator[Classes | UnreadableImage]:
    """The answer for every image, in order; an image that cannot be read gives its error instead."""
    model, card = load_model(checkpoint, device or best_device())
    for path in images:
        try:
            yield classify(model, card, path, top=top, size=size)
        except UnreadableImage as error:
            yield error


@torch.inference_mode()
def classify(model: nn.Module, card: Card, path: Path, *, top: int = TOP, size: int | None = None) -> Classes:
    picture = open_image(path)
    pixels = create_transform(**card.preprocessing(size))(picture)
    device = next(model.parameters()).device
    shares = model(pixels[None].to(device)).float().softmax(1)[0]
    best = shares.topk(min(top, len(card.classes)))
    names = tuple(card.classes[i] for i in best.indices.tolist())
    return Classes(str(path), names, tuple(best.values.tolist()))


def best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
