"""From a map of patches to a sequence of tokens and back."""

import torch
from timm.layers import resample_abs_pos_embed
from timm.models import register_notrace_function
from torch import Tensor

Grid = tuple[int, int]  # rows, cols


@register_notrace_function
def add_positions(patches: Tensor, positions: Tensor | None, trained_grid: Grid) -> Tensor:
    """Add learned positions, if there are any, resampled when the image has another size than they were learned at."""
    if positions is None:
        return patches.flatten(1, 2)
    rows, cols = patches.shape[1], patches.shape[2]
    positions = resample_abs_pos_embed(positions, (rows, cols), trained_grid, num_prefix_tokens=0)
    return patches.flatten(1, 2) + positions  # b n c


def append_class_token(tokens: Tensor, class_token: Tensor) -> Tensor:
    """The class token comes last: only there does it see every patch."""
    return torch.cat([tokens, class_token.expand(tokens.shape[0], -1, -1)], dim=1)


def both_ways(tokens: Tensor) -> Tensor:
    """Multipass encoding: the sequence followed by its flip, so that every patch is seen from both sides."""
    return torch.cat([tokens, tokens.flip(1)], dim=1)


def fold_both_ways(tokens: Tensor) -> Tensor:
    """Mean of the two appearances of each patch."""
    forth, back = tokens.chunk(2, dim=1)
    return (forth + back.flip(1)) / 2


def to_map(tokens: Tensor, grid: Grid) -> Tensor:
    """Tokens `b n c` to a map `b c rows cols`.

    In this order of steps, here and back: in the other a single image has strides by which PyTorch 2.15's BatchNorm on
    a CPU takes gradients of one layout for those of another.
    """
    return tokens.unflatten(1, grid).permute(0, 3, 1, 2)


def to_tokens(features: Tensor) -> Tensor:
    """A map `b c rows cols` to tokens `b n c`."""
    return features.permute(0, 2, 3, 1).flatten(1, 2)
