"""Rows of pixels out of all kinds of files, equal to what PIL reads of them; and what is no image."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pyvips
from PIL import Image

from vir.data.images import UnreadableImage, open_image
from vir.streaming import open_reader
from vir.streaming.readers import ArrayReader

HEIGHT, WIDTH = 150, 70


def noise(channels: int = 3, dtype: Any = np.uint8) -> np.ndarray:
    shape = (HEIGHT, WIDTH, channels) if channels > 1 else (HEIGHT, WIDTH)
    return np.random.default_rng(0).integers(0, np.iinfo(dtype).max, shape, dtype=dtype)


def by_bands(file: Path, step: int = 40) -> np.ndarray:
    reader = open_reader(file)
    height = reader.shape[0]
    return np.concatenate([reader.read_rows(i, min(i + step, height)) for i in range(0, height, step)])


def as_vips(pixels: np.ndarray) -> Any:
    return pyvips.Image.new_from_array(pixels)


TIFFS = {
    "striped.tif": {},
    "tiled.tif": {"tile": True, "tile_width": 32, "tile_height": 32},
    "pyramid.tif": {"tile": True, "pyramid": True, "tile_width": 32, "tile_height": 32},
    "deflate.tif": {"compression": "deflate", "predictor": "horizontal"},
    "big.tif": {"bigtiff": True},
}


@pytest.mark.parametrize("name", TIFFS)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_tiff(name: str, dtype: Any, tmp_path: Path) -> None:
    pixels = noise(dtype=dtype)
    as_vips(pixels).tiffsave(str(tmp_path / name), **TIFFS[name])
    got = by_bands(tmp_path / name)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, pixels)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1"])
def test_png_of_any_mode(mode: str, tmp_path: Path) -> None:
    Image.fromarray(noise()).convert(mode).save(tmp_path / "x.png")
    np.testing.assert_array_equal(by_bands(tmp_path / "x.png"), np.asarray(open_image(tmp_path / "x.png")))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_what_is_transparent_lies_on_white(mode: str, tmp_path: Path) -> None:
    Image.fromarray(noise(4), "RGBA").convert(mode).save(tmp_path / "x.png")
    difference = by_bands(tmp_path / "x.png").astype(int) - np.asarray(open_image(tmp_path / "x.png"))
    assert np.abs(difference).max() <= 1  # both round


def test_jpeg_progressive_grey_and_turned(tmp_path: Path) -> None:
    smooth = np.add.outer(np.arange(HEIGHT), np.arange(WIDTH)).astype(np.uint8)
    for name, options in {"plain": {}, "progressive": {"progressive": True}}.items():
        Image.fromarray(smooth).save(tmp_path / f"{name}.jpg", quality=95, **options)
        got = by_bands(tmp_path / f"{name}.jpg").astype(int)
        assert np.abs(got - np.asarray(open_image(tmp_path / f"{name}.jpg"))).max() <= 2
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    Image.fromarray(smooth).save(tmp_path / "turned.jpg", quality=95, exif=exif)
    got = by_bands(tmp_path / "turned.jpg").astype(int)
    assert got.shape == (WIDTH, HEIGHT, 3)
    assert np.abs(got - np.asarray(open_image(tmp_path / "turned.jpg"))).max() <= 2


def test_cmyk_becomes_rgb(tmp_path: Path) -> None:
    Image.new("CMYK", (WIDTH, HEIGHT), (0, 255, 255, 0)).save(tmp_path / "x.tif")
    red, green, blue = by_bands(tmp_path / "x.tif")[0, 0]
    assert red > 150 > 100 > max(green, blue)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_numpy_files(channels: int, dtype: Any, tmp_path: Path) -> None:
    pixels = noise(channels, dtype)
    np.save(tmp_path / "x.npy", pixels)
    got = by_bands(tmp_path / "x.npy")
    assert got.shape == (HEIGHT, WIDTH, 3)
    assert got.dtype == dtype
    if channels == 3:
        np.testing.assert_array_equal(got, pixels)
    if channels == 1:
        np.testing.assert_array_equal(got[..., 2], pixels)


def test_an_invisible_pixel_is_white() -> None:
    pixels = np.zeros((1, 2, 4), np.uint8)
    pixels[0, 1, 3] = 255
    assert ArrayReader(pixels).read_rows(0, 1).tolist() == [[[255] * 3, [0] * 3]]


@pytest.mark.parametrize("name", ["x.jpg", "x.png", "x.tif"])
def test_a_file_cut_short_is_said_to_be_so(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (900, 400, 3), dtype=np.uint8)).save(file)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UnreadableImage, match=name):
        by_bands(file, 100)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.tif", b"", "empty"),
        ("words.jpg", b"not an image at all", "cannot be read"),
        ("x.npy", b"not numpy", "not a whole NumPy file"),
    ],
)
def test_what_is_no_image_is_said_to_be_none(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UnreadableImage, match=says):
        open_reader(tmp_path / name)


def test_other_mistakes_are_answered_in_words(tmp_path: Path) -> None:
    with pytest.raises(UnreadableImage, match="does not exist"):
        open_reader(tmp_path / "nothing.tif")
    with pytest.raises(UnreadableImage, match="directory"):
        open_reader(tmp_path)
    as_vips(noise().astype(np.float32)).tiffsave(str(tmp_path / "float.tif"))
    with pytest.raises(UnreadableImage, match="8 or 16 bit"):
        open_reader(tmp_path / "float.tif")
    for shape, dtype in (((4, 4, 2), np.uint8), ((4,), np.uint8), ((4, 4, 3), np.float32), ((0, 4, 3), np.uint8)):
        with pytest.raises(UnreadableImage, match="shape"):
            ArrayReader(np.zeros(shape, dtype))
