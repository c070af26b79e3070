"""The one way in for images: whatever the file holds, an upright RGB image or an error in words comes out; of a mask,
the number of every pixel."""

import io
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

MOST_PIXELS = 512_000_000  # 1.5 GB as RGB

# PIL's pixel limit and Python's warning filters belong to the whole process: one thread at a time may change them.
_PROCESS_SETTINGS = threading.Lock()
if hasattr(os, "register_at_fork"):  # a worker must not be forked while they are changed: it would keep them so
    os.register_at_fork(
        before=_PROCESS_SETTINGS.acquire,
        after_in_parent=_PROCESS_SETTINGS.release,
        after_in_child=_PROCESS_SETTINGS.release,
    )


class UnreadableImage(ValueError):
    """A file that does not hold an image, or not a whole one, or one too large."""


class TooManyPixels(UnreadableImage):
    """Found in the header: no pixel was read."""


def open_image(source: Path | str | bytes | BinaryIO, *, most_pixels: int = MOST_PIXELS) -> Image.Image:
    """Read an image, the first one where there are several, as upright RGB; a file object is read from its start."""
    name = _name_of(source)
    with _in_words(name, most_pixels):
        with _opened(source, name) as file:
            image = _load_upright(file, name, most_pixels)
        return _to_rgb(image)


def open_numbers(source: Path | str | bytes | BinaryIO, *, most_pixels: int = MOST_PIXELS) -> np.ndarray:
    """Read a mask: one whole number per pixel, as stored; of a palette the indices count and not the colours."""
    name = _name_of(source)
    with _in_words(name, most_pixels), _opened(source, name) as file:
        with _pil_settings(most_pixels), _read_header(file, name) as image:
            _check_size(image, name, most_pixels)
            if image.mode not in NUMBERS:
                raise UnreadableImage(
                    f"{name} has {len(image.getbands())} channels ({image.mode}), expected one whole number per pixel. "
                    "Save the mask as a grey or palette PNG."
                )
            numbers = np.array(image)
        return numbers.astype(np.uint8) if numbers.dtype == bool else numbers


NUMBERS = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L")  # PIL's modes with one whole number per pixel


@dataclass(frozen=True)
class Header:
    """The size of an image as stored, and how it is to be turned to stand upright (EXIF's number, 1: not at all)."""

    width: int
    height: int
    orientation: int

    @property
    def upright(self) -> tuple[int, int]:
        return (self.height, self.width) if self.orientation > 4 else (self.width, self.height)


def read_header(source: Path | str | bytes | BinaryIO, *, most_pixels: int = MOST_PIXELS) -> Header:
    """What open_image would do with an image, without its pixels."""
    name = _name_of(source)
    with (
        _in_words(name, most_pixels),
        _opened(source, name) as file,
        _pil_settings(most_pixels),
        _read_header(file, name) as image,
    ):
        _check_size(image, name, most_pixels)
        return Header(image.width, image.height, _noted_orientation(image))


def _noted_orientation(image: Image.Image) -> int:
    try:
        noted = image.getexif().get(ExifTags.Base.Orientation, 1)
    except MemoryError:
        raise
    except Exception:  # a spoilt note does not spoil the pixels
        return 1
    return noted if noted in range(1, 9) else 1


def turned(values: np.ndarray, orientation: int) -> np.ndarray:
    """Turn the last two axes, rows and columns, as open_image turns an image of this orientation."""
    if orientation > 4:
        values = values.swapaxes(-1, -2)
    if orientation in (2, 3, 6, 7):
        values = values[..., ::-1]
    if orientation in (3, 4, 7, 8):
        values = values[..., ::-1, :]
    return np.ascontiguousarray(values)


@contextmanager
def _in_words(name: str, most_pixels: int) -> Iterator[None]:
    """Whatever goes wrong with a file becomes an error in words."""
    try:
        yield
    except UnreadableImage:
        raise
    except MemoryError as error:
        raise UnreadableImage(
            f"{name} does not fit into the free memory. Free some, or make the image smaller."
        ) from error
    except Image.DecompressionBombError as error:
        raise TooManyPixels(
            f"{name} is too large, expected at most {most_pixels:,} pixels. {error} "
            "Make it smaller, or raise most_pixels if you trust the file."
        ) from error
    except Exception as error:  # PIL's formats raise whatever their parsers stumble over, IndexError and zlib.error too
        raise UnreadableImage(
            f"{name} is damaged or cut short ({str(error) or type(error).__name__}), expected a whole image. "
            "Fetch it again or leave it out."
        ) from error


def _name_of(source: Path | str | bytes | BinaryIO) -> str:
    if isinstance(source, Path | str):
        return str(source)
    if isinstance(source, bytes):
        return f"The image of {len(source)} bytes"
    return str(getattr(source, "name", "The image in the file object"))


