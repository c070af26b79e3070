"""The command `vir`: parse, call, print."""

import json
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.table import Table

import vir

app = typer.Typer(help="Vision Retention Networks: a vision backbone for large images.", no_args_is_help=True)
bench = typer.Typer(help="Measure speed and memory against what you would use instead.", no_args_is_help=True)
app.add_typer(bench, name="bench")
console = Console()

Sizes = Annotated[list[int] | None, typer.Option("--size", help="Pixels of a side; repeat for several.", min=1)]
Batch = Annotated[int, typer.Option(help="Images in a batch.", min=1)]
Threads = Annotated[int, typer.Option(help="CPU threads to use.", min=1)]
Repeats = Annotated[int, typer.Option(help="How often each call is timed; the median is shown.", min=1)]


def _in_a_folder(file: Path | None) -> Path | None:
    """Found out before minutes of measuring, not after."""
    if file is not None and not file.parent.is_dir():
        raise typer.BadParameter(f"the folder {file.parent} does not exist: make it, or name another.")
    return file


Json = Annotated[
    Path | None,
    typer.Option("--json", help="Also write the figures to this file.", dir_okay=False, callback=_in_a_folder),
]


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
        _fail(str(error))
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
            str(result.size), result.form, f"{1e3 * result.seconds:.0f} ms", _megabytes(result.peak_bytes),
            f"{result.difference:.1e}", best, end_section=result.form == FORMS[-1],
        )  # fmt: skip
    console.print(table)


@bench.command("cpu")
def bench_cpu(
    sizes: Sizes = None,
    batch: Batch = 1,
    threads: Threads = 2,
    repeats: Repeats = 7,
    out: Json = None,
) -> None:
    """Compare ViR-S/16, 1D and 2D, with timm's ViT-S/16 on this CPU."""
    from vir.bench import cpu

    torch.set_num_threads(threads)
    sizes = sizes or [224, 512, 1024]
    table = Table("px", "model", "images/s", "times ViT", "spread", "peak memory")
    rows = []
    with console.status("") as status:
        for some in cpu.compare(sizes, batch, repeats, say=status.update):
            rows += some
            for row in some:
                table.add_row(
                    str(row.size), row.model, f"{row.images_per_second:.2f}", f"{row.ratio:.2f}",
                    f"{row.spread:.0%}", _megabytes(row.peak_bytes), end_section=row is some[-1],
                )  # fmt: skip
    console.print(table)
    _report([row.as_dict() for row in rows], out)


@bench.command("forms")
def bench_forms(
    sides: Annotated[
        list[int] | None, typer.Option("--side", help="Patches of a side; repeat for several.", min=1)
    ] = None,
    heads: Annotated[int, typer.Option(help="Heads.", min=1)] = 6,
    head_dim: Annotated[int, typer.Option(help="Size of a head.", min=1)] = 64,
    batch: Batch = 1,
    threads: Threads = 2,
    repeats: Repeats = 15,
    out: Json = None,
) -> None:
    """Compare the forms of retention with each other, and `auto` with the best of them, on this CPU."""
    from vir.bench import forms

    torch.set_num_threads(threads)
    sides = sides or [14, 18, 24, 32, 64, 128]
    shown = ("parallel", "chunkwise", "recurrent", "scan")
    table = Table("", "tokens", *shown, "times best", title="milliseconds; * is the form that auto takes")
    rows = []
    with console.status("timing") as status:
        for row in forms.compare(sides, heads, head_dim, batch, repeats):
            status.update(f"{row.retention}, {row.tokens} tokens done")
            rows.append(row)
            times = (_milliseconds(row.milliseconds.get(form), form == row.chosen) for form in shown)
            kind = f"{row.retention} grad" if row.gradients else row.retention
            table.add_row(kind, str(row.tokens), *times, f"{row.ratio:.2f}")
    console.print(table)
    _report([row.as_dict() for row in rows], out)


def _report(rows: list[dict[str, Any]], out: Path | None) -> None:
    """Say where the figures come from, and write them if asked."""
    from vir.bench.measure import provenance

    origin = provenance("cpu", "float32")
    console.print(", ".join(f"{key} {value}" for key, value in origin.items() if value))
    if out is not None:
        out.write_text(json.dumps({"origin": origin, "rows": rows}, indent=1))
        console.print(f"written to {out}")


def _milliseconds(value: float | None, chosen: bool) -> str:
    if value is None:
        return ""
    return f"{value:.{1 if value < 100 else 0}f}{'*' if chosen else ''}"


def _megabytes(size: int | None) -> str:
    return "not told here" if size is None else f"{size / 2**20:.0f} MB"


def _fail(message: str) -> NoReturn:
    console.print(f"[red]Error:[/] {message}")
    raise typer.Exit(2)
