"""A sheet of photographs, each with what the model takes it for."""

from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from vir.answers import Classes

BLUE, GREY = "#0072B2", "#C8D3DB"
COLUMNS, SIDE, BARS = 3, 2.6, 0.75  # pictures of a row; inches of a picture, and of the bars under it
DPI = 110


def draw(shown: list[tuple[str, Image.Image, Classes]], remark: str, file: Path) -> None:
    """Pictures with their names, and under each the most probable classes as bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns, rows = min(COLUMNS, len(shown)), -(-len(shown) // COLUMNS)
    across, down, foot = SIDE + 0.3, SIDE + BARS + 0.55, 0.45
    width, height = columns * across + 0.3, rows * down + foot
    figure = plt.figure(figsize=(width, height))
    for index, (name, picture, answer) in enumerate(shown):
        row, column = divmod(index, columns)
        left, top = 0.3 + column * across, height - 0.35 - row * down
        photo = figure.add_axes((left / width, (top - SIDE) / height, SIDE / width, SIDE / height))
        photo.imshow(ImageOps.fit(picture, (round(SIDE * DPI),) * 2))
        photo.set_title(name, fontsize=10, pad=4, parse_math=False)
        photo.set_axis_off()
        bars = figure.add_axes((left / width, (top - SIDE - BARS) / height, SIDE / width, (BARS - 0.08) / height))
        _draw_bars(bars, answer)
    figure.text(0.3 / width, 0.15 / height, remark, fontsize=8.5, color="#444444", parse_math=False)
    figure.savefig(file, dpi=DPI, metadata={"Software": None})
    plt.close(figure)


def _draw_bars(panel: Any, answer: Classes) -> None:
    shares = answer.probabilities
    panel.barh(range(len(shares)), shares, color=[BLUE] + [GREY] * (len(shares) - 1), height=0.82)
    panel.set(xlim=(0, 1), ylim=(len(shares) - 0.5, -0.5))
    panel.set_axis_off()
    for place, (name, share) in enumerate(zip(answer.names, shares, strict=True)):
        wide = share > 0.75  # then the words stand inside
        panel.text(
            0.02 if wide else share + 0.02, place, f"{name} {100 * share:.0f} %", va="center", fontsize=8.5,
            color="white" if wide and place == 0 else "black", parse_math=False,
        )  # fmt: skip
