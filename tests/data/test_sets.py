"""Folders as people have them: split or not, with stray files, empty classes and mistakes."""

import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image
from timm.data import create_transform

from vir.data.loading import NO_CLASS, Examples, Share, judging_batches, seed_from, seeded, training_batches
from vir.data.sets import NoImages, open_images, open_sets


def fill(folder: Path, count: int, colour: int = 0) -> None:
    folder.mkdir(parents=True)
    for i in range(count):
        Image.new("RGB", (12, 10), (colour, i, 0)).save(folder / f"{i}.png")


@pytest.fixture
def split(tmp_path: Path) -> Path:
    for name in ("train", "val"):
        fill(tmp_path / name / "cats", 6, 10)
        fill(tmp_path / name / "dogs", 4, 20)
    return tmp_path


def test_a_split_folder(split: Path) -> None:
    sets = open_sets(split)
    assert sets["train"].classes == sets["val"].classes == ("cats", "dogs")
    assert len(sets["train"]) == 10
    assert sets["train"].per_class() == [6, 4]
    assert sets["train"].remarks == ()


def test_classes_keep_their_numbers_where_some_are_missing(split: Path) -> None:
    for file in (split / "val" / "cats").iterdir():
        file.unlink()
    fill(split / "val" / "birds", 2)
    val = open_sets(split)["val"]
    assert val.classes == ("cats", "dogs")
    assert val.per_class() == [0, 4]
    nothing, left_out = val.remarks
    assert "1 of 2 classes have no images" in nothing
    assert nothing.endswith(": 'cats'")
    assert "1 folders" in left_out
    assert left_out.endswith(": 'birds'")


def test_long_lists_of_what_is_missing_are_cut(tmp_path: Path) -> None:
    fill(tmp_path / "cats", 2)
    (remark,) = open_images(tmp_path, ("cats", *"abcdefg")).remarks
    assert remark.endswith("7 of 8 classes have no images in " + f"{tmp_path}: 'a', 'b', 'c', 'd', 'e', ..")


def test_images_to_judge_by_have_a_name(split: Path) -> None:
    classes = ("cats", "dogs")
    fill(split / "test" / "dogs", 3)
    counts = {name: len(open_images(split, classes, name)) for name in ("train", "val", "test")}
    assert counts == {"train": 10, "val": len(open_images(split, classes)), "test": 3}
    with pytest.raises(NoImages, match="has no folder 'night'"):
        open_images(split, classes, "night")


def test_a_folder_without_a_split_holds_some_out_and_the_same_when_it_grows(tmp_path: Path) -> None:
    fill(tmp_path / "cats", 60)
    fill(tmp_path / "dogs", 60)
    before = open_sets(tmp_path)
    held = {before["val"].name(i) for i in range(len(before["val"]))}
    assert 4 <= len(held) <= 24
    assert len(before["train"]) + len(held) == 120
    for i in range(30):
        Image.new("RGB", (4, 4)).save(tmp_path / "dogs" / f"new{i}.png")
    after = open_sets(tmp_path)
    assert held <= {after["val"].name(i) for i in range(len(after["val"]))}


def test_a_tar_file_of_class_folders(split: Path, tmp_path: Path) -> None:
    archive = tmp_path / "images.tar"
    with tarfile.open(archive, "w") as out:
        out.add(split / "train", arcname=".")
    images = open_images(archive, ("cats", "dogs"))
    examples = Examples(images, create_transform(8), stand_in=False)
    batches = list(judging_batches(examples, 4, Share(), 0))
    assert torch.cat([b.targets for b in batches]).bincount().tolist() == [6, 4]
    assert not any(b.unreadable for b in batches)


def test_a_tar_file_with_a_split(split: Path, tmp_path: Path) -> None:
    fill(split / "test" / "dogs", 3)
    archive = tmp_path / "images.tar"
    with tarfile.open(archive, "w") as out:
        for part in ("train", "val", "test"):
            out.add(split / part, arcname=f"photos/{part}")
    sets = open_sets(archive)
    for part, images in sets.items():
        assert images.per_class() == [6, 4]
        assert {images.name(i).split("/")[1] for i in range(len(images))} == {part}
        assert images.read(9)[1] == 1
    classes = ("cats", "dogs")
    assert [len(open_images(archive, classes, part)) for part in ("train", "val", "test")] == [10, 10, 3]
    with pytest.raises(NoImages, match="has no folder 'night'"):
        open_images(archive, classes, "night")


