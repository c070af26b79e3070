"""Label maps as people have them: in both kinds of folders, with names, void numbers and mistakes."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vir.data.images import UnreadableImage
from vir.data.scenes import VOID, open_scenes
from vir.data.sets import NoImages

MAP = [[0, 1, 2], [3, 255, 1]]


def fill(images: Path, masks: Path, numbers: list[list[int]] = MAP, count: int = 2) -> None:
    images.mkdir(parents=True)
    masks.mkdir(parents=True)
    for i in range(count):
        Image.new("RGB", (3, 2), (i, 0, 0)).save(images / f"{i}.jpg")
        Image.fromarray(np.array(numbers, np.uint8)).save(masks / f"{i}.png")


def simple(root: Path, numbers: list[list[int]] = MAP) -> Path:
    for part in ("train", "val", "test"):
        fill(root / part / "images", root / part / "masks", numbers)
    return root


def test_folders_with_names(tmp_path: Path) -> None:
    (simple(tmp_path) / "classes.txt").write_text("sky\nroad\n\ntree\ncar\n")
    sets = open_scenes(tmp_path)
    assert set(sets) == {"train", "val", "test"}
    assert sets["test"].classes == ("sky", "road", "tree", "car")
    image, labels = sets["test"].read(1)
    assert image.size == (3, 2)
    assert labels.tolist() == MAP
    assert labels.dtype == np.uint8
    assert len(sets["val"]) == 2
    assert sets["val"].name(1) == "1.jpg"
    assert sets["train"].remarks == ()


@pytest.mark.parametrize("names", ["sky\nroad\ntree\nvoid\n", "sky\nroad\ntree\n"])
def test_another_void_number_with_a_name_or_without(tmp_path: Path, names: str) -> None:
    (simple(tmp_path) / "classes.txt").write_text(names)
    train = open_scenes(tmp_path, void=(3,))["train"]
    assert train.classes == ("sky", "road", "tree")
    assert train.read(0)[1].tolist() == [[0, 1, 2], [VOID, VOID, 1]]


def test_a_void_number_before_the_classes_moves_them_down(tmp_path: Path) -> None:
    (simple(tmp_path) / "classes.txt").write_text("nothing\nroad\ntree\ncar\n")
    train = open_scenes(tmp_path, void=(0,))["train"]
    assert train.classes == ("road", "tree", "car")
    assert train.read(0)[1].tolist() == [[VOID, 0, 1], [2, VOID, 0]]


def test_ade20k_as_it_is_unpacked(tmp_path: Path) -> None:
    for part in ("training", "validation"):
        fill(tmp_path / "images" / part, tmp_path / "annotations" / part)
    rows = ["Idx\tRatio\tTrain\tVal\tStuff\tName", "1\t0.1\t9\t9\t1\twall", "2\t0.1\t9\t9\t1\tbuilding, edifice"]
    (tmp_path / "objectInfo150.txt").write_text("\n".join([*rows, "3\t0.1\t9\t9\t1\tsky"]))
    sets = open_scenes(tmp_path)
    assert sets["val"].classes == ("wall", "building", "sky")
    assert sets["val"].read(0)[1].tolist() == [[VOID, 0, 1], [2, VOID, 0]]


def test_without_names_the_numbers_are_names(tmp_path: Path) -> None:
    train = open_scenes(simple(tmp_path))["train"]
    assert train.classes == ("0", "1", "2", "3")
    assert any("classes.txt" in remark for remark in train.remarks)
    known = open_scenes(tmp_path, classes=("a", "b", "c"), void=(1,))["train"]
    assert known.read(0)[1].tolist() == [[0, VOID, 1], [2, VOID, VOID]]


def test_mistakes_are_answered_in_words(tmp_path: Path) -> None:
    names = simple(tmp_path) / "classes.txt"
    names.write_text("sky\nroad\n")
    with pytest.raises(UnreadableImage, match="from 0 to 255, and 2 is none of the 2 classes"):
        open_scenes(tmp_path)["train"].read(0)
    with pytest.raises(NoImages, match=r"in this order\.$"):
        open_scenes(tmp_path, classes=("road", "sky"))
    with pytest.raises(NoImages, match=r"left out: --void 0\.$"):
        open_scenes(tmp_path, classes=("road",))
    names.write_text("sky\nsky\n")
    with pytest.raises(NoImages, match="twice"):
        open_scenes(tmp_path)
    names.write_text("sky\n")
    with pytest.raises(NoImages, match="0 classes"):
        open_scenes(tmp_path, void=(0,))
    with pytest.raises(NoImages, match="is no folder"):
        open_scenes(tmp_path / "nowhere")


def test_a_mask_of_another_size_and_numbers_beyond_a_byte(tmp_path: Path) -> None:
    (simple(tmp_path) / "classes.txt").write_text("a\nb\nc\nd\n")
    masks = tmp_path / "train" / "masks"
    Image.new("L", (4, 2)).save(masks / "0.png")
    Image.fromarray(np.full((2, 3), 700, np.uint16)).save(masks / "1.png")
    train = open_scenes(tmp_path)["train"]
    with pytest.raises(UnreadableImage, match="4 x 2 pixels, expected 3 x 2"):
        train.read(0)
    with pytest.raises(UnreadableImage, match="700"):
        train.read(1)


def test_a_label_map_of_an_image_as_stored_turns_with_it(tmp_path: Path) -> None:
    (simple(tmp_path) / "classes.txt").write_text("a\nb\nc\nd\n")
    exif = Image.Exif()
    exif[0x0112] = 8
    Image.new("RGB", (3, 2)).save(tmp_path / "train" / "images" / "0.jpg", exif=exif)
    image, labels = open_scenes(tmp_path)["train"].read(0)
    assert image.size == (2, 3)
    assert labels.tolist() == [[2, 1], [1, 255], [0, 3]]
