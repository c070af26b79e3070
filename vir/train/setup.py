"""From a recipe to the parts of a run; what does not fit together is said before it starts."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import Mixup, create_transform
from timm.models import get_pretrained_cfg
from torch import nn

from vir.bench.measure import provenance
from vir.checkpoint import Card, load_model
from vir.data.augment import Augment
from vir.data.loading import Share
from vir.data.sets import LabelledImages
from vir.data.streams import StreamedImages
from vir.layers.retention import MultiHeadRetention, set_form, stretch_decay
from vir.ops import Form
from vir.train.recipes import Decay, Recipe


class CannotTrain(ValueError):
    """The run cannot start or go on: what was found, what to do."""


@dataclass(frozen=True)
class Run:
    """Where a run reads and writes, and how careful it is."""

    data: str
    out: Path
    start: Path | None = None  # trained weights to begin with
    decay: Decay = "keep"  # where the start had another resolution
    workers: int = 4
    save_minutes: float = 5.0
    most_unreadable: float = 0.01  # share of the images, above which the run stops
    terms: str = ""  # under which the data may be used
    void: tuple[int, ...] = ()  # numbers in label maps that are no class, besides 255
    restart: bool = False  # forget a run that is found in `out`


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back: tuples become lists."""
    return json.loads(json.dumps(values))


def precision(recipe: Recipe) -> str:
    if recipe.precision != "auto":
        return recipe.precision
    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if has_bf16 else "no"


