"""One photograph, one model, three forms of retention: the same answer at another price."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import timm
import torch
from PIL import Image, UnidentifiedImageError
from timm.data import ImageNetInfo, create_transform, resolve_model_data_config
from torch import Tensor

from vir import ops
from vir.bench.measure import peak_memory, time_each
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
        try:
            return Image.open(path).convert("RGB")
        except (FileNotFoundError, IsADirectoryError, UnidentifiedImageError) as error:
            raise ValueError(f"{path} is not an image that can be read ({error}). Give a JPEG or PNG file.") from None
    try:
        from skimage.data import chelsea
    except ImportError:
        raise ValueError(
            "the demo's photograph comes with scikit-image, which is not installed: run "
            "pip install 'vision-retention[demo]' or name an image of your own with --image."
        ) from None
    return Image.fromarray(chelsea())


def run(image: Image.Image, sizes: list[int]) -> Iterator[Result]:
    """Classify the image at each size in each form."""
    torch.manual_seed(0)
    # LayerScale starts at 1e-5, which would hide the blocks of an untrained model: open it.
    model = timm.create_model(MODEL, init_values=1.0).eval()
    for size in sizes:
        config = resolve_model_data_config(model) | {"input_size": (3, size, size), "crop_pct": 1.0}
        transform: Callable[[Image.Image], Tensor] = create_transform(**config)
        batch = transform(image).unsqueeze(0)
        expected: Tensor | None = None
        for form in FORMS:
            set_form(model, form)
            with torch.inference_mode():
                classify = partial(model, batch)
                logits = classify()
                expected = logits if expected is None else expected
                timing = time_each({form: classify}, repeats=1)[form]
                peak = peak_memory(classify)
            yield Result(size, form, timing.median, peak, (logits - expected).abs().max().item(), logits)


def best_classes(logits: Tensor, count: int = 3) -> list[tuple[str, float]]:
    """Names and probabilities of the most probable classes of ImageNet."""
    info = ImageNetInfo()
    best = logits.softmax(-1).topk(count)
    return [
        (info.index_to_description(i).split(",")[0], p)
        for i, p in zip(best.indices[0].tolist(), best.values[0].tolist(), strict=True)
    ]
