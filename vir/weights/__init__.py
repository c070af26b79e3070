"""Weights that ship with the package: every .safetensors file in this folder, named model.data, its card inside.

timm offers those named after one of its models. A model with arguments of its own, which no name tells timm, is named
otherwise and found by our commands and `vir.checkpoint.load_model` alone.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open

FOLDER = Path(__file__).parent
HEADER = "vir"  # the card's name in the header of a file
DEFAULT = "hvir_tiny.imagenette"  # what answers when no checkpoint is named


def shipped() -> dict[str, Path]:
    return {file.stem: file for file in sorted(FOLDER.glob("*.safetensors"))}


def pretrained_cfgs(model: str) -> dict[str, dict[str, Any]]:
    """Of a model's shipped weights, what timm needs to know, by the name under which timm offers them."""
    found = {}
    for name, file in shipped().items():
        if name.partition(".")[0] != model:
            continue
        with safe_open(file, "pt") as content:
            card = json.loads(content.metadata()[HEADER])
        found[name] = {
            "file": str(file), "num_classes": len(card["classes"]), "label_names": card["classes"],
            "input_size": (3, card["size"], card["size"]), "crop_pct": card["crop_pct"],
            "mean": tuple(card["mean"]), "std": tuple(card["std"]), "interpolation": card["interpolation"],
        }  # fmt: skip
    return found
