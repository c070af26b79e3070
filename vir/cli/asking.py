"""vir evaluate, export and predict: what a trained model is worth, and what it says."""

import json
import math
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from vir import weights
from vir.cli.shared import WORKERS, Checkpoint, Data, Decay, Json, Size, Split, Void, Workers, console, fail


def add_commands(app: typer.Typer) -> None:
    for command in (evaluate, export, predict):
        app.command()(command)


def evaluate(
    checkpoint: Checkpoint,
    data: Data = "data",
    split: Split = "val",
    size: Size = None,
    decay: Decay = "keep",
    batch: Annotated[int, typer.Option(help="Images at a time, in classification.", min=1)] = 64,
    void: Void = None,
    mirrored: Annotated[
        bool, typer.Option(help="Segmentation: by the mean of the answers to an image and to its mirror image.")
    ] = False,
    workers: Workers = WORKERS,
    out: Json = None,
) -> None:
    """Tell how good a trained model is on images that it has not seen."""
    from vir.checkpoint import BadCheckpoint, load_model
    from vir.data.sets import NoImages
    from vir.evaluate.by_task import judge_data
    from vir.evaluate.measures import told
    from vir.evaluate.segmentation import SegmentationJudgement
    from vir.layers.retention import stretch_decay
    from vir.predict import best_device, check_size

    try:
        model, card = load_model(checkpoint, best_device())
        check_size(card, size)
        if mirrored and card.task != "segmentation":
            fail(f"--mirrored is for segmentation, and {checkpoint} is of {card.task}: leave it out.")
        if decay == "rescale":
            stretch_decay(model, card.stretch * card.size / (size or card.size))
        how: dict[str, Any] = {"size": size, "batch": batch, "workers": workers, "void": tuple(void or ())}
        with console.status("judging"):
            verdict = judge_data(
                model, card, data, split=split, device=best_device(), mirrored=mirrored, say=_note, **how
            )  # fmt: skip
    except (BadCheckpoint, NoImages) as error:
        fail(str(error))
    metrics = verdict.metrics()
    loss = f", loss {metrics['loss']:.4f}" if "loss" in metrics else ""
    numbers = told(card.task, metrics, len(card.classes)) + loss
    console.print(f"{card.model} at {size or card.size} px on {verdict.images:,} images: {numbers}", highlight=False)
    found = verdict.per_class() if isinstance(verdict, SegmentationJudgement) else {}
    by_class = {name: round(iou, 6) for name, iou in found.items() if not math.isnan(iou)}
    for name, iou in by_class.items():
        console.print(f"  {name}: IoU {100 * iou:.2f} %", highlight=False)
    for line in verdict.unreadable:
        console.print(f"not read: {line}", highlight=False)
    if out is not None:
        told_of: dict[str, Any] = {
            "checkpoint": str(checkpoint), "model": card.model, "model_args": card.model_args, "data": Path(data).name,
            "split": split, "trained_size": card.size, "size": size or card.size, "decay": decay, "mirrored": mirrored,
        }  # fmt: skip
        told_of |= metrics | ({"iou_of_classes": by_class} if by_class else {})
        out.write_text(json.dumps(told_of, indent=1) + "\n")


def _note(remark: str) -> None:
    console.print(f"note: {remark}", highlight=False)


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
    judging: dict[str, Any] = {"split": split, "workers": workers, "void": tuple(void or ()), "say": _note}
    try:
        with console.status("judging"):
            card = make(checkpoint, data, out, command=command, terms=terms, **judging)
    except (BadCheckpoint, NoImages) as error:
        fail(str(error))
    size, told = out.stat().st_size / 1e6, MEASURES[card.task].told(card.metrics)
    console.print(f"{out}: {size:.1f} MB, {told}; its card is {out.with_suffix('.md')}", highlight=False)


def predict(
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")],
    checkpoint: Annotated[
        str, typer.Option(help="The .safetensors file of a trained model, or the name of weights that ship.")
    ] = weights.DEFAULT,
    top: Annotated[int, typer.Option(help="Classes to show of each image.", min=1)] = 5,
    least: Annotated[float, typer.Option(help="How sure it must be of an object to show it.", min=0, max=1)] = 0.5,
    size: Size = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for the images with objects or label maps drawn on them.", file_okay=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line instead.")] = False,
) -> None:
    """Ask a trained model what is in a photograph: its class, its objects or the class of every pixel."""
    from vir.checkpoint import BadCheckpoint, read_card
    from vir.data.images import UnreadableImage
    from vir.data.sets import image_files
    from vir.predict import predict as ask

    files = [file for place in images for file in (image_files(place) if place.is_dir() else [place])]
    if not files:
        fail(f"{', '.join(map(str, images))}: there is no image in it. Name images, or a folder of them.")
    failed, taken = 0, set[Path]()
    try:
        if out is not None and read_card(checkpoint).task == "classification":
            fail(
                f"--out {out}: {checkpoint} is a classifier, and gives an image one class, of which nothing can be "
                "drawn on it. Leave --out out, or ask vir demo for a sheet of images with their classes."
            )
        for path, answer in zip(files, ask(files, checkpoint, top=top, least=least, size=size), strict=True):
            if isinstance(answer, UnreadableImage):
                failed += 1
                why = str(answer).removeprefix(str(path)).lstrip()  # these errors begin with the name
                told = Text.assemble((str(path), "red"), f" {why}")
                _tell(as_json, {"image": str(path), "error": str(answer)}, told)
                continue
            drawn = _drawn(path, answer, out, taken)
            told = Text(f"{path}: {_in_words(answer)}{f'; drawn in {drawn}' if drawn else ''}")
            _tell(as_json, answer.as_dict(), told)
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


def _drawn(path: Path, answer: Any, folder: Path | None, taken: set[Path]) -> Path | None:
    """The image with the answer on it, where there is something to draw; never in the place of the image itself, nor of
    another one of the same name."""
    from vir.answers import Classes
    from vir.data.images import open_image
    from vir.viz.answers import draw

    if folder is None or isinstance(answer, Classes):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    names = (f"{path.stem}{f'_{number}' if number > 1 else ''}.answer.png" for number in count(1))
    file = next(folder / name for name in names if folder / name not in taken)
    taken.add(file)
    draw(open_image(path), answer).save(file)
    return file


def _tell(as_json: bool, values: dict[str, Any], words: Text) -> None:
    if as_json:
        print(json.dumps(values))
    else:
        console.print(words, highlight=False, soft_wrap=True)  # a path that is broken into lines cannot be copied
