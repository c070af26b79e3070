"""vir draw: figures of what retention sees."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from vir import weights
from vir.cli.shared import Sizes, console, fail, keep

draw = typer.Typer(help="Draw what retention sees, and how trainings went.", no_args_is_help=True)
SHOWN = 3  # photographs, where none are named


def _two_numbers(text: str, between: str, what: str) -> tuple[int, int]:
    try:
        first, second = (int(part) for part in text.split(between))
    except ValueError:
        raise typer.BadParameter(
            f"got {text!r}, expected {what}: two whole numbers with a {between} between them."
        ) from None
    return first, second


def _grid(text: str) -> tuple[int, int]:
    return _two_numbers(text, "x", "rows and columns")


def _query(text: str) -> Any:
    return "class" if text == "class" else _two_numbers(text, ",", "row and column of a patch, or the word class")


Out = Annotated[Path, typer.Option(help="The picture to write, .png or .svg.", dir_okay=False)]
Checkpoint = Annotated[
    str, typer.Option(help="The .safetensors file of a trained classifier, or the name of weights that ship.")
]
Patch = Annotated[
    Any, typer.Option(parser=_query, metavar="ROW,COL|class", help="Who looks: a patch, counted from 0, or class.")
]


@draw.command()
def masks(
    grid: Annotated[Any, typer.Option(parser=_grid, metavar="ROWSxCOLS", help="Patches of the image.")] = "14x14",
    patch: Patch = "8,8",
    heads: Annotated[int, typer.Option(help="Heads of the layer.", min=1)] = 6,
    head: Annotated[int, typer.Option(help="The head whose decay is drawn, from 0; the last sees farthest.")] = 0,
    decay: Annotated[Literal["log", "retnet"], typer.Option(help="How the heads share out their decays.")] = "log",
    gamma: Annotated[float | None, typer.Option(help="A decay of your own instead of a head's.")] = None,
    class_token: Annotated[
        bool, typer.Option("--class-token/--no-class-token", help="With the class token, or patches alone.")
    ] = True,
    out: Out = Path("masks.png"),
) -> None:
    """Draw decay masks and what one patch sees, 1D and 2D side by side."""
    from vir import ops
    from vir.viz.masks import draw_masks
    from vir.viz.style import CannotDraw

    if gamma is None:
        if not 0 <= head < heads:
            fail(f"head {head} of {heads} heads, expected a number from 0 to {heads - 1}.")
        gamma = ops.decay(heads, decay)[head].item()
    try:
        draw_masks(out, grid, patch, gamma, class_token)
    except CannotDraw as error:
        fail(str(error))
    console.print(f"masks with gamma = {gamma:.4f}: {out}", highlight=False)


@draw.command()
def maps(
    image: Annotated[Path, typer.Argument(help="Your photograph.")],
    checkpoint: Checkpoint = weights.DEFAULT,
    patch: Annotated[
        Any,
        typer.Option(
            parser=_query,
            metavar="ROW,COL|class",
            help="Who looks, counted from 0 in the last layer shown; else the class token, or the last patch.",
        ),
    ] = None,
    layer: Annotated[
        list[int] | None, typer.Option(help="Layer to show, from 0, or -1 for the last; repeat for several.")
    ] = None,
    every: Annotated[bool, typer.Option("--every-layer", help="Show all layers, one in a row.")] = False,
    size: Annotated[
        int | None, typer.Option(help="Pixels of the shorter side; what the model was trained with by default.", min=1)
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(help="Checkpoint of a timm ViT, trained by vir train: its attention below, for comparison."),
    ] = None,
    out: Out = Path("maps.png"),
) -> None:
    """Draw what the class token, or a patch, retains from every patch of a photograph, head by head."""
    from vir.checkpoint import BadCheckpoint, load_model
    from vir.data.images import UnreadableImage, open_image
    from vir.viz.maps import draw_maps
    from vir.viz.style import CannotDraw

    keep(image, out=out)
    try:
        picture = open_image(image)
        model, card = load_model(checkpoint)
        other = None if beside is None else load_model(beside)
        layers = None if every else layer or [-1]
        shown = draw_maps(out, model, card, picture, query=patch, layers=layers, size=size, beside=other)
    except (BadCheckpoint, CannotDraw, UnreadableImage) as error:
        fail(str(error))
    below = ""
    if other is not None:
        below = f", {len(shown.pop().weights)} heads of {other[1].model} below"
    count = sum(len(one.weights) for one in shown)
    console.print(f"{count} heads of {len(shown)} layers of {card.model}{below}: {out}", highlight=False)


@draw.command()
def horizon(
    checkpoint: Checkpoint = weights.DEFAULT,
    sizes: Sizes = None,
    measured: Annotated[
        list[Path] | None,
        typer.Option(help="Also measure the effective receptive field on this image; repeat for several."),
    ] = None,
    at: Annotated[
        int | None,
        typer.Option(help="Pixels of a side to measure at; what the model was trained with by default.", min=1),
    ] = None,
    patch: Annotated[
        Any,
        typer.Option(parser=_query, metavar="ROW,COL|class", help="Whose field is measured; the patch in the middle."),
    ] = None,
    out: Out = Path("horizon.png"),
) -> None:
    """Draw how far each head sees, in patches and in pixels, against resolution; and as measured by gradients."""
    from vir.checkpoint import BadCheckpoint, load_model
    from vir.data.images import UnreadableImage, open_image
    from vir.streaming.horizon import FAINT
    from vir.viz.fading import KINDS
    from vir.viz.horizon import draw_horizon, reaches
    from vir.viz.inside import check_classifier, check_side, retention_layers, square
    from vir.viz.receptive import receptive_field
    from vir.viz.style import CannotDraw, check_file

    keep(*measured or (), out=out)
    sizes = sorted(sizes or [128, 256, 512, 1024, 2048, 4096])
    try:
        check_file(out)
        model, card = load_model(checkpoint)
        check_classifier(card)
        layers = retention_layers(model)
        field, side = None, at or card.size
        if measured:
            check_side(side, layers)
            pictures = (square(open_image(file), card, side) for file in measured)
            field = receptive_field(model, pictures, patch)
        kinds = reaches(layers)
        draw_horizon(out, kinds, sizes, card.model, field)
    except (BadCheckpoint, CannotDraw, UnreadableImage) as error:
        fail(str(error))
    widest = sizes[-1]
    table = Table("patch", "head", "decay", "to a half", f"to {FAINT:.0%}", "px up in 1D", "in 2D")
    for heads in kinds:
        for reach in heads:
            steps = (f"{reach.steps(share):,.0f}" for share in (0.5, FAINT))
            up = (f"{reach.upwards(FAINT, kind, widest):,.0f}" for kind in KINDS)
            start = f"{reach.stride} px", str(reach.head), f"{reach.gamma:.4f}"
            table.add_row(*start, *steps, *up, end_section=reach is heads[-1])
    console.print(table)
    console.print(f"Patches until one counts so little of the nearest; pixels up at {widest} px, to {FAINT:.0%}.")
    if field is not None:
        console.print(
            f"measured at {side} px: half of the gradient within {field.radius(0.5):.0f} px, 95 % within "
            f"{field.radius(0.95):.0f} px; {field.ahead():.1%} of it below or to the right.",
            highlight=False,
        )
    console.print(f"the picture: {out}", highlight=False)


@draw.command()
def shift(
    image: Annotated[
        Path | None, typer.Argument(help="Your photograph; one of scikit-learn's by default.", show_default=False)
    ] = None,
    checkpoint: Checkpoint = weights.DEFAULT,
    layer: Annotated[int, typer.Option(help="The layer whose q, k and v are moved, from 0; -1 is the last.")] = -1,
    by: Annotated[int, typer.Option(help="Patches by which the content is moved in the pictures.")] = 3,
    size: Annotated[int, typer.Option(help="Pixels of the shorter side.", min=1)] = 448,
    out: Out = Path("shift.png"),
) -> None:
    """Draw how much features change when the content moves by whole patches, 1D against 2D."""
    from vir.checkpoint import BadCheckpoint, load_model
    from vir.data.images import UnreadableImage, open_image
    from vir.demo.photographs import NoPhotographs, photographs
    from vir.viz.shift import TITLES, draw_shifts
    from vir.viz.style import CannotDraw

    keep(*[image] if image else [], out=out)
    try:
        picture = open_image(image or next(iter(photographs().values())))
        model, card = load_model(checkpoint)
        changes = draw_shifts(out, model, card, picture, layer=layer, size=size, by=by)
    except (BadCheckpoint, CannotDraw, NoPhotographs, UnreadableImage) as error:
        fail(str(error))
    table = Table(f"by {by} patches", "1D changes by", "2D changes by")
    for move, kinds in changes.items():
        table.add_row(TITLES[move], *(f"{steps[by].relative:.2g}" for steps in kinds.values()))
    console.print(table)
    console.print(f"||after - before|| / ||before|| over the patches that stay; the picture: {out}", highlight=False)


@draw.command()
def curves(
    runs: Annotated[list[Path], typer.Argument(help="Folders of trainings, or their logs (.csv).")],
    out: Out = Path("curves.png"),
) -> None:
    """Draw the curves of several trainings in one picture, to compare them."""
    from vir.train.compare import draw_curves
    from vir.viz.style import CannotDraw

    try:
        best = draw_curves(out, runs)
    except CannotDraw as error:
        fail(str(error))
    table = Table("run", "best %")
    for name, score in best.items():
        table.add_row(name, f"{score:.2f}")
    console.print(table)
    console.print(f"the picture: {out}", highlight=False)


@draw.command()
def paper(
    images: Annotated[
        list[Path] | None, typer.Argument(help="Your photographs; scikit-image's by default.", show_default=False)
    ] = None,
    checkpoint: Checkpoint = weights.DEFAULT,
    results: Annotated[Path, typer.Option(help="A folder with what vir bench wrote with --json.")] = Path("results"),
    runs: Annotated[Path, typer.Option(help="A folder with the cards (best.json) of trainings.")] = Path("runs"),
    out: Annotated[Path, typer.Option(help="The folder to fill.", file_okay=False)] = Path("paper"),
) -> None:
    """Make every figure and table of the paper that can be made here, with a page that shows them."""
    from vir.checkpoint import BadCheckpoint, load_model
    from vir.data.images import UnreadableImage, open_image
    from vir.demo.photographs import NoPhotographs, photographs
    from vir.viz.paper import INDEX, Sources, make_paper, read_benchmarks
    from vir.viz.runs import accuracies, untrained_at
    from vir.viz.style import CannotDraw

    try:
        files = {path.name: path for path in images} if images else dict(list(photographs().items())[:SHOWN])
        pictures = {name: open_image(file) for name, file in files.items()}
        model, card = load_model(checkpoint)
        sources = Sources(model, card, pictures, read_benchmarks(results), accuracies(runs), untrained_at(runs))
        with console.status("") as status:
            exhibits = make_paper(out, sources, status.update)
    except (BadCheckpoint, CannotDraw, NoPhotographs, UnreadableImage) as error:
        fail(str(error))
    for exhibit in exhibits:
        console.print(f"{'made   ' if exhibit.there else 'missing'} {exhibit.title}", highlight=False)
        if not exhibit.there:
            console.print(f"        {exhibit.words}", highlight=False, style="dim")
    console.print(f"open {out / INDEX}", highlight=False)
