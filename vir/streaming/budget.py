"""How many rows a band may have, so that the peak of memory stays under a budget."""

from pathlib import Path
from typing import Any

import torch

from vir.layers.blocks import SLICE_TOKENS
from vir.models.vir import VisionRetention
from vir.streaming.engine import CannotStream

# Measured, rounded up: numbers that live at once for each token, in widths of the model (a GPU takes its MLP whole),
# and states that live at once besides one for each layer.
WIDTHS = {("cpu", "1d"): 11, ("cpu", "2d"): 16}
WIDTHS_ELSEWHERE = 18
STATES = {("cpu", "2d"): 8}
STATES_ELSEWHERE = 3
READING = 40_000_000  # bytes that libvips and others take once they read
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(text: str) -> int:
    """2GB, 1500 MB, 2000000000."""
    words = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = next((u for u in ("KB", "MB", "GB", "TB") if words.endswith(u[0])), "")
    number = words.removesuffix(unit[:1]).strip()
    try:
        size = float(number) * UNITS[unit]
    except ValueError:
        size = 0.0
    if not size >= 1:
        raise CannotStream(f"--memory {text}: expected a size such as 2GB or 800MB.")
    return int(size)


def _kind(model: VisionRetention) -> tuple[str, str]:
    layer: Any = model.blocks[0].retention
    return model.patch_embed.proj.weight.device.type, layer.retention


def state_bytes(model: VisionRetention, cols: int) -> int:
    """Of one layer."""
    layer: Any = model.blocks[0].retention
    count = cols if layer.retention == "2d" else 1
    return 4 * count * model.embed_dim * (model.embed_dim // layer.heads)


def fixed_bytes(model: VisionRetention, cols: int, in_use: int) -> int:
    """What a run needs whatever the height of its bands, besides what is in use already."""
    layer = state_bytes(model, cols)
    hidden = 2 * 4 * 4 * model.embed_dim * SLICE_TOKENS  # of the MLP, before and after its activation
    return in_use + READING + (len(model.blocks) + STATES.get(_kind(model), STATES_ELSEWHERE)) * layer + hidden


def row_bytes(model: VisionRetention, cols: int) -> int:
    """What a run needs for each row of patches in a band."""
    patch, weight = model.patch_embed.patch_size[0] ** 2 * 3, model.patch_embed.proj.weight
    width = WIDTHS.get(_kind(model), WIDTHS_ELSEWHERE) * model.embed_dim * weight.element_size()
    token = width + patch * 7 + 4 * model.num_classes  # pixels as they are read, as numbers, and of the next band
    return cols * token


def rows_within(model: VisionRetention, cols: int, budget: int, most: int) -> int:
    """Rows of patches of a band, at most so many."""
    fixed, row = fixed_bytes(model, cols, memory_in_use(model.patch_embed.proj.weight.device)), row_bytes(model, cols)
    rows = (budget - fixed) // row
    if rows < 1:
        layer: Any = model.blocks[0].retention
        hint = " 1D retention needs one state, not one for each column." if layer.retention == "2d" else ""
        raise CannotStream(
            f"--memory {budget / 1e9:.2f} GB is too little for one row of {cols} patches: it needs "
            f"{(fixed + row) / 1e9:.2f} GB, {row / 1e9:.3f} GB of it for the row. Give more, or take a smaller "
            f"model.{hint}"
        )
    return int(min(rows, most))


def memory_in_use(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))
    except OSError:  # not Linux: what PyTorch needs once it is loaded
        return 500_000_000
    return int(line.split()[1]) * 1024
