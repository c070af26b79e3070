"""vir bench trained: the speed of trained models on your own images."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from vir.cli.figures import report, working
from vir.cli.shared import Batch, Json, Repeats, console, fail, megabytes


def bench_trained(
    checkpoints: Annotated[
        list[str], typer.Argument(help=".safetensors files of trained models, or names of weights that ship.")
    ],
    images: Annotated[Path, typer.Option(help="A folder of images, or one image.", exists=True)],
    most: Annotated[int, typer.Option(help="Images to take of it, in the order of their names.", min=1)] = 32,
    batch: Batch = 1,
    half: Annotated[bool, typer.Option(help="In bf16, by autocast.")] = False,
    repeats: Repeats = 5,
    out: Json = None,
) -> None:
    """Tell how many images a second trained models of any task answer for, one beside the other."""
    from vir.bench import trained
    from vir.checkpoint import BadCheckpoint
    from vir.data.images import UnreadableImage, open_image
    from vir.data.sets import image_files
    from vir.predict import best_device

    device = best_device()
    try:
        files = image_files(images)[:most]
        if not files:
            fail(f"--images {images}: there is no image in it. Name a folder of images.")
        with working("measuring"):
            pictures = [open_image(file) for file in files]
            rows = trained.compare(checkpoints, pictures, batch=batch, half=half, repeats=repeats, device=device)
    except (BadCheckpoint, UnreadableImage, ValueError) as error:
        fail(str(error))
    columns = "px", "images/s", "times the first", "spread", "peak memory", "objects"
    table = Table(Column("checkpoint", overflow="fold"), *columns)
    for row in rows:
        times = row.images_per_second / rows[0].images_per_second
        memory = megabytes(row.peak_bytes) if row.peak_bytes is not None else ""
        told = f"{row.images_per_second:,.1f}", f"{times:.2f}", f"{row.spread:.0%}", memory
        table.add_row(row.checkpoint, str(row.size), *told, "" if row.objects is None else f"{row.objects:,.1f}")
    console.print(table)
    report([row.as_dict() for row in rows], out, device, "bf16" if half else "float32")
