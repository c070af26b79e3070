"""Classification: one class for an image."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import isqrt
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from PIL import Image
from timm.data import create_transform
from torch import Tensor, nn

from vir.checkpoint import Card
from vir.data.held import Held, held_batches, hold, on_device
from vir.data.images import open_image
from vir.data.loading import Batch, Examples, judging_batches, seed_from, seeded, training_batches
from vir.data.sets import SHARDS, open_sets
from vir.data.streams import StreamedImages, open_streams, streamed_batches, streamed_judging
from vir.evaluate.classification import Judgement, judge, judge_set
from vir.predict import best_device
from vir.train import report
from vir.train.setup import build_classifier, device_augment, mixing, training_transform
from vir.train.tasks.base import DROPOUT, MIXING, Numbers, Task


class Classification(Task):
    columns = ("val_loss", "val_top1")

    def open(self, data: str) -> Any:
        return open_streams(data) if data.startswith(SHARDS) else open_sets(data)

    @property
    def streamed(self) -> bool:
        return isinstance(self.sets["train"], StreamedImages)

    def build(self) -> tuple[Any, Card]:
        model, self.card = build_classifier(self.recipe, self.place, self.sets["train"])
        self.mixing = mixing(self.recipe, len(self.card.classes))
        self.counts_right = self.mixing is None
        self.held: Held | None = None
        self.held_to_judge: list[Batch] | None = None
        return model, self.card

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        side = self.recipe.mosaic
        return self.part // side**2, 3, side * self.recipe.size, side * self.recipe.size

    def as_trained(self, model: nn.Module) -> AbstractContextManager[None]:
        return every_patch(model) if self.recipe.mosaic > 1 else nullcontext()

    def prepare(self) -> tuple[int, list[str]]:
        if self.streamed or self.recipe.augment == "workers":
            return super().prepare()
        self.held = hold(self.sets["train"], self.recipe.size, self.place.workers, self.device)
        return len(self.held.targets), self.held.unreadable

    def batches(self, epochs: int, first_epoch: int, first_step: int) -> Iterator[Batch]:
        recipe, workers = self.recipe, self.place.workers
        first = first_epoch, first_step
        if self.held is not None:
            augment = device_augment(recipe, self.card)
            return held_batches(self.held, augment, recipe.seed, recipe.batch, epochs, self.share, *first)
        transform = training_transform(recipe, self.card)
        if self.streamed:
            shape = recipe.batch, epochs, self.share, workers
            return streamed_batches(self.sets["train"], transform, recipe.seed, *shape, *first)
        examples = Examples(self.sets["train"], transform, recipe.seed)
        return training_batches(examples, recipe.batch, epochs, self.share, workers, *first)

    def loss(self, model: nn.Module, batch: Batch, numbers: Numbers) -> tuple[Tensor, Tensor]:
        images, labels = batch.images.to(self.device, non_blocking=True), batch.targets.to(self.device)
        targets, smoothing = labels, self.recipe.smoothing
        if self.recipe.mosaic > 1:
            return self._loss_of_patches(model, images, labels, numbers)
        if self.mixing is not None:
            with seeded(*numbers, MIXING):
                images, targets = self.mixing(images, labels)
            smoothing = 0.0  # it is in the mixed targets
        if images.is_cuda:
            images = images.contiguous(memory_format=torch.channels_last)
        torch.manual_seed(seed_from(*numbers, DROPOUT))
        logits = model(images).float()
        loss = F.cross_entropy(logits, targets, label_smoothing=smoothing)
        return loss, (logits.detach().argmax(1) == labels).sum()

    def _loss_of_patches(
        self, model: nn.Module, images: Tensor, labels: Tensor, numbers: Numbers
    ) -> tuple[Tensor, Tensor]:
        """Images laid side by side; every patch is to know the class of its own."""
        side = self.recipe.mosaic
        together = rearrange(images, "(b y x) c h w -> b c (y h) (x w)", y=side, x=side)
        torch.manual_seed(seed_from(*numbers, DROPOUT))
        with self.as_trained(model):
            logits = model(together).float()
        patches = isqrt(logits.shape[1])  # of a side; the class token, if there is one, stands behind them
        logits = rearrange(
            logits[:, : patches**2], "b (y r x c) k -> (b y x) k (r c)", y=side, x=side, r=patches // side
        )  # fmt: skip
        targets = labels[:, None].expand(-1, logits.shape[2])
        loss = F.cross_entropy(logits, targets, label_smoothing=self.recipe.smoothing)
        return loss, (logits.detach().mean(2).argmax(1) == labels).sum()

    def judge(self, model: nn.Module) -> Judgement:
        return judge(model, self._judged(), len(self.card.classes), self.device)

    def join(self, mine: Any) -> Any:
        return mine if self.streamed else super().join(mine)  # a stream is not shared

    def _judged(self) -> Iterable[Batch]:
        """The images to judge by; held on the device as well, if those to learn from are."""
        transform = create_transform(**self.card.preprocessing())
        if self.streamed:
            return streamed_judging(self.sets["val"], transform, self.part)
        if self.held_to_judge is not None:
            return self.held_to_judge
        examples = Examples(self.sets["val"], transform, stand_in=False)
        batches = judging_batches(examples, self.part, self.share, self.place.workers)
        if self.recipe.augment == "device":
            self.held_to_judge = on_device(list(batches), self.device)
        return self.held_to_judge or batches

    def row(self, verdict: Judgement) -> dict[str, float]:
        return {"val_loss": verdict.mean_loss, "val_top1": verdict.top1}

    def pictures(self, model: nn.Module, card: Card, folder: Path) -> Iterator[Path]:
        if self.streamed:  # it has no files to show
            return
        images = self.sets["val"]
        verdict = judge_set(model, card, images, workers=self.place.workers, device=best_device())
        confusion, mistakes = folder / "confusion.png", folder / "mistakes.png"
        report.confusion(verdict.confusion(), list(card.classes), confusion)
        yield confusion
        places = {Path(images.name(index)): index for _, index, _, _ in verdict.worst}

        def show(name: Path) -> Image.Image:
            file, _ = images.read(places[name])  # it may lie in an archive
            with file:
                return open_image(file)

        worst = [
            report.Mistake(images.name(index), card.classes[truth], card.classes[answer], sure)
            for sure, index, truth, answer in verdict.worst
        ]
        report.mistakes(worst, show, mistakes)
        yield mistakes


@contextmanager
def every_patch(model: Any) -> Iterator[None]:
    """Let a ViR answer for every token, not for the whole image."""
    inner = getattr(model, "module", model)
    pool, inner.global_pool = inner.global_pool, ""
    try:
        yield
    finally:
        inner.global_pool = pool
