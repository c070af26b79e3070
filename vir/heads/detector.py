"""Cascade Mask R-CNN as a whole: images in, losses or detections out."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.ops import FeaturePyramidNetwork

from vir.heads.backbone import Backbone
from vir.heads.targets import Target, check_images, check_targets


class FeaturePyramid(nn.Module):
    """A backbone and an FPN; maps leave it in float32, since anchors and boxes take the precision of the maps."""

    def __init__(self, backbone: Backbone, fpn: FeaturePyramidNetwork) -> None:
        super().__init__()
        self.body = backbone
        self.fpn = fpn

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        maps = OrderedDict((str(i), x) for i, x in enumerate(self.body(images)))
        return OrderedDict((name, x.float()) for name, x in self.fpn(maps).items())


class CascadeMaskRCNN(GeneralizedRCNN):
    """In training `model(images, targets)` gives a dict of losses, else `model(images)` a dict for each image.

    Images are a list of `3 height width` in 0..1, of any sizes. A target has boxes `n 4`, labels from 1 and masks
    `n height width`. A dict of answers has boxes, labels, scores and masks `n 1 height width` in 0..1, in the image's
    own coordinates.
    """

    def __init__(
        self, pyramid: FeaturePyramid, rpn: nn.Module, cascade: nn.Module, transform: Any, classes: int
    ) -> None:
        super().__init__(pyramid, rpn, cascade, transform)
        self.classes = classes

    @property
    def body(self) -> Backbone:
        """The backbone alone, to load weights into."""
        return self.backbone.body

    def set_size(self, short: int) -> None:
        """The short side to which images are brought, in training and evaluation."""
        self.transform.min_size = (short,)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.body.set_grad_checkpointing(enable)

    def forward(self, images: Sequence[Tensor], targets: Sequence[Target] | None = None) -> Any:
        check_images(images, self.transform.max_size)
        checked = check_targets(images, targets, self.classes) if self.training else None
        return super().forward(list(images), checked)
