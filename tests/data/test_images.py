"""Images of every kind that cameras, scanners and the web produce, and the wrecks that they leave behind."""

import io
import multiprocessing
import os
import struct
import tarfile
import threading
import time
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from vir.data.images import MOST_PIXELS, UnreadableImage, open_image

ORIENTATION = 0x0112
WHITE, BLACK = (255, 255, 255), (0, 0, 0)
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


@pytest.fixture(autouse=True)
def _silence_is_kept() -> Iterator[None]:
    """Any warning that gets out of the decoder fails the test, and PIL's limit is as it was."""
    limit = Image.MAX_IMAGE_PIXELS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert limit == Image.MAX_IMAGE_PIXELS


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def pixels(image: Image.Image) -> list[tuple[int, ...]]:
    """All pixels, row by row, once the image is seen to be what was promised."""
    assert image.mode == "RGB"
    return [tuple(pixel) for pixel in np.asarray(image).reshape(-1, 3).tolist()]


def near(pixel: tuple[int, ...], expected: tuple[int, ...], by: int = 4) -> bool:
    return max(abs(a - b) for a, b in zip(pixel, expected, strict=True)) <= by


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *extra: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(extra) + data + chunk(b"IEND", b"")


# Sources


def test_paths_bytes_and_file_objects_read_alike(tmp_path: Path) -> None:
    image = noise(5, 3)
    file = tmp_path / "photo.png"
    image.save(file)
    for source in (file, str(file), file.read_bytes(), io.BytesIO(file.read_bytes())):
        assert pixels(open_image(source)) == pixels(image)


def test_the_caller_keeps_the_file_object(tmp_path: Path) -> None:
    file = tmp_path / "photo.png"
    noise(5, 3).save(file)
    with file.open("rb") as opened:
        first = open_image(opened)
        assert not opened.closed
        assert pixels(open_image(opened)) == pixels(first)  # from its start again


