"""Trained models on disk: weights in safetensors, with a card in its header that says all that is needed to use them.

Nothing is pickled: loading runs no code. A file is written whole or not at all.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

import vir.models  # noqa: F401  (registers the models in timm)
from vir import weights
from vir.heads import build_detector, build_segmentor
from vir.heads.peers import PEERS, build_peer
from vir.layers.retention import stretch_decay
from vir.weights import HEADER

FORMAT = 1
Task = Literal["classification", "detection", "segmentation"]


class BadCheckpoint(ValueError):
    """A file that is no checkpoint of ours, or does not fit: what was found and what to do."""


@dataclass(frozen=True)
class Card:
    """What a model is, knows and is worth."""

    model: str  # timm's name
    classes: tuple[str, ...]
    size: int  # pixels of a side
    model_args: dict[str, Any] = field(default_factory=dict)
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    interpolation: str = "bicubic"
    crop_pct: float = 0.9
    stretch: float = 1.0  # of the decay, for a larger grid than the one of training
    task: Task = "classification"
    metrics: dict[str, float] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)  # where it came from, how much, under which terms
    recipe: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, Any] = field(default_factory=dict)  # versions, commit, date
    format: int = FORMAT

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Card":
        if values.get("format") != FORMAT:
            raise BadCheckpoint(f"format {values.get('format')!r}, expected {FORMAT}: update vision-retention.")
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        for name in ("classes", "mean", "std"):
            known[name] = tuple(known[name])
        return cls(**known)

    def preprocessing(self, size: int | None = None) -> dict[str, Any]:
        """Arguments of timm's create_transform."""
        side = size or self.size
        return {
            "input_size": (3, side, side), "mean": self.mean, "std": self.std,
            "interpolation": self.interpolation, "crop_pct": self.crop_pct,
        }  # fmt: skip

    def build(self) -> nn.Module:
        """The model without its weights."""
        model = BUILDERS[self.task](self.model, len(self.classes), **self.model_args)
        stretch_decay(model, self.stretch)
        return model


def _classifier(model: str, classes: int, **model_args: Any) -> nn.Module:
    return timm.create_model(model, num_classes=classes, **model_args)


def _detector(model: str, classes: int, **model_args: Any) -> nn.Module:
    return (build_peer if model in PEERS else build_detector)(model, classes, **model_args)


BUILDERS: dict[Task, Callable[..., nn.Module]] = {
    "classification": _classifier,
    "detection": _detector,
    "segmentation": build_segmentor,
}


def write(tensors: Mapping[str, Tensor], header: dict[str, Any], file: Path) -> None:
    """Beside the old file first, then in its place: a kill or a full disk leaves the old one whole."""
    content = save({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, {HEADER: json.dumps(header)})
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with beside.open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(beside, file)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def read(file: Path, device: str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header of a file that `write` made."""
    if file.is_dir():
        best = file / "best.safetensors"
        raise BadCheckpoint(
            f"{file} is a folder, expected a .safetensors file. "
            + (f"Give {best}." if best.is_file() else "Give the one that training wrote: there is no best model in it.")
        )
    if not file.is_file():
        names = ", ".join(weights.shipped())
        also = f", or the name of weights that ship: {names}" if names else ""
        raise BadCheckpoint(f"{file} does not exist. Give the .safetensors file that training wrote{also}.")
    try:
        with safe_open(file, "pt", device=device) as content:
            header = (content.metadata() or {}).get(HEADER)
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118  (no mapping)
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(f"{file} is not a whole safetensors file ({error}).") from None
    if header is None:
        raise BadCheckpoint(
            f"{file} has no card of vir in its header: it was not written by vir train. Load such weights with "
            "timm.create_model(name, checkpoint_path=...)."
        )
    return tensors, json.loads(header)


def save_model(model: nn.Module | Mapping[str, Tensor], card: Card, file: Path) -> None:
    """Weights and card in one file, and the card beside it for people to read."""
    tensors = model.state_dict() if isinstance(model, nn.Module) else model
    write(tensors, asdict(card), file)
    file.with_suffix(".json").write_text(json.dumps(asdict(card), indent=1))


def load_model(file: Path | str, device: str | torch.device = "cpu") -> tuple[nn.Module, Card]:
    """The trained model in evaluation mode, in float32, and its card; from a file or by the name of shipped weights."""
    tensors, header = read(found(file))
    card = card_of(header, file)
    model = card.build()
    try:
        model.load_state_dict({name: x.float() if x.is_floating_point() else x for name, x in tensors.items()})
    except RuntimeError as error:
        raise BadCheckpoint(f"{file}: the weights do not fit {card.model} ({error}).") from None
    return model.to(device).eval(), card


def save_half(file: Path | str, out: Path | str, card: Card | None = None) -> None:
    """A copy with its numbers in fp16, at half the size, to ship; `load_model` computes with them in float32."""
    check_apart(file, out)
    tensors, header = read(found(file))
    halved = {name: x.half() if x.is_floating_point() else x for name, x in tensors.items()}
    save_model(halved, card or card_of(header, file), Path(out))


def check_apart(file: Path | str, out: Path | str) -> None:
    """That a copy does not take the place of its source, by another path or name either."""
    source, out = found(file), Path(out)
    if source.exists() and out.exists() and out.samefile(source):
        raise BadCheckpoint(
            f"{out} is the checkpoint itself: a copy in its place would leave nothing of its full precision. "
            "Name another file for the copy."
        )


def read_card(checkpoint: Path | str) -> Card:
    """What a model is, without building it."""
    _, header = read(found(checkpoint))
    return card_of(header, checkpoint)


def card_of(header: dict[str, Any], file: Path | str) -> Card:
    if "format" not in header:  # only what training writes to go on from has none
        raise BadCheckpoint(
            f"{file} is no model, but the state of a training: it has no card. Give the best.safetensors or "
            "last.safetensors beside it."
        )
    return Card.from_dict(header)


def found(checkpoint: Path | str) -> Path:
    """A file, or the name of weights that ship."""
    return weights.shipped().get(str(checkpoint), Path(checkpoint))
