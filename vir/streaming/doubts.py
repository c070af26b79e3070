"""What may be wrong with an image that can be read, told before hours of streaming: satellites fill files otherwise."""

from pathlib import Path

import numpy as np

from vir.streaming.readers import ArrayReader, VipsReader, open_reader

WHITE = 65535
DARK = WHITE // 4  # 14 bits and fewer
MOST = 0.99  # of the numbers: some are always brighter, such as clouds
ROWS, STEP = 2048, 16  # looked at from the top, some at a time: a row may be long
ENOUGH = 2**22  # numbers that are not zero, as the border of a satellite's image is


def doubts(image: Path | str | np.ndarray) -> list[str]:
    reader = open_reader(image)  # one of its own: files are read in order, and only once
    found = []
    if isinstance(reader, VipsReader) and reader.tiff_transparency:
        found.append(
            f"{reader.name} says of its last channel that it is transparency: what it hides becomes white. Some "
            "programs write that of any fourth channel. If it is something else, choose three, such as by: "
            "gdal_translate -b 1 -b 2 -b 3 in.tif out.tif"
        )
    if reader.dtype == np.uint16 and (dark := _too_dark(reader)):
        found.append(dark)
    return found


def _too_dark(reader: ArrayReader | VipsReader) -> str | None:
    """Reflectances of 3,000, of 65,535, are all but black to a model."""
    counts = np.zeros(WHITE + 1, np.int64)
    height, stop = reader.shape[0], 0
    while stop < min(height, ROWS) and counts.sum() < ENOUGH:
        start, stop = stop, min(stop + STEP, height)
        counts += np.bincount(reader.read_rows(start, stop).ravel(), minlength=WHITE + 1)
        counts[0] = 0
    below = int(np.searchsorted(counts.cumsum(), MOST * counts.sum()))
    if below >= DARK or not counts.any():
        return None
    return (
        f"{reader.name} has 16 bits, where {WHITE} is white, but {MOST:.0%} of its first {stop} rows lie up to "
        f"{below}: the model sees them nearly black. If less is white in it, scale it to 8 bit first, such as by: "
        f"gdal_translate -scale 0 {below} 0 255 -ot Byte in.tif out.tif"
    )
