"""What both models owe to timm's contract."""

from collections.abc import Sequence

from timm.layers import trunc_normal_
from torch import nn


def take_indices(count: int, indices: int | Sequence[int] | None) -> list[int]:
    """Absolute indices of the wanted features: all for None, the last n for an int, else those named."""
    if indices is None:
        indices = count
    wanted = range(count - indices, count) if isinstance(indices, int) else indices
    absolute = [i + count if i < 0 else i for i in wanted]
    if not absolute or min(absolute) < 0 or max(absolute) >= count:
        raise ValueError(f"feature indices {indices!r} do not fit a model of {count} levels (0 to {count - 1}).")
    return absolute


def check_output_fmt(output_fmt: str, known: tuple[str, ...]) -> None:
    if output_fmt not in known:
        raise ValueError(f"output_fmt={output_fmt!r}, expected one of {', '.join(map(repr, known))}.")


def init_linear(module: nn.Module) -> None:
    """Truncated normal weights and zero biases, as in timm's ViT; other modules keep PyTorch's initial values."""
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
