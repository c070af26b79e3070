"""One photograph, one model, three forms of retention: the same answer at another price."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor

from vir import ops
from vir.bench.measure import peak_memory
from vir.checkpoint import load_model
from vir.layers.retention import MultiHeadRetention, set_form
from vir.viz.inside import check_classifier
from vir.viz.style import CannotDraw

FORMS: tuple[ops.Form, ...] = ("parallel", "recurrent", "chunkwise")


@dataclass(frozen=True)
class Result:
    size: int
    form: ops.Form
    seconds: float
    peak_bytes: int | None
    difference: float  # largest difference of the logits from those of the parallel form
    answer: str


def run(
    checkpoint: str, image: Image.Image, sizes: list[int], say: Callable[[str], None] = lambda step: None
) -> Iterator[Result]:
    """Classify the image at each size in each form; all times are taken before any memory."""
    model, card = load_model(checkpoint)
    check_classifier(card)
    if not any(isinstance(module, MultiHeadRetention) for module in model.modules()):
        raise CannotDraw(f"{card.model} has no retention, whose forms are compared here: give a ViR or an HViR.")
    cases = [(size, form) for size in sizes for form in FORMS]
    batches = {size: _batch(image, card.preprocessing(size)) for size in sizes}

    @torch.inference_mode()
    def classify(size: int, form: ops.Form) -> Tensor:
        set_form(model, form)
        return model(batches[size])

    logits, seconds = {}, {}
    for form in FORMS:
        classify(min(sizes), form)  # warm up
    for case in cases:
        say(f"{case[0]} px, {case[1]}")
        start = time.perf_counter()
        logits[case] = classify(*case)
        seconds[case] = time.perf_counter() - start
    for size, form in cases:
        say(f"memory at {size} px, {form}")
        peak = peak_memory(partial(classify, size, form))
        difference = (logits[size, form] - logits[size, "parallel"]).abs().max().item()
        answer = card.classes[int(logits[size, form].argmax())]
        yield Result(size, form, seconds[size, form], peak, difference, answer)


def _batch(image: Image.Image, config: dict[str, Any]) -> Tensor:
    transform: Callable[[Image.Image], Tensor] = create_transform(**config)
    return transform(image).unsqueeze(0)
