"""Heads that look at a box: what is in it, and where it should be."""

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, TwoMLPHead
from torchvision.ops import generalized_box_iou_loss

from vir.heads.boxes import CodeWeights, decode, encode
from vir.ops import kernels

BoxLoss = Literal["smooth_l1", "giou"]


def _smooth_l1(code: Tensor, boxes: Tensor, truth: Tensor, weights: CodeWeights) -> Tensor:
    return F.smooth_l1_loss(code, encode(truth, boxes, weights), reduction="sum")


def _giou(code: Tensor, boxes: Tensor, truth: Tensor, weights: CodeWeights) -> Tensor:
    return generalized_box_iou_loss(decode(code, boxes, weights), truth, reduction="sum")


# Sums over boxes of how far each is from its truth, once moved as the code says.
BOX_LOSSES: dict[BoxLoss, Callable[[Tensor, Tensor, Tensor, CodeWeights], Tensor]] = {
    "smooth_l1": _smooth_l1,
    "giou": _giou,
}


class BoxHead(nn.Module):
    """From the features in a box to logits of background and classes, and one code for its move, whatever the class."""

    def __init__(self, body: nn.Module, hidden: int, classes: int) -> None:
        super().__init__()
        self.body = body
        self.classifier = nn.Linear(hidden, classes + 1)
        self.regressor = nn.Linear(hidden, 4)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.normal_(self.regressor.weight, std=0.001)  # boxes stay at first where they are
        nn.init.zeros_(self.classifier.bias)
        nn.init.zeros_(self.regressor.bias)

    def forward(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(pooled)
        return self.classifier(x).float(), self.regressor(x).float()


class MapNorm(nn.GroupNorm):
    """A GroupNorm by its own kernel where no gradient is asked for; under autocast its maps stay as they come."""

    def forward(self, x: Tensor) -> Tensor:
        if kernels.group_norm_serves(x, self.weight, self.bias, self.num_groups):
            return kernels.group_norm(x, self.weight, self.bias, self.num_groups, self.eps)
        return super().forward(x)


def two_fc(channels: int, size: int, hidden: int) -> nn.Module:
    return TwoMLPHead(channels * size**2, hidden)


def four_conv_one_fc(channels: int, size: int, hidden: int) -> nn.Module:
    """Norms are over groups of channels: boxes of one image are too alike for the statistics of a batch."""
    return FastRCNNConvFCHead(
        (channels, size, size), [channels] * 4, [hidden], norm_layer=lambda dim: MapNorm(max(1, dim // 8), dim)
    )
