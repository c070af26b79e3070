"""What detection and segmentation have in common: images of any size with something known of each."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from vir.answers import Detections, Segmentation
from vir.bench.measure import provenance
from vir.checkpoint import Card, load_model
from vir.checkpoint import Task as TaskName
from vir.data.dense import DenseBatch, DenseExamples, JointTransform
from vir.data.images import UnreadableImage
from vir.data.loading import training_batches
from vir.heads.targets import TooLong
from vir.predict import answer_to
from vir.train.recipes import scaled
from vir.train.setup import CannotTrain, plain, precision
from vir.train.tasks.base import Task, drawn_sheet
from vir.transfer import from_classifier, load_classifier
from vir.viz.answers import draw

SHOWN = 9  # images of the sheet


class DenseTask(Task):
    name: TaskName

    @abstractmethod
    def transform(self) -> JointTransform:
        """Of the images to learn from."""

    def build(self) -> tuple[Any, Card]:
        torch.manual_seed(self.recipe.seed)
        recipe, classes = self.recipe, tuple(self.sets["train"].classes)
        args = dict(recipe.model_args)
        if recipe.drop_path is not None:
            args["drop_path_rate"] = recipe.drop_path
        card = Card(
            recipe.model, classes, recipe.size, args, task=self.name,
            data={"path": str(self.place.data), "images": len(self.sets["train"]), "terms": self.place.terms},
            origin=provenance("cuda" if torch.cuda.is_available() else "cpu", precision(recipe)),
        )  # fmt: skip
        model, self.card = self._started(card) if self.place.start else (card.build(), card)
        self.card = replace(self.card, recipe=plain(vars(recipe)))
        return model, self.card

    def _started(self, card: Card) -> tuple[Any, Card]:
        """From a classifier, whose backbone is taken, or from a model of the same task and classes."""
        assert self.place.start is not None
        trained, old = load_model(self.place.start)
        if old.task == "classification":
            args = from_classifier(self.place.start) | card.model_args
            card = replace(card, model=args.pop("name"), model_args=args, stretch=args.pop("stretch", 1.0))
            model: Any = card.build()
            load_classifier(model.body, self.place.start)
            return model, card
        if old.task != self.name:
            raise CannotTrain(
                f"{self.place.start} is a model for {old.task}, and this run for {self.name}: start from a classifier, "
                "or from a model for the same."
            )
        if old.classes != card.classes:
            raise CannotTrain(
                f"{self.place.start} knows the classes {', '.join(old.classes)}, and {self.place.data} has "
                f"{', '.join(card.classes)}: start from a classifier, or give the data the same classes by the same "
                "numbers (in its classes.txt, or its JSON)."
            )
        args = scaled(old.model_args, card.size / old.size)  # a detector brings images to its own sizes
        card = replace(card, model=old.model, model_args=args, stretch=old.stretch)
        model = card.build()
        model.load_state_dict(trained.state_dict())
        return model, card

    def batches(self, epochs: int, first_epoch: int, first_step: int) -> Iterator[DenseBatch]:
        examples = DenseExamples(self.sets["train"], self.transform(), self.recipe.seed)
        return training_batches(
            examples, self.recipe.batch, epochs, self.share, self.place.workers, first_epoch, first_step
        )  # fmt: skip

    def pictures(self, model: nn.Module, card: Card, folder: Path) -> Iterator[Path]:
        """What the model says of some images that it did not learn from."""
        pictures = list(islice(self._drawn(model, card), SHOWN))
        if pictures:
            yield drawn_sheet(pictures, folder / "answers.png")

    def _drawn(self, model: nn.Module, card: Card) -> Iterator[Image.Image]:
        images = self.sets["val"]
        for index in range(len(images)):
            try:
                image, _ = images.read(index)
                answer = answer_to(model, card, image, images.name(index))
            except (UnreadableImage, TooLong):
                continue  # the judging has told of it
            assert isinstance(answer, Detections | Segmentation)
            yield draw(image, answer)
