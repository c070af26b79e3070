"""vir bench: speed and memory against what you would use instead."""

from functools import partial
from typing import Annotated, Any, Literal

import torch
import typer
from rich.table import Table

from vir.cli.figures import origin_of, report, tell, working, write
from vir.cli.shared import (
    Batch,
    Batches,
    Json,
    Plot,
    Repeats,
    Sizes,
    Threads,
    console,
    fail,
    megabytes,
)

How = Annotated[
    Literal["eager", "recorded", "compiled", "graphs"],
    typer.Option(
        help="How models run: as they are; recorded as CUDA graphs, which wait for no host; by torch.compile; or as "
        "the CUDA graphs that this makes."
    ),
]

bench = typer.Typer(help="Measure speed and memory against what you would use instead.", no_args_is_help=True)


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
    if min(sizes) < cpu.PATCH:
        fail(f"--size {min(sizes)}: expected at least {cpu.PATCH} pixels, the side of a patch of these models.")
    table = Table("px", "model", "images/s", "times ViT", "spread", "peak memory")
    rows = []
    with working() as status:
        for some in cpu.compare(sizes, batch, repeats, say=status.update):
            rows += some
            for row in some:
                table.add_row(
                    str(row.size), row.model, f"{row.images_per_second:.2f}", f"{row.ratio:.2f}",
                    f"{row.spread:.0%}", megabytes(row.peak_bytes), end_section=row is some[-1],
                )  # fmt: skip
    console.print(table)
    report([row.as_dict() for row in rows], out)


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
    with working("timing") as status:
        for row in forms.compare(sides, heads, head_dim, batch, repeats):
            status.update(f"{row.retention}, {row.tokens} tokens done")
            rows.append(row)
            times = (_milliseconds(row.milliseconds.get(form), form == row.chosen) for form in shown)
            kind = f"{row.retention} grad" if row.gradients else row.retention
            table.add_row(kind, str(row.tokens), *times, f"{row.ratio:.2f}")
    console.print(table)
    report([row.as_dict() for row in rows], out)


@bench.command("ops")
def bench_ops(
    shapes: Annotated[
        list[str] | None, typer.Option("--shape", help="Patches of a side x batch, such as 64x16; repeat for several.")
    ] = None,
    repeats: Repeats = 31,
    backward: Annotated[bool, typer.Option(help="Time the gradients too.")] = True,
    fla: Annotated[
        bool, typer.Option(help="Also flash-linear-attention, whose search for settings takes minutes at first.")
    ] = True,
    out: Json = None,
    plot: Plot = None,
) -> None:
    """Compare the kernels with attention and flash-linear-attention on this GPU (bf16, 12 heads of 64)."""
    from vir.bench import operators, plots

    need_gpu("bench ops")
    chosen = [_shape(text) for text in shapes] if shapes else list(operators.SHAPES)
    if fla and (why := operators.without_linear_attention()):
        console.print(f"note: without flash-linear-attention ({why}): pip install flash-linear-attention")
    names = ("attention", "best of fla", "kernel 1D", "kernel 2D", "PyTorch 1D", "PyTorch 2D")
    title = "milliseconds; called is forward from Python, the others are the GPU alone"
    table = Table("", "tokens", "batch", "limit", *names, title=title)
    rows: list[dict[str, Any]] = []
    origin = {**origin_of("cuda", "bf16"), **operators.linear_attention_version(fla)}
    with working() as status:
        for row in operators.compare(chosen, repeats, backward, fla):
            status.update(f"{row.tokens} tokens done")
            rows.append(row.as_dict())
            write(rows, origin, out)
            if not row.right:
                worst = max(row.errors, key=lambda name: row.errors[name])
                table.add_row("wrong", f"{row.tokens:,}", str(row.batch), f"{worst}: error {row.errors[worst]:.1e}")
                continue
            ways = {"forward": row.forward, "called": row.called, "backward": row.backward}
            for way, times in ways.items():
                best_of_fla = min((t for name, t in times.items() if name.startswith("fla")), default=None)
                shown = [_short(best_of_fla if name == "best of fla" else times.get(name)) for name in names]
                table.add_row(way, f"{row.tokens:,}", str(row.batch), _short(row.limit), *shown)
    console.print(table)
    tell(origin, out)
    if plot is not None:
        plots.operators(rows, origin, plot)
        console.print(f"drawn to {plot}")
    if not all(row["right"] for row in rows):
        fail("a kernel gave wrong numbers at the shapes marked so: their speed is not shown.")


