"""Datasets in the Hugging Face hub's format, read from the disk: no network is needed."""

from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as Picture
from typer.testing import CliRunner

from vir.cli import app
from vir.data.images import open_image
from vir.data.sets import NoImages, open_images, open_sets

NAMES = ["cat", "dog"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def stored(folder: Path, count: int, split: str) -> Path:
    """A folder as the hub has it: parquet with the images inside."""
    folder.mkdir(exist_ok=True)
    pictures = [Picture.fromarray(np.full((12, 10, 3), 20 * i % 255, dtype=np.uint8)) for i in range(count)]
    columns = {"picture": pictures, "kind": [i % 2 for i in range(count)]}
    features = Features({"picture": Image(), "kind": ClassLabel(names=NAMES)})
    Dataset.from_dict(columns, features=features).to_parquet(folder / f"{split}-0.parquet")
    return folder


def test_splits_images_and_classes(tmp_path: Path) -> None:
    folder = stored(tmp_path / "pets", 6, "train")
    stored(folder, 4, "validation")
    sets = open_sets(f"hfds/{folder}")
    assert (len(sets["train"]), len(sets["val"])) == (6, 4)
    assert sets["train"].classes == tuple(NAMES)
    assert sets["train"].per_class() == [3, 3]
    file, target = sets["train"].read(3)
    with file:
        image = open_image(file)
    assert (image.size, image.getpixel((0, 0)), target) == ((10, 12), (60, 60, 60), 1)
    assert len(open_images(f"hfds/{folder}", NAMES)) == 4


def test_some_are_held_out_where_there_is_no_second_split(tmp_path: Path) -> None:
    sets = open_sets(f"hfds/{stored(tmp_path / 'pets', 80, 'train')}")
    assert len(sets["train"]) + len(sets["val"]) == 80
    assert len(sets["val"]) > 0
    again = open_sets(f"hfds/{tmp_path / 'pets'}")
    assert list(again["val"].indices) == list(sets["val"].indices)


def test_what_is_no_dataset_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(NoImages, match="cannot be opened"):
        open_sets(f"hfds/{tmp_path / 'nowhere'}")
    words = tmp_path / "words"
    words.mkdir()
    Dataset.from_dict({"a": ["x"]}, features=Features({"a": Value("string")})).to_parquet(words / "train.parquet")
    with pytest.raises(NoImages, match="expected one of images"):
        open_sets(f"hfds/{words}")
    with pytest.raises(NoImages, match="in this order"):
        open_images(f"hfds/{stored(tmp_path / 'pets', 4, 'train')}", ["dog", "cat"])


def test_a_run_learns_from_it_and_shows_its_mistakes(tmp_path: Path) -> None:
    folder = stored(tmp_path / "pets", 16, "train")
    stored(folder, 8, "test")
    out = tmp_path / "run"
    done = CliRunner().invoke(
        app, ["train", "--model", "hvir_tiny", "--data", f"hfds/{folder}", "--out", str(out), "--epochs", "1", "--size",
              "32", "--batch", "8", "--workers", "0"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    with Picture.open(out / "mistakes.png") as sheet:  # a grey panel stands for an image that does not open
        grey = np.all(np.asarray(sheet.convert("RGB")) == 0xD0, axis=-1)
    assert grey.mean() < 0.01
    done = CliRunner().invoke(
        app, ["evaluate", str(out / "best.safetensors"), "--data", f"hfds/{folder}", "--workers", "0"]
    )
    assert "on 8 images" in done.output
