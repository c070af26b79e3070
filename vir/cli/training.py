"""vir train, finetune, evaluate, predict."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from vir import weights
from vir.cli.shared import console, fail

Checkpoint = Annotated[
    str, typer.Argument(help="The .safetensors file of a trained model, or the name of weights that ship.")
]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        help="A folder with train/ and val/ or of class folders, a .tar of them, wds/FOLDER of shards, or hfds/NAME.",
    ),
]
Out = Annotated[Path, typer.Option(help="Where checkpoints, logs and pictures go; a run found there goes on.")]
Decay = Annotated[
    Literal["keep", "rescale"], typer.Option(help="At another size: keep the decay, or what it sees in pixels.")
]
Epochs = Annotated[int | None, typer.Option(help="Times that every image is seen.", min=1)]
BatchSize = Annotated[int | None, typer.Option("--batch", help="Images of a step, over all processes.", min=1)]
Rate = Annotated[float | None, typer.Option("--lr", help="Highest learning rate.", min=0)]
Size = Annotated[int | None, typer.Option(help="Pixels of a side.", min=8)]
Seed = Annotated[int | None, typer.Option(help="Another seed, another run; the same seed, the same run.", min=0)]
Mixup = Annotated[float | None, typer.Option(help="Strength of mixup; 0 is off.", min=0)]
Cutmix = Annotated[float | None, typer.Option(help="Strength of cutmix; 0 is off.", min=0)]
Average = Annotated[
    float | None, typer.Option("--ema", help="Decay of averaged weights, such as 0.999; 0 is off.", min=0, max=1)
]
Clip = Annotated[float | None, typer.Option(help="Largest norm of the gradients; 0 is off.", min=0)]
Precision = Annotated[
    Literal["auto", "no", "bf16", "fp16"] | None, typer.Option(help="Of the computation; auto is bf16 on a GPU.")
]
Accumulate = Annotated[int | None, typer.Option(help="Parts of a batch, where the whole does not fit.", min=1)]
Augment = Annotated[
    Literal["workers", "device"] | None,
    typer.Option(help="Where crops are drawn: by workers, or on the device from images held there (small sets)."),
]
Recorded = Annotated[
    bool | None,
    typer.Option(help="Record a step once on a GPU and replay it: faster where a model is small for its GPU."),
]
JudgedEvery = Annotated[int | None, typer.Option(help="Epochs between looks at the validation images.", min=1)]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="An argument of the model, such as patch_size=8 or ablation=gated; repeat for several."),
]
WORKERS = min(4, os.cpu_count() or 1)
Workers = Annotated[int, typer.Option(help="Processes that read images.", min=0)]
SaveMinutes = Annotated[float, typer.Option(help="Minutes between saved states inside an epoch.", min=0)]
Unreadable = Annotated[float, typer.Option(help="Share of unreadable images above which the run stops.", min=0, max=1)]
Void = Annotated[
    list[int] | None,
    typer.Option(help="Segmentation: a number in label maps that is no class, besides 255; repeat for several."),
]
Split = Annotated[str, typer.Option(help="Detection and segmentation: which images to judge by, such as val or test.")]
Terms = Annotated[str, typer.Option(help="Under which the data may be used: goes into the checkpoint.")]
Restart = Annotated[bool, typer.Option("--restart", help="Forget the run that is in --out.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Tell the whole plan, and stop.")]


def add_commands(app: typer.Typer) -> None:
    for command in (train, finetune, evaluate, export, predict):
        app.command()(command)


def train(
    recipe: Annotated[str | None, typer.Argument(help="Name of a recipe; `vir train list` shows them.")] = None,
    data: Data = "data",
    out: Out = Path("runs/train"),
    model: Annotated[str | None, typer.Option(help="Any model of vir or timm; instead of a recipe.")] = None,
    retention: Annotated[Literal["1d", "2d"] | None, typer.Option(help="Kind of retention, of our models.")] = None,
    arguments: Set = None,
    epochs: Epochs = None,
    batch: BatchSize = None,
    lr: Rate = None,
    size: Size = None,
    seed: Seed = None,
    mixup: Mixup = None,
    cutmix: Cutmix = None,
    ema: Average = None,
    clip: Clip = None,
    precision: Precision = None,
    accumulate: Accumulate = None,
    augment: Augment = None,
    recorded: Recorded = None,
    judged_every: JudgedEvery = None,
    workers: Workers = WORKERS,
    save_minutes: SaveMinutes = 5.0,
    most_unreadable: Unreadable = 0.01,
    void: Void = None,
    terms: Terms = "",
    restart: Restart = False,
    dry_run: DryRun = False,
) -> None:
    """Train a model on a folder of images, by a recipe or with defaults that suit some thousands of images."""
    from vir.train.recipes import RECIPES, plain
    from vir.train.setup import Run

    if recipe == "list":
        return _list_recipes()
    if recipe is not None and recipe not in RECIPES:
        fail(f"no recipe {recipe!r}: expected one of {', '.join(RECIPES)}, or --model for any model.")
    base = RECIPES[recipe]() if recipe else plain(model or "hvir_tiny")
    model_args = base.model_args | _arguments(arguments) | ({"retention": retention} if retention else {})
    changes = {
        "epochs": epochs, "batch": batch, "lr": lr, "size": size, "seed": seed, "mixup": mixup, "cutmix": cutmix,
        "ema": ema, "clip": clip, "precision": precision, "accumulate": accumulate, "augment": augment,
        "recorded": recorded, "judged_every": judged_every,
        "model": model, "model_args": model_args,
    }  # fmt: skip
    chosen = _changed(base, changes)
    run = Run(data, out, None, "keep", workers, save_minutes, most_unreadable, terms, tuple(void or ()))
    _train(chosen, run, restart, dry_run)


def finetune(
    checkpoint: Checkpoint,
    data: Data = "data",
    out: Out = Path("runs/finetune"),
    recipe: Annotated[str | None, typer.Option(help="Name of a recipe; defaults suit most.")] = None,
    decay: Decay = "keep",
    arguments: Set = None,
    epochs: Epochs = None,
    batch: BatchSize = None,
    lr: Rate = None,
    size: Size = None,
    seed: Seed = None,
    mixup: Mixup = None,
    cutmix: Cutmix = None,
    ema: Average = None,
    clip: Clip = None,
    precision: Precision = None,
    accumulate: Accumulate = None,
    augment: Augment = None,
    recorded: Recorded = None,
    judged_every: JudgedEvery = None,
    workers: Workers = WORKERS,
    save_minutes: SaveMinutes = 5.0,
    most_unreadable: Unreadable = 0.01,
    void: Void = None,
    terms: Terms = "",
    restart: Restart = False,
    dry_run: DryRun = False,
) -> None:
    """Train a trained model on: other images, other classes, or a higher resolution."""
    from vir.checkpoint import BadCheckpoint, found, load_model
    from vir.train.recipes import RECIPES, Recipe
    from vir.train.setup import Run

    try:
        _, card = load_model(checkpoint)
    except BadCheckpoint as error:
        fail(str(error))
    if recipe is not None and recipe not in RECIPES:
        fail(f"no recipe {recipe!r}: expected one of {', '.join(RECIPES)}.")
    gentle = Recipe(
        card.model, task=card.task, size=card.size, epochs=10, lr=1e-4, warmup_epochs=1, min_lr=1e-6,
        layer_decay=0.8 if card.task == "classification" else None,
    )  # fmt: skip
    base = RECIPES[recipe]() if recipe else gentle
    if arguments and base.task == "classification":
        fail("--set changes a classifier, whose weights would no longer fit: it is for the heads of other tasks.")
    changes = {
        "epochs": epochs, "batch": batch, "lr": lr, "size": size, "seed": seed, "mixup": mixup, "cutmix": cutmix,
        "ema": ema, "clip": clip, "precision": precision, "accumulate": accumulate, "augment": augment,
        "recorded": recorded, "judged_every": judged_every,
        "model": card.model, "model_args": base.model_args | _arguments(arguments),
    }  # fmt: skip
    chosen = _changed(base, changes)
    known = terms or card.data.get("terms", "")
    run = Run(
        data, out, found(checkpoint), decay, workers, save_minutes, most_unreadable, known, tuple(void or ())
    )  # fmt: skip
    _train(chosen, run, restart, dry_run)


def _arguments(given: list[str] | None) -> dict[str, Any]:
    """Names and values of --set: numbers, true and false as such, the rest as words."""
    found: dict[str, Any] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not name.isidentifier() or not equals:
            fail(f"--set {text}: expected a name and a value with = between them, such as patch_size=8.")
        if value == "null":  # timm would drop it, and the model take its default
            fail(f"--set {text}: expected a value; 0 turns off what can be off, such as init_values=0.")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def _changed(recipe: Any, changes: dict[str, Any]) -> Any:
    """The recipe with what the user gave; 0 turns off what can be off."""
    given = {name: value for name, value in changes.items() if value is not None}
    if "epochs" in given:  # a short run has no time for a long warm-up
        given["warmup_epochs"] = min(recipe.warmup_epochs, given["epochs"] // 5)
    return replace(recipe, **{n: None if n in ("ema", "clip") and not value else value for n, value in given.items()})


def _train(recipe: Any, run: Any, restart: bool, dry_run: bool) -> None:
    import timm
    from accelerate import PartialState

    from vir.checkpoint import BadCheckpoint
    from vir.data.images import UnreadableImage
    from vir.data.sets import NoImages
    from vir.evaluate.measures import MEASURES
    from vir.heads.peers import PEERS
    from vir.train.finish import finish
    from vir.train.loop import train as start
    from vir.train.setup import CannotTrain
    from vir.train.state import forget

    peer = recipe.task == "detection" and recipe.model in PEERS
    if not timm.is_model(recipe.model) and not peer:
        near = ", ".join(timm.list_models(f"{recipe.model[:4]}*")[:8]) or "those that `vir models` lists"
        fail(f"no model {recipe.model!r}: expected a name that timm knows, such as {near}.")
    if restart and not dry_run:
        forget(run.out)
    try:
        if dry_run:
            return _tell_plan(recipe, run)
        card = start(recipe, run, console)
        if not PartialState().is_main_process:
            return
        for made in finish(recipe, run, card):
            console.print(f"written: {made}", highlight=False)
    except (CannotTrain, NoImages, BadCheckpoint, UnreadableImage) as error:
        fail(str(error))
    best = run.out / "best.safetensors"
    told = MEASURES[card.task].told(card.metrics)
    console.print(f"best: {told} of {int(card.metrics['images']):,} images, in {best}", highlight=False)


def _tell_plan(recipe: Any, run: Any) -> None:
    import torch

    from vir.data.loading import Share
    from vir.train.plan import cost
    from vir.train.setup import check_batch
    from vir.train.tasks import TASKS

    share = Share(parts=recipe.accumulate)
    task = TASKS[recipe.task](recipe, run, torch.device("cpu"), share)
    train_set, val_set = task.sets["train"], task.sets["val"]
    steps = check_batch(recipe, len(train_set), share)
    whole = cost(recipe, len(train_set.classes), len(train_set), 1)
    some = ", ".join(train_set.classes[:8]) + (", ..." if len(train_set.classes) > 8 else "")
    model = f"{recipe.model}, {whole.parameters / 1e6:.2f} million parameters, {recipe.size} px"
    table = Table(show_header=False)
    for name, value in {
        "task": recipe.task,
        "images": f"{len(train_set):,} to learn from, {len(val_set):,} to judge by",
        "classes": f"{len(train_set.classes)}: {some}",
        "steps": f"{recipe.epochs + recipe.cooldown_epochs} epochs of {steps} steps of {recipe.batch} images",
        "model": model,
        "cost": f"{whole.images:,} images" + (f", {whole.flops / 1e15:.3g} PFLOP" if whole.flops else ""),
        "memory": f"about {whole.bytes / 2**30:.1f} GB on one process (kernels need less)" if whole.bytes else "",
        "results": str(run.out),
    }.items():
        if value:
            table.add_row(name, value)
    for remark in (*train_set.remarks, *val_set.remarks):
        console.print(f"note: {remark}", highlight=False)
    console.print(table)
    settings = ", ".join(f"{name} {value}" for name, value in vars(recipe).items() if value not in (None, {}, False))
    console.print(settings, highlight=False)


def _list_recipes() -> None:
    from vir.train.recipes import RECIPES

    table = Table("recipe", "what it is")
    for name, make in RECIPES.items():
        table.add_row(name, " ".join((make.__doc__ or "").split("\n")[0].split()))
    console.print(table)


def evaluate(
    checkpoint: Checkpoint,
    data: Data = "data",
    split: Split = "val",
    size: Size = None,
    decay: Decay = "keep",
    batch: Annotated[int, typer.Option(help="Images at a time, in classification.", min=1)] = 64,
    void: Void = None,
    workers: Workers = WORKERS,
    out: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
) -> None:
    """Tell how good a trained model is on images that it has not seen."""
    from vir.checkpoint import BadCheckpoint, load_model
    from vir.data.sets import NoImages
    from vir.evaluate.by_task import judge_data
    from vir.evaluate.measures import ALSO, MEASURES
    from vir.layers.retention import stretch_decay
    from vir.predict import best_device

    try:
        model, card = load_model(checkpoint, best_device())
        if decay == "rescale":
            stretch_decay(model, card.stretch * card.size / (size or card.size))
        how: dict[str, Any] = {"size": size, "batch": batch, "workers": workers, "void": tuple(void or ())}
        with console.status("judging"):
            verdict = judge_data(model, card, data, split=split, device=best_device(), **how)
    except (BadCheckpoint, NoImages) as error:
        fail(str(error))
    metrics = verdict.metrics()
    told = [MEASURES[card.task].told(metrics), ALSO[card.task].told(metrics)]
    told += [f"loss {metrics['loss']:.4f}"] if "loss" in metrics else []
    console.print(
        f"{card.model} at {size or card.size} px on {verdict.images:,} images: {', '.join(told)}", highlight=False
    )
    for line in verdict.unreadable:
        console.print(f"not read: {line}", highlight=False)
    if out is not None:
        out.write_text(json.dumps(metrics, indent=1))


def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Option(help="The file to write, such as birds.safetensors.")],
    data: Data = "data",
    split: Split = "val",
    command: Annotated[str, typer.Option(help="How it was trained: goes into the card.")] = "",
    terms: Annotated[str, typer.Option(help="Under which the data may be used, if training was not told.")] = "",
    void: Void = None,
    workers: Workers = WORKERS,
) -> None:
    """Make a copy to hand on: half the size, judged again as it is, with a card in Markdown."""
    from vir.checkpoint import BadCheckpoint
    from vir.data.sets import NoImages
    from vir.evaluate.measures import MEASURES
    from vir.export import export as make

    if out.suffix != ".safetensors":
        fail(f"--out {out}: expected a name that ends in .safetensors.")
    judging = {"split": split, "workers": workers, "void": tuple(void or ())}
    try:
        with console.status("judging"):
            card = make(checkpoint, data, out, command=command, terms=terms, **judging)
    except (BadCheckpoint, NoImages) as error:
        fail(str(error))
    size, told = out.stat().st_size / 1e6, MEASURES[card.task].told(card.metrics)
    console.print(f"{out}: {size:.1f} MB, {told}; its card is {out.with_suffix('.md')}", highlight=False)


def predict(
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    checkpoint: Annotated[
        str, typer.Option(help="The .safetensors file of a trained model, or the name of weights that ship.")
    ] = weights.DEFAULT,
    top: Annotated[int, typer.Option(help="Classes to show of each image.", min=1)] = 5,
    least: Annotated[float, typer.Option(help="How sure it must be of an object to show it.", min=0, max=1)] = 0.5,
    size: Size = None,
    out: Annotated[
        Path | None, typer.Option(help="A folder for the images with objects or label maps drawn on them.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line instead.")] = False,
) -> None:
    """Ask a trained model what is in a photograph: its class, its objects or the class of every pixel."""
    from vir.checkpoint import BadCheckpoint
    from vir.data.images import UnreadableImage
    from vir.predict import predict as ask

    failed = 0
    try:
        for path, answer in zip(images, ask(images, checkpoint, top=top, least=least, size=size), strict=True):
            if isinstance(answer, UnreadableImage):
                failed += 1
                _tell(as_json, {"image": str(path), "error": str(answer)}, f"[red]{path}:[/] {answer}")
                continue
            drawn = _drawn(path, answer, out)
            _tell(as_json, answer.as_dict(), f"{path}: {_in_words(answer)}{f'; drawn in {drawn}' if drawn else ''}")
    except BadCheckpoint as error:
        fail(str(error))
    if failed:
        raise typer.Exit(1)


def _in_words(answer: Any) -> str:
    from vir.answers import Classes, Detections

    if isinstance(answer, Classes):
        return ", ".join(f"{n} {100 * p:.1f} %" for n, p in zip(answer.names, answer.probabilities, strict=True))
    if isinstance(answer, Detections):
        found = [f"{answer.names.count(name)} x {name}" for name in dict.fromkeys(answer.names)]
        return ", ".join(found) or "nothing found"
    return ", ".join(f"{name} {100 * share:.1f} %" for name, share in answer.shares.items())


def _drawn(path: Path, answer: Any, folder: Path | None) -> Path | None:
    """The image with the answer on it, where there is something to draw; never in the place of the image itself."""
    from vir.answers import Classes
    from vir.data.images import open_image
    from vir.viz.answers import draw

    if folder is None or isinstance(answer, Classes):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{path.stem}.answer.png"
    draw(open_image(path), answer).save(file)
    return file


def _tell(as_json: bool, values: dict[str, Any], words: str) -> None:
    if as_json:
        print(json.dumps(values))
    else:
        console.print(words, highlight=False)
