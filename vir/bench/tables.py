"""Figures of benchmarks as tables of Markdown: python -m vir.bench.tables results/models_B.json prints one.

--into RESULTS.md makes all tables of a file anew that stand between such marks, which keep the rest of the command;
paths are as seen from that file:

    <!-- tables results/models_B.json --batch 128 -->
    <!-- end -->
"""

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vir.bench import plots
from vir.bench.measure import SURE, joined

Rows = list[dict[str, Any]]
Cells = list[list[str]]  # the first are the heads of columns

MARKED = re.compile(r"(<!-- tables (.+?) -->\n).*?(<!-- end -->)", re.S)
MARK = "~: spread above 5 %, or timed once"
RIVALS = {"convnext_tiny": "ConvNeXt-T", "swin_tiny": "Swin-T"}
KINDS = ("1D", "2D")
HERE = Path()  # as seen from where the command runs


class NoTable(ValueError):
    """Files of which no table can be made."""


def operators(rows: Rows, only: str | None) -> Cells:
    """Milliseconds of each kind of retention beside its rival: the best of fla in 1D, attention in 2D."""
    heads = ["tokens", "batch", "limit"]
    for kind in _kinds(only):
        rival = "best of fla" if kind == "1D" else "attention"
        heads += [rival, kind, f"{rival} / {kind}", f"{rival}, backward", f"{kind}, backward", f"{rival} / {kind}"]
        heads += [f"{kind}, backward / forward"]
    return [heads, *(_shape(row, only) for row in rows)]


def _shape(row: dict[str, Any], only: str | None) -> list[str]:
    cells = [f"{row['tokens']:,}", str(row["batch"]), _milliseconds(row["limit"])]
    for kind in _kinds(only):
        own = []
        sure = "~" if row["spread"] > SURE else ""  # one for all of a shape
        for way in (row["forward"], row["backward"]):
            peers = [t for name, t in way.items() if name.startswith("fla" if kind == "1D" else "attention")]
            rival, ours = min(peers, default=None), way.get(f"kernel {kind}")
            own.append(ours)
            cells += [_milliseconds(rival), f"**{sure}{_milliseconds(ours)}**", _ratio(rival, ours)]
        cells.append(_ratio(own[1], own[0]))
    return cells


def models(rows: Rows, only: str | None) -> Cells:
    """ViR beside ViT and below its ceiling, a size and batch to a line."""
    names = list(dict.fromkeys(_part(row) for row in rows))
    kinds = [kind for kind in _kinds(only) if kind in names]
    forms = [name for name in names if name not in ("ViT", *kinds, "ceiling")]
    families = len({row["family"] for row in rows}) > 1
    heads = ["model"] * families + ["px", "batch", "ViT, images/s", *kinds]
    heads += [f"{kind} / {other}" for other in ("ViT", "ceiling") for kind in kinds]
    heads += ["peak memory: " + ", ".join(("ViT", *kinds)), *forms]
    cells = [heads]
    for family, px, batch in dict.fromkeys((row["family"], row["size"][0], row["batch"]) for row in rows):
        of = {_part(r): r for r in rows if (r["family"], r["size"][0], r["batch"]) == (family, px, batch)}
        line = [f"{family}/16"] * families + [f"{px}", f"{batch}", *(_speed(of.get(name)) for name in ("ViT", *kinds))]
        line += [_share(of.get(kind), of.get("ViT")) for kind in kinds]
        line += [_share(of.get(kind), of.get("ceiling"), 3) for kind in kinds]
        line += [_memory([of.get(name) for name in ("ViT", *kinds)]), *(_speed(of.get(form)) for form in forms)]
        cells.append(line)
    return cells


def headline(rows: Rows, only: str | None) -> Cells:
    """How many times as fast as ViT, at the largest batch that both ran."""
    cells = [["image", "batch", "ViT-B/16 (timm, SDPA)", *(f"ViR-B/16 {kind}" for kind in _kinds(only))]]
    cells[0].append("peak memory: " + ", ".join(("ViT", *_kinds(only))))
    for px in sorted({row["size"][0] for row in rows}):
        batch = max(r["batch"] for r in rows if r["size"][0] == px and _part(r) == "ViT" and r["images_per_second"])
        of = {_part(row): row for row in rows if (row["size"][0], row["batch"]) == (px, batch)}
        times = [f"{_share(of[kind], of['ViT'])} times" for kind in _kinds(only)]
        memory = _memory([of[name] for name in ("ViT", *_kinds(only))])
        cells.append([f"{px} px", f"{batch}", f"{_speed(of['ViT'])} images/s", *times, memory])
    return cells


def hierarchy(rows: Rows, only: str | None) -> Cells:
    """HViR beside timm's models of its size, each with its share of its ceiling where that was measured."""
    rivals = [short for name, short in RIVALS.items() if any(row["model"].startswith(name) for row in rows)]
    ceilings = any(row["model"].endswith("ceiling") for row in rows)
    heads = ["model", "px", "batch", "images/s", *(f"times {short}" for short in rivals)]
    cells = [[*heads, *["of its ceiling"] * ceilings, "peak memory"]]
    for size in dict.fromkeys(tuple(row["size"]) for row in rows):
        of = {row["model"]: row for row in rows if tuple(row["size"]) == size}
        rival = {short: row for name, short in RIVALS.items() for row in of.values() if row["model"].startswith(name)}
        for name, row in of.items():
            if name.endswith("ceiling"):
                continue
            line = [name, " x ".join(map(str, size)), f"{row['batch']}", _speed(row)]
            line += [_share(row, rival.get(short)) for short in rivals]
            line += [_share(row, of.get(f"{name} ceiling"), 3)] * ceilings
            cells.append([*line, _memory([row])])
    return cells


