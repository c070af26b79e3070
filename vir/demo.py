"""One photograph, one model, three forms of retention: the same answer at another price."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image
from timm.data import ImageNetInfo, create_transform, resolve_model_data_config
from torch import Tensor

from vir import ops
from vir.bench.measure import peak_memory
from vir.data.images import open_image
from vir.layers.retention import set_form

MODEL = "vir_small_patch16_224"
FORMS: tuple[ops.Form, ...] = ("parallel", "recurrent", "chunkwise")


@dataclass(frozen=True)
class Result:
    size: int
    form: ops.Form
    seconds: float
    peak_bytes: int | None
    difference: float  # largest difference of the logits from those of the parallel form
    logits: Tensor


def photograph(path: Path | None) -> Image.Image:
    """The user's image, or the cat that scikit-image ships."""
    if path is not None:
        return open_image(path)
    try:
        from skimage.data import chelsea
    except ImportError:
        raise ValueError(
            "the demo's photograph comes with scikit-image, which is not installed: run "
            "pip install 'vision-retention[demo]' or name an image of your own with --image."
        ) from None
    return Image.fromarray(chelsea())


def run(image: Image.Image, sizes: list[int], say: Callable[[str], None] = lambda step: None) -> Iterator[Result]:
    """Classify the image at each size in each form; all times are taken before any memory."""
    torch.manual_seed(0)
    # LayerScale starts at 1e-5, which would hide the blocks of an untrained model: open it.
    model = timm.create_model(MODEL, init_values=1.0).eval()
    config = resolve_model_data_config(model) | {"crop_pct": 1.0}
    cases = [(size, form) for size in sizes for form in FORMS]
    batches = {size: _batch(image, config | {"input_size": (3, size, size)}) for size in sizes}

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
        yield Result(size, form, seconds[size, form], peak, difference, logits[size, form])


def _batch(image: Image.Image, config: dict[str, Any]) -> Tensor:
    transform: Callable[[Image.Image], Tensor] = create_transform(**config)
    return transform(image).unsqueeze(0)


def best_class(logits: Tensor) -> str:
    """The name of the most probable class of ImageNet."""
    return ImageNetInfo().index_to_description(int(logits.argmax())).split(",")[0]
