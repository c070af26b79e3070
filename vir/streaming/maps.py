"""Results that are written as they come: NumPy files that grow row by row, and a picture of the classes."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

LONGEST_SIDE = 1600  # of the picture
# Okabe and Ito's colours first, then others as far from them as may be.
PALETTE = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000", "#999999", "#7A3E9D",
    "#8C564B", "#17BECF", "#BCBD22", "#AEC7E8", "#FFBB78", "#98DF8A", "#FF9896", "#C5B0D5", "#C49C94", "#DBDB8D",
)  # fmt: skip
OTHERS = "#D9D9D9"


class RowFile:
    """A .npy file of rows x cols x channels in half precision.

    It is written, not mapped: then a full disk is an error and not a crash.
    """

    def __init__(self, file: Path, shape: tuple[int, int, int], again: bool) -> None:
        self.path, self.shape = file, shape
        self.row_bytes = 2 * shape[1] * shape[2]
        self.handle: BinaryIO = file.open("r+b" if again else "wb")
        if not again:
            header = {"descr": "<f2", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(self.handle, header)
            self.first = self.handle.tell()
            return
        np.lib.format.read_magic(self.handle)
        found, _, dtype = np.lib.format.read_array_header_1_0(self.handle)
        if found != shape or dtype != np.float16:
            raise ValueError(f"{file} holds {found} of {dtype}, expected {shape} of float16.")
        self.first = self.handle.tell()

    def write(self, top: int, rows: np.ndarray) -> None:
        self.handle.seek(self.first + top * self.row_bytes)
        self.handle.write(np.ascontiguousarray(rows, dtype="<f2").tobytes())
        self.handle.flush()

    def close(self) -> None:
        with suppress(OSError):  # a full disk was told by write
            self.handle.close()


def draw_classes(scores: Path, classes: Sequence[str], file: Path) -> None:
    """The likeliest class of every patch, or of every few where there are many, with a legend of those that occur."""
    found = np.load(scores, mmap_mode="r")
    step = -(-max(found.shape[:2]) // LONGEST_SIDE)
    best = np.stack([np.asarray(found[row, ::step]).argmax(-1) for row in range(0, found.shape[0], step)])
    draw_map(best, classes, file)


def draw_map(best: np.ndarray, classes: Sequence[str], file: Path) -> None:
    """Every class in the colour of its number; where several would have the same, the rarer ones are grey."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    counts = np.bincount(best.ravel(), minlength=len(classes))
    shown: dict[int, int] = {}  # colours by the number of the class, in every map alike; two never share one
    for index in np.argsort(-counts, kind="stable").tolist():
        if counts[index] and index % len(PALETTE) not in shown:
            shown[index % len(PALETTE)] = index
    colours = np.full((len(classes), 3), to_rgb(OTHERS))
    for place, index in shown.items():
        colours[index] = to_rgb(PALETTE[place])
    rows, cols = best.shape
    longest = max(rows, cols)
    figure = plt.figure(figsize=(10 * cols / longest + 2.5, max(2.0, 10 * rows / longest)), layout="constrained")
    panel = figure.add_subplot()
    panel.imshow(colours[best], interpolation="nearest")
    panel.set_axis_off()
    handles: list[Any] = [
        Patch(color=PALETTE[place], label=f"{classes[index]} {100 * counts[index] / best.size:.0f} %")
        for place, index in shown.items()
    ]
    if others := counts.sum() - counts[list(shown.values())].sum():
        handles.append(Patch(color=OTHERS, label=f"others {100 * others / best.size:.0f} %"))
    figure.legend(handles=handles, loc="outside right upper", frameon=False)
    figure.savefig(file, dpi=110, metadata={"Software": None})
    plt.close(figure)
