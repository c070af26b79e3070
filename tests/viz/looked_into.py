"""Models that are small enough to look into, with their blocks opened: LayerScale at 1e-5 would hide every mistake."""

from typing import Any

import timm
import torch
from torch import Tensor, nn

import vir  # noqa: F401  (registers the models)

FAMILIES = ["vir_tiny_patch16_224", "hvir_tiny"]
SIZES: dict[str, dict[str, Any]] = {
    "vir_tiny_patch16_224": {"depth": 2, "embed_dim": 48, "heads": 3, "img_size": 64},
    "hvir_tiny": {"dims": (8, 16, 32, 64), "depths": (1, 1, 2, 2), "heads": (2, 4), "stem_dim": 8},
}


def small(family: str, **options: Any) -> nn.Module:
    return timm.create_model(family, init_values=1.0, num_classes=3, **SIZES[family], **options).eval()


def pixels(height: int, width: int) -> Tensor:
    return torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(1))
