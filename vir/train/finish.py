"""After a run: how it went, where the best model errs, and what its worst mistakes look like."""

from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from vir.checkpoint import Card, load_model
from vir.data.images import open_image
from vir.data.sets import open_sets
from vir.data.streams import PREFIX
from vir.evaluate.classification import judge_set
from vir.predict import best_device
from vir.train import report
from vir.train.setup import Run


def finish(run: Run, card: Card) -> Iterator[Path]:
    """Pictures of a finished run, one after the other."""
    curves, confusion, mistakes = (run.out / name for name in ("curves.png", "confusion.png", "mistakes.png"))
    report.curves(run.out / "log.csv", curves)
    yield curves
    if run.data.startswith(PREFIX):  # a stream has no files to show
        return
    model, _ = load_model(run.out / "best.safetensors", best_device())
    images = open_sets(run.data, card.classes)["val"]
    verdict = judge_set(model, card, images, workers=run.workers, device=best_device())
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
