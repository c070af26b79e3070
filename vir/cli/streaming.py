"""vir stream: an image larger than memory, from its first row to its last."""

import json
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Annotated, Any, Literal

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from vir.cli.shared import Data, Decay, a_picture, console, fail
from vir.cli.training import Precision


@dataclass(frozen=True)
class Wishes:
    """What the user asked for."""

    out: Path
    memory: str | None
    band: int | None
    decay: str
    pool: Literal["token", "avg"] | None
    features: bool
    precision: str | None
    resume: bool
    restart: bool
    quiet: bool


def stream(
    image: Annotated[Path, typer.Argument(help="TIFF, SVS, GeoTIFF, JPEG, PNG, ... of any size, or a .npy file.")],
    checkpoint: Annotated[
        str, typer.Option(help="The .safetensors file of a trained ViR, or the name of weights that ship.")
    ],
    out: Annotated[Path, typer.Option(help="Where results go, and what is needed to go on after a kill.")] = Path(
        "streamed"
    ),
    memory: Annotated[str | None, typer.Option(help="Keep the peak of memory under this, such as 2GB.")] = None,
    band: Annotated[
        int | None, typer.Option(help="Rows of patches of a band; chosen by itself if not given.", min=1)
    ] = None,
    decay: Decay = "keep",
    pool: Annotated[
        Literal["token", "avg"] | None, typer.Option(help="Who answers: the class token, or the mean of all patches.")
    ] = None,
    features: Annotated[bool, typer.Option("--features", help="Also write the features of every patch.")] = False,
    precision: Precision = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the unfinished run in --out.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Remove what an earlier run left in --out.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Tell how far each head sees on this image, and stop.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON instead.")] = False,
) -> None:
    """Recognise an image that does not fit into memory: its class, a map of classes, features, band by band."""
    from vir.checkpoint import BadCheckpoint, load_model
    from vir.data.images import UnreadableImage
    from vir.predict import best_device
    from vir.streaming import CannotStream, open_reader

    try:
        model, card = load_model(checkpoint, best_device())
        reader = open_reader(image)
        wishes = Wishes(out, memory, band, decay, pool, features, precision, resume, restart, quiet=as_json)
        if explain:
            return _explain(model, card, reader, decay)
        answer = _run(model, card, reader, image, wishes)
    except (BadCheckpoint, UnreadableImage, CannotStream) as error:
        fail(str(error))
    if as_json:
        print(json.dumps(answer))
        return
    shown = ", ".join(f"{name} {100 * share:.1f} %" for name, share in answer["answer"].items())
    console.print(f"{image}: {shown}", highlight=False)
    console.print(f"map of classes: {out / 'map.png'}; scores of every patch: {out / 'scores.npy'}", highlight=False)


def _run(model: Any, card: Any, reader: Any, image: Path, wishes: Wishes) -> dict[str, Any]:
    import torch

    from vir.streaming import Streamer
    from vir.streaming.budget import parse_bytes, rows_within
    from vir.streaming.doubts import doubts
    from vir.streaming.engine import default_rows
    from vir.streaming.job import ANSWER, MAP, SCORES, Job, identity_of
    from vir.streaming.maps import draw_classes

    stretch, (_, cols) = _stretch(model, card, reader, wishes.decay)
    on_gpu = next(model.parameters()).is_cuda
    half = wishes.precision == "bf16" or (wishes.precision in (None, "auto") and on_gpu)
    model = model.to(torch.bfloat16) if half else model
    streamer = Streamer(model, *reader.shape[:2], mean=card.mean, std=card.std, pool=wishes.pool)
    rows = wishes.band or default_rows(cols, streamer.device.type)
    if wishes.memory:
        rows = rows_within(model, cols, parse_bytes(wishes.memory), rows)
    job = Job(
        streamer, reader, rows, wishes.out, identity_of(image, model, card.model, stretch),
        resume=wishes.resume, restart=wishes.restart, features=wishes.features, image=image,
    )  # fmt: skip
    warnings = doubts(image)
    for warning in warnings if not wishes.quiet else ():
        console.print(Text.assemble(("Warning:", "yellow"), f" {warning}"))
    logits = _with_progress(job, streamer, wishes.quiet)
    if logits is None:
        console.print(f"stopped; what was done is kept in {job.out}: go on with --resume.", highlight=False)
        raise typer.Exit(130)
    best = logits.float().softmax(0).topk(min(5, len(card.classes)))
    answer = {
        "image": str(image), "height": streamer.height, "width": streamer.width,
        "answer": {card.classes[i]: p for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)},
        "pool": streamer.pool, "band_rows": job.rows, "decay": wishes.decay,
    }  # fmt: skip
    if warnings:
        answer["warnings"] = warnings
    (job.out / ANSWER).write_text(json.dumps(answer, indent=1))
    draw_classes(job.out / SCORES, card.classes, job.out / MAP)
    return answer


