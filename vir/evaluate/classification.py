"""Accuracy of a classifier, with all that can be told from its mistakes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from timm.data import create_transform
from torch import Tensor, nn

from vir.checkpoint import Card
from vir.data.loading import NO_CLASS, Batch, Examples, Share, judging_batches
from vir.data.sets import LabelledImages

WORST = 24  # mistakes that are kept


@dataclass
class Judgement:
    """Sums over images; of several processes they are added."""

    counts: Tensor  # truth x answer
    loss: float = 0.0
    in_five: int = 0
    worst: list[tuple[float, int, int, int]] = field(default_factory=list)  # probability, index, truth, answer
    unreadable: list[str] = field(default_factory=list)

    @property
    def images(self) -> int:
        return int(self.counts.sum())

    @property
    def top1(self) -> float:
        return 100 * int(self.counts.diagonal().sum()) / max(1, self.images)

    @property
    def top5(self) -> float:
        return 100 * self.in_five / max(1, self.images)

    @property
    def mean_loss(self) -> float:
        return self.loss / max(1, self.images)

    def join(self, other: "Judgement") -> None:
        """Add what another process has seen."""
        self.counts = self.counts + other.counts
        self.loss += other.loss
        self.in_five += other.in_five
        self.worst = sorted([*self.worst, *other.worst], reverse=True)[:WORST]
        self.unreadable += other.unreadable

    def metrics(self) -> dict[str, float]:
        known = {"top1": self.top1, "top5": self.top5, "loss": self.mean_loss, "images": float(self.images)}
        return {name: round(value, 6) for name, value in known.items()}

    def confusion(self) -> np.ndarray:
        return self.counts.numpy()


@torch.inference_mode()
def judge(
    model: nn.Module,
    batches: Iterable[Batch],
    classes: int,
    device: torch.device,
    say: Callable[[int], None] = lambda images: None,
) -> Judgement:
    """Ask the model about every image."""
    model.eval()
    seen = Judgement(torch.zeros(classes, classes, dtype=torch.long))
    for batch in batches:
        seen.unreadable += batch.unreadable
        known = batch.targets != NO_CLASS
        targets = batch.targets[known]
        if len(targets):
            logits = model(batch.images.to(device, non_blocking=True)).float().cpu()[known]
            _add(seen, logits, targets, batch.indices[known])
        say(len(batch.targets))
    return seen


def _add(seen: Judgement, logits: Tensor, targets: Tensor, indices: Tensor) -> None:
    seen.loss += F.cross_entropy(logits, targets, reduction="sum").item()
    answers = logits.argmax(1)
    seen.counts.index_put_((targets, answers), torch.ones_like(targets), accumulate=True)
    best = logits.topk(min(5, logits.shape[1]), 1).indices
    seen.in_five += int((best == targets[:, None]).sum())
    wrong = (answers != targets).nonzero().flatten()
    sure = logits.softmax(1)[wrong, answers[wrong]]
    rows = zip(sure.tolist(), indices[wrong].tolist(), targets[wrong].tolist(), answers[wrong].tolist(), strict=True)
    seen.worst = sorted([*seen.worst, *rows], reverse=True)[:WORST]


def judge_set(
    model: nn.Module,
    card: Card,
    images: LabelledImages,
    size: int | None = None,
    batch: int = 64,
    workers: int = 4,
    device: str = "cpu",
) -> Judgement:
    """Ask a trained model about a whole set, in full precision."""
    examples = Examples(images, create_transform(**card.preprocessing(size)), stand_in=False)
    return judge(model, judging_batches(examples, batch, Share(), workers), len(card.classes), torch.device(device))
