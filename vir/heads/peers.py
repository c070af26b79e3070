"""torchvision's Mask R-CNN, to train and measure beside ours by the same commands."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

from vir.heads.targets import check_images

# Of a recipe for our detectors: torchvision's has heads of its own.
OURS = {"box_head", "width", "hidden", "proposals", "samples", "drop_path_rate"}
PEERS = {"maskrcnn_resnet18_fpn": "resnet18", "maskrcnn_resnet50_fpn": "resnet50"}


class PeerMaskRCNN(MaskRCNN):
    """As torchvision has it, from scratch; sizes can be changed as in our detectors."""

    def set_size(self, short: int) -> None:
        self.transform.min_size = (short,)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        if enable:
            raise ValueError("torchvision's Mask R-CNN does not know activation checkpointing: leave it off.")

    def forward(self, images: Sequence[Tensor], targets: Any = None) -> Any:
        check_images(images, self.transform.max_size)
        return super().forward(list(images), targets if self.training else None)


def build_peer(
    name: str,
    classes: int,
    *,
    min_size: int | Sequence[int] = 800,
    max_size: int = 1333,
    anchor_scale: float = 8.0,
    detections: int = 100,
    **others: Any,
) -> PeerMaskRCNN:
    """Without weights. Its anchors are those of our detectors; what shapes our heads alone does not count."""
    if unknown := set(others) - OURS:
        raise ValueError(f"{name} has no {', '.join(sorted(unknown))}: take it out of the arguments.")
    backbone = resnet_fpn_backbone(backbone_name=PEERS[name], weights=None, trainable_layers=5)
    sides = tuple((anchor_scale * stride,) for stride in (4, 8, 16, 32, 64))
    return PeerMaskRCNN(
        backbone, classes + 1, min_size=min_size, max_size=max_size, box_detections_per_img=detections,
        rpn_anchor_generator=AnchorGenerator(sides, ((0.5, 1.0, 2.0),) * len(sides)),
    )  # fmt: skip
