"""How well label maps are met: counts of pixels, which add up over batches and processes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vir.data.dense import DenseBatch
from vir.data.scenes import VOID


@dataclass
class SegmentationJudgement:
    """Pixels by truth and answer; of several processes they are added.

    A class that is neither in the truth nor in the answers has no IoU and does not count in the mean; one that is only
    answered has 0. So do mmsegmentation and others; the counts are over all images and not per image.
    """

    classes: tuple[str, ...]
    counts: Tensor  # truth x answer
    images: int = 0
    unreadable: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, classes: Sequence[str]) -> "SegmentationJudgement":
        return cls(tuple(classes), torch.zeros(len(classes), len(classes), dtype=torch.int64))

    def add(self, truth: Tensor, answer: Tensor) -> None:
        """One label map and the model's; void pixels of the truth do not count."""
        if truth.shape != answer.shape:
            raise ValueError(f"an answer of shape {tuple(answer.shape)}, expected {tuple(truth.shape)} as the truth.")
        known = truth != VOID
        size = len(self.classes)
        truth, answer = truth[known].long(), answer[known].long()
        for name, numbers in (("truth", truth), ("answer", answer)):
            if len(numbers) and (int(numbers.min()) < 0 or int(numbers.max()) >= size):
                raise ValueError(
                    f"the {name} has numbers from {int(numbers.min())} to {int(numbers.max())}, expected 0 to "
                    f"{size - 1} for {size} classes, or {VOID} in the truth for none."
                )
        pairs = truth * size + answer
        self.counts += pairs.bincount(minlength=size * size).reshape(size, size).cpu()
        self.images += 1

    def join(self, other: "SegmentationJudgement") -> None:
        """Add what another process has seen."""
        self.counts = self.counts + other.counts
        self.images += other.images
        self.unreadable += other.unreadable

    def per_class(self) -> dict[str, float]:
        """The IoU of every class from 0 to 1; nan where it is neither there nor answered."""
        return dict(zip(self.classes, self._iou().tolist(), strict=True))

    def _iou(self) -> Tensor:
        both = self.counts.diagonal().double()
        either = self.counts.sum(0) + self.counts.sum(1) - self.counts.diagonal()
        return both / either  # 0 / 0 is nan

    @property
    def miou(self) -> float:
        return float(self._iou().nanmean().nan_to_num())

    @property
    def pixel_accuracy(self) -> float:
        return int(self.counts.diagonal().sum()) / max(1, int(self.counts.sum()))

    def metrics(self) -> dict[str, float]:
        there = self.counts.sum(1) > 0
        recall = self.counts.diagonal()[there].double() / self.counts.sum(1)[there]
        known = {
            "miou": self.miou,
            "pixel_accuracy": self.pixel_accuracy,
            "class_accuracy": float(recall.mean()) if len(recall) else 0.0,
            "images": float(self.images),
        }
        return {name: round(value, 6) for name, value in known.items()}


@torch.inference_mode()
def judge_segmentation(
    model: nn.Module,
    batches: Iterable[DenseBatch],
    classes: Sequence[str],
    device: torch.device,
    say: Callable[[int], None] = lambda images: None,
    *,
    mirrored: bool = False,
) -> SegmentationJudgement:
    """Ask the model about every image, each in its own size; logits are brought to the size of the truth.

    `mirrored`: about its mirror image as well, and the mean of both answers counts.
    """
    model.eval()
    seen = SegmentationJudgement.of(classes)
    for batch in batches:
        seen.unreadable += batch.unreadable
        for image, truth in zip(batch.images, batch.targets, strict=True):
            if truth is not None:
                pixels = image[None].to(device, non_blocking=True)
                logits = _both_ways(model, pixels) if mirrored else model(pixels)
                seen.add(truth.to(device), labels_of(logits, (truth.shape[0], truth.shape[1]))[0])
        say(len(batch.images))
    return seen


def _both_ways(model: nn.Module, image: Tensor) -> Tensor:
    """Probabilities; retention in 2D sees left and up, so that the mirror image shows it what lies on the right."""
    return (model(image).softmax(1) + model(image.flip(-1)).flip(-1).softmax(1)) / 2


def labels_of(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """The best class of every pixel of an image of this size (height, width): b c h w -> b h w."""
    if tuple(logits.shape[-2:]) != size:
        logits = F.interpolate(logits.float(), size, mode="bilinear", align_corners=False)
    return logits.argmax(1)
