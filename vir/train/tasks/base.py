"""What the loop asks of a task."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from accelerate.utils import gather_object
from PIL import Image
from torch import Tensor, nn

from vir.checkpoint import Card
from vir.data.loading import Share
from vir.train.recipes import Recipe
from vir.train.setup import Run

DROPOUT, MIXING = 1, 2  # kinds of random numbers in a step
Numbers = tuple[int, ...]  # seed, epoch, step, part, rank: all that random numbers of a step come from


class Verdict(Protocol):
    """What judging gives."""

    unreadable: list[str]

    def metrics(self) -> dict[str, float]: ...

    def join(self, other: Any) -> None: ...


class Task(ABC):
    """Data, model, loss and verdict of a run."""

    columns: ClassVar[tuple[str, ...]]  # of the log: metrics after each epoch, in per cent
    counts_right: bool = False  # whether training tells how many images were right

    def __init__(self, recipe: Recipe, run: Run, device: torch.device, share: Share) -> None:
        self.recipe, self.place, self.device, self.share = recipe, run, device, share
        self.sets: Any = self.open(run.data)
        self.card: Card

    @property
    def part(self) -> int:
        """Images that this process takes at a time."""
        return max(1, self.recipe.batch // (self.share.processes * self.share.parts))

    @abstractmethod
    def open(self, data: str) -> Any:
        """The sets to learn from and to judge by."""

    @abstractmethod
    def build(self) -> tuple[Any, Card]:
        """The model to train, fresh or from trained weights, and the card that its checkpoints carry."""

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        """Of the images of a step, where all steps have the same."""
        return self.part, 3, self.recipe.size, self.recipe.size

    def as_trained(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, the model gives what the loss needs, where that is not its usual answer."""
        return nullcontext()

    def prepare(self) -> tuple[int, list[str]]:
        """How many images there are to learn from, and which of them are known beforehand to be unreadable."""
        return len(self.sets["train"]), []

    @abstractmethod
    def batches(self, epochs: int, first_epoch: int, first_step: int) -> Iterator[Any]:
        """The batches of this process, from some step on."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any, numbers: Numbers) -> tuple[Tensor, Tensor]:
        """The loss of a batch, and how many of its images were right."""

    @abstractmethod
    def judge(self, model: nn.Module) -> Verdict:
        """What this process finds out about its share of the images to judge by."""

    def join(self, mine: Verdict) -> Verdict:
        """What all processes found out, told to each of them."""
        if self.share.processes > 1:
            first, *others = gather_object([mine])
            for other in others:
                first.join(other)
            return first
        return mine

    @abstractmethod
    def row(self, verdict: Any) -> dict[str, float]:
        """Of the log."""

    @abstractmethod
    def pictures(self, model: nn.Module, card: Card, folder: Path) -> Iterator[Path]:
        """Of a trained model: where it errs and what it says."""


def drawn_sheet(pictures: list[Image.Image], file: Path, width: int = 1600, columns: int = 3) -> Path:
    """Pictures side by side, each as wide as a column, in rows as high as their highest."""
    side = width // columns
    resized = [p.resize((side, max(1, round(p.height * side / p.width)))) for p in pictures]
    rows = [resized[start : start + columns] for start in range(0, len(resized), columns)]
    sheet = Image.new("RGB", (width, sum(max(p.height for p in row) for row in rows)), "white")
    top = 0
    for row in rows:
        for column, picture in enumerate(row):
            sheet.paste(picture, (column * side, top))
        top += max(p.height for p in row)
    sheet.save(file)
    return file
