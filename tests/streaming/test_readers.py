"""Rows of pixels out of all kinds of files, equal to what PIL reads of them; and what is no image."""

import re
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pyvips
from PIL import Image

from vir.data.images import UnreadableImage, open_image
from vir.streaming import open_reader
from vir.streaming.doubts import doubts
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


def geotiff(file: Path, pixels: np.ndarray, extra: int, rgb: bool = True, big: bool = False) -> Path:
    """What GDAL writes: channels beyond the colours are of the kind `extra`, 0 if nothing is known of them."""
    as_vips(pixels).tiffsave(str(file), bigtiff=big)
    order, content = "<" if sys.byteorder == "little" else ">", bytearray(file.read_bytes())
    # libvips calls all of them transparency: the tags are changed in place.
    long, entry = ("Q", 20) if big else ("I", 12)
    (first,) = struct.unpack_from(order + long, content, 8 if big else 4)
    (entries,) = struct.unpack_from(order + ("Q" if big else "H"), content, first)
    for number in range(entries):
        place = first + (8 if big else 2) + entry * number
        tag, _, count = struct.unpack_from(order + "HH" + long, content, place)
        value = place + entry - struct.calcsize(long)
        if tag == 262:
            struct.pack_into(order + "H", content, value, 2 if rgb else 1)
        if tag == 338 and 2 * count <= struct.calcsize(long):
            struct.pack_into(order + f"{count}H", content, value, *[extra] * count)
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("big", [False, True])
def test_a_fourth_channel_is_transparency_only_where_the_file_says_so(dtype: Any, big: bool, tmp_path: Path) -> None:
    pixels = noise(4, dtype)
    with pytest.raises(UnreadableImage, match=r"4 channels, none of them called transparency.*gdal_translate"):
        open_reader(geotiff(tmp_path / "infrared.tif", pixels, 0, big=big))
    got = by_bands(geotiff(tmp_path / "transparent.tif", pixels, 2, big=big))
    white, share = np.iinfo(dtype).max, pixels[..., 3:] / np.iinfo(dtype).max
    assert np.abs(got - (pixels[..., :3] * share + white * (1 - share))).max() <= 1  # libvips cuts off
    with pytest.raises(UnreadableImage, match="2 channels"):
        open_reader(geotiff(tmp_path / "grey.tif", noise(2, dtype), 0, rgb=False, big=big))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_three_channels_of_a_geotiff_that_are_not_called_rgb(dtype: Any, tmp_path: Path) -> None:
    """So GDAL writes three channels of 16 bit."""
    pixels = noise(3, dtype)
    np.testing.assert_array_equal(by_bands(geotiff(tmp_path / "x.tif", pixels, 0, rgb=False)), pixels)


def test_too_many_channels_are_counted_right(tmp_path: Path) -> None:
    as_vips(noise(13, np.uint16)).tiffsave(str(tmp_path / "x.tif"))
    with pytest.raises(UnreadableImage, match=r"13 channels, expected.*-scale 0 3000 0 255"):
        open_reader(tmp_path / "x.tif")
    with pytest.raises(UnreadableImage, match=r"4\).*uint16, expected"):
        ArrayReader(noise(4, np.uint16))


def test_doubts_are_told(tmp_path: Path) -> None:
    dark = np.random.default_rng(0).integers(1, 3000, (HEIGHT, WIDTH, 3), dtype=np.uint16)
    dark[:100] = 0  # the border, where the satellite saw nothing
    dark[120, :3] = 60_000  # a cloud
    as_vips(dark).tiffsave(str(tmp_path / "dark.tif"))
    for image in (dark, tmp_path / "dark.tif"):
        (told,) = doubts(image)
        assert "nearly black" in told
        (white,) = re.findall(r"-scale 0 (\d+) 0 255", told)
        assert 2900 < int(white) < 3000
    as_vips(noise(4)).tiffsave(str(tmp_path / "transparent.tif"))
    (told,) = doubts(tmp_path / "transparent.tif")
    assert "transparency" in told
    Image.fromarray(noise(4), "RGBA").save(tmp_path / "x.png")
    for fine in (
        tmp_path / "x.png",
        noise(),
        noise(dtype=np.uint16),
        np.zeros((4, 4, 3), np.uint16),
        dark // 16 + 60000,
    ):
        assert doubts(fine) == []


@pytest.mark.parametrize(
    ("channels", "dtype"), [(1, np.uint8), (3, np.uint8), (4, np.uint8), (1, np.uint16), (3, np.uint16)]
)
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
