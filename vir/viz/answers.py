"""Answers drawn on their image: boxes and masks with names and scores, label maps with names."""

import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vir.answers import Detections, Segmentation
from vir.data import rle

Colour = tuple[int, int, int]
Rectangle = tuple[float, float, float, float]  # left, top, right, bottom

# Okabe and Ito's colours, told apart by colour-blind readers; then lighter and darker ones of the same.
_SEVEN = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167))
_SHADES = (((255, 255, 255), 0.0), ((255, 255, 255), 0.55), ((0, 0, 0), 0.45))
COLOURS: tuple[Colour, ...] = tuple(
    (
        round(red + (towards[0] - red) * share),
        round(green + (towards[1] - green) * share),
        round(blue + (towards[2] - blue) * share),
    )
    for towards, share in _SHADES
    for red, green, blue in _SEVEN
)
BRIGHT = 2 * len(_SEVEN)  # of the colours, the first
BLACK, WHITE = (0, 0, 0), (255, 255, 255)

LEAST_SIDE = 512  # pixels of the longer side: smaller images are enlarged, or the words could not be read
LEAST_LETTERS, LETTERS = 12, 1 / 45  # height of the letters: at least, and as a share of the shorter side
LONGEST_NAME = 28
FEW = 8  # objects
OBJECT, SCENE = 0.4, 0.55  # how much of the colour lies over the image
COARSE = 128  # pixels of the longer side of the map in which places for names are looked for
LEAST_SHARE = 0.002  # of an image: smaller classes get no name


def draw(image: Image.Image, answer: Detections | Segmentation) -> Image.Image:
    """The image with the answer on it; a small one is enlarged by a whole factor."""
    if isinstance(answer, Segmentation):
        return draw_segmentation(image, answer)
    return draw_detections(image, answer)


