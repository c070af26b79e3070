"""Whole detectors and segmentors from the name of a backbone; all of their numbers are here.

Arguments are plain values, since they go into checkpoints: the same ones build the same model again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from vir.heads.align import PyramidAlign
from vir.heads.backbone import STRIDES, Backbone, BatchNorm, OutputNorm, create_body
from vir.heads.box_heads import BoxHead, BoxLoss, four_conv_one_fc, two_fc
from vir.heads.boxes import CodeWeights
from vir.heads.cascade import Cascade, CascadeStage
from vir.heads.detector import CascadeMaskRCNN, FeaturePyramid
from vir.heads.masks import ToSizeAndBack
from vir.heads.proposals import ProposalHead, Proposer
from vir.heads.upernet import AUXILIARY_LEVEL, UPerHead, UPerNet, conv_norm_act
from vir.layers.retention import stretch_decay

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

BoxHeadKind = Literal["2fc", "4conv1fc"]


@dataclass(frozen=True)
class BoxHeadRule:
    """How the features in a box are read, and how a move of it is judged."""

    body: Callable[[int, int, int], nn.Module]
    loss: BoxLoss
    loss_weight: float


BOX_HEADS: dict[BoxHeadKind, BoxHeadRule] = {
    "2fc": BoxHeadRule(two_fc, "smooth_l1", 1.0),
    "4conv1fc": BoxHeadRule(four_conv_one_fc, "giou", 10.0),
}


@dataclass(frozen=True)
class StageRule:
    """What a stage of the cascade asks for."""

    iou: float
    code_weights: CodeWeights
    loss_weight: float


STAGES = (
    StageRule(0.5, (10, 10, 5, 5), 1.0),
    StageRule(0.6, (20, 20, 10, 10), 0.5),
    StageRule(0.7, (30, 30, 15, 15), 0.25),
)
BOX_SIZE, MASK_SIZE = 7, 14  # of the grid of features taken out of a box
POOLING_GRIDS = (1, 2, 3, 6)
AUXILIARY_WEIGHT = 0.4


def build_backbone(
    name: str,
    *,
    output_norm: OutputNorm = "layer",
    frozen_stages: int = 0,
    batch_norm: BatchNorm = "trained",
    stretch: float = 1.0,
    **model_args: Any,
) -> Backbone:
    """A model of timm, ours or another, as four maps; `stretch` is the power of the decay, as in a card."""
    body = create_body(name, **model_args)
    stretch_decay(body, stretch)
    return Backbone(body, output_norm=output_norm, frozen_stages=frozen_stages, batch_norm=batch_norm)


def build_detector(
    name: str,
    classes: int,
    *,
    box_head: BoxHeadKind = "4conv1fc",
    min_size: int | Sequence[int] = 800,
    max_size: int = 1333,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    width: int = 256,
    hidden: int = 1024,
    anchor_scale: float = 8.0,
    proposals: int = 1000,
    samples: int = 512,
    score_threshold: float = 0.05,
    nms_threshold: float = 0.5,
    detections: int = 100,
    **backbone_args: Any,
) -> CascadeMaskRCNN:
    """Cascade Mask R-CNN for this many classes, the background not counted: labels are 1 to `classes`.

    Of several values of `min_size` training takes one by chance, and evaluation the last. `anchor_scale` is the side of
    an anchor in strides. Further arguments are those of `build_backbone` and of the model, such as `retention="1d"`.
    """
    _check_classes(classes)
    if box_head not in BOX_HEADS:
        raise ValueError(f"box_head={box_head!r}, expected one of {', '.join(map(repr, BOX_HEADS))}.")
    backbone = build_backbone(name, **backbone_args)
    fpn = FeaturePyramidNetwork(list(backbone.channels), width, LastLevelMaxPool())
    cascade = Cascade(
        [_stage(rule, BOX_HEADS[box_head], classes, width, hidden) for rule in STAGES],
        PyramidAlign(BOX_SIZE, STRIDES),
        PyramidAlign(MASK_SIZE, STRIDES),
        samples=samples,
        positive_fraction=0.25,
        score_threshold=score_threshold,
        nms_threshold=nms_threshold,
        detections=detections,
    )
    min_sizes: Any = min_size if isinstance(min_size, int) else tuple(min_size)
    transform = ToSizeAndBack(min_sizes, max_size, list(mean), list(std), size_divisible=STRIDES[-1])
    rpn = _proposer(width, anchor_scale, proposals)
    return CascadeMaskRCNN(FeaturePyramid(backbone, fpn), rpn, cascade, transform, classes)


def build_segmentor(
    name: str,
    classes: int,
    *,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    width: int = 512,
    auxiliary_width: int = 256,
    dropout: float = 0.1,
    hardest: float = 1.0,
    overlap_weight: float = 0.0,
    **backbone_args: Any,
) -> UPerNet:
    """UPerNet for labels 0 to `classes` - 1. Further arguments are those of `build_backbone` and of the model.

    `hardest` is the share of pixels, those that are wrong most, that a step of training learns from; with
    `overlap_weight` it also learns from the overlap of each class with its answers, where rare ones count as much.
    """
    _check_classes(classes)
    if not 0 < hardest <= 1:
        raise ValueError(f"hardest={hardest}, expected a share of the pixels, above 0 and at most 1.")
    if overlap_weight < 0:
        raise ValueError(f"overlap_weight={overlap_weight}, expected 0 or more: how much overlaps count in the loss.")
    backbone = build_backbone(name, **backbone_args)
    auxiliary = nn.Sequential(
        conv_norm_act(backbone.channels[AUXILIARY_LEVEL], auxiliary_width, 3),
        *_classifier(auxiliary_width, classes, dropout),
    )
    return UPerNet(
        backbone,
        UPerHead(backbone.channels, width, POOLING_GRIDS),
        nn.Sequential(*_classifier(width, classes, dropout)),
        auxiliary,
        classes=classes,
        auxiliary_weight=AUXILIARY_WEIGHT,
        hardest=hardest,
        overlap_weight=overlap_weight,
        mean=mean,
        std=std,
    )


def _check_classes(classes: int) -> None:
    if classes < 1:
        raise ValueError(f"classes={classes}, expected the number of classes, 1 or more.")


def _classifier(width: int, classes: int, dropout: float) -> tuple[nn.Module, nn.Module]:
    return nn.Dropout2d(dropout), nn.Conv2d(width, classes, 1)


def _stage(rule: StageRule, head: BoxHeadRule, classes: int, width: int, hidden: int) -> CascadeStage:
    return CascadeStage(
        BoxHead(head.body(width, BOX_SIZE, hidden), hidden, classes),
        nn.Sequential(MaskRCNNHeads(width, [width] * 4, 1), MaskRCNNPredictor(width, width, classes + 1)),
        iou=rule.iou,
        code_weights=rule.code_weights,
        box_loss=head.loss,
        box_loss_weight=head.loss_weight,
        loss_weight=rule.loss_weight,
    )


def _proposer(width: int, anchor_scale: float, proposals: int) -> Proposer:
    strides = (*STRIDES, 2 * STRIDES[-1])  # the FPN adds a smaller map, for the largest objects
    anchors = AnchorGenerator(tuple((anchor_scale * stride,) for stride in strides), ((0.5, 1.0, 2.0),) * len(strides))
    return Proposer(
        anchors,
        ProposalHead(width, anchors.num_anchors_per_location()[0]),
        fg_iou_thresh=0.7,
        bg_iou_thresh=0.3,
        batch_size_per_image=256,
        positive_fraction=0.5,
        pre_nms_top_n={"training": 2 * proposals, "testing": proposals},
        post_nms_top_n={"training": 2 * proposals, "testing": proposals},
        nms_thresh=0.7,
    )
