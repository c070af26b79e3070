"""Where objects may be: torchvision's region proposal network; on a GPU it chooses for all images at once."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead

from vir.heads.batch import Size, borders
from vir.heads.boxes import best_of_overlapping

NOT_THERE = -1.0  # a score below all scores


class ProposalHead(RPNHead):
    """torchvision's, with its answers in float32: proposals are decoded in the precision they come in."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        logits, codes = super().forward(x)
        return [y.float() for y in logits], [y.float() for y in codes]


class Proposer(RegionProposalNetwork):
    """torchvision's, with a choice of its own among the proposals on a GPU, which keeps the same ones.

    torchvision's goes from image to image, asks the GPU about each several times, and has it go through the boxes of an
    image one after the other: a sixth of the time of a whole detector.
    """

    def filter_proposals(
        self, proposals: Tensor, objectness: Tensor, image_shapes: list[Size], num_anchors_per_level: list[int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        choose = super().filter_proposals if proposals.device.type == "cpu" else self.choose_at_once
        return choose(proposals, objectness, image_shapes, num_anchors_per_level)

    def choose_at_once(
        self, proposals: Tensor, objectness: Tensor, image_shapes: list[Size], num_anchors_per_level: list[int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """For each image boxes and scores, from the best down."""
        objectness = objectness.detach().reshape(len(proposals), -1)
        levels = zip(proposals.split(num_anchors_per_level, 1), objectness.split(num_anchors_per_level, 1), strict=True)
        best = [self._best(*level) for level in levels]
        boxes, scores = (torch.stack(x, 1) for x in zip(*best, strict=True))  # b l n 4, b l n
        boxes = boxes.clamp(min=0).minimum(borders(image_shapes, boxes)[:, None, None])
        there = (boxes[..., 2:] - boxes[..., :2] >= self.min_size).all(-1) & (scores >= max(self.score_thresh, 0))
        stay = best_of_overlapping(boxes.flatten(0, 1), there.flatten(0, 1), self.nms_thresh).view_as(there)
        scores = scores.where(stay, NOT_THERE).flatten(1)
        scores, order = (x[:, : self.post_nms_top_n()] for x in scores.sort(dim=1, descending=True, stable=True))
        boxes = boxes.flatten(1, 2).gather(1, order[..., None].expand(-1, -1, 4))
        counts = (scores > NOT_THERE).sum(1).tolist()
        return [b[:n] for b, n in zip(boxes, counts, strict=True)], [s[:n] for s, n in zip(scores, counts, strict=True)]

    def _best(self, boxes: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Of one level; filled up where it has too few."""
        wanted = self.pre_nms_top_n()
        logits, index = logits.topk(min(wanted, logits.shape[1]), 1)
        missing = wanted - logits.shape[1]
        boxes = boxes.gather(1, index[..., None].expand(-1, -1, 4))
        return F.pad(boxes, (0, 0, 0, missing)), F.pad(logits.sigmoid(), (0, missing), value=NOT_THERE)
