"""The paper's figures and tables, as far as they can be made: from a model, a photograph, and what was measured before.

Nothing is measured here: benchmarks take a GPU, trainings take days. What they wrote is read.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image
from torch import nn

from vir import ops
from vir.bench import plots
from vir.bench.measure import joined
from vir.checkpoint import Card
from vir.models import hvir
from vir.models.catalog import PAPER_COMPONENTS, entries
from vir.viz.exhibits import Exhibit, Table, page
from vir.viz.horizon import draw_horizon, reaches
from vir.viz.inside import check_classifier, retention_layers
from vir.viz.maps import draw_maps
from vir.viz.masks import draw_masks
from vir.viz.runs import Accuracy, Line, by_size, with_ablations
from vir.viz.shift import draw_shifts
from vir.viz.style import BLUE, COLOUR_OF, CannotDraw, caption, figure_to

INDEX = "index.html"
BATCHES = (16, 128)  # of the paper's figures of throughput
RESOLUTIONS = (224, 384, 512, 768, 1024, 2048, 4096)
# Images a second on an A100, the paper's table of classification; ratios to ConvNeXt-T can be compared with ours.
PAPER_SPEED = {
    "hvir_0": 5012, "hvir_1": 3680, "hvir_2": 2820, "hvir_3": 1510, "hvir_4": 650,
    "convnext_tiny": 3196, "convnext_small": 2008, "convnext_base": 1485,
    "swin_tiny_patch4_window7_224": 2758, "swin_small_patch4_window7_224": 1720,
}  # fmt: skip
Measured = tuple[list[dict[str, Any]], dict[str, Any]]  # rows of a benchmark, and where they come from


@dataclass(frozen=True)
class Sources:
    """What exhibits are made from."""

    model: nn.Module
    card: Card
    photographs: dict[str, Image.Image]
    benchmarks: list[dict[str, Any]] = field(default_factory=list)  # as vir bench wrote them
    trained: list[Accuracy] = field(default_factory=list)
    untrained: dict[tuple[str, str], Line] = field(default_factory=dict)  # at other sizes, by model and kind of decay

    def measured(self, kind: Callable, wanted: Callable[[dict[str, Any]], bool]) -> Measured:
        """The rows that one kind of plot draws, if they are wanted."""
        some = [(one, [r for r in one["rows"] if plots.kind(r) is kind and wanted(r)]) for one in self.benchmarks]
        there = [(one["origin"], rows) for one, rows in some if rows]
        return [row for _, rows in there for row in rows], joined([origin for origin, _ in there])


def read_benchmarks(folder: Path) -> list[dict[str, Any]]:
    """What vir bench wrote with --json; other files are passed over."""
    found = []
    for file in sorted(folder.rglob("*.json")):
        try:
            one = json.loads(file.read_text())
            if isinstance(one["origin"], dict) and all(plots.kind(row) for row in one["rows"]):
                found.append(one)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def make_paper(folder: Path, sources: Sources, say: Callable[[str], None] = lambda step: None) -> list[Exhibit]:
    """All of them into the folder, with a page that shows them in the paper's order."""
    check_classifier(sources.card)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotDraw(f"{folder} cannot be made: {error.strerror}. Name another folder.") from None
    exhibits = []
    for make in EXHIBITS:
        say(make.__name__.replace("_", " "))
        exhibits.append(make(folder, sources))
    words = (
        "Every figure and table of ViR: Towards Efficient Vision Retention Backbones in its order, as far as it can be "
        "made from the given model, benchmarks and trainings; then ours. What could not be made says why."
    )
    (folder / INDEX).write_text(page("The paper's figures, from our own measurements", words, exhibits))
    return exhibits


def receptive_fields(folder: Path, sources: Sources) -> Exhibit:
    gamma = ops.decay(6)[0].item()
    draw_masks(folder / "masks.png", (7, 7), (4, 4), gamma)
    words = (
        "What one patch sees in 1D and in 2D, and the masks of all patches: computed from the definition. The head "
        f"that forgets fastest, gamma = {gamma:.4f}."
    )
    return Exhibit("Receptive fields and masks of 1D and 2D retention", words, ("masks.png",))


