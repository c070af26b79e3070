"""vir bench draw: figures of earlier runs as pictures."""

import json
from pathlib import Path
from typing import Annotated

import typer

from vir.cli.shared import a_picture, console, fail


def bench_draw(
    files: Annotated[list[Path], typer.Argument(help="What --json wrote, of one kind of benchmark.")],
    out: Annotated[Path, typer.Option(help="The picture, PNG or SVG.", callback=a_picture)] = Path("bench.png"),
    headline: Annotated[bool, typer.Option("--headline", help="Of models: how many times as fast as ViT.")] = False,
    batches: Annotated[
        list[int] | None, typer.Option("--batch", help="Of models: this batch alone; repeat for several.", min=1)
    ] = None,
) -> None:
    """Draw the figures of earlier runs, several together if they are of one kind."""
    from vir.bench import plots
    from vir.bench.measure import joined

    found = []
    for file in files:
        try:
            found.append(json.loads(file.read_text()))
            kinds = {plots.kind(row) for one in found for row in one["rows"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            fail(
                f"{file} is not what vir bench ops, models, components, hvir or stream writes with --json: "
                f"{_wrong_with(error)}. Name such a file."
            )
    if len(kinds) != 1:
        names = ", ".join(sorted(kind.__name__ for kind in kinds)) or "nothing"
        fail(f"the files hold {names}: expected figures of one kind of benchmark.")
    (draw,) = kinds
    if headline and draw is not plots.models:
        fail(f"--headline is of vir bench models, and the files hold {draw.__name__}.")
    draw = plots.headline if headline else draw
    rows = [row for one in found for row in one["rows"] if not batches or row.get("batch") in batches]
    if not rows:
        fail(f"no figures of batch {', '.join(map(str, batches or ()))} in the files.")
    draw(rows, joined([one["origin"] for one in found]), out)
    console.print(f"drawn to {out}")


def _wrong_with(error: Exception) -> str:
    """Not in Python's words: they hold the whole of a file that is no text."""
    if isinstance(error, OSError):
        return f"it cannot be read ({error.strerror})"
    if isinstance(error, ValueError):
        return "it is no JSON"
    return "it has no figures of these, and others are not drawn"