def draw_detections(image: Image.Image, answer: Detections, scores: bool = True) -> Image.Image:
    """Boxes, masks, names and scores: a colour for each class, or for each object where all are of one class."""
    _check(image, answer.width, answer.height, answer.image)
    zoom, canvas = _enlarged(image)
    style = _Style.of(canvas)
    colours = _colours_of(answer)
    pixels = np.array(canvas)
    for number in reversed(range(len(answer.masks or ()))):  # the surest last, above all others
        _lay_mask(pixels, answer, number, colours[number], zoom, style.line)
    canvas = Image.fromarray(pixels)
    pen = ImageDraw.Draw(canvas)
    boxes = [_on_canvas(box, zoom, canvas) for box in answer.boxes]
    line = max(1, style.line // 2) if answer.masks is not None else style.line
    for box, colour in reversed(list(zip(boxes, colours, strict=True))):
        pen.rectangle(box, outline=colour, width=line)
    many_alike = len(answer) > FEW and len(set(answer.names)) == 1
    placed: list[Rectangle] = []
    for number, (box, colour) in enumerate(zip(boxes, colours, strict=True)):
        if many_alike and number and box[2] - box[0] < 2 * style.font.size:
            continue  # words would cover more than the object
        for words in _wordings(answer, number, scores, many_alike):
            if _write_at(pen, canvas, words, box, colour, style, placed):
                break
    return canvas


def _colours_of(answer: Detections) -> list[Colour]:
    """By the classes that are there, so that few share a colour; the dark ones would be lost in dark images."""
    there = sorted(set(answer.category_ids))
    numbers = range(len(answer)) if len(there) == 1 else [there.index(number) for number in answer.category_ids]
    return [COLOURS[number % BRIGHT] for number in numbers]


def _wordings(answer: Detections, number: int, scores: bool, many_alike: bool) -> Iterator[str]:
    """What is written at an object, and shorter words for where that finds no place."""
    score = f"{100 * answer.scores[number]:.0f} %"
    if number == 0 or not many_alike:  # the same name at every one of many objects would say nothing
        name = _shortened(answer.names[number])
        yield f"{name} {score}" if scores else name
    if scores:
        yield score


def draw_segmentation(image: Image.Image, answer: Segmentation) -> Image.Image:
    """Every class in its colour, with its name where it is widest; what has no class stays as it is, but grey."""
    height, width = answer.labels.shape
    _check(image, width, height, answer.image)
    zoom, canvas = _enlarged(image)
    style = _Style.of(canvas)
    labels = answer.labels.repeat(zoom, 0).repeat(zoom, 1)
    pixels = np.array(canvas)
    pixels[:] = np.where((labels < len(answer.classes))[..., None], pixels, np.array(canvas.convert("L"))[..., None])
    for number in np.unique(labels):
        if number < len(answer.classes):
            _blend(pixels, labels == number, COLOURS[int(number) % len(COLOURS)], SCENE)
    _blend(pixels, _borders(labels, max(1, style.line // 2)), WHITE, 0.8)
    canvas = Image.fromarray(pixels)
    pen = ImageDraw.Draw(canvas)
    placed: list[Rectangle] = []
    for name, share in answer.shares.items():
        if share >= LEAST_SHARE:
            number = answer.classes.index(name)
            x, y = _deepest(answer.labels == number)
            spot = x * canvas.width, y * canvas.height, x * canvas.width, y * canvas.height
            _write_at(pen, canvas, _shortened(name), spot, COLOURS[number % len(COLOURS)], style, placed, centre=True)
    return canvas


class _Style:
    """Sizes of letters and lines that fit an image."""

    def __init__(self, letters: int) -> None:
        self.font = _font(letters)
        self.line = max(2, round(letters / 7))
        self.margin = max(2, round(letters / 6))

    @classmethod
    def of(cls, canvas: Image.Image) -> "_Style":
        return cls(max(LEAST_LETTERS, round(min(canvas.size) * LETTERS)))


@lru_cache(maxsize=16)
def _font(size: int) -> ImageFont.FreeTypeFont:
    """The letters that come with matplotlib: the same on every machine."""
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), size)


def _check(image: Image.Image, width: int, height: int, name: str) -> None:
    if image.size != (width, height):
        raise ValueError(
            f"the image is {image.width} x {image.height}, but the answer is about {width} x {height} pixels. Give the "
            f"image that was asked about ({name})."
        )


def _enlarged(image: Image.Image) -> tuple[int, Image.Image]:
    zoom = math.ceil(LEAST_SIDE / max(image.size)) if max(image.size) < LEAST_SIDE else 1
    rgb = image.convert("RGB")
    return zoom, rgb if zoom == 1 else rgb.resize((zoom * rgb.width, zoom * rgb.height), Image.Resampling.NEAREST)


def _on_canvas(box: Rectangle, zoom: int, canvas: Image.Image) -> Rectangle:
    """The pixels that a box covers, inside the image and never fewer than one."""
    left, top = (
        min(max(0, math.floor(side * zoom)), most - 1) for side, most in zip(box[:2], canvas.size, strict=True)
    )
    right, bottom = (min(math.ceil(side * zoom), most) - 1 for side, most in zip(box[2:], canvas.size, strict=True))
    return left, top, max(left, right), max(top, bottom)


def _lay_mask(pixels: np.ndarray, answer: Detections, number: int, colour: Colour, zoom: int, line: int) -> None:
    assert answer.masks is not None
    left, top, width, height = (round(side) for side in rle.box(answer.masks[number]))
    if not width or not height:
        return
    part = answer.mask(number)[top : top + height, left : left + width].repeat(zoom, 0).repeat(zoom, 1)
    place = pixels[top * zoom : (top + height) * zoom, left * zoom : (left + width) * zoom]
    _blend(place, part, colour, OBJECT)
    _blend(place, part & ~_eroded(part, line), colour, 1.0)


def _blend(pixels: np.ndarray, mask: np.ndarray, colour: Colour, share: float) -> None:
    pixels[mask] = np.rint(pixels[mask] * (1 - share) + np.array(colour) * share).astype(np.uint8)


def _eroded(mask: np.ndarray, times: int) -> np.ndarray:
    """Without its border, so many pixels wide; the edge of the array is a border as well."""
    for _ in range(times):
        around = np.pad(mask, 1)
        mask = mask & around[:-2, 1:-1] & around[2:, 1:-1] & around[1:-1, :-2] & around[1:-1, 2:]
    return mask


def _borders(labels: np.ndarray, line: int) -> np.ndarray:
    """Where one class meets another."""
    borders = np.zeros(labels.shape, bool)
    for step in range(1, line + 1):
        borders[:, :-step] |= labels[:, :-step] != labels[:, step:]
        borders[:-step] |= labels[:-step] != labels[step:]
    return borders


def _deepest(mask: np.ndarray) -> tuple[float, float]:
    """The place farthest from the border of a mask, as shares of width and height, found in a coarse copy of it."""
    step = max(1, math.ceil(max(mask.shape) / COARSE))
    coarse = mask[step // 2 :: step, step // 2 :: step]
    if not coarse.any():
        rows, columns = mask.nonzero()
        return (columns[0] + 0.5) / mask.shape[1], (rows[0] + 0.5) / mask.shape[0]
    while (smaller := _eroded(coarse, 1)).any():
        coarse = smaller
    rows, columns = coarse.nonzero()
    middle = ((rows - rows.mean()) ** 2 + (columns - columns.mean()) ** 2).argmin()
    return (columns[middle] + 0.5) * step / mask.shape[1], (rows[middle] + 0.5) * step / mask.shape[0]


def _write_at(
    pen: ImageDraw.ImageDraw,
    canvas: Image.Image,
    words: str,
    box: Rectangle,
    colour: Colour,
    style: _Style,
    placed: list[Rectangle],
    centre: bool = False,
) -> bool:
    """Write on a patch of colour at a box, or on its middle, where nothing is written yet; False: there is no room."""
    left, _, right, _ = style.font.getbbox(words)
    width, height = right - left + 2 * style.margin, style.font.size + 2 * style.margin
    if width > canvas.width or height > canvas.height:
        return False
    for x, y in _places(box, width, height, centre):
        x, y = min(max(0, x), canvas.width - width), min(max(0, y), canvas.height - height)
        patch = (x, y, x + width, y + height)
        if not any(_meet(patch, other) for other in placed):
            placed.append(patch)
            pen.rectangle(patch, fill=colour)
            ink = BLACK if 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 130 else WHITE
            pen.text((x + width / 2, y + height / 2), words, fill=ink, font=style.font, anchor="mm")
            return True
    return False


def _places(box: Rectangle, width: float, height: float, centre: bool) -> list[tuple[float, float]]:
    """Where the upper left corner of a patch may be, the best first."""
    left, top, right, bottom = box
    if centre:
        x, y = (left + right - width) / 2, (top + bottom - height) / 2
        return [(x, y), (x, y - height), (x, y + height), (x - width, y), (x + width, y)]
    return [
        (left, top - height),
        (left, top),
        (left, bottom + 1),
        (right - width, top - height),
        (right - width, bottom),
    ]


def _meet(one: Rectangle, other: Rectangle) -> bool:
    return one[0] <= other[2] and other[0] <= one[2] and one[1] <= other[3] and other[1] <= one[3]


def _shortened(name: str) -> str:
    name = "".join(letter if letter.isprintable() else "?" for letter in name)
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1].rstrip() + "…"