@bench.command("models")
def bench_models(
    kinds: Annotated[list[str] | None, typer.Option("--model", help="S, B or L; repeat for several.")] = None,
    sizes: Sizes = None,
    batches: Batches = None,
    forms: Annotated[bool, typer.Option(help="Also ViR in plain PyTorch, parallel and chunkwise.")] = True,
    training: Annotated[bool, typer.Option(help="Time a training step instead of inference.")] = False,
    how: How = "eager",
    repeats: Repeats = 11,
    out: Json = None,
    plot: Plot = None,
) -> None:
    """Compare ViR with timm's ViT of the same size on this GPU: images/s, memory, share of the ceiling (bf16)."""
    from vir.bench import models, plots

    if training and how == "recorded":
        fail("--training is not recorded here: expected --how eager, compiled or graphs.")
    need_gpu("bench models")
    table = Table("model", "px", "batch", "images/s", "times ViT", "of the ceiling", "spread", "peak memory")
    mode: models.Mode = "training" if training else "inference"
    measured: list[models.Row] = []
    for kind in kinds or ():
        if kind not in models.SIZES:
            fail(f"--model {kind}: expected one of {', '.join(models.SIZES)}.")
    origin = origin_of("cuda", "bf16")

    def keep(row: models.Row) -> None:
        measured.append(row)
        write([row.as_dict() for row in measured], origin, out)

    with working() as status:
        for kind in kinds or ["B"]:
            for size in sizes or [224, 512, 1024, 2048, 4096]:
                makers = partial(models.plain_models, kind, size, forms)
                asked = (size, size), batches or [16], mode, how, repeats
                for some in models.compare(kind, makers, *asked, status.update, keep, warm_up=not measured):
                    _add_models(table, some, some[0].images_per_second, some[-1].images_per_second)
    console.print(table)
    tell(origin, out, models.doubts(measured))
    if plot is not None:
        plots.models([row.as_dict() for row in measured], origin, plot)
        console.print(f"drawn to {plot}")


@bench.command("components")
def bench_components(
    kind: Annotated[str, typer.Option("--model", help="S, B or L.")] = "B",
    size: Annotated[int, typer.Option(help="Pixels of a side.", min=1)] = 224,
    batch: Batch = 128,
    how: How = "eager",
    repeats: Repeats = 11,
    out: Json = None,
    plot: Plot = None,
) -> None:
    """Compare a ViR with the variants of the paper's component study on this GPU (bf16, 1D)."""
    from vir.bench import models, plots
    from vir.models.catalog import PAPER_COMPONENTS

    need_gpu("bench components")
    if kind not in models.SIZES:
        fail(f"--model {kind}: expected one of {', '.join(models.SIZES)}.")
    makers, pixels = partial(models.component_models, kind, size), (size, size)
    family = f"ViR-{kind}/16 {plots.COMPONENTS}"
    with working() as status:
        (some,) = models.compare(family, makers, pixels, [batch], "inference", how, repeats, status.update)
    table = Table("component", "images/s", "times base", "paper: times base", "spread", "peak memory")
    for row in some:
        if row.images_per_second is None:
            table.add_row(row.model, row.missing)
            continue
        ours = f"{row.images_per_second / some[0].images_per_second:.2f}" if some[0].images_per_second else ""
        theirs = PAPER_COMPONENTS[row.model].images_per_second / PAPER_COMPONENTS["base"].images_per_second
        told = f"{row.images_per_second:,.0f}", ours, f"{theirs:.2f}", f"{row.spread:.0%}", megabytes(row.peak_bytes)
        table.add_row(row.model, *told)
    console.print(table)
    rows = [row.as_dict() for row in some]
    origin = report(rows, out, "cuda", "bf16")
    if plot is not None:
        plots.hierarchy(rows, origin, plot)
        console.print(f"drawn to {plot}")


@bench.command("hvir")
def bench_hvir(
    names: Annotated[list[str] | None, typer.Option("--model", help="hvir_0 to hvir_4; repeat for several.")] = None,
    peers: Annotated[
        list[str] | None, typer.Option("--peer", help="timm's models beside them; repeat for several.")
    ] = None,
    under: Annotated[
        Literal["classifier", "backbone", "detector", "segmentor"],
        typer.Option(help="What is measured: a classifier, four maps alone, Cascade Mask R-CNN or UPerNet."),
    ] = "classifier",
    size: Annotated[str, typer.Option(help="Rows x columns of the image in pixels.")] = "224x224",
    batch: Batch = 128,
    how: How = "eager",
    repeats: Repeats = 11,
    out: Json = None,
    plot: Plot = None,
) -> None:
    """Compare HViR-0 to -4 with timm's models of their class on this GPU (bf16, channels last)."""
    import timm

    from vir.bench import models, plots

    if under == "detector" and how == "recorded":
        fail("--under detector cannot be recorded: its work depends on the image. Expected --how eager or compiled.")
    need_gpu("bench hvir")
    table = Table("model", "px", "batch", "images/s", "times ConvNeXt-T", "of the ceiling", "spread", "peak memory")
    pixels = _shape(size)
    for name in names or ():
        if name not in models.HIERARCHICAL:
            fail(f"--model {name}: expected one of {', '.join(models.HIERARCHICAL)}.")
    for name in peers or ():
        if not timm.is_model(name):
            fail(f"--peer {name}: expected a model that timm knows, such as {', '.join(models.PEERS)}.")
    chosen = names or list(models.HIERARCHICAL), peers or list(models.PEERS), pixels
    makers = partial(models.hierarchical_models, *chosen)
    if under != "classifier":
        makers = partial(models.dense_models, *chosen, under)
    mode: models.Mode = "autocast" if under in ("detector", "segmentor") else "inference"
    family = "HViR" if under == "classifier" else f"HViR, {under}"
    measured: list[models.Row] = []
    origin = origin_of("cuda", "bf16")

    def keep(row: models.Row) -> None:
        measured.append(row)
        write([row.as_dict() for row in measured], origin, out)

    with working() as status:
        (some,) = models.compare(family, makers, pixels, [batch], mode, how, repeats, status.update, keep)
    speeds = {row.model: row.images_per_second for row in some}
    for row in some:
        _add_models(table, [row], speeds.get("convnext_tiny"), speeds.get(f"{row.model} ceiling"))
    console.print(table)
    tell(origin, out, models.doubts(measured))
    if plot is not None:
        plots.hierarchy([row.as_dict() for row in measured], origin, plot)
        console.print(f"drawn to {plot}")