def check_batch(recipe: Recipe, images: int, share: Share) -> int:
    """Steps of an epoch."""
    parts = share.processes * share.parts
    if recipe.batch % parts:
        raise CannotTrain(
            f"--batch {recipe.batch} cannot be shared by {share.processes} processes in {share.parts} parts: expected "
            f"a multiple of {parts}."
        )
    if recipe.batch > images:
        raise CannotTrain(f"--batch {recipe.batch} is more than the {images} images to learn from: choose a smaller.")
    if (recipe.mixup or recipe.cutmix) and recipe.batch // parts % 2:
        raise CannotTrain(
            f"--batch {recipe.batch} gives each process {recipe.batch // parts} images at a time: mixup and cutmix "
            "need an even number. Change --batch, or turn them off with --mixup 0 --cutmix 0."
        )
    if recipe.recorded and recipe.task != "classification":
        raise CannotTrain(f"--recorded is of classification, and this recipe is {recipe.task}: leave it out.")
    if recipe.augment == "device" and recipe.randaugment:
        raise CannotTrain("--augment device has no RandAugment, which this recipe asks for. Leave --augment workers.")
    if recipe.mosaic > 1:
        _check_mosaic(recipe, recipe.batch // parts)
    if recipe.augment == "workers" and (recipe.tilt or recipe.quarter_turns):
        raise CannotTrain("this recipe turns images, which --augment device does alone.")
    return images // recipe.batch


def _check_mosaic(recipe: Recipe, part: int) -> None:
    if not recipe.model.startswith("vir_") or recipe.augment != "device" or recipe.mixup or recipe.cutmix:
        raise CannotTrain(
            f"mosaics of {recipe.mosaic} x {recipe.mosaic} images are for a ViR, with --augment device --mixup 0 "
            f"--cutmix 0: this run has {recipe.model}, --augment {recipe.augment}, --mixup {recipe.mixup} and --cutmix "
            f"{recipe.cutmix}."
        )
    if part % recipe.mosaic**2:
        raise CannotTrain(
            f"--batch {recipe.batch} gives each process {part} images at a time, expected a multiple of the "
            f"{recipe.mosaic**2} images of a mosaic."
        )


def choose_form(model: nn.Module, form: Form) -> None:
    """How retention is computed in training."""
    if form == "auto":
        return
    if form == "kernel" and not torch.cuda.is_available():
        raise CannotTrain("--form kernel is of a CUDA GPU, and there is none here. Leave it out.")
    if not any(isinstance(module, MultiHeadRetention) for module in model.modules()):
        raise CannotTrain(f"--form {form} is of retention, and {type(model).__name__} has none. Leave it out.")
    try:
        set_form(model, form)
    except ValueError as error:
        raise CannotTrain(f"--form {form}: {error}") from None


def fitting_batch(recipe: Recipe, images: int) -> int:
    """The recipe's, or as many halvings less as a small set asks for: no epoch leaves out more than a quarter of it."""
    batch = recipe.batch
    while batch > 2 and (batch > images or images % batch > images // 4):  # mixup needs two
        batch //= 2
    return batch


def new_classifier(recipe: Recipe, classes: int, **more: Any) -> nn.Module:
    given = {**recipe.model_args, **more}
    try:
        return timm.create_model(recipe.model, num_classes=classes, **given)
    except (TypeError, ValueError, AssertionError, ZeroDivisionError) as error:
        told = ", ".join(f"{name}={value}" for name, value in given.items()) or "its defaults"
        raise CannotTrain(f"{recipe.model} cannot be made with {told}: {error}") from None


def build_classifier(recipe: Recipe, run: Run, images: LabelledImages | StreamedImages) -> tuple[Any, Card]:
    """The model to train, fresh or from trained weights, and the card that its checkpoints carry."""
    torch.manual_seed(recipe.seed)
    args, stretch = dict(recipe.model_args), 1.0
    drop: dict[str, Any] = {} if recipe.drop_path is None else {"drop_path_rate": recipe.drop_path}
    if run.start is None:
        sized = {"img_size": recipe.mosaic * recipe.size} if has_size(recipe.model) else {}
        model: Any = new_classifier(recipe, len(images.classes), **sized, **drop)
        args |= sized
    else:
        trained, old = load_model(run.start)
        if old.task != "classification":
            raise CannotTrain(f"{run.start} is a model for {old.task}, expected a classifier: name a --recipe for it.")
        model = replace(old, model_args={**old.model_args, **drop}).build()
        model.load_state_dict(trained.state_dict())
        args = dict(old.model_args)
        stretch = old.stretch * (old.size / recipe.size if run.decay == "rescale" else 1.0)
        if "img_size" in args and recipe.size != old.size:
            try:
                model.set_input_size(img_size=recipe.size)
            except ValueError as error:
                raise CannotTrain(f"{run.start} at --size {recipe.size}: {error}") from None
            args["img_size"] = recipe.size
        if images.classes != old.classes:
            model.reset_classifier(len(images.classes))
    stretch_decay(model, stretch)
    config: Any = get_pretrained_cfg(recipe.model)
    card = Card(
        recipe.model, images.classes, recipe.size, args, stretch=stretch,
        mean=tuple(config.mean), std=tuple(config.std), interpolation=config.interpolation, crop_pct=config.crop_pct,
        data={"path": str(run.data), "images": len(images), "terms": run.terms}, recipe=plain(asdict(recipe)),
        origin=provenance("cuda" if torch.cuda.is_available() else "cpu", precision(recipe)),
    )  # fmt: skip
    return model, card


def has_size(model: str) -> bool:
    """Whether a model is made for one size of image: then it is made for the size of the run."""
    config = get_pretrained_cfg(model)
    return model.startswith("vir_") or bool(config and config.fixed_input_size)


def training_transform(recipe: Recipe, card: Card) -> Any:
    return create_transform(
        input_size=recipe.size, is_training=True, scale=recipe.crop_scale, hflip=recipe.flip, vflip=recipe.upside_down,
        color_jitter=recipe.colour_jitter, auto_augment=recipe.randaugment, interpolation="random",
        mean=card.mean, std=card.std, re_prob=recipe.erasing, re_mode="pixel",
    )  # fmt: skip


def device_augment(recipe: Recipe, card: Card) -> Augment:
    return Augment(
        recipe.size, card.mean, card.std, recipe.crop_scale, recipe.flip, recipe.upside_down, recipe.quarter_turns,
        recipe.tilt, recipe.colour_jitter, recipe.erasing,
    )  # fmt: skip


def mixing(recipe: Recipe, classes: int) -> Mixup | None:
    if not (recipe.mixup or recipe.cutmix):
        return None
    return Mixup(recipe.mixup, recipe.cutmix, label_smoothing=recipe.smoothing, num_classes=classes)