def classification(folder: Path, sources: Sources) -> Exhibit:
    rows, origin = sources.measured(
        plots.hierarchy,
        lambda r: r["family"] == "HViR" and tuple(r["size"]) == (224, 224) and r["how"] == "eager",
    )
    speed = {row["model"]: row["images_per_second"] for row in rows if row["images_per_second"]}
    base = speed.get("convnext_tiny")
    lines: list[tuple[str, ...]] = []
    for entry in entries():
        paper = entry.printed
        printed = (f"{paper.params:.1f}", f"{paper.gmacs:.1f}", f"{paper.top1:.1f}") if paper else ("", "", "")
        ours = f"{entry.params:.1f}", f"{entry.gmacs:.1f}"
        lines.append((entry.name, str(entry.size), *ours, *printed, *_ratios(entry.name, speed, base)))
    peers = [name for name in PAPER_SPEED if name in speed and name not in hvir.SIZES]
    lines += [(name, "224", *[""] * 5, *_ratios(name, speed, base)) for name in peers]
    words = (
        "Parameters in millions and multiply-adds in billions, ours and printed; the paper's accuracy on ImageNet, "
        "which is not reproduced here; images a second as a multiple of ConvNeXt-T's, the paper's on an A100 and ours"
        + (f" ({_told(origin)})." if base else ": no benchmark was given, see vir bench hvir --json.")
    )
    head = ("model", "px", "M", "GMACs", "paper: M", "paper: GMACs", "paper: top-1 %", "paper: speed", "our speed")
    return Exhibit("Table of classification", words, table=Table(head, lines))


def _ratios(name: str, speed: dict[str, float], base: float | None) -> tuple[str, str]:
    printed, ours = PAPER_SPEED.get(name), speed.get(name)
    return (
        f"{printed / PAPER_SPEED['convnext_tiny']:.2f}" if printed else "",
        f"{ours / base:.2f}" if ours and base else "",
    )


def detection_and_segmentation(folder: Path, sources: Sources) -> Exhibit:
    words = (
        "COCO and ADE20K are not here. With them: vir train hvir_1_coco --data .. and vir train hvir_1_ade20k "
        "--data .., which have the paper's settings, 1D and 2D."
    )
    return Exhibit("Tables of detection, segmentation, and 1D against 2D on them", words)


def accuracy_and_resolution(folder: Path, sources: Sources) -> Exhibit:
    title = "Accuracy against resolution, 1D and 2D"
    lines = by_size(sources.trained)
    if not lines:
        words = (
            "No ViR trained at several sizes was given: vir train at one size, vir finetune at others, then --runs "
            "with the folder of their cards."
        )
        return Exhibit(title, words)
    styles = {"": "-", "keep": "--", "rescale": ":"}
    drawn = {(name, ""): points for name, points in lines.items()}
    drawn |= {(name, decay): points for (name, decay), points in sources.untrained.items() if name in lines}
    with figure_to(folder / "resolution.png", 8, 4.5) as figure:
        panel = figure.subplots()
        for (name, decay), points in drawn.items():
            colour = COLOUR_OF.get(name.split(", ")[1].lower(), BLUE)
            label = None if decay else name
            panel.plot(*zip(*points, strict=True), marker="o", color=colour, label=label, linestyle=styles[decay])
        for decay, words in {"keep": "decay kept", "rescale": "decay rescaled"}.items():
            if any(of == decay for _, of in drawn):  # both colours have it
                panel.plot([], [], color="0.4", label=f"not fine-tuned, {words}", linestyle=styles[decay])
        panel.set(xlabel="pixels of a side", ylabel="top-1 %")
        panel.set_xticks(sorted({size for points in drawn.values() for size, _ in points}))
        panel.grid()
        panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, fontsize=9)
        caption(figure, "The best accuracy at each size among the trainings given.")
    return Exhibit(title, "In small: not ImageNet, and not ViR-B/16.", ("resolution.png",))


def throughput(folder: Path, sources: Sources) -> Exhibit:
    title = "Throughput against resolution, ViR-B/16 and ViR-L/16 beside ViT"
    rows, origin = sources.measured(
        plots.models,
        lambda r: (
            r["family"] in ("B", "L") and r["batch"] in BATCHES and r["mode"] == "inference" and r["how"] == "eager"
        ),
    )
    if not rows:
        words = (
            "No benchmark was given: vir bench models --model B --model L --batch 16 --batch 128 "
            "--json results/models.json on a CUDA GPU, then --results results."
        )
        return Exhibit(title, words)
    once = {(r["model"], tuple(r["size"]), r["batch"]): r for r in rows}  # of what was measured again, the last
    plots.models(list(once.values()), origin, folder / "throughput.png")
    words = f"Batches of 16 and 128, as in the paper, which measured on an A100. Ours: {_told(origin)}."
    return Exhibit(title, words, ("throughput.png",))


