"""The features inside boxes, each from the level of a pyramid that suits its size."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision.ops import roi_align

USUAL_SIDE, USUAL_LEVEL = 224, 2  # a box of this side is looked up in the third map, as in the paper of the FPN
NEARLY = 1e-6


class PyramidAlign(nn.Module):
    """RoIAlign on several maps: `m c size size` of m boxes.

    torchvision's MultiScaleRoIAlign gives the same; it goes through the images one by one, asks a GPU about each level,
    and guesses the strides from the sizes of images.
    """

    def __init__(self, size: int, strides: Sequence[int], points: int = 2) -> None:
        super().__init__()
        self.size, self.strides, self.points = size, tuple(strides), points

    def forward(self, maps: Sequence[Tensor], boxes: Tensor, image: Tensor) -> Tensor:
        """`image` is the number of the image that a box is in."""
        level = self.level(boxes)
        order = level.argsort()
        rois = torch.cat([image[:, None].to(boxes), boxes], 1)[order]
        counts = level.bincount(minlength=len(self.strides)).tolist()
        found = torch.cat(
            [
                roi_align(x, some, self.size, 1 / stride, self.points)
                for x, some, stride in zip(maps, rois.split(counts), self.strides, strict=True)
            ]
        )
        return torch.empty_like(found).index_copy(0, order, found)

    def level(self, boxes: Tensor) -> Tensor:
        side = (boxes[:, 2:] - boxes[:, :2]).prod(1).sqrt()
        return ((side / USUAL_SIDE).log2() + USUAL_LEVEL + NEARLY).floor().clamp(0, len(self.strides) - 1).long()