@bench.command("stream")
def bench_stream(
    kind: Annotated[str, typer.Option("--model", help="S, B or L.")] = "S",
    heights: Annotated[
        list[int] | None, typer.Option("--height", help="Rows of pixels; repeat for several.", min=16)
    ] = None,
    width: Annotated[int, typer.Option(help="Columns of pixels.", min=16)] = 4096,
    band_rows: Annotated[
        int | None, typer.Option(help="Rows of patches of a band; else as many as vir stream takes.", min=1)
    ] = None,
    patience: Annotated[float, typer.Option(help="Seconds of a run above which larger images are left out.")] = 120.0,
    threads: Threads = 2,
    repeats: Repeats = 3,
    out: Json = None,
    plot: Plot = None,
) -> None:
    """Compare streaming with tiles and with whole images, on this GPU or CPU: megapixels/s and peak memory."""
    from vir.bench import plots, streaming
    from vir.predict import best_device

    if kind not in streaming.KINDS:
        fail(f"--model {kind}: expected one of {', '.join(streaming.KINDS)}.")
    torch.set_num_threads(threads)
    device = best_device()
    table = Table("contender", "height", "megapixels/s", "of tiles", "spread", "peak memory")
    rows: list[dict[str, Any]] = []
    origin = origin_of(device, "bf16" if device == "cuda" else "float32")
    heights = heights or [1024, 4096, 16384, 65536]
    with working() as status:
        shape = heights, width, torch.device(device), patience, repeats, band_rows
        for row in streaming.compare(kind, *shape, status.update):
            rows.append(row.as_dict())
            write(rows, origin, out)
    tiles = {
        (r["height"], "2D" in r["contender"]): r["megapixels_per_second"] for r in rows if "tiles" in r["contender"]
    }
    for one in rows:
        speed = one["megapixels_per_second"]
        told = [one["missing"]]
        if speed:
            rival = tiles.get((one["height"], "2D" in one["contender"]))  # the same model; 1D for those without
            share = f"{speed / rival:.2f}" if rival else ""
            told = [f"{speed:.2f}", share, f"{one['spread']:.0%}", megabytes(one["peak_bytes"])]
        table.add_row(one["contender"], f"{one['height']:,}", *told)
    console.print(table)
    tell(origin, out)
    if plot is not None:
        plots.streaming(rows, origin, plot)
        console.print(f"drawn to {plot}")


def _add_models(table: Table, rows: list[Any], rival: float | None, ceiling: float | None) -> None:
    for row in rows:
        speed = row.images_per_second
        if speed is None:
            table.add_row(row.model, str(row.size[0]), str(row.batch), row.missing)
            continue
        shares = [f"{speed / other:.2f}" if other else "" for other in (rival, ceiling)]
        table.add_row(
            row.model, str(row.size[0]), str(row.batch), f"{speed:,.1f}", *shares,
            f"{row.spread:.0%}", megabytes(row.peak_bytes), end_section=row is rows[-1],
        )  # fmt: skip


def need_gpu(command: str) -> None:
    if not torch.cuda.is_available():
        fail(f"vir {command} measures a CUDA GPU and finds none here. On a CPU: vir bench cpu, vir bench forms.")


def _shape(text: str) -> tuple[int, int]:
    numbers = text.split("x")
    if len(numbers) != 2 or not all(number.isdigit() and int(number) for number in numbers):
        fail(f"{text!r}: expected two whole numbers with an x between them, such as 64x16.")
    return int(numbers[0]), int(numbers[1])


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _milliseconds(value: float | None, chosen: bool) -> str:
    if value is None:
        return ""
    return f"{value:.{1 if value < 100 else 0}f}{'*' if chosen else ''}"
