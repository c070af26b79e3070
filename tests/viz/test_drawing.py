"""Answers on their images: at the right place, at every size, the same every time."""

import numpy as np
import pytest
import torch
from PIL import Image

from vir.answers import Detections, Segmentation
from vir.viz.answers import COLOURS, draw, draw_detections

NAMES = ("cat", "a very long name of a thing that nobody would ever write out", "line\nbreak $x$ \x07")


def some(width: int, height: int, count: int, masks: bool = True) -> Detections:
    place = np.random.default_rng(0)
    boxes, drawn = [], torch.zeros(count, height, width)
    for number in range(count):
        left, top = int(place.integers(0, width)), int(place.integers(0, height))
        right, bottom = min(width, left + 1 + width // 8), min(height, top + 1 + height // 8)
        boxes.append([left, top, right, bottom])
        drawn[number, top:bottom, left:right] = 1
    output = {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.from_numpy(place.integers(1, 4, count)),
        "scores": torch.from_numpy(place.random(count)),
    }
    return Detections.from_output("x", (height, width), output | ({"masks": drawn} if masks else {}), NAMES)


@pytest.mark.parametrize(
    ("size", "masks"),
    [((1, 1), True), ((32, 32), True), ((32, 32), False), ((20, 700), True), ((640, 480), False), ((4000, 3000), True)],
)
def test_every_size(size: tuple[int, int], masks: bool) -> None:
    image = Image.new("RGB", size, (90, 90, 90))
    answer = some(*size, count=3, masks=masks)
    picture = draw(image, answer)
    assert max(picture.size) >= 512
    assert picture.width % size[0] == picture.height % size[1] == 0  # enlarged by a whole factor, if at all
    assert np.asarray(picture).std() > 0
    assert picture.tobytes() == draw(image, answer).tobytes()
    assert image.getpixel((0, 0)) == (90, 90, 90)  # the image that was given stays as it was


def test_a_mask_is_coloured_where_it_is() -> None:
    mask = torch.zeros(1, 600, 800)
    mask[0, 300:500, 100:300] = 1
    output = {"boxes": torch.tensor([[100.0, 300, 300, 500]]), "labels": torch.ones(1, dtype=torch.int64)}
    answer = Detections.from_output("x", (600, 800), output | {"scores": torch.ones(1), "masks": mask}, ("cat",))
    pixels = np.asarray(draw(Image.new("RGB", (800, 600)), answer))
    assert tuple(pixels[300, 200]) == tuple(pixels[400, 100]) == COLOURS[0]  # its edge
    assert tuple(pixels[400, 200]) == tuple(np.rint(np.array(COLOURS[0]) * 0.4).astype(int))
    assert (pixels[510:] == 0).all()
    assert (pixels[:, 320:] == 0).all()
    assert (pixels[270:299, 100:160] != 0).any()  # its name, above


def test_many_objects_of_one_class_and_none() -> None:
    many = some(640, 480, 120)
    one = Detections("x", 640, 480, many.boxes, ("cat",) * 120, (1,) * 120, many.scores, many.masks)
    image = Image.new("RGB", (640, 480))
    assert len(np.unique(np.asarray(draw(image, one)).reshape(-1, 3), axis=0)) > 10  # each in its own colour
    assert np.asarray(draw(image, some(640, 480, 0))).max() == 0
    assert draw_detections(image, one, scores=False).tobytes() != draw(image, one).tobytes()


def test_label_maps_are_coloured_and_void_is_not() -> None:
    labels = np.zeros((300, 600), np.uint8)
    labels[:, 300:] = 30  # more classes than colours
    labels[200:, 400:] = 255
    image = Image.new("RGB", (600, 300), (200, 100, 0))
    pixels = np.asarray(draw(image, Segmentation("x", labels, tuple(f"class {i}" for i in range(40)))))
    expected = np.rint(np.array([200, 100, 0]) * (1 - 0.55) + np.array(COLOURS[0]) * 0.55)
    assert tuple(pixels[10, 10]) == tuple(expected.astype(int))
    assert len(set(pixels[250, 500].tolist())) == 1  # grey
    assert tuple(pixels[10, 590]) != tuple(pixels[10, 10])
    assert (pixels[100:200, 100:200] != pixels[10, 10]).any()  # the name, in the middle of its class


@pytest.mark.parametrize("size", [(1, 1), (32, 32), (1500, 1000)])
def test_label_maps_of_every_size(size: tuple[int, int]) -> None:
    labels = (np.add.outer(np.arange(size[1]), np.arange(size[0])) // 7 % 3).astype(np.uint8)
    image, answer = Image.new("RGB", size), Segmentation("x", labels, NAMES)
    assert draw(image, answer).tobytes() == draw(image, answer).tobytes()


def test_colours_differ() -> None:
    assert len(set(COLOURS)) == len(COLOURS) == 21


def test_the_wrong_image_is_answered_in_words() -> None:
    with pytest.raises(ValueError, match="10 x 10, but the answer is about 640 x 480"):
        draw(Image.new("RGB", (10, 10)), some(640, 480, 1))
