"""What the page asks of a model: an answer, what a query retains, what a form costs. One question at a time."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from vir import ops
from vir.answers import Classes
from vir.checkpoint import Card
from vir.demo.forms import FORMS
from vir.layers.retention import Retention, set_form
from vir.predict import answer_to
from vir.serve.kinds import retention_as
from vir.serve.memory import peak_of_tensors, start_watching
from vir.viz.fading import KINDS, Query
from vir.viz.inside import check_classifier, chosen, device_of, pixels_of, retention_layers, square, whole
from vir.viz.retained import Retained, retained

LARGEST = 4  # times the size of training
MOST_NUMBERS = 2**29  # of a parallel form's n x n, 2 GB in float32
MOST_FITTED = 6_000_000  # pixels of a photograph as the maps see it: a long one grows with its shorter side


class CannotAnswer(ValueError):
    """What was asked for cannot be computed here: what was given, what was expected, what to do."""


@dataclass(frozen=True)
class Cost:
    """One form and kind of retention at one size."""

    form: ops.Form
    retention: Retention
    size: int
    seconds: float
    peak_bytes: int
    difference: float  # largest difference of the logits from those of the same kind in form auto
    answer: str
    probability: float


class Explorer:
    """A classifier and its card; whoever asks while it computes waits."""

    def __init__(self, model: nn.Module, card: Card) -> None:
        check_classifier(card)
        self.model, self.card = model, card
        self.layers = retention_layers(model)
        self.trained: Retention = self.layers[0].module.retention  # once: a question may change it for its time
        self.sizes = [card.size * times for times in range(1, LARGEST + 1)]
        self.one_at_a_time = threading.Lock()
        start_watching()

    def kind(self, retention: str | None = None) -> Retention:
        """The kind of retention that is asked for; the one of training if none is."""
        if retention is None:
            return self.trained
        for kind in KINDS:
            if kind == retention:
                return kind
        raise CannotAnswer(f"retention={retention!r}, expected {' or '.join(KINDS)}.")

    def answer(self, image: Image.Image, size: int | None = None, retention: str | None = None) -> Classes:
        """All classes, the most probable first: the answer of vir predict."""
        side = self._checked(size)
        with self._asked(retention):
            answer = answer_to(self.model, self.card, image, "photograph", top=len(self.card.classes), size=side)
        assert isinstance(answer, Classes)  # the task of the card was checked
        return answer

    def fitted(self, image: Image.Image, size: int | None = None) -> Image.Image:
        """The whole photograph as the maps see it."""
        side = self._checked(size)
        if side * side * max(image.size) > MOST_FITTED * min(image.size):
            raise CannotAnswer(
                f"the photograph is {image.width} x {image.height} px, too long at {side} px of its shorter side. "
                "Take a smaller size, or cut it."
            )
        return whole(image, side, max(layer.stride for layer in self.layers))

    def fitted_size(self, image: Image.Image, size: int | None = None) -> tuple[int, int]:
        """Width and height of that, without its colours: of a large photograph they would take half a second."""
        return self.fitted(Image.new("1", image.size), size).size

    def retained(
        self,
        image: Image.Image,
        layer: int,
        query: Query | None,
        size: int | None = None,
        retention: str | None = None,
    ) -> Retained:
        """What vir draw maps shows, of one layer."""
        layers = chosen(self.layers, [layer])
        with self._asked(retention):
            pixels = pixels_of(self.fitted(image, size), self.card).to(device_of(self.model))
            return retained(self.model, pixels, layers, query)[0]

    @torch.inference_mode()
    def cost(self, image: Image.Image, form: str, size: int | None = None, retention: str | None = None) -> Cost:
        """The answer once more, computed in this form, with its time and memory."""
        if form not in FORMS:
            raise CannotAnswer(f"form={form!r}, expected one of {', '.join(FORMS)}.")
        side = self._checked(size)
        self._check_room(form, side)
        with self._asked(retention) as kind:
            pixels = square(image, self.card, side).to(device_of(self.model))
            expected = self.model(pixels)
            try:
                set_form(self.model, form)
                logits, seconds = self._timed(pixels)
                peak = peak_of_tensors(lambda: self.model(pixels))
            finally:
                set_form(self.model, "auto")
        shares = logits.float().softmax(1)[0]
        best = int(shares.argmax())
        difference = (logits - expected).abs().max().item()
        return Cost(form, kind, side, seconds, peak, difference, self.card.classes[best], float(shares[best]))

    @contextmanager
    def _asked(self, retention: str | None) -> Iterator[Retention]:
        """One question, when it is its turn, with this kind of retention."""
        kind = self.kind(retention)
        with self.one_at_a_time, retention_as(self.model, kind):
            yield kind

    def _timed(self, pixels: Tensor) -> tuple[Tensor, float]:
        if pixels.is_cuda:
            torch.cuda.synchronize()  # what was asked before must not count
        start = time.perf_counter()
        logits = self.model(pixels)
        if pixels.is_cuda:
            torch.cuda.synchronize()
        return logits, time.perf_counter() - start

    def _checked(self, size: int | None) -> int:
        side = self.card.size if size is None else size
        least, most = max(layer.stride for layer in self.layers), self.sizes[-1]
        if not least <= side <= most:
            raise CannotAnswer(f"size={side}, expected {least} to {most} pixels of a side.")
        return side

    def _check_room(self, form: str, side: int) -> None:
        if form != "parallel":
            return
        for layer in self.layers:
            rows, cols = layer.grid(side, side)
            if layer.module.heads * (rows * cols) ** 2 > MOST_NUMBERS:
                raise CannotAnswer(
                    f"the parallel form would need a table of {rows * cols:,} x {rows * cols:,} numbers per head at "
                    f"{side} px. Take another form or a smaller size."
                )

    def described(self) -> dict[str, Any]:
        """What the page must know before the first photograph."""
        return {
            "model": self.card.model,
            "classes": self.card.classes,
            "size": self.card.size,
            "sizes": self.sizes,
            "forms": FORMS,
            "retention": self.trained,
            "crop": self.card.crop_pct,
            "layers": [
                {
                    "number": layer.number,
                    "stride": layer.stride,
                    "heads": layer.module.heads,
                    "gamma": [round(value, 4) for value in layer.gamma.tolist()],
                }
                for layer in self.layers
            ],
        }
