"""A detector and a segmentor that are small enough to serve, as files; what they say is by chance."""

from pathlib import Path

import torch

from tests.heads.small import DETECTOR, SEGMENTOR, THIN_HVIR
from vir.checkpoint import Card, save_model

FEW = {"proposals": 12}
CARDS = {
    "detector": Card("hvir_tiny", ("cat", "dog"), 64, {**THIN_HVIR, **DETECTOR, **FEW}, task="detection"),
    "segmentor": Card("hvir_tiny", ("sky", "wall", "grass"), 64, {**THIN_HVIR, **SEGMENTOR}, task="segmentation"),
}


def saved(kind: str, folder: Path) -> str:
    torch.manual_seed(0)
    file = folder / f"{kind}.safetensors"
    save_model(CARDS[kind].build(), CARDS[kind], file)
    return str(file)