MAKES = {"operators": operators, "models": models, "hierarchy": hierarchy}  # by what draws such rows


def markdown(cells: Cells) -> str:
    lines = [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join([lines[0], "| --- " * len(cells[0]) + "|", *lines[1:]])


def told(asked: argparse.Namespace, folder: Path = HERE) -> str:
    """The table that is asked for, and where its figures come from."""
    runs = [figures(folder / file) for file in asked.files]
    rows = [row for run in runs for row in run["rows"]]
    rows = [row for row in rows if not asked.px or row["size"][0] in asked.px]
    rows = [row for row in rows if not asked.batch or row["batch"] in asked.batch]
    kinds, ways = {plots.kind(row).__name__ for row in rows}, {_way(row) for row in rows}
    expected = {"models"} if asked.headline else MAKES.keys()
    if len(kinds) != 1 or len(ways) != 1 or not kinds <= expected:
        given = ", ".join(sorted(kinds | ways)) or "nothing"
        raise NoTable(f"the files hold {given}: expected {' or '.join(expected)}, all run in one way.")
    cells = (headline if asked.headline else MAKES[kinds.pop()])(rows, asked.only)
    origin = joined([run["origin"] for run in runs])
    whence = ", ".join(f"{name} {value}" for name, value in origin.items() if name not in ("vir", "cuda"))
    files = ", ".join(f"[{Path(file).name}]({file})" for file in asked.files)
    mark = f" {MARK}." if any("~" in cell for line in cells for cell in line) else ""
    return f"{markdown(cells)}\n\n{files}: {ways.pop()}, {whence}.{mark}"


def figures(file: Path) -> dict[str, Any]:
    """A run's rows and their origin."""
    try:
        run = json.loads(file.read_text())
        _ = [plots.kind(row) for row in run["rows"]], run["origin"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoTable(f"{file} is not what vir bench ops, models or hvir writes with --json: {error!r}.") from None
    return run


def refreshed(document: Path) -> str:
    """The text of a document with its tables made anew."""
    read = parser()

    def table(found: re.Match[str]) -> str:
        return f"{found[1]}{told(read.parse_args(shlex.split(found[2])), document.parent)}\n{found[3]}"

    return MARKED.sub(table, document.read_text())


def _way(row: dict[str, Any]) -> str:
    return f"{row['mode']}, {plots.HOW[row['how']]}" if "mode" in row else "milliseconds of the GPU"


def _kinds(only: str | None) -> Sequence[str]:
    return KINDS if only is None else (only,)


def _part(row: dict[str, Any]) -> str:
    """What a model is beside the others of its family: ViT, ceiling, 1D, 2D parallel, ..."""
    first, *rest = row["model"].split()
    return " ".join(rest) if first.startswith("ViR") else first.split("-")[0]


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if value < 0.1 else f"{value:#.3g}"


def _ratio(a: float | None, b: float | None) -> str:
    return f"{a / b:.2f}" if a and b else ""


def _unsure(row: dict[str, Any]) -> str:
    return "~" if row["spread"] > SURE or row["repeats"] == 1 else ""


def _speed(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    speed = row["images_per_second"]
    return f"{_unsure(row)}{speed:,.{0 if speed >= 1000 else 1}f}" if speed else row["missing"]


def _share(row: dict[str, Any] | None, other: dict[str, Any] | None, digits: int = 2) -> str:
    if not row or not other or not row["images_per_second"] or not other["images_per_second"]:
        return ""
    return f"{_unsure(row) or _unsure(other)}{row['images_per_second'] / other['images_per_second']:.{digits}f}"


def _memory(rows: list[dict[str, Any] | None]) -> str:
    sizes = [None if row is None else row["peak_bytes"] for row in rows]
    if not any(sizes):
        return ""
    small = max(size or 0 for size in sizes) < 1e8
    told = ["-" if size is None else f"{size / 1e6:.0f}" if small else f"{size / 1e9:.2f}" for size in sizes]
    return f"{', '.join(told)} {'MB' if small else 'GB'}"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vir.bench.tables", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="what vir bench ops, models or hvir wrote with --json")
    parser.add_argument("--only", choices=KINDS, help="of ops and models: this kind of retention alone")
    parser.add_argument("--px", type=int, action="append", help="of models: this size alone; repeat for several")
    parser.add_argument("--batch", type=int, action="append", help="this batch alone; repeat for several")
    parser.add_argument("--headline", action="store_true", help="of models: how many times as fast as ViT")
    parser.add_argument("--into", type=Path, action="append", help="a Markdown file whose tables are made anew")
    return parser


def main() -> None:
    asked = parser().parse_args()
    try:
        for file in asked.into or ():
            file.write_text(refreshed(file))
        if asked.files or not asked.into:
            print(told(asked))
    except NoTable as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