def test_a_tar_file_that_breaks_off_is_told(split: Path, tmp_path: Path) -> None:
    archive = tmp_path / "images.tar"
    with tarfile.open(archive, "w") as out:
        out.add(split / "train", arcname=".")
    archive.write_bytes(archive.read_bytes()[:3000])
    with pytest.raises(NoImages, match="not a whole tar file"):
        open_sets(archive)
    archive.write_bytes(b"no tar file at all")
    with pytest.raises(NoImages, match="not a whole tar file"):
        open_images(archive, ("cats", "dogs"))


def test_more_than_png_and_jpeg(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    for extension in ("webp", "tiff", "bmp", "gif", "jpg", "png"):
        Image.new("RGB", (9, 9), (7, 7, 7)).save(tmp_path / "cats" / f"a.{extension}")
    (tmp_path / "cats" / "notes.txt").write_text("no image")
    assert len(open_images(tmp_path, ("cats",))) == 6


def test_mistakes_are_answered_in_words(tmp_path: Path) -> None:
    with pytest.raises(NoImages, match="does not exist"):
        open_sets(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoImages, match="holds no images"):
        open_sets(tmp_path / "empty")
    fill(tmp_path / "flat", 3)
    with pytest.raises(NoImages, match="no class folders"):
        open_sets(tmp_path / "flat")
    fill(tmp_path / "few" / "cats", 3)
    with pytest.raises(NoImages, match="too few"):
        open_sets(tmp_path / "few")
    (tmp_path / "notes.txt").write_text("no images")
    with pytest.raises(NoImages, match="is a file"):
        open_sets(tmp_path / "notes.txt")


def test_processes_and_parts_share_the_very_batches(split: Path) -> None:
    examples = Examples(open_sets(split)["train"], create_transform(8, is_training=True), seed=3)
    whole = [b.indices for b in training_batches(examples, 8, 3, Share(), 0)]
    assert len(whole) == 3  # ten images hold one batch of eight in every epoch
    assert len({tuple(b.tolist()) for b in whole}) == 3
    shared = [list(training_batches(examples, 8, 3, Share(rank, 2, 2), 0)) for rank in range(2)]
    for epoch in range(3):
        parts = [shared[rank][2 * epoch + part].indices for part in range(2) for rank in range(2)]
        assert torch.equal(torch.cat(parts), whole[epoch])


def test_a_run_goes_on_in_the_middle_with_the_same_pixels(split: Path) -> None:
    examples = Examples(open_sets(split)["train"], create_transform(8, is_training=True, re_prob=0.5), seed=3)
    whole = list(training_batches(examples, 2, 2, Share(), 0))
    rest = list(training_batches(examples, 2, 2, Share(), 0, first_epoch=1, first_step=2))
    assert len(rest) == 3
    for a, b in zip(whole[-3:], rest, strict=True):
        assert torch.equal(a.images, b.images)


def test_every_image_is_judged_once_by_some_process(split: Path) -> None:
    examples = Examples(open_sets(split)["val"], create_transform(8), stand_in=False)
    seen = [i for rank in range(3) for b in judging_batches(examples, 2, Share(rank, 3), 0) for i in b.indices.tolist()]
    assert sorted(seen) == list(range(10))


def test_an_unreadable_image_is_judged_as_none(split: Path) -> None:
    (split / "val" / "dogs" / "1.png").write_bytes(b"")
    examples = Examples(open_sets(split)["val"], create_transform(8), stand_in=False)
    (batch,) = judging_batches(examples, 20, Share(), 0)
    assert (batch.targets == NO_CLASS).sum() == 1
    assert "dogs/1.png" in batch.unreadable[0]


def test_seeds_leave_the_rest_of_the_program_alone() -> None:
    torch.manual_seed(5)
    before = torch.rand(2)
    torch.manual_seed(5)
    first = torch.rand(1)
    with seeded(1, 2, 3):
        inner = torch.rand(1)
    assert torch.equal(torch.cat([first, torch.rand(1)]), before)
    with seeded(1, 2, 3):
        assert torch.equal(torch.rand(1), inner)
    assert seed_from(1, 2, 3) != seed_from(1, 3, 2)


def test_a_tar_file_with_train_and_other_folders_is_split_among_train_alone(tmp_path: Path) -> None:
    fill(tmp_path / "night" / "cats", 60)
    fill(tmp_path / "train" / "cats", 60)
    with tarfile.open(tmp_path / "images.tar", "w") as out:
        for part in ("night", "train"):
            out.add(tmp_path / part, arcname=part)
    sets = open_sets(tmp_path / "images.tar")
    assert sum(map(len, sets.values())) == 60
    assert {images.name(i).split("/")[0] for images in sets.values() for i in range(len(images))} == {"train"}
