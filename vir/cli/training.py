"""vir train and finetune."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from vir.cli.shared import WORKERS, Checkpoint, Data, Decay, Size, Void, Workers, console, fail

Out = Annotated[
    Path, typer.Option(help="Where checkpoints, logs and pictures go; a run found there goes on.", file_okay=False)
]
Epochs = Annotated[int | None, typer.Option(help="Times that every image is seen.", min=1)]
BatchSize = Annotated[int | None, typer.Option("--batch", help="Images of a step, over all processes.", min=1)]
Rate = Annotated[float | None, typer.Option("--lr", help="Highest learning rate.", min=0)]
Seed = Annotated[int | None, typer.Option(help="Another seed, another run; the same seed, the same run.", min=0)]
Mixup = Annotated[float | None, typer.Option(help="Strength of mixup; 0 is off.", min=0)]
Cutmix = Annotated[float | None, typer.Option(help="Strength of cutmix; 0 is off.", min=0)]
ColourJitter = Annotated[
    float | None, typer.Option(help="Strength of changes of brightness, contrast and saturation; 0 is off.", min=0)
]
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
Form = Annotated[
    Literal["auto", "parallel", "chunkwise", "recurrent", "scan", "kernel"] | None,
    typer.Option(help="How retention is computed, to compare: the numbers are the same; auto takes the fastest."),
]
JudgedEvery = Annotated[int | None, typer.Option(help="Epochs between looks at the validation images.", min=1)]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="An argument of the model, such as patch_size=8 or ablation=gated; repeat for several."),
]
SaveMinutes = Annotated[float, typer.Option(help="Minutes between saved states inside an epoch.", min=0)]
Unreadable = Annotated[float, typer.Option(help="Share of unreadable images above which the run stops.", min=0, max=1)]
Terms = Annotated[str, typer.Option(help="Under which the data may be used: goes into the checkpoint.")]
Restart = Annotated[bool, typer.Option("--restart", help="Forget the run that is in --out.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Tell the whole plan, and stop.")]


def add_commands(app: typer.Typer) -> None:
    for command in (train, finetune):
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
    colour_jitter: ColourJitter = None,
    ema: Average = None,
    clip: Clip = None,
    precision: Precision = None,
    accumulate: Accumulate = None,
    augment: Augment = None,
    form: Form = None,
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
    from vir.train.recipes import RECIPES, at_size, plain
    from vir.train.setup import Run

    if recipe == "list":
        return _list_recipes()
    if recipe is not None and recipe not in RECIPES:
        fail(f"no recipe {recipe!r}: expected one of {', '.join(RECIPES)}, or --model for any model.")
    base = RECIPES[recipe]() if recipe else plain(model or "hvir_tiny")
    base = at_size(base, size) if size else base
    model_args = base.model_args | _arguments(arguments) | ({"retention": retention} if retention else {})
    changes = {
        "epochs": epochs, "batch": batch, "lr": lr, "seed": seed, "mixup": mixup, "cutmix": cutmix,
        "ema": ema, "clip": clip, "precision": precision, "accumulate": accumulate, "augment": augment,
        "form": form, "recorded": recorded, "judged_every": judged_every, "colour_jitter": colour_jitter,
        "model": model, "model_args": model_args,
    }  # fmt: skip
    chosen = _changed(base, changes)
    run = Run(data, out, None, "keep", workers, save_minutes, most_unreadable, terms, tuple(void or ()), restart)
    _train(chosen, run, dry_run, flexible=batch is None and recipe is None)


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
    colour_jitter: ColourJitter = None,
    ema: Average = None,
    clip: Clip = None,
    precision: Precision = None,
    accumulate: Accumulate = None,
    augment: Augment = None,
    form: Form = None,
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
    from vir.train.recipes import RECIPES, Recipe, at_size
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
    base = at_size(base, size) if size else base
    if arguments and base.task == "classification":
        fail("--set changes a classifier, whose weights would no longer fit: it is for the heads of other tasks.")
    changes = {
        "epochs": epochs, "batch": batch, "lr": lr, "seed": seed, "mixup": mixup, "cutmix": cutmix,
        "ema": ema, "clip": clip, "precision": precision, "accumulate": accumulate, "augment": augment,
        "form": form, "recorded": recorded, "judged_every": judged_every, "colour_jitter": colour_jitter,
        "model": card.model, "model_args": base.model_args | _arguments(arguments),
    }  # fmt: skip
    chosen = _changed(base, changes)
    before = card.data.get("terms", "")  # what was learned under them is still in the weights
    known = f"{terms}; of the weights it began with: {before}" if terms and before else terms or before
    run = Run(
        data, out, found(checkpoint), decay, workers, save_minutes, most_unreadable, known, tuple(void or ()), restart
    )  # fmt: skip
    _train(chosen, run, dry_run, flexible=batch is None and recipe is None)


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


def _train(recipe: Any, run: Any, dry_run: bool, flexible: bool) -> None:
    """Flexible: the batch is nobody's choice."""
    import timm
    import torch
    from accelerate import PartialState

    from vir.checkpoint import BadCheckpoint
    from vir.data.images import UnreadableImage
    from vir.data.loading import Share
    from vir.data.sets import NoImages
    from vir.evaluate.measures import MEASURES
    from vir.heads.peers import PEERS
    from vir.train.finish import finish
    from vir.train.loop import train as start
    from vir.train.setup import CannotTrain, fitting_batch
    from vir.train.tasks import TASKS

    peer = recipe.task == "detection" and recipe.model in PEERS
    if not timm.is_model(recipe.model) and not peer:
        near = ", ".join(timm.list_models(f"{recipe.model[:4]}*")[:8]) or "those that `vir models` lists"
        fail(f"no model {recipe.model!r}: expected a name that timm knows, such as {near}.")
    try:
        if flexible:
            images = len(
                TASKS[recipe.task](recipe, run, torch.device("cpu"), Share(parts=recipe.accumulate)).sets["train"]
            )
            recipe = replace(recipe, batch=fitting_batch(recipe, images))
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
    from vir.train.place import check_start
    from vir.train.plan import cost
    from vir.train.setup import check_batch
    from vir.train.tasks import TASKS

    check_start(run)
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
        "memory": f"about {whole.bytes / 1e9:.1f} GB on one process (kernels need less)" if whole.bytes else "",
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
        table.add_row(name, " ".join((make.__doc__ or "").split("\n\n")[0].split()))
    console.print(table)
