"""Images with objects as people have them: COCO's JSON and masks of numbered objects, whole and broken."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco

from vir.data import rle
from vir.data.images import UnreadableImage, open_image, open_numbers, read_header, turned
from vir.data.objects import open_objects
from vir.data.sets import NoImages
from vir.data.truth import masks_of

SQUARE = [2.0, 1.0, 6.0, 1.0, 6.0, 4.0, 2.0, 4.0]
CATEGORIES = [{"id": 7, "name": "cat"}, {"id": 3, "name": "dog"}, {"id": 90, "name": "bird"}]


def an_object(number: int = 1, **changes: Any) -> dict[str, Any]:
    known = {
        "id": number, "image_id": 10, "category_id": 7, "bbox": [2.0, 1.0, 4.0, 3.0], "area": 12.0, "iscrowd": 0,
        "segmentation": [SQUARE],
    }  # fmt: skip
    return {name: value for name, value in (known | changes).items() if value is not ...}


def write_coco(root: Path, objects: list[dict[str, Any]], part: str = "train2017", **changes: Any) -> Path:
    """Three images, of ids 10, 20 and 30, each 12 x 8."""
    images = [{"id": 10 * i, "file_name": f"{i}.png", "width": 12, "height": 8} for i in (1, 2, 3)]
    content = {"images": images, "annotations": objects, "categories": CATEGORIES} | changes
    (root / "annotations").mkdir(exist_ok=True)
    (root / part).mkdir(exist_ok=True)
    for image in images:
        Image.new("RGB", (12, 8), (10 * image["id"] % 256, 0, 0)).save(root / part / image["file_name"])
    file = root / "annotations" / f"instances_{part}.json"
    file.write_text(json.dumps(content))
    return file


def both(root: Path, objects: list[dict[str, Any]], **changes: Any) -> Path:
    write_coco(root, objects, "train2017", **changes)
    write_coco(root, objects, "val2017", **changes)
    return root


def test_polygons_and_both_kinds_of_counts_are_the_same_mask(tmp_path: Path) -> None:
    mask = np.zeros((8, 12), np.uint8)
    mask[1:4, 2:6] = 1
    packed = coco.encode(np.asfortranarray(mask))
    runs = [int(n) for n in np.diff(np.flatnonzero(np.diff(np.r_[2, mask.ravel("F"), 2])))]
    outlines = [
        [SQUARE],
        {"size": [8, 12], "counts": packed["counts"].decode()},
        {"size": [8, 12], "counts": runs},
    ]
    root = both(tmp_path, [an_object(i, segmentation=o, iscrowd=int(i > 0)) for i, o in enumerate(outlines)])
    image, target = open_objects(root)["train"].read(0)
    assert image.size == (12, 8)
    assert torch.equal(target["masks"], torch.from_numpy(mask).bool().expand(3, 8, 12))
    assert target["boxes"].tolist() == [[2, 1, 6, 4]] * 3
    assert target["iscrowd"].tolist() == [0, 1, 1]
    assert target["area"].tolist() == [12, 12, 12]
    assert target["image_id"] == 10


def test_categories_with_gaps_become_1_2_3_and_have_the_way_back(tmp_path: Path) -> None:
    objects = [an_object(category_id=number, image_id=20) for number in (90, 3, 7)]
    sets = open_objects(both(tmp_path, objects))
    assert sets["val"].classes == ("dog", "cat", "bird")
    assert sets["val"].category_ids == (3, 7, 90)
    assert sets["val"].read(1)[1]["labels"].tolist() == [3, 1, 2]


def test_given_classes_fix_the_numbers(tmp_path: Path) -> None:
    both(tmp_path, [an_object()])
    assert open_objects(tmp_path, ("cow", "bird", "dog", "cat"))["train"].read(0)[1]["labels"].tolist() == [4]
    with pytest.raises(NoImages, match="classes of the model"):
        open_objects(tmp_path, ("dog", "bird"))


def test_validation_takes_the_numbers_of_training_by_name(tmp_path: Path) -> None:
    write_coco(tmp_path, [an_object()])
    write_coco(tmp_path, [an_object(category_id=1)], "val2017", categories=[{"id": 1, "name": "cat"}])
    assert open_objects(tmp_path)["val"].read(0)[1]["labels"].tolist() == [2]


def test_an_image_without_objects(tmp_path: Path) -> None:
    objects = open_objects(both(tmp_path, [an_object()]))["train"]
    _, target = objects.read(2)
    assert target["boxes"].shape == (0, 4)
    assert target["masks"].shape == (0, 8, 12)
    assert target["labels"].dtype == torch.int64
    assert objects.truth(2).objects == ()


@pytest.mark.parametrize("box", [[3, 3, 0, 4], [3, 3, 4, 0], [12, 2, 3, 3], [-5, 2, 5, 2], [3, 3, -1, 2]])
def test_boxes_without_area_are_left_out_and_told(tmp_path: Path, box: list[float]) -> None:
    objects = open_objects(both(tmp_path, [an_object(1, bbox=box), an_object(2)]))["train"]
    assert objects.read(0)[1]["boxes"].tolist() == [[2, 1, 6, 4]]
    assert any("1 objects" in remark and "without area" in remark for remark in objects.remarks)


def test_what_lies_outside_the_image_is_cut_off(tmp_path: Path) -> None:
    outside = [-3.0, -3.0, 3.0, -3.0, 3.0, 2.0, -3.0, 2.0]
    objects = open_objects(both(tmp_path, [an_object(segmentation=[outside], bbox=[-3, -3, 6, 5])]))["train"]
    _, target = objects.read(0)
    assert target["boxes"].tolist() == [[0, 0, 3, 2]]
    assert target["masks"][0].nonzero().amax(0).tolist() == [1, 2]
    assert objects.truth(0).objects[0]["bbox"] == [-3, -3, 6, 5]  # the measure is taken from what was annotated


def test_what_is_missing_of_an_object_is_made_up_for(tmp_path: Path) -> None:
    bare = [an_object(1, bbox=..., area=...), an_object(2, segmentation=[]), an_object(3, segmentation=[[1, 1, 5, 5]])]
    objects = open_objects(both(tmp_path, bare))["train"]
    _, target = objects.read(0)
    assert target["boxes"].tolist() == [[2, 1, 6, 4]] * 3
    assert target["area"].tolist() == [12] * 3
    assert target["masks"].flatten(1).sum(1).tolist() == [12] * 3
    assert any("no outline" in remark for remark in objects.remarks)


def test_missing_images_are_left_out_and_told(tmp_path: Path) -> None:
    both(tmp_path, [an_object(image_id=20), an_object(image_id=30), an_object(image_id=99)])
    (tmp_path / "train2017" / "2.png").unlink()
    objects = open_objects(tmp_path)["train"]
    assert [objects.name(i) for i in range(len(objects))] == ["1.png", "3.png"]
    assert len(objects.read(1)[1]["boxes"]) == 1
    assert any("1 of 3 images" in remark and "2.png" in remark for remark in objects.remarks)
    assert any("does not name" in remark for remark in objects.remarks)
    for file in (tmp_path / "train2017").iterdir():
        file.unlink()
    with pytest.raises(NoImages, match="none of the 3 images"):
        open_objects(tmp_path)
    (tmp_path / "train2017").rmdir()
    with pytest.raises(NoImages, match="expected a folder"):
        open_objects(tmp_path)


def image_entry(**changes: Any) -> dict[str, Any]:
    return {"id": 10, "file_name": "1.png", "width": 12, "height": 8} | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": [image_entry(), image_entry()]}, "two images with the id 10"),
        ({"images": [image_entry(id="ten")]}, "id 'ten'"),
        ({"images": [image_entry(width=None)]}, "width None"),
        ({"images": [image_entry(height=0)]}, "height 0"),
        ({"images": [image_entry(file_name=3)]}, "file_name 3"),
        ({"images": []}, "no images"),
        ({"images": {}}, "lists of objects"),
        ({"categories": [*CATEGORIES, {"id": 3, "name": "cow"}]}, "two categories with the id 3"),
        ({"categories": [*CATEGORIES, {"id": 4, "name": "dog"}]}, "several categories called 'dog'"),
        ({"annotations": [an_object(category_id=8)]}, "category_id 8"),
        ({"annotations": [an_object(bbox=[1, 2, 3])]}, "four numbers"),
        ({"annotations": [an_object(bbox=[1, 2, 3, float("nan")])]}, "four numbers"),
        ({"annotations": [an_object(bbox=..., segmentation=[[1, 2, 3]])]}, "one list"),
        ({"annotations": [3]}, "lists of objects"),
    ],
)
def test_mistakes_in_the_file_are_answered_in_words(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(NoImages, match=words):
        open_objects(both(tmp_path, [], **changes))


def test_a_broken_file_is_answered_in_words(tmp_path: Path) -> None:
    both(tmp_path, [])
    file = tmp_path / "annotations" / "instances_train2017.json"
    for content in (file.read_bytes()[:50], b"", b"\xff\xfe\x00", b"[" * 100_000):
        file.write_bytes(content)
        with pytest.raises(NoImages, match="no JSON"):
            open_objects(tmp_path)
    (tmp_path / "annotations" / "instances_train2014.json").write_text("{}")
    with pytest.raises(NoImages, match="expected one of them"):
        open_objects(tmp_path)


@pytest.mark.parametrize(
    ("outline", "words"),
    [
        ({"size": [8, 12], "counts": [5, 5]}, "sum 96"),
        ({"size": [8, 12], "counts": [100, -4]}, "sum 96"),
        ({"size": [8, 12], "counts": ""}, "packed runs"),
        ({"size": [8, 12], "counts": "zz"}, "packed runs"),
        ({"size": [8, 12], "counts": ";23000"}, "packed runs"),
        ({"size": [12, 8], "counts": [96]}, "as the image"),
        ([[1, 2, 3]], "one list"),
        ([[1, 2, "x", 4, 5, 6]], "list of numbers"),
        ([[1e12, 0, 4, 4, 9, 9]], "far outside"),
        ("abc", "type str"),
    ],
)
def test_a_broken_outline_spoils_its_image_alone(tmp_path: Path, outline: Any, words: str) -> None:
    objects = open_objects(both(tmp_path, [an_object(segmentation=outline), an_object(image_id=20)]))["train"]
    with pytest.raises(UnreadableImage, match=words):
        objects.read(0)
    assert len(objects.read(1)[1]["boxes"]) == 1


def test_packed_runs_are_read_as_pycocotools_writes_them() -> None:
    numbers = np.random.default_rng(0)
    for _ in range(100):
        height, width = numbers.integers(1, 50, 2).tolist()
        mask = numbers.random((height, width)) < numbers.random() ** 3
        assert (rle.decode(rle.from_coco(dict(rle.encode(mask)), height, width)) == mask).all()


def test_two_annotations_of_the_same_id_are_two_objects(tmp_path: Path) -> None:
    assert len(open_objects(both(tmp_path, [an_object(5), an_object(5)]))["train"].read(0)[1]["boxes"]) == 2


def test_an_image_of_another_size_than_its_annotation(tmp_path: Path) -> None:
    both(tmp_path, [an_object()])
    Image.new("RGB", (6, 4)).save(tmp_path / "train2017" / "1.png")
    with pytest.raises(UnreadableImage, match="12 x 8 pixels, expected 6 x 4"):
        open_objects(tmp_path)["train"].read(0)


def test_coco_without_validation_holds_some_out(tmp_path: Path) -> None:
    images = [{"id": i, "file_name": f"{i}.png", "width": 2, "height": 2} for i in range(60)]
    objects = [an_object(image_id=i, bbox=[0, 0, 1, 2], segmentation=[]) for i in range(60)]
    write_coco(tmp_path, objects, images=images)
    for image in images:
        Image.new("RGB", (2, 2)).save(tmp_path / "train2017" / image["file_name"])
    sets = open_objects(tmp_path)
    assert len(sets["train"]) + len(sets["val"]) == 60
    assert 2 <= len(sets["val"]) <= 15
    assert sets["val"].truth(1).image_id == int(Path(sets["val"].name(1)).stem)
    write_coco(tmp_path, [])
    with pytest.raises(NoImages, match="too few"):
        open_objects(tmp_path)


def test_validation_alone_is_enough_to_judge(tmp_path: Path) -> None:
    write_coco(tmp_path, [an_object()], "val")
    assert set(open_objects(tmp_path)) == {"val"}


def oriented(file: Path, image: Image.Image, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(file, exif=exif)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_headers_and_turns_agree_with_the_decoder(tmp_path: Path, orientation: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (8, 12), np.uint8)
    oriented(tmp_path / "a.png", Image.fromarray(pixels), orientation)
    upright = open_image(tmp_path / "a.png")
    assert read_header(tmp_path / "a.png").upright == upright.size
    assert (np.asarray(upright)[..., 0] == turned(pixels, orientation)).all()


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
def test_annotations_turn_with_their_image(tmp_path: Path, orientation: int) -> None:
    """Of an image with a note of the camera, annotated as stored, what is bright stays what is marked."""
    pixels = np.zeros((8, 12), np.uint8)
    pixels[1:4, 2:6] = 255
    both(tmp_path, [an_object()])
    oriented(tmp_path / "train2017" / "1.png", Image.fromarray(pixels), orientation)
    image, target = open_objects(tmp_path)["train"].read(0)
    bright = torch.from_numpy(np.asarray(image)[..., 0] > 0)
    assert image.size == (8, 12)
    assert torch.equal(target["masks"][0], bright)
    rows, columns = bright.nonzero().T
    assert target["boxes"][0].tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]


def test_annotations_of_the_upright_image_stay(tmp_path: Path) -> None:
    both(tmp_path, [an_object()])
    oriented(tmp_path / "train2017" / "1.png", Image.new("RGB", (8, 12)), 6)  # upright: 12 x 8, as annotated
    image, target = open_objects(tmp_path)["train"].read(0)
    assert image.size == (12, 8)
    assert target["boxes"].tolist() == [[2, 1, 6, 4]]


def numbered(root: Path, names: list[str], masks: str = "masks", suffix: str = "") -> None:
    (root / "images").mkdir(parents=True)
    (root / masks).mkdir()
    for number, name in enumerate(names):
        Image.new("RGB", (12, 8), (number, 0, 0)).save(root / "images" / f"{name}.webp")
        mask = np.zeros((8, 12), np.uint16)
        mask[1:4, 2:6], mask[6:, 9:], mask[0, 0] = 300, 2, 2  # the second object is in two parts
        Image.fromarray(mask).save(root / masks / f"{name}{suffix}.png")


def test_masks_of_numbered_objects_with_a_split_file(tmp_path: Path) -> None:
    numbered(tmp_path, ["a", "b", "c", "d"], "labels")
    (tmp_path / "split.txt").write_text("a train\nb val\nc train\n")
    sets = open_objects(tmp_path, ("nucleus",))
    assert [sets["train"].name(i) for i in range(2)] == ["a.webp", "c.webp"]
    assert any("d.webp" in remark for remark in sets["train"].remarks)
    image, target = sets["val"].read(0)
    assert image.size == (12, 8)
    assert sets["val"].classes == ("nucleus",)
    assert target["boxes"].tolist() == [[0, 0, 12, 8], [2, 1, 6, 4]]
    assert target["area"].tolist() == [7, 12]
    truth = sets["val"].truth(0).target()
    for name in ("boxes", "labels", "iscrowd", "area"):
        assert torch.equal(target[name], truth[name])
    assert target["masks"].shape == (8, 12)  # one map for both
    assert torch.equal(masks_of(target), truth["masks"])
    (tmp_path / "split.txt").write_text("a train\nb vall\n")
    with pytest.raises(NoImages, match="line 2"):
        open_objects(tmp_path)
    with pytest.raises(NoImages, match="of one class"):
        open_objects(tmp_path, ("a", "b"))


def test_masks_without_a_split_hold_the_same_images_out_when_they_grow(tmp_path: Path) -> None:
    numbered(tmp_path / "few", [f"p{i}" for i in range(60)], "masks", "_mask")
    numbered(tmp_path / "more", [f"p{i}" for i in range(90)], "masks", "_mask")
    few, more = (open_objects(tmp_path / which) for which in ("few", "more"))
    held = {few["val"].name(i) for i in range(len(few["val"]))}
    assert 2 <= len(held) <= 15
    assert len(few["train"]) + len(held) == 60
    assert held <= {more["val"].name(i) for i in range(len(more["val"]))}
    assert few["train"].classes == ("object",)


def test_folders_of_a_split_and_images_without_a_mask(tmp_path: Path) -> None:
    numbered(tmp_path / "train", ["a", "b"])
    numbered(tmp_path / "test", ["c"])
    (tmp_path / "train" / "masks" / "a.png").unlink()
    sets = open_objects(tmp_path)
    assert sets["train"].name(0) == "b.webp"
    assert any("a.webp" in remark for remark in sets["train"].remarks)
    assert any("test images" in remark for remark in sets["val"].remarks)
    (tmp_path / "train" / "masks" / "b.png").rename(tmp_path / "train" / "masks" / "z.png")
    with pytest.raises(NoImages, match="no image in"):
        open_objects(tmp_path)


def test_masks_that_do_not_fit(tmp_path: Path) -> None:
    numbered(tmp_path / "train", ["a", "b", "c", "d"])
    numbered(tmp_path / "val", ["e"])
    masks = tmp_path / "train" / "masks"
    Image.new("L", (5, 8)).save(masks / "a.png")
    Image.new("RGB", (12, 8)).save(masks / "b.png")
    (masks / "c.png").write_bytes(b"no image")
    Image.new("L", (12, 8)).save(masks / "d.png")
    objects = open_objects(tmp_path)["train"]
    with pytest.raises(UnreadableImage, match="5 x 8 pixels, expected 12 x 8"):
        objects.read(0)
    with pytest.raises(UnreadableImage, match="3 channels"):
        objects.read(1)
    with pytest.raises(UnreadableImage, match="not an image"):
        objects.read(2)
    assert masks_of(objects.read(3)[1]).shape == (0, 8, 12)


def test_a_mask_of_an_image_as_stored_turns_with_it(tmp_path: Path) -> None:
    numbered(tmp_path / "train", ["a"])
    numbered(tmp_path / "val", ["a"])
    (tmp_path / "train" / "images" / "a.webp").unlink()
    oriented(tmp_path / "train" / "images" / "a.png", Image.new("RGB", (12, 8)), 6)
    image, target = open_objects(tmp_path)["train"].read(0)
    assert image.size == (8, 12)
    assert target["boxes"][1].tolist() == [4, 2, 7, 6]  # rows 1 to 4 from the top are now columns 1 to 4 from the right


def test_an_image_of_one_pixel(tmp_path: Path) -> None:
    for part in ("train", "val"):
        numbered(tmp_path / part, ["a"])
        Image.new("RGB", (1, 1)).save(tmp_path / part / "images" / "a.webp")
        Image.new("L", (1, 1), 9).save(tmp_path / part / "masks" / "a.png")
    _, target = open_objects(tmp_path)["train"].read(0)
    assert target["boxes"].tolist() == [[0, 0, 1, 1]]
    assert masks_of(target).tolist() == [[[True]]]


def test_a_palette_gives_its_indices_and_one_bit_its_one(tmp_path: Path) -> None:
    picture = Image.new("P", (3, 2), 2)
    picture.putpalette([0, 0, 0, 200, 10, 10, 9, 9, 9])
    picture.save(tmp_path / "p.png")
    assert open_numbers(tmp_path / "p.png").tolist() == [[2, 2, 2]] * 2
    Image.new("1", (3, 2), 1).save(tmp_path / "1.png")
    assert open_numbers(tmp_path / "1.png").tolist() == [[1, 1, 1]] * 2


def test_folders_with_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(NoImages, match="is no folder"):
        open_objects(tmp_path / "nowhere")
    with pytest.raises(NoImages, match="no images with masks"):
        open_objects(tmp_path)
    numbered(tmp_path, ["a"])
    Image.new("RGB", (12, 8)).save(tmp_path / "images" / "a.jpg")
    with pytest.raises(NoImages, match="same name"):
        open_objects(tmp_path)
