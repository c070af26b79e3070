"""Detection: boxes and masks of objects."""

from typing import Any

import torch
from torch import Tensor, nn

from vir.data.dense import DenseBatch, DenseExamples
from vir.data.joint import ForDetection, ForJudgingDetection
from vir.data.loading import judging_batches, seed_from
from vir.data.objects import open_objects
from vir.data.truth import masks_of
from vir.evaluate.by_task import most_objects
from vir.evaluate.detection import DetectionJudgement, judge_detection
from vir.train.tasks.base import DROPOUT, Numbers
from vir.train.tasks.dense import DenseTask


class Detection(DenseTask):
    name = "detection"
    columns = ("val_box_ap", "val_mask_ap")

    def open(self, data: str) -> Any:
        return open_objects(data)

    def transform(self) -> ForDetection:
        jitter = self.recipe.colour_jitter
        return ForDetection(
            flip=self.recipe.flip, upside_down=self.recipe.upside_down, jitter=(jitter, jitter, jitter, 0.0),
            **self.recipe.transform_args,
        )  # fmt: skip

    def loss(self, model: nn.Module, batch: DenseBatch, numbers: Numbers) -> tuple[Tensor, Tensor]:
        batch = batch.to(self.device)
        torch.manual_seed(seed_from(*numbers, DROPOUT))  # of sizes and samples, too
        losses = model(batch.images, [{**target, "masks": masks_of(target)} for target in batch.targets])
        return torch.stack([x.float() for x in losses.values()]).sum(), torch.zeros((), device=self.device)

    def judge(self, model: nn.Module) -> DetectionJudgement:
        images = self.sets["val"]
        examples = DenseExamples(images, ForJudgingDetection(), stand_in=False, read=images.read_truth)
        batches = judging_batches(examples, self.part, self.share, self.place.workers)
        return judge_detection(model, batches, images.classes, self.device, most=most_objects(model))

    def row(self, verdict: DetectionJudgement) -> dict[str, float]:
        metrics = verdict.metrics()
        return {name: 100 * metrics[name.removeprefix("val_")] for name in self.columns}
