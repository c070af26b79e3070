"""After a run: how it went, where the best model errs, and what it says."""

from collections.abc import Iterator
from pathlib import Path

import torch

from vir.checkpoint import Card, load_model
from vir.data.loading import Share
from vir.predict import best_device
from vir.train import report
from vir.train.recipes import Recipe
from vir.train.setup import Run
from vir.train.tasks import TASKS


def finish(recipe: Recipe, run: Run, card: Card) -> Iterator[Path]:
    """Pictures of a finished run, one after the other."""
    curves = run.out / "curves.png"
    report.curves(run.out / "log.csv", curves)
    yield curves
    task = TASKS[card.task](recipe, run, torch.device(best_device()), Share())
    task.card = card
    model, _ = load_model(run.out / "best.safetensors", best_device())
    yield from task.pictures(model, card, run.out)
