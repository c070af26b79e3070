"""Models to hand on, and weights that ship: what their card promises is what they do."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from typer.testing import CliRunner

from vir import weights
from vir.checkpoint import Card, load_model, save_model
from vir.cli import app
from vir.evaluate.measures import MEASURES
from vir.models import hvir

CLASSES = ("bird", "cat", "dog")


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    card = Card(
        "hvir_tiny", CLASSES, 64, crop_pct=1.0, metrics={"top1": 99.0, "epoch": 3.0},
        data={"images": 12, "terms": "CC0"}, recipe={"epochs": 5, "batch": 4, "optimizer": "adamw", "lr": 1e-3},
    )  # fmt: skip
    file = tmp_path / "best.safetensors"
    save_model(card.build(), card, file)
    return file


@pytest.fixture
def images(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for name in CLASSES:
        folder = tmp_path / "data" / name
        folder.mkdir(parents=True)
        for i in range(4):
            Image.fromarray(generator.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return tmp_path / "data"


def export(trained: Path, images: Path, out: Path) -> str:
    done = CliRunner().invoke(
        app, ["export", str(trained), "--data", str(images), "--out", str(out), "--workers", "0", "--command", "vir x"]
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    return done.output


def test_an_exported_model_is_as_good_as_its_card_says(trained: Path, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "a folder to be made" / "hvir_tiny.pets.safetensors"
    export(trained, images, out)
    assert out.stat().st_size < 0.6 * trained.stat().st_size
    _, card = load_model(out)
    told = CliRunner().invoke(app, ["evaluate", str(out), "--data", str(images), "--workers", "0"]).output
    assert f"top-1 {card.metrics['top1']:.2f} %" in told
    assert card.metrics["images"] == 12
    assert card.metrics["top1"] != 99.0
    words = out.with_suffix(".md").read_text()
    for part in (
        "hvir_tiny.pets",
        "bird, cat, dog",
        f"top-1 {card.metrics['top1']:.2f} %",
        "CC0",
        "`vir x`",
        "5 epochs",
    ):
        assert part in words
    assert "top-5" not in told + words, "the best five of three classes"


def test_an_export_never_takes_the_place_of_its_source(trained: Path, images: Path, tmp_path: Path) -> None:
    before = trained.read_bytes()
    (tmp_path / "further").mkdir()
    for out in (trained, tmp_path / "further" / ".." / trained.name):
        done = CliRunner().invoke(app, ["export", str(trained), "--data", str(images), "--out", str(out)])
        assert done.exit_code == 2
        assert "is the checkpoint itself" in " ".join(done.output.split())
    assert trained.read_bytes() == before


@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_nothing_is_told_of_a_model_that_no_image_was_for(
    command: str, trained: Path, images: Path, tmp_path: Path
) -> None:
    for file in images.glob("*/*.png"):
        file.write_bytes(b"no image")
    arguments = [command, str(trained), "--data", str(images), "--workers", "0"]
    more = ["--out", str(tmp_path / "x.safetensors")] if command == "export" else []
    done = CliRunner().invoke(app, [*arguments, *more])
    assert done.exit_code == 2, done.output
    said = " ".join(done.output.split())
    assert "none of the 12 images to judge by in" in said
    assert "is not an image that can be read" in said
    assert not list(tmp_path.glob("x.*"))


def test_a_failed_export_leaves_an_earlier_file_as_it_was(trained: Path, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    export(trained, images, out)
    before = {file: file.read_bytes() for file in tmp_path.glob("x.*")}
    arguments = ["export", str(trained), "--data", str(tmp_path / "nowhere"), "--out", str(out)]
    assert CliRunner().invoke(app, arguments).exit_code == 2
    assert {file: file.read_bytes() for file in tmp_path.glob("*x.*")} == before
    assert len(before) == 3


def test_numbers_that_are_no_class_are_told_with_a_way_out(tmp_path: Path) -> None:
    for folder, mode in (("images", "RGB"), ("masks", "L")):
        (tmp_path / "val" / folder).mkdir(parents=True)
        for i in range(2):
            Image.new(mode, (40, 32), 11 if mode == "L" else "grey").save(tmp_path / "val" / folder / f"{i}.png")
    arguments = ["evaluate", "upernet_hvir_tiny.camvid", "--data", str(tmp_path), "--size", "32", "--workers", "0"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2, done.output
    said = " ".join(done.output.split())
    assert "none of the 2 images to judge by in" in said
    assert "11 is none of the 11 classes nor void" in said
    assert "--void NUMBER" in said


def test_a_failed_export_leaves_nothing(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    done = CliRunner().invoke(app, ["export", str(trained), "--data", str(tmp_path / "nowhere"), "--out", str(out)])
    assert done.exit_code == 2
    assert "nowhere" in done.output
    assert not list(tmp_path.glob("x.*"))


def test_shipped_weights_are_found_by_name_and_by_timm(
    trained: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    export(trained, images, shelf / "hvir_tiny.pets.safetensors")
    monkeypatch.setattr(weights, "FOLDER", shelf)
    model, _ = load_model("hvir_tiny.pets")
    found = weights.pretrained_cfgs("hvir_tiny")
    assert list(found) == ["hvir_tiny.pets"]
    assert not weights.pretrained_cfgs("hvir_0")
    by_timm = timm.create_model("hvir_tiny", pretrained=True, pretrained_cfg=hvir._cfg(**found["hvir_tiny.pets"]))
    image = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        assert torch.equal(by_timm.eval()(image), model(image))
    assert by_timm.pretrained_cfg["input_size"] == (3, 64, 64)
    assert by_timm.pretrained_cfg["label_names"] == list(CLASSES)


def test_names_without_weights_stay_untrained_and_large() -> None:
    assert timm.create_model("hvir_tiny").num_classes == 1000
    assert timm.get_pretrained_cfg("hvir_tiny").num_classes == 1000


@pytest.mark.parametrize("name", sorted(weights.shipped()))
def test_what_ships_is_whole_and_says_where_it_is_from(name: str) -> None:
    model, card = load_model(name)
    image = torch.rand(1, 3, card.size, card.size)
    with torch.inference_mode():
        answer = model(image)
    logits = answer[0]["scores"] if card.task == "detection" else answer
    assert torch.isfinite(logits).all()
    if timm.is_model(name.partition(".")[0]):
        assert card.task == "classification", "timm would take it for a classifier"
        by_timm = timm.create_model(name, pretrained=True).eval()
        assert by_timm.pretrained_cfg["label_names"] == list(card.classes)
        with torch.inference_mode():
            assert torch.equal(by_timm(image), logits)
    else:
        assert card.model_args, "timm could build it from its name, so it must have the name that timm knows"
    file = weights.shipped()[name]
    assert file.stat().st_size < 14e6
    words = file.with_suffix(".md").read_text()
    assert MEASURES[card.task].told(card.metrics) in words
    assert name in words
    assert card.data["terms"]
    assert "/" not in card.data["path"], "a path of the machine that trained it"


def test_the_default_weights_ship() -> None:
    assert weights.DEFAULT in weights.shipped()


def test_an_unknown_name_is_answered_with_those_that_ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.b.safetensors").touch()
    monkeypatch.setattr(weights, "FOLDER", tmp_path)
    done = CliRunner().invoke(app, ["predict", "cat.jpg", "--checkpoint", "nothing"])
    assert done.exit_code == 2
    assert "a.b" in done.output
