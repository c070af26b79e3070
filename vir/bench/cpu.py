"""ViR-S/16 against timm's ViT-S/16 on a CPU: images a second and peak memory as the image grows."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import timm
import torch
from torch import nn

from vir.bench.measure import peak_memory, time_each

RIVAL = "vit_small_patch16_224"


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


def compare(sizes: list[int], batch: int, repeats: int) -> Iterator[list[Row]]:
    """One list of rows for each image size, the ViT first."""
    for size in sizes:
        image = torch.randn(batch, 3, size, size)
        networks = models(size)
        with torch.inference_mode():
            calls = {name: partial(network, image) for name, network in networks.items()}
            timings = time_each(calls, repeats)
            peaks = {name: peak_memory(call) for name, call in calls.items()}
        rival = next(iter(timings.values())).median
        yield [
            Row(name, size, batch, batch / t.median, rival / t.median, t.spread, peaks[name])
            for name, t in timings.items()
        ]
