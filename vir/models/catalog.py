"""Every model with our counts and the paper's, and where the paper cannot be right."""

from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

from vir.models import hvir, vir


@dataclass(frozen=True)
class Printed:
    """What the paper's tables print for a model, and our remark where it does not fit."""

    params: float  # millions
    gmacs: float  # billions of multiply-adds, called FLOPs there
    top1: float  # per cent on ImageNet-1K: by its code, whose training form differs from its formulas
    erratum: str = ""


@dataclass(frozen=True)
class PrintedComponent:
    """A line of the paper's component study: ViR-B/16 with one part changed, speed on an A100 at batch 128."""

    images_per_second: float
    top1: float


PAPER_COMPONENTS = {
    "base": PrintedComponent(671, 82.6),
    "gated": PrintedComponent(621, 82.1),
    "no_class_token": PrintedComponent(638, 82.2),
    "scaled_key": PrintedComponent(665, 82.5),
    "multipass": PrintedComponent(328, 82.9),
}


@dataclass(frozen=True)
class Entry:
    name: str
    size: int  # pixels of a side
    params: float
    gmacs: float
    printed: Printed | None


PAPER = {
    ("hvir_0", 224): Printed(23.7, 3.2, 81.1),
    ("hvir_1", 224): Printed(39.1, 4.9, 82.6),
    ("hvir_2", 224): Printed(56.5, 8.2, 83.3),
    ("hvir_3", 224): Printed(112.6, 17.0, 84.6),
    ("hvir_4", 224): Printed(397.2, 26.3, 84.8, "no layout of these widths and depths gives the printed figures"),
    ("vir_small_patch16_224", 224): Printed(31.4, 3.3, 81.0, "the printed figures are those of FasterViT-0"),
    ("vir_base_patch16_224", 224): Printed(53.4, 5.3, 82.6, "the printed figures are those of FasterViT-1"),
    ("vir_large_patch16_224", 224): Printed(304.4, 59.7, 83.7),
    ("vir_large_patch14_224", 224): Printed(304.4, 77.8, 85.0),
    ("vir_large_patch14_224", 448): Printed(
        304.4, 310.3, 86.1, "the printed parameters leave out the positions added at 448 px"
    ),
}


def entries() -> list[Entry]:
    """All registered models at their own size, and ViR-L/14 at 448 px as well."""
    rows = [(name, 224) for name in (*vir.SIZES, *hvir.SIZES)]
    rows.insert(len(vir.SIZES), ("vir_large_patch14_224", 448))
    return [Entry(name, size, *count(name, size), PAPER.get((name, size))) for name, size in rows]


def count(name: str, size: int = 224) -> tuple[float, float]:
    """Millions of parameters and billions of multiply-adds for one image.

    As in the paper q k^T and A v are left out: only convolutions and linear layers count. Nothing is allocated.
    """
    options: dict[str, Any] = {"img_size": size} if name in vir.SIZES else {}
    with torch.device("meta"):
        model = timm.create_model(name, **options).eval()
        image = torch.empty(1, 3, size, size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(image)
    aten = torch.ops.aten
    counted = counter.get_flop_counts()["Global"]
    flops = sum(counted.get(op, 0) for op in (aten.convolution, aten.addmm, aten.mm))
    return sum(p.numel() for p in model.parameters()) / 1e6, flops / 2e9
