"""Detectors and segmentors small enough to test, and scenes of coloured rectangles for them to see."""

from typing import Any

import torch
from torch import Tensor

from vir.heads import build_detector, build_segmentor
from vir.heads.detector import CascadeMaskRCNN
from vir.heads.upernet import UPerNet

THIN_HVIR: dict[str, Any] = {
    "dims": [16, 32, 64, 64], "depths": [1, 1, 1, 1], "stem_dim": 16, "heads": [2, 4], "init_values": 1.0,
    "drop_path_rate": 0.0,
}  # fmt: skip
THIN_VIR: dict[str, Any] = {"depth": 2, "embed_dim": 48, "heads": 3, "img_size": 64, "init_values": 1.0}
THIN: dict[str, dict[str, Any]] = {
    "hvir_tiny": THIN_HVIR,
    "vir_tiny_patch16_224": THIN_VIR,
    "vit_tiny_patch16_224": {"depth": 3},
    "swin_tiny_patch4_window7_224": {"depths": [1, 1, 1, 1], "embed_dim": 24, "num_heads": [1, 2, 4, 8]},
}
DETECTOR: dict[str, Any] = {
    "min_size": 64, "max_size": 96, "width": 32, "hidden": 64, "proposals": 50, "samples": 32, "anchor_scale": 4.0,
}  # fmt: skip
SEGMENTOR: dict[str, Any] = {"width": 32, "auxiliary_width": 16}
COLOURS = torch.tensor([[0.9, 0.1, 0.1], [0.1, 0.1, 0.9]])


def detector(name: str = "hvir_tiny", classes: int = 2, **options: Any) -> CascadeMaskRCNN:
    return build_detector(name, classes, **{**THIN.get(name, {}), **DETECTOR, **options})


def segmentor(name: str = "hvir_tiny", classes: int = 3, **options: Any) -> UPerNet:
    return build_segmentor(name, classes, **{**THIN.get(name, {}), **SEGMENTOR, **options})


def scene(
    height: int, width: int, objects: list[tuple[tuple[int, int, int, int], int]]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Dim noise with a coloured rectangle for each box; the colour is the label."""
    image = 0.2 + 0.2 * torch.rand(3, height, width, generator=torch.Generator().manual_seed(1))
    masks = torch.zeros(len(objects), height, width, dtype=torch.uint8)
    for mask, ((x1, y1, x2, y2), label) in zip(masks, objects, strict=True):
        image[:, y1:y2, x1:x2] = COLOURS[label - 1][:, None, None]
        mask[y1:y2, x1:x2] = 1
    boxes = torch.tensor([box for box, _ in objects], dtype=torch.float32).reshape(-1, 4)
    return image, {"boxes": boxes, "labels": torch.tensor([label for _, label in objects]).long(), "masks": masks}
