"""One style for the figures of `vir draw`: colours, letters, and files whose bytes depend on what is drawn alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart by colour-blind readers and in grey.
BLUE, ORANGE, VERMILION, GREEN, GREY, SKY = "#0072B2", "#E69F00", "#D55E00", "#009E73", "#999999", "#56B4E9"
COLOUR_OF = {"1d": BLUE, "2d": VERMILION}
DPI = 150
LETTERS_PER_INCH = 14.5  # of a caption
FORMATS = (".png", ".svg")

SEEN = matplotlib.colormaps["viridis"].with_extremes(bad="#F2F2F2")  # what is never seen is no colour of the scale
# Blue retains with a minus sign, orange with a plus; nothing retained is clear, and what lies below shows through.
SIGNED = LinearSegmentedColormap.from_list(
    "signed", [(0.0, "#0050A0FF"), (0.25, "#0072B2B8"), (0.5, "#FFFFFF00"), (0.75, "#E69F00B8"), (1.0, "#D55E00FF")]
)

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters on every machine
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.labelsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "figure.titlesize": 13,
    "svg.fonttype": "path",
    "svg.hashsalt": "vir",
    "path.simplify": True,
}
METADATA: dict[str, dict[str, Any]] = {".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}}


class CannotDraw(ValueError):
    """What was asked for cannot be drawn: what was given, what was expected, what to do."""


def check_file(file: Path) -> None:
    """Found out before a model runs, not after."""
    if file.suffix.lower() not in FORMATS:
        raise CannotDraw(f"{file} ends in {file.suffix!r}, expected {' or '.join(FORMATS)}. Name such a file.")
    if not file.parent.is_dir():
        raise CannotDraw(f"the folder {file.parent} does not exist: make it, or name another.")


@contextmanager
def figure_to(file: Path, width: float, height: float) -> Iterator[Figure]:
    """An empty figure of so many inches; what was drawn on it when the block ends is in the file."""
    check_file(file)
    # Whatever the user's own settings are; but for the backend, which would not be put back and is not needed.
    settings: Any = {**{name: x for name, x in matplotlib.rcParamsDefault.items() if name != "backend"}, **STYLE}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        # Without dates and versions, the same drawing gives the same bytes.
        figure.savefig(file, dpi=DPI, metadata=METADATA[file.suffix.lower()], facecolor="white")


def caption(figure: Figure, words: str) -> None:
    """What is shown and how it was made, below the panels."""
    lines = wrap(words, int(LETTERS_PER_INCH * figure.get_figwidth()))
    figure.supxlabel("\n".join(lines), fontsize=9, color="#444444", x=0.01, ha="left")


def bare(panel: Any) -> None:
    """A panel that is a picture: no axes."""
    panel.set(xticks=[], yticks=[])
    panel.spines[:].set_visible(False)
