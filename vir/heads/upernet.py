"""UPerNet: a class for every pixel, from all levels of a backbone at once.

"Unified Perceptual Parsing for Scene Understanding", Xiao, Liu, Zhou, Jiang, Sun, 2018.

The one of segmentation-models-pytorch (0.6) is not used: it takes sides of whole multiples of 32 alone and no backbone
of one stride, has no auxiliary head for pixels, freezes nothing, and cannot train on a single image.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vir.heads.backbone import STRIDES, Backbone

IGNORE = 255  # the label of pixels that teach nothing
AUXILIARY_LEVEL = STRIDES.index(16)


class BatchNorm(nn.BatchNorm2d):
    """A BatchNorm that takes its running statistics where a channel is a single value, which has no spread.

    So it is when a single image is pooled to one pixel.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.numel() == x.shape[1]:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(x)


def conv_norm_act(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False), BatchNorm(outputs), nn.ReLU(inplace=True)
    )


def resized(x: Tensor, size: Sequence[int]) -> Tensor:
    return F.interpolate(x, (size[0], size[1]), mode="bilinear", align_corners=False)


class PyramidPooling(nn.Module):
    """The map beside means over the parts of coarse grids: what the whole image, its halves and so on look like."""

    def __init__(self, inputs: int, outputs: int, grids: Sequence[int]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(grid), conv_norm_act(inputs, outputs, 1)) for grid in grids
        )
        self.fuse = conv_norm_act(inputs + len(grids) * outputs, outputs, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fuse(torch.cat([x, *(resized(branch(x), x.shape[-2:]) for branch in self.branches)], 1))


class UPerHead(nn.Module):
    """Pyramid pooling on the smallest map, then from level to level down to the largest, then all of them together."""

    def __init__(self, channels: Sequence[int], width: int, grids: Sequence[int]) -> None:
        super().__init__()
        self.pooling = PyramidPooling(channels[-1], width, grids)
        self.lateral = nn.ModuleList(conv_norm_act(dim, width, 1) for dim in channels[:-1])
        self.smooth = nn.ModuleList(conv_norm_act(width, width, 3) for _ in channels[:-1])
        self.fuse = conv_norm_act(len(channels) * width, width, 3)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        levels = [self.pooling(maps[-1])]
        for lateral, x in zip(reversed(self.lateral), reversed(maps[:-1]), strict=True):
            x = lateral(x)
            levels.append(x + resized(levels[-1], x.shape[-2:]))
        top, *others = levels
        others = [smooth(x) for smooth, x in zip(reversed(self.smooth), others, strict=True)]
        size = others[-1].shape[-2:]
        return self.fuse(torch.cat([resized(x, size) for x in (top, *others)], 1))


def pixel_loss(logits: Tensor, labels: Tensor, hardest: float = 1.0) -> Tensor:
    """Mean cross-entropy over the pixels that teach something; zero where none does.

    With `hardest` below 1 only over so many, as a share of all pixels, that are wrong most: roads and skies are learned
    soon, and would outvote poles and signs for the rest of a training.
    """
    taught = (labels != IGNORE).sum().clamp(min=1)
    if hardest == 1:
        return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum") / taught
    losses = F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="none").flatten()
    count = max(1, round(hardest * losses.numel()))
    return losses.topk(count, sorted=False).values.sum() / taught.clamp(max=count)


def overlap_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """1 - IoU, the mean over the classes that a batch shows, with probabilities for answers; zero where it shows none.

    A class counts as much as any other, however few pixels it has: what mIoU asks for, and the mean over pixels not.
    """
    taught = (labels != IGNORE)[:, None]
    truth = labels[:, None] == torch.arange(logits.shape[1], device=labels.device)[:, None, None]
    probabilities, pixels = logits.float().softmax(1) * taught, (0, 2, 3)
    common, shown = (probabilities * truth).sum(pixels), truth.sum(pixels)
    iou = common / (probabilities.sum(pixels) + shown - common).clamp(min=1e-6)
    return ((1 - iou) * (shown > 0)).sum() / (shown > 0).sum().clamp(min=1)


class UPerNet(nn.Module):
    """In training `model(images, labels)` gives a dict of losses, else `model(images)` logits `b classes height width`.

    Images are `b 3 height width` in 0..1, of any size; labels `b height width` from 0, and 255 for pixels to ignore.
    """

    def __init__(
        self,
        backbone: Backbone,
        head: nn.Module,
        classifier: nn.Module,
        auxiliary: nn.Module,
        *,
        classes: int,
        auxiliary_weight: float,
        hardest: float,
        overlap_weight: float,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.classifier = classifier
        self.auxiliary = auxiliary
        self.classes = classes
        self.auxiliary_weight = auxiliary_weight
        self.hardest = hardest
        self.overlap_weight = overlap_weight
        # Not part of the weights: they are arguments of the model.
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1), persistent=False)

    @property
    def body(self) -> Backbone:
        """The backbone alone, to load weights into."""
        return self.backbone

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.backbone.set_grad_checkpointing(enable)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        self._check_images(images)
        maps = self.backbone((images - self.mean) / self.std)  # type: ignore[operator]
        logits = self._at_size_of(images, self.classifier(self.head(maps)), STRIDES[0])
        if not self.training:
            return logits
        labels = self._checked(images, labels)
        auxiliary = self._at_size_of(images, self.auxiliary(maps[AUXILIARY_LEVEL]), STRIDES[AUXILIARY_LEVEL])
        losses = {
            "loss_pixels": pixel_loss(logits, labels, self.hardest),
            "loss_auxiliary": self.auxiliary_weight * pixel_loss(auxiliary, labels),
        }
        if self.overlap_weight:
            losses["loss_overlap"] = self.overlap_weight * overlap_loss(logits, labels)
        return losses

    @staticmethod
    def _at_size_of(images: Tensor, logits: Tensor, stride: int) -> Tensor:
        """Enlarged by the stride, and what the backbone had filled up cut off again: no pixel moves."""
        rows, cols = logits.shape[-2:]
        return resized(logits, (rows * stride, cols * stride))[..., : images.shape[-2], : images.shape[-1]]

    @staticmethod
    def _check_images(images: Tensor) -> None:
        if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point() or not images.numel():
            raise ValueError(
                f"images are {images.dtype} of shape {tuple(images.shape)}, expected floats in 0..1 of shape "
                "b 3 height width: scale bytes by 1 / 255, and crop or fill images of several sizes to one."
            )

    def _checked(self, images: Tensor, labels: Tensor | None) -> Tensor:
        expected = (len(images), *images.shape[-2:])
        if labels is None or labels.shape != expected:
            given = "no labels" if labels is None else f"labels of shape {tuple(labels.shape)}"
            raise ValueError(f"{given}, expected {expected}: in training every image needs a label for each pixel.")
        wrong = (labels != IGNORE) & ((labels < 0) | (labels >= self.classes))
        if bool(wrong.any()):
            raise ValueError(
                f"labels {labels[wrong].unique().tolist()[:5]} are none of the {self.classes} classes: expected 0 to "
                f"{self.classes - 1}, or {IGNORE} for pixels to ignore."
            )
        return labels.long()
