"""WebDataset shards: counted, read to the end, shuffled by epoch, the same again after a kill."""

import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console
from timm.data import create_transform

from vir.checkpoint import load_model
from vir.data.loading import Share
from vir.data.sets import NoImages, open_images
from vir.data.streams import open_streams, streamed_batches, streamed_judging
from vir.evaluate.by_task import judge_data
from vir.train.loop import train
from vir.train.recipes import Recipe
from vir.train.setup import Run

pytest.importorskip("webdataset")


@pytest.fixture
def shards(tmp_path: Path) -> str:
    number = 0
    for split, count in (("train", 3), ("val", 1)):
        for shard in range(count):
            with tarfile.open(tmp_path / f"{split}-{shard:03}.tar", "w") as archive:
                for _ in range(8):
                    add(archive, number)
                    number += 1
    (tmp_path / "classes.txt").write_text("dark\nlight\n")
    return f"wds/{tmp_path}"


def add(archive: tarfile.TarFile, number: int) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (24, 24), (200 * (number % 2) + number, 0, 0)).save(picture, "png")
    for extension, content in (("png", picture.getvalue()), ("cls", str(number % 2).encode())):
        entry = tarfile.TarInfo(f"{number:05}.{extension}")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))


def test_counts_classes_and_all_images_once(shards: str) -> None:
    sets = open_streams(shards)
    assert (len(sets["train"]), len(sets["val"])) == (24, 8)
    assert sets["val"].classes == ("dark", "light")
    batches = list(streamed_judging(sets["val"], create_transform(8), 3))
    assert torch.cat([b.targets for b in batches]).tolist() == [0, 1] * 4


def test_epochs_differ_and_a_run_goes_on_in_the_middle(shards: str) -> None:
    images, transform = open_streams(shards)["train"], create_transform(8, is_training=True)
    whole = list(streamed_batches(images, transform, 3, 8, 2, Share(), 0))
    assert len(whole) == 6
    assert not torch.equal(whole[0].images, whole[3].images)
    rest = list(streamed_batches(images, transform, 3, 8, 2, Share(), 0, first_epoch=1, first_step=1))
    assert len(rest) == 2
    for a, b in zip(whole[-2:], rest, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.targets, b.targets)


def test_a_run_learns_from_shards(shards: str, tmp_path: Path) -> None:
    recipe = Recipe("hvir_tiny", size=32, epochs=2, batch=8, warmup_epochs=0, lr=2e-3)
    card = train(recipe, replace(Run(shards, tmp_path / "out"), workers=0), Console(quiet=True))
    assert card.metrics["images"] == 8
    assert card.classes == ("dark", "light")
    model, card = load_model(tmp_path / "out" / "best.safetensors")
    judged = judge_data(model, card, shards)
    assert judged.metrics()["top1"] == card.metrics["top1"]
    assert judge_data(model, card, shards, split="train").images == 24
    for wrong, says in (({"split": "test"}, "under 'test'"), ({"classes": ("a", "b")}, "has the classes dark, light")):
        with pytest.raises(NoImages, match=says):
            judge_data(
                model,
                replace(card, classes=wrong.get("classes", card.classes)),
                shards,
                split=wrong.get("split", "val"),
            )
    with pytest.raises(NoImages, match="from the first image to the last"):
        open_images(shards, card.classes)


def test_mistakes_are_answered_in_words(shards: str, tmp_path: Path) -> None:
    root = Path(shards.removeprefix("wds/"))
    (root / "train-000.tar").write_bytes(b"no tar file at all")
    with pytest.raises(NoImages, match="not a whole tar file"):
        open_streams(shards)
    (root / "train-000.tar").unlink()
    (root / "classes.txt").unlink()
    with pytest.raises(NoImages, match="names of the classes"):
        open_streams(shards)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "classes.txt").write_text("a\n")
    with pytest.raises(NoImages, match="holds no shards"):
        open_streams(f"wds/{tmp_path / 'empty'}")
