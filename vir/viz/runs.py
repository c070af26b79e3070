"""The cards of finished trainings in a folder, as a table of accuracies: seeds of one setting in one line."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from vir.checkpoint import BadCheckpoint, Card
from vir.models import vir

UNTOLD = ("img_size",)  # said by the size already
Line = list[tuple[int, float]]  # size, accuracy


@dataclass(frozen=True)
class Setting:
    """All that makes trainings comparable, but for the seed."""

    data: str
    model: str
    arguments: tuple[tuple[str, str], ...]
    size: int
    epochs: int
    rate: float

    def argument(self, name: str) -> str | None:
        return dict(self.arguments).get(name)

    @property
    def told(self) -> str:
        """The model and what is special about it."""
        return ", ".join([self.model, *(f"{name}={value}" for name, value in self.arguments)])


@dataclass(frozen=True)
class Accuracy:
    setting: Setting
    top1: tuple[float, ...]  # per cent, a seed each

    @property
    def mean(self) -> float:
        return mean(self.top1)

    @property
    def told(self) -> str:
        seeds = f" ({', '.join(f'{x:.2f}' for x in self.top1)})" if len(self.top1) > 1 else ""
        return f"{self.mean:.2f}{seeds}"


def accuracies(folder: Path) -> list[Accuracy]:
    """Of every classifier whose card lies in the folder, or below it; the best of a set of data first."""
    seeds: dict[Setting, dict[int, float]] = {}
    for file in sorted(folder.rglob("*.json")):
        card = _card(file)
        if card is not None and card.task == "classification" and "top1" in card.metrics:
            seeds.setdefault(_setting(card), {})[int(card.recipe.get("seed", 0))] = card.metrics["top1"]
    found = [Accuracy(setting, tuple(top1 for _, top1 in sorted(by.items()))) for setting, by in seeds.items()]
    return sorted(found, key=lambda one: (one.setting.data, one.setting.epochs, -one.mean))


def _card(file: Path) -> Card | None:
    """None of a file that is something else."""
    try:
        values = json.loads(file.read_text())
        return Card.from_dict(values) if isinstance(values, dict) else None
    except (BadCheckpoint, KeyError, OSError, TypeError, ValueError):
        return None


def _setting(card: Card) -> Setting:
    arguments = tuple((name, str(x)) for name, x in sorted(card.model_args.items()) if name not in UNTOLD)
    recipe = card.recipe
    data = Path(card.data.get("path", "")).name
    return Setting(
        data, card.model, arguments, card.size, int(recipe.get("epochs", 0)), float(recipe.get("lr", 0.0))
    )  # fmt: skip


def with_ablations(found: Sequence[Accuracy]) -> list[Accuracy]:
    """A ViR and the same with one part of it changed, as in the paper's study of components; none without changes."""

    def budget(one: Accuracy) -> tuple[str, str, int, int]:
        setting = one.setting
        return setting.data, setting.model, setting.size, setting.epochs

    changed = [one for one in found if one.setting.argument("ablation")]
    alike = {budget(one) for one in changed}
    return [one for one in found if not one.setting.arguments and budget(one) in alike] + changed


def by_size(found: Sequence[Accuracy]) -> dict[str, Line]:
    """Accuracy against resolution of each plain ViR that was trained or fine-tuned at several sizes."""
    lines: dict[str, dict[int, float]] = {}
    for one in found:
        if one.setting.model in vir.SIZES and not one.setting.argument("ablation"):
            best = lines.setdefault(_line_name(one.setting.model, dict(one.setting.arguments), one.setting.data), {})
            best[one.setting.size] = max(one.mean, best.get(one.setting.size, 0.0))
    return {name: sorted(line.items()) for name, line in lines.items() if len(line) > 1}


def _line_name(model: str, arguments: dict[str, str], data: str) -> str:
    patch = arguments.get("patch_size")
    patches = f" with patches of {patch} px" if patch else ""
    return f"{model}{patches}, {arguments.get('retention', '1d').upper()}, {data}"


def untrained_at(folder: Path) -> dict[tuple[str, str], Line]:
    """What `vir evaluate --json` found of ViRs at sizes that they were not trained at, by model and kind of decay."""
    lines: dict[tuple[str, str], dict[int, float]] = {}
    for file in sorted(folder.rglob("*.json")):
        try:
            found = json.loads(file.read_text())
            name = _line_name(found["model"], found["model_args"], found["data"]), found["decay"]
            if found["model"] in vir.SIZES:
                lines.setdefault(name, {})[found["size"]] = found["top1"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # something else
    return {name: sorted(line.items()) for name, line in lines.items()}
