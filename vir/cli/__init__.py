"""The command `vir`: parse, call, print."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

import vir
from vir.cli.bench import bench
from vir.cli.shared import Sizes, console, fail, megabytes
from vir.cli.streaming import stream
from vir.cli.training import add_commands

app = typer.Typer(help="Vision Retention Networks: a vision backbone for large images.", no_args_is_help=True)
add_commands(app)
app.command()(stream)
app.add_typer(bench, name="bench")


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
    image: Annotated[Path | None, typer.Option(help="Your photograph; a cat from scikit-image by default.")] = None,
    sizes: Sizes = None,
) -> None:
    """Classify a photograph with ViR-S/16 in the three forms: same logits, other time and memory."""
    from vir.demo import FORMS, MODEL, best_class, photograph, run

    try:
        picture = photograph(image)
    except ValueError as error:
        fail(str(error))
    sizes = sizes or [224, 1024]
    name = image.name if image else "the cat Chelsea (scikit-image)"
    console.print(f"{MODEL} on {name}, {picture.width} x {picture.height} px")
    console.print("[yellow]The weights are random until trained ones ship: the classes below mean nothing yet.[/]")
    table = Table("px", "form", "time", "memory", "logits differ by", "answer")
    with console.status("") as status:
        results = list(run(picture, sizes, say=status.update))
    for result in results:
        best = best_class(result.logits)
        table.add_row(
            str(result.size), result.form, f"{1e3 * result.seconds:.0f} ms", megabytes(result.peak_bytes),
            f"{result.difference:.1e}", best, end_section=result.form == FORMS[-1],
        )  # fmt: skip
    console.print(table)