def _stretch(model: Any, card: Any, reader: Any, decay: str) -> tuple[float, tuple[int, int]]:
    """Set the decay of the model for this image; returns its power, and the grid of patches."""
    from vir.layers.retention import stretch_decay
    from vir.streaming.engine import check_model

    check_model(model)
    patch = model.patch_embed.patch_size[0]
    rows, cols = (-(-side // patch) for side in reader.shape[:2])
    stretch = card.stretch
    if decay == "rescale":
        trained = model.patch_embed.grid_size
        stretch *= math.sqrt(trained[0] * trained[1] / (rows * cols))
    stretch_decay(model, stretch)
    return stretch, (rows, cols)


@contextmanager
def _asked_to_stop() -> Iterator[Event]:
    """The first Ctrl-C, or a polite kill, ends a run after the band that it is at; the second one at once."""
    asked = Event()

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    usual = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def _with_progress(job: Any, streamer: Any, quiet: bool) -> Any:
    from vir.streaming.budget import memory_in_use

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"), TimeRemainingColumn())
    with _asked_to_stop() as asked, Progress(*columns, console=console, disable=quiet) as progress:
        task = progress.add_task("rows", total=streamer.height, completed=streamer.row * streamer.patch, told="")

        def say(done: Any) -> None:
            speed = done.pixels / 1e6 / max(done.seconds, 1e-9)
            used = memory_in_use(streamer.device) / 1e9
            told = f"{done.rows:,} of {streamer.height:,}, {speed:.1f} megapixels/s, {used:.2f} GB"
            progress.update(task, completed=done.rows, told=told)

        return job.run(say, asked.is_set)


def _explain(model: Any, card: Any, reader: Any, decay: str) -> None:
    from vir.streaming.horizon import FAINT, sights

    _, (rows, cols) = _stretch(model, card, reader, decay)
    kind, (height, width) = model.blocks[0].retention.retention, reader.shape[:2]
    console.print(
        f"{card.model} in {kind.upper()} on {height:,} x {width:,} px, {rows:,} x {cols:,} patches: where a patch "
        f"counts {FAINT:.0%} of the nearest, in each of {len(model.blocks)} layers",
        highlight=False,
    )
    table = Table("head", "decay", "patches", "px to the left", "px upwards")
    for sight in sights(model, cols):
        numbers = (f"{x:,.0f}" for x in (sight.patches, sight.across, sight.down))
        table.add_row(str(sight.head), f"{sight.gamma:.5f}", *numbers)
    console.print(table)
    console.print(
        "With a fixed decay the class token of a huge image sees mostly its end. --decay rescale stretches what a head "
        "sees with the image; --pool avg lets all patches answer. Neither was trained for: judge the result."
    )


def mosaic(
    checkpoint: Annotated[str, typer.Option(help="The .safetensors file of a trained ViR.")],
    data: Data = "data",
    columns: Annotated[int, typer.Option(help="Images of a row.", min=1)] = 72,
    seed: Annotated[int, typer.Option(help="Of the order of the images.", min=0)] = 0,
    regions: Annotated[
        bool, typer.Option(help="Lay the images of a class together, as land lies, or all at random.")
    ] = False,
    out: Annotated[Path, typer.Option(help="The picture to write.", callback=a_picture)] = Path("mosaic.png"),
) -> None:
    """Lay validation images side by side, stream them as one, and tell how much of the map is right."""
    from vir.checkpoint import BadCheckpoint, load_model
    from vir.data.sets import NoImages, open_images
    from vir.demo.mosaic import Mosaic, draw, judge_map
    from vir.predict import best_device
    from vir.streaming import CannotStream

    try:
        model, card = load_model(checkpoint, best_device())
        images = Mosaic(open_images(data, card.classes), card.size, columns, seed, regions)
        with console.status("") as status:
            judged = judge_map(model, card, images, status.update)
    except (BadCheckpoint, NoImages, CannotStream, ValueError) as error:
        fail(str(error))
    draw(images, judged, card.classes, out)
    height, width, _ = images.shape
    console.print(
        f"{images.rows * columns:,} images as one of {width:,} x {height:,} px, streamed: {100 * judged.images:.2f} % "
        f"of the images right, {100 * judged.patches:.2f} % of the patches; asked about one by one: "
        f"{100 * judged.alone:.2f} % right",
        highlight=False,
    )
    console.print(f"image, truth, streamed map, map of images alone: {out}", highlight=False)
