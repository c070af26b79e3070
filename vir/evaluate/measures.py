"""The numbers by which models of a task are compared, in per cent."""

from collections.abc import Mapping
from dataclasses import dataclass

from vir.checkpoint import Task


@dataclass(frozen=True)
class Measure:
    metric: str  # its name among the metrics of a card
    words: str
    scale: float = 1.0

    def of(self, metrics: Mapping[str, float]) -> float:
        return self.scale * metrics[self.metric]

    def told(self, metrics: Mapping[str, float]) -> str:
        return f"{self.words} {self.of(metrics):.2f} %"


MEASURES: dict[Task, Measure] = {
    "classification": Measure("top1", "top-1"),
    "detection": Measure("mask_ap", "mask AP", 100.0),
    "segmentation": Measure("miou", "mIoU", 100.0),
}
# Told beside it, by `told`.
ALSO: dict[Task, Measure] = {
    "classification": Measure("top5", "top-5"),
    "detection": Measure("box_ap", "box AP", 100.0),
    "segmentation": Measure("pixel_accuracy", "pixels right", 100.0),
}
AMONG = 5  # answers, of which the right one is to be one


def told(task: Task, metrics: Mapping[str, float], classes: int) -> str:
    """A model's numbers in words; of so few classes every answer is among the best five, whatever the model says."""
    measures = [MEASURES[task]]
    if task != "classification" or classes > AMONG:
        measures.append(ALSO[task])
    return ", ".join(measure.told(metrics) for measure in measures)
