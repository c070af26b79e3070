"""Benchmarks as pictures. Rows come as dictionaries, fresh from a run or out of its JSON file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
HOW = {  # a model runs
    "eager": "eager",
    "recorded": "eager, as CUDA graphs",
    "compiled": "compiled",
    "graphs": "compiled, as CUDA graphs",
}
COMPONENTS = "components"  # how families of a ViR's variants end
# Okabe and Ito's colours: told apart by colour-blind readers and in grey.
COLOURS = {
    "attention": "#999999",
    "best of fla": "#E69F00",
    "kernel 1D": "#0072B2",
    "kernel 2D": "#009E73",
    "PyTorch 1D": "#56B4E9",
    "PyTorch 2D": "#CC79A7",
    "memory limit": "#000000",
}
# What a model's name tells of its colour, the most particular first.
MARKS = {
    "ceiling": "memory limit",
    "parallel": "PyTorch 1D",
    "chunkwise": "PyTorch 2D",
    "1D": "kernel 1D",
    "2D": "kernel 2D",
}
MISSING = {"out of memory": "x", "too slow": "+"}  # what stands at the foot where there is no figure
STREAMED = {
    "1D streamed": "kernel 1D",
    "2D streamed": "kernel 2D",
    "1D in tiles": "best of fla",
    "2D in tiles": "memory limit",
    "parallel": "PyTorch 2D",
}


def operators(rows: Rows, origin: dict[str, Any], file: Path) -> None:
    """Milliseconds of every contender at every shape, forward and backward; wrong ones have none."""
    plt = _pyplot()
    rows = [row for row in rows if row.get("right", True)]
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.5), sharey=True, layout="constrained")
    places = range(len(rows))
    for panel, way in zip(panels, ("forward", "backward"), strict=True):
        for name, colour in COLOURS.items():
            times = [_milliseconds(row, way, name) for row in rows]
            if any(times):
                style = {"marker": "_", "markersize": 22, "markeredgewidth": 2} if name == "memory limit" else {}
                panel.plot(places, times, **{"marker": "o", "linestyle": "none", **style}, color=colour, label=name)
        panel.set_yscale("log")
        panel.set_xticks(places, [f"{row['tokens']:,}\nbatch {row['batch']}" for row in rows])
        panel.set_xlabel("tokens")
        panel.set_title(way)
    panels[0].set_ylabel("milliseconds")
    every_name = panels[0].get_legend_handles_labels()  # gradients have no limit
    panels[1].legend(*every_name, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    _finish(figure, origin, file)


def _milliseconds(row: dict[str, Any], way: str, name: str) -> float | None:
    if name == "memory limit":
        return row["limit"] if way == "forward" else None
    times = row[way]
    if name == "best of fla":
        return min((t for peer, t in times.items() if peer.startswith("fla")), default=None)
    return times.get(name)


def models(rows: Rows, origin: dict[str, Any], file: Path) -> None:
    """Images a second against the side of the image; a mark at the foot where a model was too large or too slow."""
    plt = _pyplot()
    families = list(dict.fromkeys(row["family"] for row in rows))
    ways = {(row["batch"], row["mode"], row["how"]) for row in rows}
    cases = sorted(ways, key=lambda case: (*case[:2], list(HOW).index(case[2])))
    shape = {"nrows": len(families), "ncols": len(cases), "figsize": (1 + 5 * len(cases), 4.5 * len(families))}
    figure, panels = plt.subplots(**shape, squeeze=False, sharey="row", layout="constrained")
    for line, family in zip(panels, families, strict=True):
        sides = sorted({row["size"][0] for row in rows if row["family"] == family})
        speeds = [row["images_per_second"] for row in rows if row["family"] == family and row["images_per_second"]]
        floor = 0.5 * min(speeds, default=1.0)
        for panel, (batch, mode, how) in zip(line, cases, strict=True):
            case = family, batch, mode, how
            mine = [r for r in rows if (r["family"], r["batch"], r["mode"], r["how"]) == case]
            panel.set_visible(bool(mine))
            _models_panel(panel, mine, floor)
            panel.set(xscale="log", yscale="log", xlabel="pixels of a side")
            panel.set_xticks(sides, [str(side) for side in sides])
            panel.minorticks_off()
            panel.set_title(f"{family}: {mode}, batch {batch}, {HOW[how]}")
        line[0].set_ylabel(f"images/s ({', '.join(f'{mark}: {why}' for why, mark in MISSING.items())})")
        # A model may be missing in one of the panels.
        named = {label: mark for panel in line for mark, label in zip(*panel.get_legend_handles_labels(), strict=True)}
        line[-1].legend(named.values(), named, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    _finish(figure, origin, file)


def headline(rows: Rows, origin: dict[str, Any], file: Path) -> None:
    """How many times as fast as ViT a ViR is, against the side of the image: at the largest batch that both ran."""
    plt = _pyplot()
    figure, panel = plt.subplots(figsize=(8, 4), layout="constrained")
    speed = {(row["model"], row["size"][0], row["batch"]): row["images_per_second"] for row in rows}
    rivals = {(px, batch) for (name, px, batch), value in speed.items() if name.startswith("ViT") and value}
    for name in dict.fromkeys(row["model"] for row in rows):
        if not name.endswith(("1D", "2D")):
            continue
        rival = name.replace("ViR", "ViT").rpartition(" ")[0]
        shared = {px: max(b for p, b in rivals if p == px and speed.get((name, p, b))) for px, _ in rivals}
        points = sorted((px, speed[name, px, b] / speed[rival, px, b]) for px, b in shared.items())
        colour = COLOURS[MARKS[name[-2:]]]
        panel.plot(*zip(*points, strict=True), marker="o", linewidth=2.5, color=colour, label=name)
        panel.annotate(
            f"{points[-1][1]:.1f} times", points[-1], (9, 0), textcoords="offset points", va="center", color=colour
        )  # fmt: skip
    panel.axhline(1, color=COLOURS["attention"], linestyle="--", label=f"{rival} with SDPA")
    sides = sorted({px for px, _ in rivals})
    panel.set(xscale="log", xlabel="pixels of a side", ylabel="images/s, times ViT")
    batches = {side: max(batch for px, batch in rivals if px == side) for side in sides}
    panel.set_xticks(sides, [f"{side}\nbatch {batches[side]}" for side in sides])
    panel.minorticks_off()
    panel.set_xlim(right=1.5 * sides[-1])  # room for the words
    panel.legend(frameon=False, loc="upper left")
    _finish(figure, origin, file)


def _models_panel(panel: Any, rows: Rows, floor: float) -> None:
    for index, name in enumerate(dict.fromkeys(row["model"] for row in rows)):
        mine = [row for row in rows if row["model"] == name]
        ran = [(row["size"][0], row["images_per_second"]) for row in mine if row["images_per_second"]]
        colour = next((COLOURS[key] for mark, key in MARKS.items() if mark in name), COLOURS["attention"])
        style = "--" if "ceiling" in name else "-"
        panel.plot(*zip(*ran, strict=True) if ran else ([], []), marker="o", color=colour, label=name, linestyle=style)
        for why, mark in MISSING.items():
            at = [row["size"][0] for row in mine if row["missing"] == why]
            panel.plot(at, [floor * 0.7**index] * len(at), marker=mark, linestyle="none", color=colour)


def hierarchy(rows: Rows, origin: dict[str, Any], file: Path) -> None:
    """Images a second of HViR and its peers, or of a ViR's variants, as bars, the fastest on top."""
    plt = _pyplot()
    sizes = list(dict.fromkeys((row["family"], tuple(row["size"]), row["how"]) for row in rows))
    figure, panels = plt.subplots(
        1, len(sizes), figsize=(1 + 5 * len(sizes), 5), squeeze=False, layout="constrained"
    )  # fmt: skip
    for panel, (family, size, how) in zip(panels[0], sizes, strict=True):
        case = family, size, how
        mine = [r for r in rows if (r["family"], tuple(r["size"]), r["how"]) == case and r["images_per_second"]]
        mine = sorted((r for r in mine if "ceiling" not in r["model"]), key=lambda r: r["images_per_second"])
        ours = [COLOURS["kernel 2D"] if r["model"].startswith(("hvir", "base")) else COLOURS["attention"] for r in mine]
        panel.barh([r["model"] for r in mine], [r["images_per_second"] for r in mine], color=ours)
        panel.set_xlabel("images/s")
        panel.set_title(f"{family}: {size[0]} x {size[1]} px, {HOW[how]}")
    _finish(figure, origin, file)


