"""Further models of the page, for detection and segmentation: what they find in the photograph, drawn on it."""

import weakref
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from math import sqrt
from typing import Any

from PIL import Image
from torch import nn

from vir import weights
from vir.answers import Classes, Detections, Segmentation
from vir.checkpoint import Card, Task, found, load_model, read
from vir.predict import LEAST, answer_to
from vir.serve.explorer import CannotAnswer
from vir.viz.answers import COLOURS, draw

TASKS: tuple[Task, ...] = ("detection", "segmentation")
MOST_PIXELS = 2_000_000  # of a photograph as it is asked about: every one of a hundred masks has as many


class WrongTask(ValueError):
    """A checkpoint that has no place among these: what it is, what was expected, what to do."""


class Further:
    """A detector or segmentor and its card; who asks sees to it that nobody else does meanwhile."""

    def __init__(self, name: str, model: nn.Module, card: Card) -> None:
        if card.task not in TASKS:
            raise WrongTask(
                f"{name} was trained for {card.task}, expected {' or '.join(TASKS)}. Leave it out of --also; "
                "a classifier is given as --checkpoint."
            )
        self.name, self.model, self.card = name, model, card
        # Weakly: a photograph that the server forgets is gone from here as well, and its answer with it.
        self._last: tuple[weakref.ref[Image.Image], Detections | Segmentation] | None = None

    def described(self) -> dict[str, Any]:
        """What the page must know before the first photograph."""
        return {"task": self.card.task, "name": self.name, "model": self.card.model, "classes": self.card.classes}

    def told(self, image: Image.Image, least: float = LEAST) -> dict[str, Any]:
        """The answer in names and numbers, and the photograph with the answer drawn on it."""
        if not 0 <= least <= 1:
            raise CannotAnswer(f"least={least}, expected a score from 0 to 1.")
        asked = _bounded(image)
        answer = self._answer(image, asked)
        if isinstance(answer, Detections):
            answer = _surer(answer, least)
        return {
            **self.described(),
            "width": asked.width,
            "height": asked.height,
            "least": least,
            "found": _objects(answer) if isinstance(answer, Detections) else _scene(answer),
            "picture": _data_url(draw(asked, answer)),
        }

    def _answer(self, image: Image.Image, asked: Image.Image) -> Detections | Segmentation:
        """With every score; the last one is remembered, so that another least score takes no second look."""
        last = self._last
        if last is not None and last[0]() is image:
            return last[1]
        answer = answer_to(self.model, self.card, asked, "photograph", least=0.0)
        assert not isinstance(answer, Classes)  # the task of the card was checked
        self._last = weakref.ref(image, self._forget), answer
        return answer

    def _forget(self, image: "weakref.ref[Image.Image]") -> None:
        self._last = None


def load_further(checkpoints: Sequence[str], device: str) -> list[Further]:
    """Those that are asked for, then the ones that ship."""
    shipped = [name for name, file in weights.shipped().items() if Card.from_dict(read(file)[1]).task in TASKS]
    return [Further(_called(one), *load_model(one, device)) for one in dict.fromkeys([*checkpoints, *shipped])]


def _called(checkpoint: str) -> str:
    """The name of shipped weights, or of a file with its folder: training calls all of them best."""
    if checkpoint in weights.shipped():
        return checkpoint
    file = found(checkpoint).resolve()
    return f"{file.parent.name}/{file.stem}".lstrip("/")


def _bounded(image: Image.Image) -> Image.Image:
    pixels = image.width * image.height
    if pixels <= MOST_PIXELS:
        return image
    scale = sqrt(MOST_PIXELS / pixels)
    size = max(1, int(scale * image.width)), max(1, int(scale * image.height))
    return image.resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0)


def _surer(answer: Detections, least: float) -> Detections:
    """Without what the model is less sure of; the surest come first."""
    count = sum(score >= least for score in answer.scores)
    return replace(
        answer,
        boxes=answer.boxes[:count],
        names=answer.names[:count],
        category_ids=answer.category_ids[:count],
        scores=answer.scores[:count],
        masks=None if answer.masks is None else answer.masks[:count],
    )


def _objects(answer: Detections) -> list[dict[str, Any]]:
    return [{"name": name, "share": score} for name, score in zip(answer.names, answer.scores, strict=True)]


def _scene(answer: Segmentation) -> list[dict[str, Any]]:
    """Classes with their shares of the pixels, in the colours of the drawing."""
    return [
        {"name": name, "share": share, "colour": COLOURS[answer.classes.index(name) % len(COLOURS)]}
        for name, share in answer.shares.items()
    ]


def _data_url(picture: Image.Image) -> str:
    file = BytesIO()
    picture.save(file, "JPEG", quality=90, subsampling=0)  # coloured words would be blurred
    return f"data:image/jpeg;base64,{b64encode(file.getvalue()).decode()}"
