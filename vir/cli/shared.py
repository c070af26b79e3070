"""What all commands share: the console, common options, errors."""

import os
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console
from rich.text import Text

console = Console(markup=False)  # names of files and folders may have brackets

Sizes = Annotated[list[int] | None, typer.Option("--size", help="Pixels of a side; repeat for several.", min=1)]
Batch = Annotated[int, typer.Option(help="Images in a batch.", min=1)]
Threads = Annotated[int, typer.Option(help="CPU threads to use.", min=1)]
Repeats = Annotated[
    int,
    typer.Option(help="How often each call is timed (fast models more, slow ones less); the median is shown.", min=1),
]


def _in_a_folder(file: Path | None) -> Path | None:
    """Found out before minutes of measuring, not after."""
    if file is not None and not file.parent.is_dir():
        raise typer.BadParameter(f"the folder {file.parent} does not exist: make it, or name another.")
    if file is not None and not os.access(file if file.exists() else file.parent, os.W_OK):
        raise typer.BadParameter(f"{file} cannot be written: name another.")
    return file


def a_picture(file: Path | None) -> Path | None:
    """Likewise, of what is drawn at the end."""
    if file is not None:
        from matplotlib.backend_bases import FigureCanvasBase

        kinds = [f".{kind}" for kind in FigureCanvasBase.get_supported_filetypes()]
        if file.suffix.lower() not in kinds:
            raise typer.BadParameter(f"{file} ends in {file.suffix!r}, expected .png, .svg or another of {kinds}.")
    return _in_a_folder(file)


Json = Annotated[
    Path | None,
    typer.Option("--json", help="Also write the figures to this file.", dir_okay=False, callback=_in_a_folder),
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", help="Also draw the figures to this PNG or SVG.", dir_okay=False, callback=a_picture),
]
Batches = Annotated[list[int] | None, typer.Option("--batch", help="Images in a batch; repeat for several.", min=1)]
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
Decay = Annotated[
    Literal["keep", "rescale"], typer.Option(help="At another size: keep the decay, or what it sees in pixels.")
]
LARGEST = 4096  # as far as vir bench models goes; a classifier's memory grows with the square of it


def _not_too_large(size: int | None) -> int | None:
    """A process that is killed for its memory says nothing."""
    if size is not None and size > LARGEST:
        raise typer.BadParameter(f"got {size}, expected at most {LARGEST}: for larger images there is vir stream.")
    return size


Size = Annotated[int | None, typer.Option(help=f"Pixels of a side, at most {LARGEST}.", min=8, callback=_not_too_large)]
Void = Annotated[
    list[int] | None,
    typer.Option(help="Segmentation: a number in label maps that is no class, besides 255; repeat for several."),
]
Split = Annotated[str, typer.Option(help="Which images to judge by, such as val, test or train.")]
WORKERS = min(4, os.cpu_count() or 1)
Workers = Annotated[int, typer.Option(help="Processes that read images.", min=0)]


def megabytes(size: int | None) -> str:
    return "not told here" if size is None else f"{size / 1e6:.0f} MB"


def fail(message: str) -> NoReturn:
    console.print(Text.assemble(("Error:", "red"), f" {message}"))
    raise typer.Exit(2)


def keep(*images: Path, out: Path) -> None:
    """That a picture does not take the place of one of the images that it is drawn from."""
    for image in images:
        if image.exists() and out.exists() and image.samefile(out):
            fail(f"the picture would take the place of {image} itself: choose another --out.")
