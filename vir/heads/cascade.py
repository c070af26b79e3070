"""Cascade R-CNN with masks: each stage moves the boxes of the one before, and asks for a better overlap.

"Cascade R-CNN: High Quality Object Detection and Instance Segmentation", Cai, Vasconcelos, 2019.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import maskrcnn_loss
from torchvision.ops import batched_nms, remove_small_boxes

from vir.heads.align import PyramidAlign
from vir.heads.batch import Filled, Samples, Size, Truth, borders, choose, joined
from vir.heads.box_heads import BOX_LOSSES, BoxLoss
from vir.heads.boxes import SMALLEST_SIDE, CodeWeights, decode
from vir.heads.targets import Target

Maps = dict[str, Tensor]


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

    def moved(self, boxes: Tensor, code: Tensor, border: Tensor) -> Tensor:
        """The boxes where this stage wants them, each cut at the border of its image."""
        return decode(code.detach(), boxes, self.code_weights).clamp(min=0).minimum(border)

    def box_losses(self, logits: Tensor, code: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        """Of classes and of boxes, both as means over all samples: few matches must not weigh as much as many."""
        count = max(1, len(samples.labels))
        classes = F.cross_entropy(logits, samples.labels, reduction="sum") / count
        positive = samples.positive
        loss = BOX_LOSSES[self.box_loss](code[positive], samples.boxes[positive], samples.truth, self.code_weights)
        return self.loss_weight * classes, self.loss_weight * self.box_loss_weight * loss / count

    def mask_loss(self, logits: Tensor, samples: Samples, targets: Sequence[Target]) -> Tensor:
        """Of the masks of matched boxes, each in the channel of its class."""
        boxes, matched = samples.by_image(samples.boxes[samples.positive], samples.matched)
        masks, labels = [t["masks"] for t in targets], [t["labels"] for t in targets]
        return self.loss_weight * maskrcnn_loss(logits.float(), boxes, masks, labels, matched)


class Cascade(nn.Module):
    """From maps and proposals to losses in training, and to detections else; called as torchvision calls its RoIHeads.

    Every stage has a mask head of its own, which learns from the boxes of its stage. At inference all look at the final
    boxes: probabilities of classes and logits of masks are averaged, since three heads err less than the last one, and
    in logits a head that is unsure of a pixel leaves it to the others.
    """

    def __init__(
        self,
        stages: Sequence[CascadeStage],
        box_pool: PyramidAlign,
        mask_pool: PyramidAlign,
        *,
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
        self.samples = samples
        self.positive_fraction = positive_fraction
        self.score_threshold = score_threshold
        self.nms_threshold = nms_threshold
        self.detections_per_img = detections

    def forward(
        self, maps: Maps, proposals: list[Tensor], sizes: list[Size], targets: list[Target] | None = None
    ) -> tuple[list[Target], dict[str, Tensor]]:
        proposals = [boxes.float() for boxes in proposals]
        maps = {name: x.contiguous() for name, x in maps.items()}  # RoIAlign would turn them round each time
        if self.training:
            assert targets is not None
            return [], self.losses(maps, proposals, sizes, targets)
        return self.detect(maps, proposals, sizes), {}

    def losses(
        self, maps: Maps, proposals: list[Tensor], sizes: list[Size], targets: list[Target]
    ) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = {}
        levels = self.levels(maps)
        filled, truth = Filled.up(proposals), Truth.of(targets)
        border = borders(sizes, filled.boxes)
        for number, stage in enumerate(self.stages, 1):
            assert isinstance(stage, CascadeStage)
            samples = choose(filled, truth, stage.iou, self.samples, self.positive_fraction)
            logits, code = stage.box_head(self.box_pool(levels, samples.boxes, samples.image))
            classes, moves = stage.box_losses(logits, code, samples)
            positive = samples.positive
            inside = self.mask_pool(levels, samples.boxes[positive], samples.image[positive])
            masks = stage.mask_loss(stage.mask_head(inside), samples, targets)
            losses |= {f"loss_class_{number}": classes, f"loss_box_{number}": moves, f"loss_mask_{number}": masks}
            filled = samples.proposals(stage.moved(samples.boxes, code, border[samples.image]))
        return losses

    def detect(self, maps: Maps, proposals: list[Tensor], sizes: list[Size]) -> list[Target]:
        scores, boxes = self.scored(maps, proposals, sizes)
        found = [self.best(s, b) for s, b in zip(scores, boxes, strict=True)]
        masks = self.masks(maps, [f["boxes"] for f in found], [f["labels"] for f in found])
        return [{**f, "masks": mask} for f, mask in zip(found, masks, strict=True)]

    def levels(self, maps: Maps) -> list[Tensor]:
        """The maps that boxes are looked up in: all but the smallest, which is for proposals alone."""
        return list(maps.values())[: len(self.box_pool.strides)]

    def scored(self, maps: Maps, proposals: list[Tensor], sizes: list[Size]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """For each image the mean of the stages' probabilities, and the boxes of the last stage."""
        boxes, image, counts = joined(proposals)
        levels, border, scores = self.levels(maps), borders(sizes, boxes)[image], []
        for stage in self.stages:
            assert isinstance(stage, CascadeStage)
            logits, code = stage.box_head(self.box_pool(levels, boxes, image))
            scores.append(logits.softmax(1))
            boxes = stage.moved(boxes, code, border)
        return torch.stack(scores).mean(0).split(counts), list(boxes.split(counts))

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
        every, image, counts = joined(boxes)
        inside = self.mask_pool(self.levels(maps), every, image)
        channel = torch.cat(labels)
        index = torch.arange(len(channel), device=channel.device)
        logits = [stage.mask_head(inside).float()[index, channel] for stage in self.stages]  # type: ignore[operator]
        return torch.stack(logits).mean(0).sigmoid()[:, None].split(counts)