def retention_maps(folder: Path, sources: Sources) -> Exhibit:
    files = []
    for number, image in enumerate(sources.photographs.values()):
        files.append(f"maps_{number}.png")
        draw_maps(folder / files[-1], sources.model, sources.card, image)
    names = ", ".join(sources.photographs)
    words = f"Photographs: {names}. {_accuracy_of(sources.card)}. The paper's are of a model trained on ImageNet."
    return Exhibit("Retention maps", words, tuple(files))


def components(folder: Path, sources: Sources) -> Exhibit:
    title = "Table of components"
    found = with_ablations(sources.trained)
    if len(found) < 2:
        words = (
            "No trainings with changed components were given: vir train --set ablation=gated, no_class_token, "
            "scaled_key or multipass, then --runs with the folder of their cards."
        )
        return Exhibit(title, words)
    variants, origin = sources.measured(plots.hierarchy, lambda r: r["family"].endswith(plots.COMPONENTS))
    speed = {row["model"]: row["images_per_second"] for row in variants}
    rows = []
    for one in found:
        part = one.setting.argument("ablation") or "base"
        paper = PAPER_COMPONENTS[part]
        times = paper.images_per_second / PAPER_COMPONENTS["base"].images_per_second
        ours = f"{speed[part] / speed['base']:.2f}" if speed.get(part) and speed.get("base") else ""
        rows.append((part, one.setting.told, one.told, f"{paper.top1:.1f}", ours, f"{times:.2f}"))
    words = "Top-1 %, the mean and each seed; the paper's are of ViR-B/16 on ImageNet. Speeds as times the base's" + (
        f" ({_told(origin)})." if variants else ": no benchmark was given, see vir bench components --json."
    )
    head = ("component", "model", "ours", "paper", "our speed", "paper: speed")
    return Exhibit(title, words, table=Table(head, rows))


def architecture(folder: Path, sources: Sources) -> Exhibit:
    rows = []
    for name, size in hvir.SIZES.items():
        stages = zip(size["dims"], size["depths"], strict=True)
        rows.append((name, *(f"{width} x {depth}" for width, depth in stages), ", ".join(map(str, size["heads"]))))
    words = (
        "Channels x blocks of each stage, as built; the paper's appendix prints each stage with the next one's width."
    )
    head = ("model", "stage 1", "stage 2", "stage 3", "stage 4", "heads of stages 3 and 4")
    return Exhibit("Table of HViR's architecture", words, table=Table(head, rows))


def trainings(folder: Path, sources: Sources) -> Exhibit:
    title = "Ours: all trainings given"
    if not sources.trained:
        return Exhibit(title, "None was given: --runs takes a folder with the cards (best.json) of trainings.")
    rows = []
    for one in sources.trained:
        budget = one.setting.size, one.setting.epochs, f"{one.setting.rate:g}"
        rows.append((one.setting.data, one.setting.told, *map(str, budget), one.told))
    words = "Top-1 %: the mean, and each seed where there are several."
    return Exhibit(title, words, table=Table(("data", "model", "px", "epochs", "rate", "top-1 %"), rows))


def horizon(folder: Path, sources: Sources) -> Exhibit:
    draw_horizon(folder / "horizon.png", reaches(retention_layers(sources.model)), RESOLUTIONS, sources.card.model)
    return Exhibit("Ours: how far the heads see", "Computed from the decays alone.", ("horizon.png",))


def shifts(folder: Path, sources: Sources) -> Exhibit:
    image = next(iter(sources.photographs.values()))
    draw_shifts(folder / "shift.png", sources.model, sources.card, image, layer=-1, size=448, by=3)
    words = "How much features change when the content moves by whole patches: 2D is equivariant, 1D is not."
    return Exhibit("Ours: shift equivariance", words, ("shift.png",))


EXHIBITS: Sequence[Callable[[Path, Sources], Exhibit]] = (
    receptive_fields, classification, detection_and_segmentation, accuracy_and_resolution, throughput, retention_maps,
    components, architecture, trainings, horizon, shifts,
)  # fmt: skip


def _accuracy_of(card: Card) -> str:
    right = card.metrics.get("top1")
    known = f", {right:.1f} % right on {Path(card.data.get('path', '')).name}" if right else ""
    return f"{card.model} at {card.size} px{known}"


def _told(origin: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in origin.items() if value)
