"""Pictures of a training run: its curves, what it mixes up, and its worst mistakes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from vir.train.history import SCORES, Points, Row, points_of, read_log

# Okabe and Ito's colours: told apart by colour-blind readers and in grey.
BLUE, ORANGE, VERMILION, GREEN, GREY = "#0072B2", "#E69F00", "#D55E00", "#009E73", "#999999"
DPI = 150

LONGEST_NAME = 24
MOST_COUNTED, MOST_NAMED = 20, 60  # classes: beyond these, numbers and names are too small to read

COLUMNS, MOST_SHOWN = 6, 24
THUMBNAIL, ACROSS, DOWN = 1.6, 1.75, 2.15  # inches: a picture, and from one to the next


def curves(log: Path, file: Path) -> None:
    """Loss, learning rate and accuracy against the epoch, with the best validation marked."""
    rows = read_log(log)
    if not rows:
        return _note("no epoch has finished yet", file)
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=(10, 4), sharex=True, layout="constrained")
    figure.get_layout_engine().set(wspace=0.06)
    _draw(left, points_of(rows, "loss"), VERMILION, "training loss")
    _draw(left, points_of(rows, "val_loss"), BLUE, "validation loss")
    left.set_ylabel("loss")
    rate = _learning_rate(left, points_of(rows, "lr"))
    _accuracy(right, rows)
    if len({row["epoch"] for row in rows}) == 1:
        left.set_xlim(rows[0]["epoch"] - 1, rows[0]["epoch"] + 1)  # by itself the axis would count in hundredths
    for panel, more in ((left, rate), (right, [])):
        panel.set_xlabel("epoch")
        panel.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.3)
        # Above the panel, where no curve can run into it.
        lines = [*panel.lines, *more]
        named = [line for line in lines if not line.get_label().startswith("_")]
        panel.legend(handles=named, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, borderaxespad=0.2)
    _save(figure, file)


def _draw(panel: Any, points: Points, colour: str, label: str, **style: Any) -> list[Any]:
    if not points:
        return []
    few = {"marker": "o", "markersize": 4} if len(points) <= 30 else {}  # a line of one point would not be seen
    return panel.plot(*zip(*points, strict=True), **{**few, **style}, color=colour, label=label)


def _learning_rate(panel: Any, points: Points) -> list[Any]:
    """A thin grey line behind the losses, with its own scale on the right."""
    if not points:
        return []
    twin = panel.twinx()
    panel.set_zorder(twin.get_zorder() + 1)
    panel.patch.set_visible(False)
    line = _draw(twin, points, GREY, "learning rate", linewidth=1, markersize=2)
    twin.set_ylim(0, 1.05 * max(y for _, y in points) or 1)
    twin.set_ylabel("learning rate", color="#666666")
    twin.tick_params(axis="y", colors="#666666")
    twin.yaxis.get_major_locator().set_params(nbins=5)
    twin.yaxis.set_major_formatter(lambda rate, _: f"{rate:.3g}")  # no power of ten above the axis: the legend is there
    twin.spines[["top", "left"]].set_visible(False)
    twin.spines["right"].set_color(GREY)
    return line


def _accuracy(panel: Any, rows: list[Row]) -> None:
    training = points_of(rows, "train_top1")
    scores = {words: points for name, words in SCORES.items() if (points := points_of(rows, name))}
    _draw(panel, training, VERMILION, "training top-1")
    for (words, points), colour in zip(scores.items(), (BLUE, GREEN), strict=False):
        _draw(panel, points, colour, words)
    panel.set_ylabel("top-1 (%)" if training or "validation top-1" in scores else "%")
    panel.margins(y=0.12)  # room for the number at the best epoch
    if scores:
        _mark_best(panel, training, next(iter(scores.values())))
    if not training and not scores:
        panel.set_axis_off()
        panel.text(0.5, 0.5, "no accuracy in the log", transform=panel.transAxes, ha="center", color="#666666")


def _mark_best(panel: Any, training: Points, validation: Points) -> None:
    epoch, best = max(validation, key=lambda point: point[1])
    panel.plot(epoch, best, marker="o", markersize=9, color=ORANGE, markeredgecolor="black", zorder=3)
    # The number goes to the side where the training curve is not, and never out of the panel.
    side = -1 if dict(training).get(epoch, -math.inf) > best else 1
    start, end = panel.get_xlim()
    place = (epoch - start) / (end - start)
    panel.annotate(
        f"best: {best:.1f} % (epoch {epoch:g})",
        (epoch, best),
        (0, 9 if side > 0 else -16),
        textcoords="offset points",
        ha="left" if place < 0.2 else "right" if place > 0.8 else "center",
        va="bottom" if side > 0 else "top",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.6, "pad": 1},
    )


def confusion(counts: np.ndarray, classes: list[str], file: Path) -> None:
    """How often each class (a row) was answered with each class (a column)."""
    counts = np.asarray(counts)
    size = len(classes)
    if counts.shape != (size, size):
        raise ValueError(f"{size} classes need counts of shape ({size}, {size}), not {counts.shape}.")
    if not size:
        return _note("no classes", file)
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.full(counts.shape, np.nan), where=totals > 0)
    cell = _cell(size)
    side = cell * size
    # The matrix fills the figure; names and scale hang over its edge, and saving makes room for them.
    figure = _pyplot().figure(figsize=(side, side))
    panel = figure.add_axes((0, 0, 1, 1))
    picture = panel.imshow(shares, cmap=_blues(), norm=_root(), aspect="equal")
    scale = panel.inset_axes((1 + 0.15 / side, 0, 0.15 / side, 1))
    ticks = [0, 0.05, 0.25, 0.5, 0.75, 1]
    figure.colorbar(picture, cax=scale, ticks=ticks, format=lambda share, _: f"{100 * share:.0f} %")
    scale.minorticks_off()
    scale.set_ylabel("share of the true class")
    panel.set(xlabel="answer", ylabel="truth")
    _name_classes(panel, classes)
    if size <= MOST_COUNTED:
        _write_counts(panel, counts, shares, cell)
    _save(figure, file)


def _cell(size: int) -> float:
    """The side of a cell in inches: room for a number, or for a name, or all of them in one page."""
    if size <= MOST_COUNTED:
        return min(1.5, max(0.42, 4.2 / size))
    return 0.19 if size <= MOST_NAMED else 6.5 / size


def _blues() -> Any:
    """Pale at nothing, dark at all: a row without examples, which stays white, is not taken for one without hits."""
    from matplotlib.colors import LinearSegmentedColormap

    shades = ["#EDF4FA", "#6FB1D9", BLUE, "#00395A"]
    return LinearSegmentedColormap.from_list("blues", shades).with_extremes(bad="white")


def _root() -> Any:
    """Colours go with the root of the share: the few per cent of a mix-up are what one looks for."""
    from matplotlib.colors import PowerNorm

    return PowerNorm(0.5, vmin=0, vmax=1)


def _name_classes(panel: Any, classes: list[str]) -> None:
    if len(classes) > MOST_NAMED:
        panel.set(xticks=[], yticks=[])
        return
    counted = len(classes) <= MOST_COUNTED
    names, places = [_shorten(name) for name in classes], range(len(classes))
    font = {"fontsize": 9 if counted else 7, "parse_math": False}  # a $ in a name is a dollar
    slant = {"rotation": 45 if counted else 90, "rotation_mode": "anchor", "ha": "right"}
    panel.set_xticks(places, names, **font, **slant, va="top" if counted else "center")
    panel.set_yticks(places, names, **font)


def _write_counts(panel: Any, counts: np.ndarray, shares: np.ndarray, cell: float) -> None:
    digits = len(f"{counts.max():.0f}")
    font = min(10.0, 0.9 * 72 * cell / (0.65 * digits))  # the longest number just fits its cell
    for (row, column), share in np.ndenumerate(shares):
        if np.isnan(share):
            continue
        colour = "white" if share > 0.3 else "black" if share else "#7A8A96"  # zeros step back
        panel.text(column, row, f"{counts[row, column]:.0f}", ha="center", va="center", fontsize=font, color=colour)


@dataclass(frozen=True)
class Mistake:
    """An image, what it shows, what the model says it shows, and how sure of it the model is (0 to 1)."""

    image: Path | str
    truth: str
    answer: str
    probability: float


def mistakes(worst: list[Mistake], open_image: Callable[[Path], Image.Image], file: Path) -> None:
    """A sheet of the first mistakes of the list, each with what it is and what the model says."""
    if not worst:
        return _note("no mistakes", file)
    shown = worst[:MOST_SHOWN]
    width, height = COLUMNS * ACROSS, math.ceil(len(shown) / COLUMNS) * DOWN
    figure = _pyplot().figure(figsize=(width, height))
    for index, mistake in enumerate(shown):
        line, column = divmod(index, COLUMNS)
        x, y = column * ACROSS, height - line * DOWN - THUMBNAIL
        panel = figure.add_axes((x / width, y / height, THUMBNAIL / width, THUMBNAIL / height))
        panel.set_axis_off()
        _show(panel, mistake, open_image)
    _save(figure, file)


def _show(panel: Any, mistake: Mistake, open_image: Callable[[Path], Image.Image]) -> None:
    path = Path(mistake.image)
    thumbnail = _thumbnail(path, open_image)
    panel.imshow(thumbnail or Image.new("RGB", (1, 1), "#D0D0D0"), extent=(0, 1, 0, 1))
    if thumbnail is None:
        _fit(panel, 0.55, "", path.name, "", "black")
        _fit(panel, 0.45, "", "does not open", "", "#555555")
    _fit(panel, -0.03, "truth: ", mistake.truth, "", "black")
    _fit(panel, -0.14, "says: ", mistake.answer, f" {100 * mistake.probability:.0f} %", VERMILION)


def _thumbnail(path: Path, open_image: Callable[[Path], Image.Image]) -> Image.Image | None:
    side = round(THUMBNAIL * DPI)
    try:
        with open_image(path) as image:  # or the file of one that breaks off half-way stays open
            return ImageOps.fit(image.convert("RGB"), (side, side))
    except Exception:  # decoders fail in many ways, and none of them is worth the report of a whole training
        return None


def _fit(panel: Any, y: float, before: str, name: str, after: str, colour: str) -> None:
    """A line of text, its name shortened until it is no wider than the panel."""
    text = panel.text(0.5, y, "", ha="center", va="top", fontsize=8.5, color=colour, parse_math=False)
    for length in range(LONGEST_NAME, 0, -1):
        text.set_text(before + _shorten(name, length) + after)
        if text.get_window_extent().width <= panel.get_window_extent().width:
            return


def _shorten(name: str, length: int = LONGEST_NAME) -> str:
    name = "".join(letter if letter.isprintable() else "?" for letter in name)  # folders may be called anything
    return name if len(name) <= length else name[: length - 1].rstrip() + "…"


def _note(words: str, file: Path) -> None:
    """A picture of a few words, where there is nothing to draw."""
    figure = _pyplot().figure(figsize=(5, 2.2))
    figure.text(0.5, 0.5, words, ha="center", va="center", fontsize=16, color="#444444")
    figure.savefig(file, dpi=DPI, metadata={"Software": None})
    _pyplot().close(figure)


def _save(figure: Any, file: Path) -> None:
    # Without the version of matplotlib, the same run gives the same bytes.
    figure.savefig(file, dpi=DPI, bbox_inches="tight", pad_inches=0.15, metadata={"Software": None})
    _pyplot().close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
