"""vir bench trained: real models of every task on real files."""

import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from vir.checkpoint import Card, save_model
from vir.cli import app

SMALL = {"depth": 1, "embed_dim": 32, "heads": 2, "patch_size": 8}
CARDS = {
    "classification": Card("vir_tiny_patch16_224", ("a", "b"), 32, {**SMALL, "img_size": 32}),
    "detection": Card("hvir_tiny", ("cell",), 64, {"min_size": 64, "width": 16, "box_head": "2fc"}, task="detection"),
    "segmentation": Card("hvir_tiny", ("sky", "road"), 64, {"width": 16}, task="segmentation"),
}


def said(arguments: list[str], code: int = 0) -> str:
    result = CliRunner().invoke(app, ["bench", "trained", *arguments, "--repeats", "1"])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.fixture
def images(tmp_path: Path) -> Path:
    (tmp_path / "images" / "more").mkdir(parents=True)
    for name, size in (("one.png", (70, 50)), ("two.jpg", (64, 64)), ("more/three.webp", (48, 80))):
        Image.effect_noise(size, 60).save(tmp_path / "images" / name)
    (tmp_path / "images" / "notes.txt").write_text("no image")
    return tmp_path / "images"


@pytest.mark.parametrize("task", CARDS)
def test_images_a_second_of_models_side_by_side(task: str, images: Path, tmp_path: Path) -> None:
    files = [tmp_path / "one.safetensors", tmp_path / "other.safetensors"]
    for file in files:
        save_model(CARDS[task].build(), CARDS[task], file)
    out = tmp_path / "figures.json"
    said([*map(str, files), "--images", str(images), "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["checkpoint"] for row in rows] == [str(file) for file in files]
    assert all(row["images"] == 3 and row["images_per_second"] > 0 and row["task"] == task for row in rows)


def test_what_a_detector_finds_is_told_beside_its_speed(images: Path, tmp_path: Path) -> None:
    """Untrained, torchvision's finds as much as it may in every image."""
    most = {"min_size": 64, "max_size": 64, "detections": 7}
    card = Card("maskrcnn_resnet18_fpn", ("cell",), 64, most, task="detection")
    save_model(card.build(), card, tmp_path / "peer.safetensors")
    out = tmp_path / "figures.json"
    arguments = [str(tmp_path / "peer.safetensors"), "--images", str(images), "--batch", "2", "--json", str(out)]
    assert "objects" in said(arguments)
    assert json.loads(out.read_text())["rows"][0]["objects"] == 7


def test_batches_where_sizes_allow_them(images: Path, tmp_path: Path) -> None:
    for task in ("classification", "detection", "segmentation"):
        save_model(CARDS[task].build(), CARDS[task], tmp_path / f"{task}.safetensors")
    arguments = ["--images", str(images), "--batch", "2"]
    for task in ("classification", "detection"):
        said([str(tmp_path / f"{task}.safetensors"), *arguments])
    assert "several sizes" in said([str(tmp_path / "segmentation.safetensors"), *arguments], 2)
    one = ["--images", str(images / "one.png"), "--batch", "2"]
    said([str(tmp_path / "segmentation.safetensors"), *one])


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    assert "no image in it" in said(["hvir_tiny.imagenette", "--images", str(tmp_path)], 2)
    Image.effect_noise((32, 32), 60).save(tmp_path / "one.png")
    assert "does not exist" in said(["/nowhere.safetensors", "--images", str(tmp_path)], 2)
