"""Cascade R-CNN with masks: each stage moves the boxes of the one before, and asks for a better overlap.

"Cascade R-CNN: High Quality Object Detection and Instance Segmentation", Cai, Vasconcelos, 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import maskrcnn_loss
from torchvision.ops import MultiScaleRoIAlign, batched_nms, clip_boxes_to_image, remove_small_boxes

from vir.heads.box_heads import BOX_LOSSES, BoxLoss
from vir.heads.boxes import SMALLEST_SIDE, CodeWeights, decode, match, sample
from vir.heads.targets import Target

Maps = dict[str, Tensor]
Size = tuple[int, int]


@dataclass
class Samples:
    """The boxes of one image that a stage learns from."""

    boxes: Tensor  # m 4, matched ones first
    matched: Tensor  # m, index of the truth or -1
    labels: Tensor  # m, 0 for background
    own: Tensor  # m, whether a box is a proposal, and not a truth that was put among them

    @property
    def positive(self) -> Tensor:
        return self.matched >= 0


class CascadeStage(nn.Module):
    """A box head and a mask head, and what counts as a match for them."""

    def __init__(
        self,
        box_head: nn.Module,
        mask_head: nn.Module,
        *,
        iou: float,
        code_weights: CodeWeights,
        box_loss: BoxLoss,
        box_loss_weight: float,
        loss_weight: float,
    ) -> None:
        super().__init__()
        self.box_head = box_head
        self.mask_head = mask_head
        self.iou = iou
        self.code_weights = code_weights
        self.box_loss = box_loss
        self.box_loss_weight = box_loss_weight
        self.loss_weight = loss_weight

    def moved(self, boxes: Sequence[Tensor], code: Tensor, sizes: Sequence[Size]) -> list[Tensor]:
        """The boxes of each image where this stage wants them, cut at the border."""
        moved = decode(code.detach(), torch.cat(list(boxes)), self.code_weights).split([len(b) for b in boxes])
        return [clip_boxes_to_image(b, size) for b, size in zip(moved, sizes, strict=True)]

    def box_losses(
        self, logits: Tensor, code: Tensor, samples: Sequence[Samples], targets: Sequence[Target]
    ) -> tuple[Tensor, Tensor]:
        """Of classes and of boxes, both as means over all samples: few matches must not weigh as much as many."""
        labels, positive = torch.cat([s.labels for s in samples]), torch.cat([s.positive for s in samples])
        boxes = torch.cat([s.boxes for s in samples])[positive]
        truth = torch.cat([t["boxes"][s.matched[s.positive]] for s, t in zip(samples, targets, strict=True)])
        count = max(1, len(labels))
        classes = F.cross_entropy(logits, labels, reduction="sum") / count
        moves = BOX_LOSSES[self.box_loss](code[positive], boxes, truth, self.code_weights) / count
        return self.loss_weight * classes, self.loss_weight * self.box_loss_weight * moves

    def mask_loss(self, logits: Tensor, samples: Sequence[Samples], targets: Sequence[Target]) -> Tensor:
        """Of the masks of matched boxes, each in the channel of its class."""
        loss = maskrcnn_loss(
            logits.float(),
            [s.boxes[s.positive] for s in samples],
            [t["masks"] for t in targets],
            [t["labels"] for t in targets],
            [s.matched[s.positive] for s in samples],
        )
        return self.loss_weight * loss


class Cascade(nn.Module):
    """From maps and proposals to losses in training, and to detections else; called as torchvision calls its RoIHeads.

    Every stage has a mask head of its own, which learns from the boxes of its stage. At inference all look at the final
    boxes: probabilities of classes and logits of masks are averaged, since three heads err less than the last one, and
    in logits a head that is unsure of a pixel leaves it to the others.
    """

    def __init__(
        self,
        stages: Sequence[CascadeStage],
        box_pool: MultiScaleRoIAlign,
        mask_pool: MultiScaleRoIAlign,
        *,
        stride: int,  # of the largest map
        samples: int,
        positive_fraction: float,
        score_threshold: float,
        nms_threshold: float,
        detections: int,
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.box_pool = box_pool
        self.mask_pool = mask_pool
        self.stride = stride
        self.samples = samples
        self.positive_fraction = positive_fraction
        self.score_threshold = score_threshold
        self.nms_threshold = nms_threshold
        self.detections_per_img = detections

    def forward(
        self, maps: Maps, proposals: list[Tensor], sizes: list[Size], targets: list[Target] | None = None
    ) -> tuple[list[Target], dict[str, Tensor]]:
        proposals = [boxes.float() for boxes in proposals]
        if self.training:
            assert targets is not None
            return [], self.losses(maps, proposals, sizes, targets)
        return self.detect(maps, proposals, sizes), {}

    def losses(
        self, maps: Maps, proposals: list[Tensor], sizes: list[Size], targets: list[Target]
    ) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = {}
        for number, stage in enumerate(self.stages, 1):
            assert isinstance(stage, CascadeStage)
            samples = [self.chosen(boxes, t, stage.iou) for boxes, t in zip(proposals, targets, strict=True)]
            boxes = [s.boxes for s in samples]
            logits, code = stage.box_head(self.pooled(self.box_pool, maps, boxes))
            classes, moves = stage.box_losses(logits, code, samples, targets)
            inside = self.pooled(self.mask_pool, maps, [s.boxes[s.positive] for s in samples])
            masks = stage.mask_loss(stage.mask_head(inside), samples, targets)
            losses |= {f"loss_class_{number}": classes, f"loss_box_{number}": moves, f"loss_mask_{number}": masks}
            moved = stage.moved(boxes, code, sizes)
            proposals = [b[s.own] for b, s in zip(moved, samples, strict=True)]
            proposals = [b[remove_small_boxes(b, SMALLEST_SIDE)] for b in proposals]
        return losses

    def detect(self, maps: Maps, proposals: list[Tensor], sizes: list[Size]) -> list[Target]:
        scores, boxes = self.scored(maps, proposals, sizes)
        found = [self.best(s, b) for s, b in zip(scores, boxes, strict=True)]
        masks = self.masks(maps, [f["boxes"] for f in found], [f["labels"] for f in found])
        return [{**f, "masks": mask} for f, mask in zip(found, masks, strict=True)]

    def chosen(self, proposals: Tensor, target: Target, iou: float) -> Samples:
        """Some of the proposals and the truth itself, without which a first stage that knows nothing had no match."""
        boxes = torch.cat([proposals, target["boxes"]])
        matched = match(boxes, target["boxes"], iou)
        index = sample(matched, self.samples, self.positive_fraction)
        matched = matched[index]
        labels = torch.zeros_like(matched)
        labels[matched >= 0] = target["labels"][matched[matched >= 0]]
        return Samples(boxes[index], matched, labels, index < len(proposals))

    def pooled(self, pool: MultiScaleRoIAlign, maps: Maps, boxes: list[Tensor]) -> Tensor:
        # The pool guesses its strides from the first image it is told of; a small one, filled up, would mislead it.
        rows, cols = next(iter(maps.values())).shape[-2:]
        return pool(maps, boxes, [(rows * self.stride, cols * self.stride)])

    def scored(self, maps: Maps, proposals: list[Tensor], sizes: list[Size]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """For each image the mean of the stages' probabilities, and the boxes of the last stage."""
        boxes, scores = proposals, []
        for stage in self.stages:
            assert isinstance(stage, CascadeStage)
            logits, code = stage.box_head(self.pooled(self.box_pool, maps, boxes))
            scores.append(logits.softmax(1))
            boxes = stage.moved(boxes, code, sizes)
        return torch.stack(scores).mean(0).split([len(b) for b in boxes]), boxes

    def best(self, scores: Tensor, boxes: Tensor) -> Target:
        """What one image shows: sure enough, large enough, and each object once."""
        index, label = (scores[:, 1:] > self.score_threshold).nonzero(as_tuple=True)
        scores, boxes, labels = scores[index, label + 1], boxes[index], label + 1
        kept = remove_small_boxes(boxes, SMALLEST_SIDE)
        scores, boxes, labels = scores[kept], boxes[kept], labels[kept]
        kept = batched_nms(boxes, scores, labels, self.nms_threshold)[: self.detections_per_img]
        return {"boxes": boxes[kept], "labels": labels[kept], "scores": scores[kept]}

    def masks(self, maps: Maps, boxes: list[Tensor], labels: list[Tensor]) -> tuple[Tensor, ...]:
        """For each image a probability `n 1 rows cols` in the frame of each box."""
        inside = self.pooled(self.mask_pool, maps, boxes)
        channel = torch.cat(labels)
        index = torch.arange(len(channel), device=channel.device)
        logits = [stage.mask_head(inside).float()[index, channel] for stage in self.stages]  # type: ignore[operator]
        return torch.stack(logits).mean(0).sigmoid()[:, None].split([len(b) for b in boxes])
