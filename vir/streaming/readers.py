"""Pixels by windows of rows, from the top down: files of any size through libvips, NumPy files, your own objects."""

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vir.data.images import UnreadableImage
from vir.streaming.channels import check_channels

NUMPY = ".npy"


@runtime_checkable
class Reader(Protocol):
    """Anything that knows its shape, height and width first, and gives rows `start` to `stop` as height width 3."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read_rows(self, start: int, stop: int) -> np.ndarray: ...


def open_reader(image: Path | str | np.ndarray) -> "ArrayReader | VipsReader":
    """An array or .npy file of height x width (x channels), or a file that libvips reads: TIFF, SVS, JPEG, PNG, ..."""
    if isinstance(image, np.ndarray):
        return ArrayReader(image)
    if not isinstance(image, str | Path):
        raise UnreadableImage(
            f"a {type(image).__name__} cannot be read by rows, expected the path of an image, a NumPy array of height "
            "x width x 3 of uint8, or an object with shape and read_rows(start, stop). Convert it, such as by "
            "numpy.asarray."
        )
    path = Path(image)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise UnreadableImage(f"{path} {what}, expected an image file. Check the path.")
    if path.stat().st_size == 0:
        raise UnreadableImage(f"{path} is empty, expected an image. Fetch it again.")
    return ArrayReader.of_file(path) if path.suffix.lower() == NUMPY else VipsReader(path)


class ArrayReader:
    """An array, in memory or mapped from a file: grey or RGB of 8 or 16 bit, or RGBA of 8.

    Four channels of 16 bit are a satellite's more often than an image with transparency, and an array cannot say.
    """

    def __init__(self, pixels: np.ndarray, name: str = "the array") -> None:
        channels = pixels.shape[2] if pixels.ndim == 3 else 1
        known = {np.dtype(np.uint8): (1, 3, 4), np.dtype(np.uint16): (1, 3)}.get(pixels.dtype, ())
        if pixels.ndim not in (2, 3) or channels not in known:
            raise UnreadableImage(
                f"{name} has shape {pixels.shape} and numbers of {pixels.dtype}, expected height x width, or with 1 "
                "(grey) or 3 (RGB) channels behind, of uint8 or uint16, or 4 (RGBA) of uint8. Choose its channels, "
                "such as by array[..., :3], and convert its numbers."
            )
        if 0 in pixels.shape:
            raise UnreadableImage(f"{name} has shape {pixels.shape}: it holds no pixels.")
        self.pixels, self.name = pixels, name

    @classmethod
    def of_file(cls, path: Path) -> "ArrayReader":
        try:
            return cls(np.load(path, mmap_mode="r", allow_pickle=False), str(path))
        except (ValueError, OSError, EOFError) as error:
            if isinstance(error, UnreadableImage):
                raise
            raise UnreadableImage(f"{path} is not a whole NumPy file ({error}). Save it again.") from None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.pixels.shape

    @property
    def dtype(self) -> np.dtype:
        return self.pixels.dtype

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        rows = np.asarray(self.pixels[start:stop])
        rows = rows[..., None] if rows.ndim == 2 else rows
        if rows.shape[2] == 4:
            return _over_white(rows)
        return rows if rows.shape[2] == 3 else rows.repeat(3, axis=2)


def _over_white(rgba: np.ndarray) -> np.ndarray:
    white = np.iinfo(rgba.dtype).max
    share = rgba[..., 3:].astype(np.float32) / white
    mixed = rgba[..., :3].astype(np.float32) * share + white * (1 - share)
    return np.rint(mixed).astype(rgba.dtype)


class VipsReader:
    """A file read in order by libvips, which keeps a few lines in memory, however large the image is."""

    def __init__(self, path: Path) -> None:
        try:
            import pyvips
        except (ImportError, OSError) as error:
            raise UnreadableImage(
                f"{path} is read through libvips, which is not there ({error}): pip install 'pyvips[binary]'."
            ) from None
        self.path, self.name, self.error = path, str(path), pyvips.Error
        try:
            self.image = self._as_rgb(self._open(pyvips))
            self.window = pyvips.Region.new(self.image)  # one for all rows: each new one would begin at the top
        except pyvips.Error as error:
            raise UnreadableImage(
                f"{path} cannot be read as an image ({_last_line(error)}). Check that it is one, or fetch it again."
            ) from None

    def _open(self, pyvips: Any) -> Any:
        image = pyvips.Image.new_from_file(str(self.path), access="sequential", fail_on="error")
        turned = image.get_typeof("orientation") != 0 and image.get("orientation") > 1
        if not turned:
            return image
        # What a camera turned is not read in order: libvips unpacks it into a file on the disk if it is large.
        return pyvips.Image.new_from_file(str(self.path), access="random", fail_on="error").autorot()

    def _as_rgb(self, image: Any) -> Any:
        if image.format not in ("uchar", "ushort"):
            raise UnreadableImage(
                f"{self.path} holds numbers of the kind {image.format}, expected 8 or 16 bit. Scale it to 8 bit first."
            )
        transparent = check_channels(image, self.path)
        self.tiff_transparency = transparent and str(image.get("vips-loader")).startswith("tiff")
        if image.interpretation == "cmyk":
            image = image.colourspace("srgb")
        if transparent:
            white = 65535 if image.format == "ushort" else 255
            image = image.flatten(background=white, max_alpha=white)
        return image.bandjoin([image, image]) if image.bands == 1 else image

    @property
    def shape(self) -> tuple[int, ...]:
        return self.image.height, self.image.width, 3

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint8 if self.image.format == "uchar" else np.uint16)

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        try:
            found = self.window.fetch(0, start, self.image.width, stop - start)
        except self.error as error:
            raise UnreadableImage(
                f"{self.path} breaks off between rows {start} and {stop} of {self.image.height}: {_last_line(error)}"
            ) from None
        return np.frombuffer(found, self.dtype).reshape(stop - start, self.image.width, 3)


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
