"""Segmentation: a class for every pixel."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vir.checkpoint import Card
from vir.data.dense import DenseBatch, DenseExamples
from vir.data.joint import AS_THEY_ARE, ForJudgingSegmentation, ForSegmentation
from vir.data.loading import judging_batches, seed_from
from vir.data.scenes import open_scenes
from vir.evaluate.segmentation import SegmentationJudgement, judge_segmentation
from vir.train import report
from vir.train.tasks.base import DROPOUT, Numbers
from vir.train.tasks.dense import DenseTask


class Segmentation(DenseTask):
    name = "segmentation"
    columns = ("val_miou", "val_pixel_accuracy")

    def open(self, data: str) -> Any:
        return open_scenes(data, void=self.place.void)

    def transform(self) -> ForSegmentation:
        size, jitter = self.recipe.size, self.recipe.colour_jitter
        settings: dict[str, Any] = {"crop": (size, size), "short": size} | self.recipe.transform_args
        return ForSegmentation(
            flip=self.recipe.flip, jitter=(jitter, jitter, jitter, 0.0), colours=AS_THEY_ARE, **settings
        )  # fmt: skip

    def loss(self, model: nn.Module, batch: DenseBatch, numbers: Numbers) -> tuple[Tensor, Tensor]:
        batch = batch.to(self.device)
        torch.manual_seed(seed_from(*numbers, DROPOUT))
        losses = model(torch.stack(batch.images), torch.stack(batch.targets))
        return torch.stack([x.float() for x in losses.values()]).sum(), torch.zeros((), device=self.device)

    def judge(self, model: nn.Module) -> SegmentationJudgement:
        images = self.sets["val"]
        as_judged = ForJudgingSegmentation(short=self.recipe.size, colours=AS_THEY_ARE)
        examples = DenseExamples(images, as_judged, stand_in=False)
        batches = judging_batches(examples, self.part, self.share, self.place.workers)
        return judge_segmentation(model, batches, images.classes, self.device)

    def row(self, verdict: SegmentationJudgement) -> dict[str, float]:
        metrics = verdict.metrics()
        return {name: 100 * metrics[name.removeprefix("val_")] for name in self.columns}

    def pictures(self, model: nn.Module, card: Card, folder: Path) -> Iterator[Path]:
        yield from super().pictures(model, card, folder)
        verdict = self.judge(model)
        report.confusion(verdict.counts.numpy(), list(card.classes), folder / "confusion.png")
        yield folder / "confusion.png"
