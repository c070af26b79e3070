"""The mathematics of boxes `x1 y1 x2 y2`, in float32: half precision moves the edge of a large image by pixels."""

from math import log

import torch
from torch import Tensor
from torchvision.ops import box_convert

CodeWeights = tuple[float, float, float, float]
LARGEST_GROWTH = log(1000 / 16)  # of a side in one step: exp() of a wild guess must not overflow
SMALLEST_SIDE = 1e-2  # pixels
TINY = 1e-9  # square pixels
PAIRS = 2**24  # of boxes whose overlaps are looked at together: some hundred megabytes
ROUNDS = 4  # of suppression before the GPU is asked whether it has ended


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


def overlaps(boxes: Tensor, truth: Tensor) -> Tensor:
    """IoU of all boxes with all truths of the same image: b n 4, b m 4 -> b n m; 0 where both have no area."""
    x1, y1, x2, y2 = boxes[:, :, None].unbind(-1)
    true_x1, true_y1, true_x2, true_y2 = truth[:, None].unbind(-1)
    both = (torch.minimum(x2, true_x2) - torch.maximum(x1, true_x1)).clamp_(min=0)
    both *= (torch.minimum(y2, true_y2) - torch.maximum(y1, true_y1)).clamp_(min=0)
    area, true_area = (x2 - x1) * (y2 - y1), (true_x2 - true_x1) * (true_y2 - true_y1)
    return both / (area + true_area).sub_(both).clamp_(min=TINY)


def best_of_overlapping(boxes: Tensor, there: Tensor, threshold: float) -> Tensor:
    """Non-maximum suppression in many groups at once: of boxes `g n 4` from the best down, which stay, `g n`.

    A box stays where no better one that stays overlaps it by more than the threshold. This rule is asked again and
    again, of all boxes together: each round settles those that depend on settled ones alone, so that a few are enough,
    and where nothing changes any more all are settled.
    """
    some = max(1, PAIRS // max(1, boxes.shape[1]) ** 2)
    parts = zip(boxes.split(some), there.split(some), strict=True)
    return torch.cat([_best_of_overlapping(*part, threshold) for part in parts])


def _best_of_overlapping(boxes: Tensor, there: Tensor, threshold: float) -> Tensor:
    covers = (overlaps(boxes, boxes) > threshold).tril(-1).to(torch.bfloat16)  # of a box, whether each better one does
    stay, before = there, ~there
    while not torch.equal(stay, before):
        before = stay
        for _ in range(ROUNDS):
            stay = there & (covers @ stay[..., None].to(covers.dtype))[..., 0].eq(0)  # sums of ones: none becomes 0
    return stay


def match(boxes: Tensor, truth: Tensor, threshold: float) -> Tensor:
    """For each box the truth of its image that it overlaps most, or -1 where their IoU is below: b n 4, b m 4 -> b n.

    Truths that fill up have no area, and so match nothing.
    """
    overlap, index = overlaps(boxes.float(), truth.float()).max(2)
    return torch.where(overlap >= threshold, index, -1)


def sample(matched: Tensor, there: Tensor, count: int, positive_fraction: float) -> tuple[Tensor, Tensor]:
    """By chance at most `count` boxes of each image, at most this fraction of them matched.

    Of b n boxes, some of which only fill up, b k indices and which of these count: of an image, matched ones first.
    """
    positive, some = _some(there & (matched >= 0), int(count * positive_fraction))
    negative, others = _some(there & (matched < 0), count)
    room = count - some.sum(1, keepdim=True)
    others &= torch.arange(others.shape[1], device=others.device) < room  # those that are there come first
    return torch.cat([positive, negative], 1), torch.cat([some, others], 1)


def _some(wanted: Tensor, count: int) -> tuple[Tensor, Tensor]:
    chance = torch.rand(wanted.shape, device=wanted.device).masked_fill(~wanted, -1)
    best, index = chance.topk(min(count, wanted.shape[1]), 1)
    return index, best >= 0


def _center_and_side(boxes: Tensor) -> tuple[Tensor, Tensor]:
    center, side = box_convert(boxes.float(), "xyxy", "cxcywh").split(2, 1)
    return center, side
