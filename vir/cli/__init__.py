"""The command `vir`: parse, call, print."""

import errno
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from typer.core import TyperGroup

import vir
from vir import weights
from vir.cli import asking, training
from vir.cli.bench import bench
from vir.cli.bench_draw import bench_draw
from vir.cli.bench_suite import bench_all
from vir.cli.bench_trained import bench_trained
from vir.cli.drawing import draw
from vir.cli.serving import serve
from vir.cli.shared import Sizes, a_picture, console, fail, keep, megabytes
from vir.cli.streaming import mosaic, stream


class Commands(TyperGroup):
    """What a disk refuses is told in words, whichever command asks it."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.strerror is None or error.errno == errno.EPIPE:  # what reads us has closed: not an error
                raise
            what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
            fail(f"{what}. Make room there, or name a place that can be read and written.")


app = typer.Typer(
    cls=Commands, help="Vision Retention Networks: a vision backbone for large images.", no_args_is_help=True
)
training.add_commands(app)
asking.add_commands(app)
app.command()(stream)
app.command()(mosaic)
app.command()(serve)
bench.command("draw")(bench_draw)
bench.command("trained")(bench_trained)
bench.command("all")(bench_all)
app.add_typer(bench, name="bench")
app.add_typer(draw, name="draw")


def _version(show: bool) -> None:
    if show:
        console.print(f"vision-retention {vir.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def models() -> None:
    """List every model: parameters, multiply-adds, and the paper's figures beside them."""
    from vir.models.catalog import entries

    table = Table("model", "px", "params M", "GMACs", "paper: M", "GMACs", "top-1 %")
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    with console.status("counting"):
        rows = entries()
    for row in rows:
        paper = ("ours", "", "")
        if row.printed:
            mark = "*" if row.printed.erratum else " "
            paper = f"{row.printed.params:.1f}{mark}", f"{row.printed.gmacs:.1f}{mark}", f"{row.printed.top1:.1f}"
        table.add_row(row.name, str(row.size), f"{row.params:.2f}", f"{row.gmacs:.2f}", *paper)
    console.print(table)
    for row in rows:
        if row.printed and row.printed.erratum:
            console.print(f"* {row.name} at {row.size} px: {row.printed.erratum}.")
    console.print(
        "Multiply-adds of convolutions and linear layers, as the paper counts. Its accuracies come from code whose "
        "training form differs from its formulas: they are not promised here."
    )


@app.command()
def demo(
    images: Annotated[
        list[Path] | None, typer.Argument(help="Your photographs; some that come with scikit-image by default.")
    ] = None,
    checkpoint: Annotated[
        str, typer.Option(help="The .safetensors file of a trained model, or the name of weights that ship.")
    ] = weights.DEFAULT,
    out: Annotated[Path, typer.Option(help="The sheet of pictures to write.", callback=a_picture)] = Path("demo.png"),
) -> None:
    """Ask a trained model what photographs show, and draw a sheet of its answers."""
    from vir.answers import Classes
    from vir.checkpoint import BadCheckpoint, read_card
    from vir.data.images import open_image
    from vir.demo.photographs import NoPhotographs, photographs
    from vir.demo.sheet import draw as draw_sheet
    from vir.predict import best_device, predict
    from vir.viz.inside import check_classifier
    from vir.viz.style import CannotDraw

    keep(*images or (), out=out)
    try:
        card = read_card(checkpoint)
        check_classifier(card)
        files = [(path.name, path) for path in images] if images else list(photographs().items())
        answers = list(predict([path for _, path in files], checkpoint, top=3))
    except (BadCheckpoint, CannotDraw, NoPhotographs) as error:
        fail(str(error))
    table, shown = Table("photograph", "answer", "sure", "else"), []
    for (name, path), answer in zip(files, answers, strict=True):
        if not isinstance(answer, Classes):
            fail(str(answer))
        others = zip(answer.names[1:], answer.probabilities[1:], strict=True)
        table.add_row(
            name, answer.best, f"{100 * answer.probabilities[0]:.0f} %",
            ", ".join(f"{other} {100 * share:.0f} %" for other, share in others),
        )  # fmt: skip
        shown.append((name, open_image(path), answer))
    console.print(table)
    remark = f"{checkpoint}: {card.metrics['top1']:.1f} % right on images that it did not learn from"
    console.print(f"{remark}, on a {best_device()}.", highlight=False)
    console.print(
        f"It knows {', '.join(card.classes)}, and nothing else: whatever it sees, it calls by one of these names.",
        highlight=False,
    )
    draw_sheet(
        shown, f"{remark}. It knows {len(card.classes)} kinds of things, and calls all it sees by one of them.", out
    )
    console.print(f"The pictures with their answers: {out}", highlight=False)


@app.command()
def forms(
    image: Annotated[Path | None, typer.Option(help="Your photograph; one of scikit-learn's by default.")] = None,
    checkpoint: Annotated[
        str, typer.Option(help="The .safetensors file of a trained model, or the name of weights that ship.")
    ] = weights.DEFAULT,
    sizes: Sizes = None,
) -> None:
    """Classify a photograph in the three forms of retention: same answer, other time and memory."""
    from vir.checkpoint import BadCheckpoint
    from vir.data.images import UnreadableImage, open_image
    from vir.demo.forms import FORMS, run
    from vir.demo.photographs import NoPhotographs, photographs
    from vir.viz.style import CannotDraw

    table = Table("px", "form", "time", "memory", "logits differ by", "answer")
    try:
        picture = open_image(image or next(iter(photographs().values())))
        with console.status("") as status:
            results = list(run(checkpoint, picture, sizes or [224, 768], say=status.update))
    except (BadCheckpoint, CannotDraw, NoPhotographs, UnreadableImage) as error:
        fail(str(error))
    for result in results:
        table.add_row(
            str(result.size), result.form, f"{1e3 * result.seconds:.0f} ms", megabytes(result.peak_bytes),
            f"{result.difference:.1e}", result.answer, end_section=result.form == FORMS[-1],
        )  # fmt: skip
    console.print(table)