def streaming(rows: Rows, origin: dict[str, Any], file: Path) -> None:
    """Peak memory and speed against the size of the image; a cross at the last size before a contender gave up."""
    plt = _pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for name in dict.fromkeys(row["contender"] for row in rows):
        mine = [row for row in rows if row["contender"] == name]
        ran = [row for row in mine if row["megapixels_per_second"]]
        colour = next((COLOURS[key] for mark, key in STREAMED.items() if mark in name), COLOURS["attention"])
        sizes = [row["height"] * row["width"] / 1e6 for row in ran]
        for panel, values in (
            (panels[0], [(row["peak_bytes"] or 0) / 1e9 for row in ran]),
            (panels[1], [row["megapixels_per_second"] for row in ran]),
        ):
            panel.plot(sizes, values, marker="o", color=colour, label=name)
            if ran and len(ran) < len(mine):
                panel.plot(sizes[-1:], values[-1:], marker="x", markersize=14, color=colour)
    measured = sorted({row["height"] * row["width"] / 1e6 for row in rows})
    for panel, title, unit in zip(panels, ("peak memory", "speed"), ("GB", "megapixels/s"), strict=True):
        note = "megapixels (x: larger ones were left out)"
        panel.set(xscale="log", yscale="log", xlabel=note, ylabel=unit, title=title)
        panel.set_xticks(measured, [f"{size:,.0f}" for size in measured])
        panel.minorticks_off()
    panels[1].legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    _finish(figure, origin, file)


def kind(row: dict[str, Any]) -> Callable[[Rows, dict[str, Any], Path], None]:
    """What draws such a row; a KeyError where nothing does, as of files written before rows said how models ran."""
    if "forward" in row:
        return operators
    if "contender" in row:
        return streaming
    if row["how"] not in HOW:
        raise KeyError(row["how"])
    return hierarchy if "HViR" in row["family"] or row["family"].endswith(COMPONENTS) else models


def _finish(figure: Any, origin: dict[str, Any], file: Path) -> None:
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.3, which="major")
    told = ", ".join(f"{key} {value}" for key, value in origin.items() if value)
    figure.text(0.01, -0.03, told, fontsize=7, color="grey")
    figure.savefig(file, dpi=150, bbox_inches="tight")
    _pyplot().close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
