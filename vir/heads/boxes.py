"""The mathematics of boxes `x1 y1 x2 y2`, in float32: half precision moves the edge of a large image by pixels."""

from math import log

import torch
from torch import Tensor
from torchvision.ops import box_convert, box_iou

CodeWeights = tuple[float, float, float, float]
LARGEST_GROWTH = log(1000 / 16)  # of a side in one step: exp() of a wild guess must not overflow
SMALLEST_SIDE = 1e-2  # pixels


def encode(truth: Tensor, boxes: Tensor, weights: CodeWeights) -> Tensor:
    """How each box must move, in its own sides, and grow, in logarithms, to become its truth; times the weights."""
    center, side = _center_and_side(boxes)
    true_center, true_side = _center_and_side(truth)
    side = side.clamp(min=SMALLEST_SIDE)
    code = torch.cat([(true_center - center) / side, (true_side.clamp(min=SMALLEST_SIDE) / side).log()], 1)
    return code * code.new_tensor(weights)


def decode(code: Tensor, boxes: Tensor, weights: CodeWeights) -> Tensor:
    """The inverse of encode."""
    code = code / boxes.new_tensor(weights, dtype=torch.float32)
    center, side = _center_and_side(boxes)
    side = side.clamp(min=SMALLEST_SIDE)
    moved = center + code[:, :2] * side
    grown = side * code[:, 2:].clamp(max=LARGEST_GROWTH).exp()
    return torch.cat([moved - grown / 2, moved + grown / 2], 1)


def match(boxes: Tensor, truth: Tensor, threshold: float) -> Tensor:
    """For each box the index of the truth that it overlaps most, or -1 where their IoU is below the threshold."""
    if not len(truth):
        return torch.full((len(boxes),), -1, device=boxes.device)
    overlap, index = box_iou(boxes.float(), truth.float()).max(1)
    return torch.where(overlap >= threshold, index, -1)


def sample(matched: Tensor, count: int, positive_fraction: float) -> Tensor:
    """Indices of at most `count` boxes by chance, at most this fraction of them matched; matched ones come first."""
    positive, negative = (matched >= 0).nonzero()[:, 0], (matched < 0).nonzero()[:, 0]
    positive = _some(positive, int(count * positive_fraction))
    return torch.cat([positive, _some(negative, count - len(positive))])


def _some(indices: Tensor, count: int) -> Tensor:
    return indices[torch.randperm(len(indices), device=indices.device)[:count]]


def _center_and_side(boxes: Tensor) -> tuple[Tensor, Tensor]:
    center, side = box_convert(boxes.float(), "xyxy", "cxcywh").split(2, 1)
    return center, side
