"""How far the heads of a model see, in pixels, on an image of a given width."""

import math
from dataclasses import dataclass
from typing import Any

from vir import ops
from vir.models.vir import VisionRetention

FAINT = 0.01  # of its weight: what has faded below is called unseen


@dataclass(frozen=True)
class Sight:
    """Of one head: its decay, and how many patches and pixels away a patch counts a hundredth of the nearest."""

    head: int
    gamma: float
    patches: float
    across: float  # pixels to the left
    down: float  # pixels upwards


def sights(model: VisionRetention, cols: int) -> list[Sight]:
    """In 1D a row is `cols` steps: a head sees far along it and few rows up. In 2D a step is a step."""
    layer: Any = model.blocks[0].retention
    patch = model.patch_embed.patch_size[0]
    found = []
    for head, gamma in enumerate((ops.decay(layer.heads, layer.decay) ** layer.stretch).tolist()):
        steps = math.log(FAINT) / math.log(gamma) if 0 < gamma < 1 else math.inf
        down = steps / cols if layer.retention == "1d" else steps
        found.append(Sight(head, gamma, steps, min(steps, cols) * patch, down * patch))
    return found
