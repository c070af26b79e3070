"""vir stream: an image larger than memory, from its first row to its last."""

import json
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Annotated, Any, Literal

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vir.cli.shared import console, fail
from vir.cli.training import Decay, Precision


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
    restart: Annotated[bool, typer.Option("--restart", help="Forget the unfinished run in --out.")] = False,
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
        answer = _run(model, card, reader, image, {
            "out": out, "memory": memory, "band": band, "decay": decay, "pool": pool, "features": features,
            "precision": precision, "resume": resume, "restart": restart, "explain": explain, "quiet": as_json,
        })  # fmt: skip
    except (BadCheckpoint, UnreadableImage, CannotStream) as error:
        fail(str(error))
    if answer is None:
        return
    if as_json:
        print(json.dumps(answer))
        return
    shown = ", ".join(f"{name} {100 * share:.1f} %" for name, share in answer["answer"].items())
    console.print(f"{image}: {shown}", highlight=False)
    console.print(f"map of classes: {out / 'map.png'}; scores of every patch: {out / 'scores.npy'}", highlight=False)


def _run(model: Any, card: Any, reader: Any, image: Path, given: dict[str, Any]) -> dict[str, Any] | None:
    import torch

    from vir.layers.retention import stretch_decay
    from vir.streaming import Streamer
    from vir.streaming.budget import parse_bytes, rows_within
    from vir.streaming.engine import check_model, default_rows
    from vir.streaming.job import ANSWER, SCORES, Job, identity_of
    from vir.streaming.maps import draw_classes

    check_model(model)
    patch = model.patch_embed.patch_size[0]
    grid = tuple(-(-side // patch) for side in reader.shape[:2])
    stretch = card.stretch
    if given["decay"] == "rescale":
        trained = model.patch_embed.grid_size
        stretch *= math.sqrt(trained[0] * trained[1] / (grid[0] * grid[1]))
    stretch_decay(model, stretch)
    if given["explain"]:
        _explain(model, card, reader.shape, grid)
        return None
    half = given["precision"] == "bf16" or (given["precision"] in (None, "auto") and next(model.parameters()).is_cuda)
    model = model.to(torch.bfloat16) if half else model
    streamer = Streamer(model, *reader.shape[:2], mean=card.mean, std=card.std, pool=given["pool"])
    rows = given["band"] or default_rows(grid[1], streamer.device.type)
    if given["memory"]:
        rows = rows_within(model, grid[1], parse_bytes(given["memory"]), rows)
    identity = identity_of(image, model, {"model": card.model}, stretch)
    names = ("out", "resume", "restart", "features")
    job = Job(streamer, reader, rows, identity=identity, **{name: given[name] for name in names})
    logits = _with_progress(job, streamer, quiet=given["quiet"])
    if logits is None:
        console.print(f"stopped; what was done is kept in {job.out}: go on with --resume.", highlight=False)
        raise typer.Exit(130)
    shares = logits.float().softmax(0)
    best = shares.topk(min(5, len(card.classes)))
    answer = {
        "image": str(image), "height": streamer.height, "width": streamer.width,
        "answer": {card.classes[i]: p for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)},
        "pool": streamer.pool, "band_rows": job.rows, "decay": given["decay"],
    }  # fmt: skip
    (job.out / ANSWER).write_text(json.dumps(answer, indent=1))
    draw_classes(job.out / SCORES, card.classes, job.out / "map.png")
    return answer


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


def _explain(model: Any, card: Any, shape: tuple[int, ...], grid: tuple[int, ...]) -> None:
    from vir.streaming.horizon import FAINT, sights

    kind = model.blocks[0].retention.retention
    console.print(
        f"{card.model} in {kind.upper()} on {shape[0]:,} x {shape[1]:,} px, {grid[0]:,} x {grid[1]:,} patches: where a "
        f"patch counts {FAINT:.0%} of the nearest, in each of {len(model.blocks)} layers",
        highlight=False,
    )
    table = Table("head", "decay", "patches", "px to the left", "px upwards")
    for sight in sights(model, grid[1]):
        numbers = (f"{x:,.0f}" for x in (sight.patches, sight.across, sight.down))
        table.add_row(str(sight.head), f"{sight.gamma:.5f}", *numbers)
    console.print(table)
    console.print(
        "With a fixed decay the class token of a huge image sees mostly its end. --decay rescale stretches what a head "
        "sees with the image; --pool avg lets all patches answer. Neither was trained for: judge the result."
    )
