"""Trained models of any task on real images: how many a second, each at the size that it takes them."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor, nn

from vir.bench.gpu import peak_gpu_memory
from vir.bench.measure import time_each
from vir.checkpoint import Card, load_model
from vir.data.joint import AS_THEY_ARE, ForJudgingDetection, ForJudgingSegmentation


@dataclass(frozen=True)
class Row:
    checkpoint: str
    model: str
    task: str
    size: int
    images: int
    batch: int
    images_per_second: float
    spread: float
    peak_bytes: int | None  # of a GPU, beyond the weights
    objects: float | None = None  # found in an image: each costs a detector a mask, so that unlike ones compare badly

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    checkpoints: Sequence[str | Path],
    images: Sequence[Image.Image],
    *,
    batch: int = 1,
    half: bool = False,
    repeats: int = 5,
    device: str = "cpu",
) -> list[Row]:
    """All images through each model, in turn. Reading and resizing files is left out, what a model does with its
    answers until they are boxes, masks or classes is not; `half` is bf16 by autocast."""
    known, calls = {}, {}
    for file in checkpoints:
        model, card = load_model(file, device)
        pixels = [_as_taken(card, image).to(device) for image in images]
        known[str(file)] = card
        calls[str(file)] = _answering(model, card, pixels, batch, half)
    times = time_each(calls, repeats)
    return [
        Row(
            name, card.model, card.task, card.size, len(images), batch, len(images) / times[name].median,
            times[name].spread, peak_gpu_memory(calls[name]) if device == "cuda" else None,
            sum(calls[name]()) / len(images) if card.task == "detection" else None,
        )
        for name, card in known.items()
    ]  # fmt: skip


def _as_taken(card: Card, image: Image.Image) -> Tensor:
    if card.task == "classification":
        return create_transform(**card.preprocessing())(image)
    if card.task == "detection":
        return ForJudgingDetection()(image, None)[0]  # the model itself resizes
    return ForJudgingSegmentation(short=card.size, colours=AS_THEY_ARE)(image, np.zeros((1, 1), np.uint8))[0]


def _answering(model: nn.Module, card: Card, pixels: list[Tensor], batch: int, half: bool) -> Callable[[], list[int]]:
    """All images through the model; how many objects a detector finds in each."""
    together = card.task == "detection" or batch == 1 or len({x.shape for x in pixels}) == 1
    if not together:
        raise ValueError(
            f"images of several sizes cannot go through a model for {card.task} {batch} at a time: leave --batch 1."
        )
    parts = [pixels[start : start + batch] for start in range(0, len(pixels), batch)]
    inputs: list[Any] = parts if card.task == "detection" else [torch.stack(part) for part in parts]
    kind = pixels[0].device.type
    model.eval()

    @torch.inference_mode()
    def answer() -> list[int]:
        found: list[int] = []
        with torch.autocast(kind, torch.bfloat16) if half else nullcontext():
            for some in inputs:
                answers = model(some)
                found += [len(one["boxes"]) for one in answers] if card.task == "detection" else []
        return found

    return answer
