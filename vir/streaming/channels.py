"""Which channels of a file are colours: a fourth may be transparency, or what a satellite sees in the near infrared."""

import struct
from pathlib import Path
from typing import Any

from PIL.TiffImagePlugin import ImageFileDirectory_v2

from vir.data.images import UnreadableImage

EXTRA_SAMPLES, TRANSPARENCY = 338, (1, 2)  # TIFF's tag of the channels beyond colours, and its names for transparency
# Formats that hold any channels without a word about the last one, which libvips takes for transparency.
MUTE = ("analyze", "csv", "fits", "jp2k", "mat", "nifti", "ppm", "raw", "vips")


def check_channels(image: Any, path: Path) -> bool:
    """Whether the last channel is transparency; the others are grey, RGB or CMYK, or the image is refused.

    libvips cannot be asked: to it three channels that a GeoTIFF does not call RGB are grey with two of transparency.
    """
    colours = 4 if image.interpretation == "cmyk" else 3 if image.bands >= 3 else 1
    beyond = image.bands - colours
    if beyond == 0 or (beyond == 1 and _has_transparency(image, path)):
        return beyond == 1
    scaled = " -scale 0 3000 0 255 -ot Byte" if image.format == "ushort" else ""
    chosen = "-b 1 -b 2 -b 3" if image.bands > 3 else "-b 1"
    told = ", none of them called transparency" if beyond == 1 else ""
    raise UnreadableImage(
        f"{path} has {image.bands} channels{told}, expected 1 (grey), 3 (RGB) or 4 (CMYK), and one more only where the "
        f"file says that it is transparency. Choose what is to be seen, such as by: gdal_translate {chosen}{scaled} "
        "in.tif out.tif" + (" (3000: what is to be white)." if scaled else ".")
    )


def _has_transparency(image: Any, path: Path) -> bool:
    loader = str(image.get("vips-loader"))
    if loader.startswith("tiff"):
        return _last_extra_sample(path) in TRANSPARENCY
    return not loader.startswith(MUTE)


def _last_extra_sample(path: Path) -> int | None:
    """Out of the header of a TIFF, which libvips does not pass on."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            start += file.read(8) if start[2] == 43 else b""  # BigTIFF; Pillow cannot read big-endian ones
            tags = ImageFileDirectory_v2(start)
            file.seek(tags.next)
            tags.load(file)
            return tags[EXTRA_SAMPLES][-1]
    except (OSError, SyntaxError, KeyError, ValueError, struct.error):
        return None
