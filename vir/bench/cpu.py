"""ViR-S/16 against timm's ViT-S/16 on a CPU: images a second and peak memory as the image grows."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor, nn

from vir.bench.measure import peak_memory, time_each

RIVAL = "vit_small_patch16_224"
PATCH = 16  # pixels of a side: all three see none in a smaller image


@dataclass(frozen=True)
class Row:
    model: str
    size: int
    batch: int
    images_per_second: float
    ratio: float  # to the ViT, in the same run
    spread: float
    peak_bytes: int | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def models(size: int) -> dict[str, nn.Module]:
    """The same size of network three times: attention, 1D and 2D retention."""
    return {
        "ViT-S/16 (timm)": timm.create_model(RIVAL, img_size=size).eval(),
        "ViR-S/16 1D": timm.create_model("vir_small_patch16_224", img_size=size).eval(),
        "ViR-S/16 2D": timm.create_model("vir_small_patch16_224", img_size=size, retention="2d").eval(),
    }


def compare(
    sizes: list[int], batch: int, repeats: int, say: Callable[[str], None] = lambda step: None
) -> Iterator[list[Row]]:
    """One list of rows for each image size, the ViT first; all times are taken before any memory."""
    timings, peaks = [], []
    for size in sizes:
        say(f"timing at {size} px")
        timings.append(time_each(_calls(size, batch), repeats))
    for size in sizes:
        say(f"memory at {size} px")
        peaks.append({name: _second_peak(call) for name, call in _calls(size, batch).items()})
    for size, times, peak in zip(sizes, timings, peaks, strict=True):
        rival = next(iter(times.values())).median
        yield [
            Row(name, size, batch, batch / t.median, rival / t.median, t.spread, peak[name])
            for name, t in times.items()
        ]


def _second_peak(call: Callable[[], Tensor]) -> int | None:
    """The first call of a model also loads what stays."""
    peak_memory(call)
    return peak_memory(call)


def _calls(size: int, batch: int) -> dict[str, Callable[[], Tensor]]:
    image = torch.randn(batch, 3, size, size)
    return {name: partial(_classify, model, image) for name, model in models(size).items()}


@torch.inference_mode()
def _classify(model: nn.Module, image: Tensor) -> Tensor:
    return model(image)
