"""The log of a run, read back for pictures of it."""

import csv
import math
from pathlib import Path

# What a task is judged by, in per cent: the first decides which model is best.
SCORES = {
    "val_top1": "validation top-1", "val_mask_ap": "validation mask AP", "val_box_ap": "validation box AP",
    "val_miou": "validation mIoU", "val_pixel_accuracy": "validation pixels right",
}  # fmt: skip
READ = ("epoch", "step", "lr", "loss", "train_top1", "val_loss", *SCORES)
Row = dict[str, float]
Points = list[tuple[float, float]]


def read_log(log: Path) -> list[Row]:
    """The complete lines of a log; a step that was repeated after a restart counts as it went the last time."""
    with log.open(newline="", encoding="utf-8", errors="replace") as lines:
        rows = [row for line in csv.DictReader(lines) if (row := _row(line))]
    return list({(row["epoch"], row.get("step")): row for row in rows}.values())


def _row(line: dict[str, str]) -> Row:
    """The numbers of a line, without its empty fields; nothing if it was cut off."""
    if None in line or None in line.values():  # csv's way to say: too many fields, too few
        return {}
    try:
        row = {name: float(line[name]) for name in READ if line.get(name)}
    except ValueError:
        return {}
    return row if "epoch" in row else {}


def points_of(rows: list[Row], name: str) -> Points:
    """By epoch. A loss of nan or inf would take the scale of the panel with it, and is left out."""
    return [(row["epoch"], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]