@contextmanager
def _opened(source: Path | str | bytes | BinaryIO, name: str) -> Iterator[BinaryIO]:
    """The source as a file, closed afterwards only if it was opened here."""
    if isinstance(source, bytes):
        yield io.BytesIO(source)
    elif isinstance(source, Path | str):
        with _open_file(Path(source), name) as file:
            yield file
    else:
        yield source


def _open_file(path: Path, name: str) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise UnreadableImage(f"{name} does not exist, expected an image file. Check the path.") from error
    except IsADirectoryError as error:
        raise UnreadableImage(f"{name} is a directory, expected an image file. Pass one of its files.") from error
    except (OSError, ValueError) as error:
        raise UnreadableImage(f"{name} cannot be opened ({error}). Check the path and who may read it.") from error


def _load_upright(file: BinaryIO, name: str, most_pixels: int) -> Image.Image:
    """Decode the first image of a file, in the mode it was written in."""
    with _pil_settings(most_pixels), _read_header(file, name) as image:
        _check_size(image, name, most_pixels)
        image.load()
        _turn_upright(image)
        return image


@contextmanager
def _pil_settings(most_pixels: int) -> Iterator[None]:
    """Our limit in place of PIL's and no warnings, for one image at a time; both are put back."""
    with _PROCESS_SETTINGS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        limit = Image.MAX_IMAGE_PIXELS
        # PIL warns above its limit and refuses above twice that, before it reserves memory for the pixels.
        Image.MAX_IMAGE_PIXELS = (most_pixels + 1) // 2
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _read_header(file: BinaryIO, name: str) -> Image.Image:
    try:
        image = Image.open(file)
        if image.format == "EPS":  # PIL would run Ghostscript on it
            raise UnreadableImage(f"{name} is PostScript, a program and not pixels. Convert it to PNG.")
        return image
    except UnidentifiedImageError as error:
        if file.seekable() and file.seek(0, os.SEEK_END) == 0:
            raise UnreadableImage(f"{name} is empty, expected an image. Fetch it again or leave it out.") from error
        raise UnreadableImage(
            f"{name} is not an image that can be read, expected JPEG, PNG, WebP, GIF, TIFF or another format of PIL. "
            "Convert it or leave it out."
        ) from error


def _check_size(image: Image.Image, name: str, most_pixels: int) -> None:
    if image.width * image.height > most_pixels:  # PIL lets one pixel too many pass where the limit is odd
        raise TooManyPixels(
            f"{name} is too large, expected at most {most_pixels:,} pixels. It is {image.width} x {image.height}. "
            "Make it smaller, or raise most_pixels if you trust the file."
        )


def _turn_upright(image: Image.Image) -> None:
    """Apply the orientation that the camera noted, if its note can be read."""
    try:
        # In place the pixels are turned before the note is rewritten, so a note that cannot be rewritten does no harm.
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:  # a spoilt note does not spoil the pixels
        return


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        rgb = _integers_to_grey(image).convert("RGB")
    elif image.mode == "F":
        rgb = _stretch_to_grey(np.asarray(image)).convert("RGB")
    elif image.has_transparency_data:
        rgb = _over_white(image)
    else:
        rgb = image.convert("RGB")
    rgb.info = {}  # what was noted of the file, such as its orientation, no longer holds
    return rgb


def _over_white(image: Image.Image) -> Image.Image:
    rgba = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(rgba, mask=rgba.getchannel("A"))
    return white


def _integers_to_grey(image: Image.Image) -> Image.Image:
    """Bring 0..65535 to 0..255; wider integers have no agreed white and are stretched."""
    values = np.asarray(image)
    if values.min() < 0 or values.max() > 65535:
        return _stretch_to_grey(values)
    nearest = np.rint(np.arange(65536) / 257).astype(np.uint8)  # 65535 = 257 * 255
    grey = nearest[values]
    if "transparency" in image.info:  # a PNG may declare one value transparent
        grey[values == image.info["transparency"]] = 255
    return Image.fromarray(grey)


def _stretch_to_grey(values: np.ndarray) -> Image.Image:
    """Bring the smallest finite value to 0 and the largest to 255; a constant image becomes black."""
    finite = values[np.isfinite(values)].astype(np.float64)  # float32 would overflow at large ranges
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
    if low == high:
        return Image.fromarray(np.zeros(values.shape, np.uint8))
    bounded = np.clip(np.nan_to_num(values.astype(np.float64), nan=low), low, high)
    return Image.fromarray(np.rint((bounded - low) / (high - low) * 255).astype(np.uint8))
