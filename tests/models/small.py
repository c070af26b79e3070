"""Models that are small enough to test, with their blocks opened: LayerScale at 1e-5 would hide every mistake."""

from typing import Any

import timm
import torch
from torch import nn

import vir  # noqa: F401  (registers the models)

FAMILIES = ["vir_tiny_patch16_224", "hvir_tiny"]
RETENTIONS = ["1d", "2d"]


def small(family: str, **options: Any) -> nn.Module:
    """Two blocks of ViR, or a thin HViR."""
    if family.startswith("vir"):
        sizes: dict[str, Any] = {"depth": 2, "embed_dim": 48, "heads": 3, "img_size": 64}
    else:
        sizes = {"dims": (8, 16, 32, 64), "depths": (1, 1, 2, 2), "heads": (2, 4), "stem_dim": 8}
    return timm.create_model(
        family, **{"init_values": 1.0, "num_classes": 10, "drop_path_rate": 0.0, **sizes, **options}
    )


def image(*size: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(1))