def test_a_pipe_is_read(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as to:
        to.write(encoded(Image.new("RGB", (2, 2), RED), "PNG"))
    with os.fdopen(reader, "rb") as source:
        assert pixels(open_image(source)) == [RED] * 4


def test_a_member_of_an_archive_is_read(tmp_path: Path) -> None:
    content = encoded(noise(4, 4), "PNG")
    with tarfile.open(tmp_path / "photos.tar", "w") as archive:
        for name in ("a.png", "b.png"):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    with tarfile.open(tmp_path / "photos.tar") as archive:
        extracted = archive.extractfile("b.png")
        assert extracted is not None
        assert pixels(open_image(extracted)) == pixels(noise(4, 4))


def test_the_content_decides_not_the_name(tmp_path: Path) -> None:
    file = tmp_path / "photo.jpg"
    file.write_bytes(encoded(Image.new("RGB", (2, 2), GREEN), "PNG"))
    assert pixels(open_image(file)) == [GREEN] * 4


def test_the_image_outlives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "photo.tif"
    noise(6, 4).save(file)
    image = open_image(file)
    file.unlink()
    assert pixels(image.copy()) == pixels(noise(6, 4))
    assert type(image) is Image.Image  # not one of PIL's files


def test_threads_share_the_decoder() -> None:
    limit, filters = Image.MAX_IMAGE_PIXELS, list(warnings.filters)
    content = encoded(noise(64, 64), "PNG")
    read: list[Image.Image] = []
    threads = [
        threading.Thread(target=lambda: read.extend(open_image(content) for _ in range(10)), daemon=True)
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read) == 40
    assert all(pixels(image) == pixels(noise(64, 64)) for image in read)
    assert (limit, filters) == (Image.MAX_IMAGE_PIXELS, list(warnings.filters))


class SlowFile(io.BytesIO):
    """A file on a slow disk, which tells when its reading has begun."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.begun = threading.Event()

    def read(self, size: int | None = -1, /) -> bytes:
        self.begun.set()
        time.sleep(0.2)
        return super().read(size)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked on POSIX alone")
def test_a_worker_forked_while_an_image_is_read_can_read_too() -> None:
    warnings.filterwarnings("ignore", message=".*multi-threaded.*")  # Python 3.12 on warns of what is tested here
    content = encoded(Image.new("RGB", (2, 2), RED), "PNG")
    slow = SlowFile(content)
    reader = threading.Thread(target=open_image, args=(slow,), daemon=True)
    reader.start()
    assert slow.begun.wait(10)
    worker = multiprocessing.get_context("fork").Process(target=open_image, args=(content,), daemon=True)
    worker.start()
    worker.join(20)
    ended = worker.exitcode
    worker.kill()
    reader.join()
    assert ended == 0


# Orientation


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize(
    ("orientation", "red_at", "turned"),
    [
        (1, "top left", False),
        (2, "top right", False),
        (3, "bottom right", False),
        (4, "bottom left", False),
        (5, "top left", True),
        (6, "top right", True),
        (7, "bottom right", True),
        (8, "bottom left", True),
    ],
)
def test_photos_stand_upright(kind: str, orientation: int, red_at: str, turned: bool) -> None:
    stored = Image.new("RGB", (64, 32), BLUE)
    stored.paste(RED, (0, 0, 16, 16))
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    image = open_image(encoded(stored, kind, exif=exif))
    assert image.size == ((32, 64) if turned else (64, 32))
    right, bottom = image.width - 4, image.height - 4
    corners = {"top left": (3, 3), "top right": (right, 3), "bottom left": (3, bottom), "bottom right": (right, bottom)}
    for corner, at in corners.items():
        assert near(image.getpixel(at), RED if corner == red_at else BLUE, by=12), corner
    assert ORIENTATION not in image.getexif()  # or the next reader turns it once more


@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\0\0nonsense",
        b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + bytes(range(200)),
        b"Exif\0\0II*\0\xff\xff\xff\x7f",
    ],
)
def test_a_spoilt_note_of_the_camera_does_not_spoil_the_photo(exif: bytes) -> None:
    image = open_image(encoded(Image.new("RGB", (16, 8), RED), "JPEG", exif=exif))
    assert image.size == (16, 8)
    assert near(image.getpixel((5, 5)), RED)


def test_a_note_with_tags_that_lead_nowhere_still_turns_the_photo() -> None:
    entries = struct.pack("<HHIHH", ORIENTATION, 3, 1, 6, 0) + struct.pack("<HHII", 0x010F, 2, 8, 0x7FFFFFFF)
    exif = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", 2) + entries + bytes(4)
    content = encoded(Image.new("RGB", (16, 8), RED), "JPEG", exif=exif)
    with pytest.warns(UserWarning, match=r"Truncated|[Cc]orrupt"):
        Image.open(io.BytesIO(content))  # PIL alone complains
    assert open_image(content).size == (8, 16)


# Modes


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "BMP", "WEBP"])
def test_grey(kind: str) -> None:
    assert near(open_image(encoded(Image.new("L", (8, 8), 100), kind)).getpixel((4, 4)), (100, 100, 100))


def test_one_bit() -> None:
    image = Image.new("1", (2, 1))
    image.putpixel((1, 0), 1)
    for kind in ("PNG", "TIFF", "BMP"):
        assert pixels(open_image(encoded(image, kind))) == [BLACK, WHITE]


def test_transparency_lies_over_white() -> None:
    colours = np.array([[[255, 0, 0, 255], [255, 0, 0, 0], [0, 0, 0, 128]]], np.uint8)
    for kind in ("PNG", "TIFF"):
        red, clear, half = pixels(open_image(encoded(Image.fromarray(colours), kind)))
        assert (red, clear) == (RED, WHITE)
        assert near(half, (127, 127, 127), by=1)


def test_grey_with_transparency_lies_over_white() -> None:
    image = Image.new("LA", (3, 1))
    for x, value in enumerate([(50, 255), (50, 0), (0, 128)]):
        image.putpixel((x, 0), value)
    dark, clear, half = pixels(open_image(encoded(image, "PNG")))
    assert (dark, clear) == ((50, 50, 50), WHITE)
    assert near(half, (127, 127, 127), by=1)


def palette_image() -> Image.Image:
    image = Image.new("P", (3, 1))
    image.putpalette([*RED, *GREEN, *BLUE])
    for x in range(3):
        image.putpixel((x, 0), x)
    return image


@pytest.mark.parametrize("kind", ["PNG", "GIF", "TIFF", "BMP"])
def test_palette(kind: str) -> None:
    assert pixels(open_image(encoded(palette_image(), kind))) == [RED, GREEN, BLUE]


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_palette_with_one_transparent_colour(kind: str) -> None:
    assert pixels(open_image(encoded(palette_image(), kind, transparency=1))) == [RED, WHITE, BLUE]


def test_palette_with_a_transparency_for_each_colour() -> None:
    content = encoded(palette_image(), "PNG", transparency=bytes([255, 0, 128]))
    with Image.open(io.BytesIO(content)) as image, pytest.warns(UserWarning, match="Transparency expressed in bytes"):
        image.convert("RGB")  # PIL alone complains
    red, clear, half = pixels(open_image(content))
    assert (red, clear) == (RED, WHITE)
    assert near(half, (127, 127, 255), by=1)


def test_one_transparent_colour_in_a_png_without_palette() -> None:
    key = chunk(b"tRNS", struct.pack(">3H", *RED))
    assert pixels(open_image(png(2, 1, 8, 2, bytes([0, *RED, *BLUE]), key))) == [WHITE, BLUE]


CMYK = {
    (0, 0, 0, 0): WHITE,
    (0, 0, 0, 255): BLACK,
    (255, 0, 0, 0): (0, 255, 255),
    (0, 255, 0, 0): (255, 0, 255),
    (0, 0, 255, 0): (255, 255, 0),
    (0, 255, 255, 0): RED,
}


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
@pytest.mark.parametrize("ink", CMYK)
def test_cmyk(kind: str, ink: tuple[int, int, int, int]) -> None:
    content = encoded(Image.new("CMYK", (16, 16), ink), kind)
    assert near(open_image(content).getpixel((8, 8)), CMYK[ink])


def test_ycck_as_adobe_writes_it() -> None:
    # Adobe stores red ink-inverted: cyan in Y, Cb, Cr, and no black as 255. PIL inverts once more when it saves.
    stored = (179, 171, 1, 255)
    content = bytearray(encoded(Image.new("CMYK", (16, 16), tuple(255 - x for x in stored)), "JPEG", quality=100))
    transform = content.index(b"Adobe") + 11
    assert content[transform] == 0  # CMYK as it is
    content[transform] = 2  # YCCK
    assert near(open_image(bytes(content)).getpixel((8, 8)), RED)


def test_ycbcr_and_lab() -> None:
    assert near(open_image(encoded(Image.new("YCbCr", (8, 8), (76, 85, 255)), "TIFF")).getpixel((4, 4)), RED)
    # In LAB half grey is a lightness of 53 percent.
    assert near(
        open_image(encoded(Image.new("LAB", (8, 8), (136, 128, 128)), "TIFF")).getpixel((4, 4)), (128, 128, 128)
    )


# More than eight bits


@pytest.mark.parametrize(("dtype", "mode"), [("<u2", "I;16"), (">u2", "I;16B"), ("<i4", "I")])
def test_deep_grey_is_scaled_not_clipped(dtype: str, mode: str) -> None:
    image = Image.fromarray(np.array([[0, 257, 32768, 65535]], dtype))
    content = encoded(image, "TIFF")
    with Image.open(io.BytesIO(content)) as opened:
        assert opened.mode == mode
    assert [red for red, _, _ in pixels(open_image(content))] == [0, 1, 128, 255]


def test_deep_grey_png() -> None:
    content = png(3, 1, 16, 0, b"\0" + struct.pack(">3H", 0, 32768, 65535))
    assert pixels(open_image(content)) == [BLACK, (128, 128, 128), WHITE]


def test_deep_grey_png_with_one_transparent_value() -> None:
    content = png(3, 1, 16, 0, b"\0" + struct.pack(">3H", 0, 1, 32768), chunk(b"tRNS", struct.pack(">H", 0)))
    assert pixels(open_image(content)) == [WHITE, BLACK, (128, 128, 128)]


def test_deep_grey_stands_upright() -> None:
    notes = ImageFileDirectory_v2()
    notes[ORIENTATION] = 6
    image = Image.fromarray(np.array([[0, 32768, 65535]], np.uint16))
    upright = open_image(encoded(image, "TIFF", tiffinfo=notes))
    assert upright.size == (1, 3)
    assert [red for red, _, _ in pixels(upright)] == [0, 128, 255]


def test_a_deep_pgm() -> None:
    content = b"P5 3 1 65535\n" + struct.pack(">3H", 0, 32768, 65535)
    assert pixels(open_image(content)) == [BLACK, (128, 128, 128), WHITE]


def test_integers_beyond_sixteen_bits_are_stretched() -> None:
    image = Image.fromarray(np.array([[-100_000, 0, 100_000]], np.int32))
    assert [red for red, _, _ in pixels(open_image(encoded(image, "TIFF")))] == [0, 128, 255]


def test_deep_colour_png() -> None:
    content = png(2, 1, 16, 2, b"\0" + struct.pack(">6H", 65535, 0, 32768, 0, 65535, 257))
    assert pixels(open_image(content)) == [(255, 0, 128), (0, 255, 1)]


@pytest.mark.parametrize(
    ("values", "greys"),
    [
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
        ([0.25, 0.5, 0.75], [0, 128, 255]),
        ([-3e38, 0.0, 3e38], [0, 128, 255]),
        ([7.0, 7.0, 7.0], [0, 0, 0]),
        ([float("nan"), 1.0, 2.0], [0, 0, 255]),
        ([float("-inf"), 1.0, 2.0], [0, 0, 255]),
        ([float("inf"), 1.0, 2.0], [255, 0, 255]),
        ([float("nan")] * 3, [0, 0, 0]),
    ],
)
def test_floats_are_stretched(values: list[float], greys: list[int]) -> None:
    content = encoded(Image.fromarray(np.array([values], np.float32)), "TIFF")
    assert pixels(open_image(content)) == [(grey, grey, grey) for grey in greys]


# Several images in one file


@pytest.mark.parametrize(
    ("kind", "options"), [("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {}), ("TIFF", {}), ("MPO", {})]
)
def test_the_first_of_several_images(kind: str, options: dict[str, bool]) -> None:
    first, second = Image.new("RGB", (16, 16), RED), Image.new("RGB", (16, 16), BLUE)
    content = encoded(first, kind, save_all=True, append_images=[second], **options)
    with Image.open(io.BytesIO(content)) as image:
        assert image.n_frames == 2
    assert near(open_image(content).getpixel((8, 8)), RED)


# What cannot be read


def refused(source: Path | str | bytes | io.BytesIO, most_pixels: int = MOST_PIXELS) -> str:
    with pytest.raises(UnreadableImage) as caught:
        open_image(source, most_pixels=most_pixels)
    return str(caught.value)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.95])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("PNG", {}),
        ("WEBP", {}),
        ("GIF", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("BMP", {}),
    ],
)
def test_a_file_cut_short(tmp_path: Path, kind: str, options: dict[str, object], share: float) -> None:
    content = encoded(noise(200, 150), kind, **options)
    file = tmp_path / "holiday.img"
    file.write_bytes(content[: int(len(content) * share)])
    assert str(file) in refused(file)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_file_cut_short_is_called_so(tmp_path: Path, kind: str) -> None:
    content = encoded(noise(200, 150), kind)
    file = tmp_path / "holiday.img"
    file.write_bytes(content[: len(content) // 2])
    message = refused(file)
    assert f"{file} is damaged or cut short" in message
    assert "Fetch it again or leave it out" in message


def test_a_damaged_checksum() -> None:
    content = bytearray(encoded(noise(20, 20), "PNG"))
    content[20] ^= 1  # in the header: the width no longer is what its checksum says
    assert "The image of" in refused(bytes(content))


def test_text_is_not_an_image(tmp_path: Path) -> None:
    file = tmp_path / "photo.jpg"
    file.write_text("<html>404: not found</html>" * 100)
    message = refused(file)
    assert f"{file} is not an image that can be read" in message
    assert "expected JPEG, PNG" in message


def test_an_empty_file(tmp_path: Path) -> None:
    file = tmp_path / "photo.jpg"
    file.touch()
    assert f"{file} is empty" in refused(file)
    assert "is empty" in refused(b"")
    assert "The image in the file object is empty" in refused(io.BytesIO())


def test_a_missing_file(tmp_path: Path) -> None:
    assert f"{tmp_path / 'photo.jpg'} does not exist" in refused(tmp_path / "photo.jpg")
    assert "photo.jpg does not exist" in refused(str(tmp_path / "photo.jpg"))


def test_a_directory(tmp_path: Path) -> None:
    assert f"{tmp_path} is a directory" in refused(tmp_path)


def test_a_path_that_cannot_be() -> None:
    assert "cannot be opened" in refused("photo\0.jpg")


def test_a_closed_file_object() -> None:
    file = io.BytesIO(encoded(noise(4, 4), "PNG"))
    file.close()
    assert "closed file" in refused(file)


@pytest.mark.parametrize(
    "content",
    [
        png(0, 5, 8, 0, b""),
        png(5, 0, 8, 0, b""),
        b"P5 0 4 255\n",
        b"GIF89a" + bytes(7) + b";",
    ],
    ids=["png without width", "png without height", "pgm", "gif"],
)
def test_no_pixels_at_all(content: bytes) -> None:
    assert f"The image of {len(content)} bytes" in refused(content)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "PPM", "ICO", "TGA"])
def test_damaged_bytes_give_an_image_or_a_refusal(kind: str) -> None:
    whole = np.frombuffer(encoded(noise(24, 24), kind), np.uint8)
    rng = np.random.default_rng(0)
    outcomes = set()
    for _ in range(100):
        damaged = whole.copy()
        at = rng.integers(0, min(len(whole), 200), 4)
        damaged[at] = rng.integers(0, 256, 4)
        try:
            outcomes.add(open_image(damaged.tobytes(), most_pixels=10**6).mode)
        except UnreadableImage:
            outcomes.add("refused")
    assert outcomes <= {"RGB", "refused"}
    assert "refused" in outcomes


# Size


def test_an_image_of_a_size_beyond_the_limit_is_not_decoded() -> None:
    content = png(60_000, 60_000, 8, 2, b"")  # no pixels follow: decoding would call it cut short
    message = refused(content)
    assert "3600000000 pixels" in message
    assert "at most 512,000,000 pixels" in message
    assert "raise most_pixels" in message


def test_the_limit_can_be_set() -> None:
    content = encoded(noise(10, 10), "PNG")
    assert open_image(content, most_pixels=100).size == (10, 10)
    for limit in (99, 98, 10):  # odd and even, just below and far
        assert f"at most {limit} pixels" in refused(content, most_pixels=limit)
    claimed = png(30_000, 30_000, 8, 2, b"")
    assert "900000000 pixels" in refused(claimed)
    assert "cut short" in refused(claimed, most_pixels=30_000**2)  # within the limit it is decoded


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_the_limit_of_pil_does_not_matter(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    content = encoded(noise(10, 10), kind)
    with pytest.raises(Image.DecompressionBombError):
        Image.open(io.BytesIO(content))
    assert pixels(open_image(content)) == pixels(noise(10, 10))
    assert Image.MAX_IMAGE_PIXELS == 10


def test_images_of_200_megapixels_are_read_without_a_word() -> None:
    # PIL alone refuses from 179 megapixels on. One bit each keeps the file small.
    width, height = 16_000, 12_500
    image = open_image(png(width, height, 1, 0, bytes((width // 8 + 1) * height)))
    assert image.size == (width, height)
    assert image.getpixel((width - 1, height - 1)) == BLACK


def test_a_tile_may_be_larger_than_its_image_and_the_limit() -> None:
    width, tile = 10, 64
    tags = [(256, width), (257, width), (258, 8), (259, 1), (262, 1), (277, 1), (322, tile), (323, tile)]
    start = 8 + 2 + 12 * (len(tags) + 2) + 4
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in [*tags, (324, start), (325, tile**2)])
    content = b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags) + 2) + entries + bytes(4) + bytes([7]) * tile**2
    assert pixels(open_image(content, most_pixels=width**2)) == [(7, 7, 7)] * width**2


def test_an_icon_may_not_hide_a_huge_image() -> None:
    hidden = png(60_000, 60_000, 8, 2, b"")
    entry = struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(hidden), 22)
    assert "3600000000 pixels" in refused(struct.pack("<HHH", 0, 1, 1) + entry + hidden)


def test_a_webp_of_a_size_beyond_the_limit_is_refused() -> None:
    content = encoded(noise(32, 32), "WEBP")
    assert "at most 1,000 pixels" in refused(content, most_pixels=1000)
    assert open_image(content, most_pixels=1024).size == (32, 32)


def test_the_limit_of_pil_is_put_back_after_a_refusal(tmp_path: Path) -> None:
    limit = Image.MAX_IMAGE_PIXELS
    assert limit is not None
    for content in (png(60_000, 60_000, 8, 2, b""), b"no image", encoded(noise(50, 50), "PNG")[:-500]):
        refused(content)
        assert limit == Image.MAX_IMAGE_PIXELS


def test_postscript_is_refused_because_it_is_a_program(tmp_path: Path) -> None:
    file = tmp_path / "drawing.eps"
    Image.new("RGB", (8, 8), "red").save(file)
    with pytest.raises(UnreadableImage, match=r"drawing\.eps is PostScript"):
        open_image(file)
