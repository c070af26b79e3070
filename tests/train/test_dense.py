"""Detection and segmentation by the loop and the commands of classification, on squares that the tests draw."""

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.heads.small import DETECTOR, SEGMENTOR, THIN_HVIR
from vir.checkpoint import Card, load_model, save_model
from vir.cli import app
from vir.data.loading import Share
from vir.train import loop
from vir.train.loop import train
from vir.train.recipes import RECIPES, Recipe, at_size, scaled
from vir.train.setup import CannotTrain, Run
from vir.train.tasks import TASKS, dense

SILENT = Console(quiet=True)
OBJECTS = Recipe(
    "hvir_tiny", THIN_HVIR | DETECTOR | {"box_head": "2fc"}, "detection", size=64, epochs=20, batch=4, lr=3e-3,
    warmup_epochs=2, clip=1.0, judged_every=10,
)  # fmt: skip
SCENES = Recipe(
    "hvir_tiny", THIN_HVIR | SEGMENTOR, "segmentation", {"scales": (0.8, 1.25)}, size=48, epochs=8, batch=4, lr=3e-3,
    warmup_epochs=1, colour_jitter=0.1, judged_every=2,
)  # fmt: skip
RUNS = {"detection": OBJECTS, "segmentation": SCENES}


def squares(number: int) -> tuple[Image.Image, np.ndarray]:
    """Dark noise with two bright squares, and their numbers."""
    rng = np.random.default_rng(number)
    pixels, numbers = rng.integers(0, 50, (64, 72, 3), dtype=np.uint8), np.zeros((64, 72), np.uint8)
    for value, left in ((1, rng.integers(2, 12)), (2, rng.integers(38, 48))):
        top = rng.integers(2, 38)
        pixels[top : top + 22, left : left + 22], numbers[top : top + 22, left : left + 22] = (230, 200, 60), value
    return Image.fromarray(pixels), numbers


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    roots = {task: tmp_path_factory.mktemp(task) for task in RUNS}
    for part, count in (("train", 12), ("val", 4)):
        for task, root in roots.items():
            (root / part / "images").mkdir(parents=True)
            (root / part / "masks").mkdir(parents=True)
            for i in range(count):
                image, numbers = squares(100 * len(part) + i)
                image.save(root / part / "images" / f"{i}.png")
                known = numbers if task == "detection" else (numbers > 0).astype(np.uint8)
                Image.fromarray(known).save(root / part / "masks" / f"{i}.png")
    (roots["segmentation"] / "classes.txt").write_text("ground\nsquare\n")
    return roots


def run_in(data: Path, out: Path, **options: Any) -> Run:
    return replace(Run(str(data), out, workers=0), **options)


@pytest.mark.parametrize("task", RUNS)
def test_a_broken_run_ends_with_the_same_bits(
    data: dict[str, Path], tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It breaks right after a state was saved, in the middle of an epoch, and goes on."""
    short = replace(RUNS[task], epochs=2, judged_every=1)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(short, run_in(data[task], whole), SILENT)
    monkeypatch.setattr(loop, "CHECKED_STEPS", 1)
    save = loop.Trainer._save

    def save_and_break(trainer: loop.Trainer) -> None:
        save(trainer)
        if (trainer.standing.epoch, trainer.standing.step) == (1, 2):
            raise KeyboardInterrupt

    monkeypatch.setattr(loop.Trainer, "_save", save_and_break)
    with pytest.raises(KeyboardInterrupt):
        train(short, run_in(data[task], broken, save_minutes=0.0), SILENT)
    monkeypatch.setattr(loop.Trainer, "_save", save)
    train(short, run_in(data[task], broken, save_minutes=0.0), SILENT)
    a, b = (load_file(folder / "last.safetensors") for folder in (whole, broken))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def told(arguments: list[str], code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("task", "metric", "words", "also", "least"),
    [("detection", "mask_ap", "mask AP", "box_ap50", 0.5), ("segmentation", "miou", "mIoU", "miou", 0.8)],
)
def test_from_a_folder_to_drawn_answers(
    data: dict[str, Path], tmp_path: Path, task: str, metric: str, words: str, also: str, least: float
) -> None:
    train(RUNS[task], run_in(data[task], tmp_path, terms="ours"), SILENT)
    best = tmp_path / "best.safetensors"
    _, card = load_model(best)
    assert card.task == task
    assert card.metrics[also] > least, "it learns"
    assert card.data["terms"] == "ours"
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    judged = [row["epoch"] for row in rows if row[f"val_{metric}"]]
    assert judged == [row["epoch"] for row in rows if int(row["epoch"]) % RUNS[task].judged_every == 0]
    assert max(float(row[f"val_{metric}"] or 0) for row in rows) == pytest.approx(100 * card.metrics[metric])

    said = told(["evaluate", str(best), "--data", str(data[task]), "--workers", "0"])
    figure = re.search(rf"{words} ([\d.]+) %", said)
    assert figure is not None
    assert float(figure.group(1)) == pytest.approx(100 * card.metrics[metric], abs=0.006)
    file = tmp_path / "said.json"
    mirrored = ["evaluate", str(best), "--data", str(data[task]), "--workers", "0", "--mirrored", "--json", str(file)]
    if task == "detection":
        assert "--mirrored is for segmentation" in told(mirrored, 2)
    else:
        assert re.search(r"ground: IoU [\d.]+ % square: IoU [\d.]+ %", told(mirrored))
        about = json.loads(file.read_text())
        assert about["mirrored"]
        assert about["miou"] == pytest.approx(sum(about["iou_of_classes"].values()) / 2, abs=1e-5)

    ask = ["predict", str(data[task] / "val" / "images" / "0.png"), "--checkpoint", str(best), "--least", "0.4"]
    said = told([*ask, "--out", str(tmp_path / "drawn")])
    with Image.open(tmp_path / "drawn" / "0.answer.png") as picture:
        assert max(picture.size) >= 512
    twice = [ask[0], str(data[task] / "train" / "images" / "0.png"), *ask[1:], "--out", str(tmp_path / "drawn")]
    told(twice)
    assert {file.name for file in (tmp_path / "drawn").iterdir()} == {"0.answer.png", "0_2.answer.png"}
    answer = json.loads(CliRunner().invoke(app, [*ask, "--json"]).stdout)
    assert (answer["width"], answer["height"]) == (72, 64)
    if task == "detection":
        assert "2 x object" in said
        assert all(thing["category_name"] == "object" for thing in answer["objects"])
    else:
        share = next(c["share"] for c in answer["classes"] if c["category_name"] == "square")
        assert share == pytest.approx(2 * 22 * 22 / (72 * 64), rel=0.2)

    out = tmp_path / "small.safetensors"
    assert words in told(["export", str(best), "--data", str(data[task]), "--out", str(out), "--workers", "0"])
    assert f"{task}, at {card.size} px" in out.with_suffix(".md").read_text()


def test_a_run_from_a_classifier_and_its_pictures(data: dict[str, Path], tmp_path: Path) -> None:
    card = Card("hvir_tiny", ("cat", "dog"), 64, THIN_HVIR, mean=(0.4, 0.4, 0.4))
    classifier = card.build()
    save_model(classifier, card, tmp_path / "classifier.safetensors")
    recipe = replace(SCENES, model_args=SEGMENTOR, epochs=1, lr=0.0, warmup_lr=0.0, min_lr=0.0)
    run = run_in(data["segmentation"], tmp_path / "run", start=tmp_path / "classifier.safetensors")
    train(recipe, run, SILENT)
    model, made = load_model(tmp_path / "run" / "best.safetensors")
    assert made.model_args["mean"] == [0.4, 0.4, 0.4]
    weights = {name.removeprefix("model."): x for name, x in model.body.body.state_dict().items()}
    assert torch.equal(weights["stem.0.weight"], classifier.state_dict()["stem.0.weight"])
    from vir.train.finish import finish

    assert {file.name for file in finish(recipe, run, made)} == {"curves.png", "answers.png", "confusion.png"}


def test_what_does_not_fit_is_said(data: dict[str, Path], tmp_path: Path) -> None:
    start = tmp_path / "segmentor.safetensors"
    card = Card("hvir_tiny", ("ground", "square"), 48, SCENES.model_args, task="segmentation")
    save_model(card.build(), card, start)
    with pytest.raises(CannotTrain, match="a model for segmentation, and this run for detection"):
        train(OBJECTS, run_in(data["detection"], tmp_path, start=start), SILENT)
    other = tmp_path / "other.safetensors"
    save_model(card.build(), replace(card, classes=("ground", "circle")), other)
    with pytest.raises(CannotTrain, match=r"knows the classes ground, circle, and .* has ground, square: start"):
        train(SCENES, run_in(data["segmentation"], tmp_path, start=other), SILENT)
    (tmp_path / "c" / "a").mkdir(parents=True)
    for i in range(60):
        Image.new("RGB", (8, 8), (i, i, i)).save(tmp_path / "c" / "a" / f"{i}.png")
    with pytest.raises(CannotTrain, match="expected a classifier"):
        train(Recipe("hvir_tiny", size=32, batch=8), run_in(tmp_path / "c", tmp_path / "out", start=start), SILENT)
    said = told(["evaluate", str(start), "--data", str(data["segmentation"]), "--split", "test"], 2)
    assert "no images to judge by under 'test'" in said
    said = told(["train", "nuclei", "--data", str(tmp_path / "nowhere")], 2)
    assert "nowhere is no folder" in said


def test_recipes_build_and_tell_their_plan(data: dict[str, Path]) -> None:
    names = [name for name, make in RECIPES.items() if make().task != "classification"]
    assert len(names) == 12
    changed = ["--batch", "4", "--colour-jitter", "0.7"]
    said = told(["train", "street_scenes", "--data", str(data["segmentation"]), *changed, "--dry-run"])
    assert "segmentation" in said
    assert "colour_jitter 0.7" in said
    assert "12 to learn from, 4 to judge by" in said
    assert re.search(r"6\.\d\d million parameters", said)


@pytest.mark.parametrize(("size", "sides"), [(96, [60, 72, 84, 96]), (1024, [640, 768, 896, 1024])])
def test_a_size_takes_along_all_that_a_recipe_gives_in_pixels(size: int, sides: list[int]) -> None:
    objects, scenes = (at_size(RECIPES[name](), size) for name in ("nuclei", "street_scenes"))
    assert objects.model_args["min_size"] == sides
    assert objects.model_args["max_size"] == 2 * size
    assert (objects.model_args["anchor_scale"], objects.model_args["width"]) == (4.0, 64)
    assert (objects.size, scenes.size) == (size, size)
    assert scenes.transform_args["crop"] == (size, round(size * 720 / 540))
    assert at_size(RECIPES["hvir_1_coco"](), 400).transform_args["before_crop"] == (200, 250, 300)
    assert at_size(RECIPES["photographs"](), size) == replace(RECIPES["photographs"](), size=size)


def test_a_detector_learns_on_at_the_size_that_it_is_asked_for(data: dict[str, Path], tmp_path: Path) -> None:
    start = tmp_path / "start.safetensors"
    args = OBJECTS.model_args | {"min_size": [48, 64], "max_size": 128}
    card = Card("hvir_tiny", ("object",), 64, args, task="detection")
    save_model(card.build(), card, start)
    arguments = ["--data", str(data["detection"]), "--size", "96", "--epochs", "1", "--batch", "4", "--workers", "0"]
    told(["finetune", str(start), "--out", str(tmp_path / "out"), *arguments])
    model, card = load_model(tmp_path / "out" / "best.safetensors")
    assert (card.size, model.transform.min_size, model.transform.max_size) == (96, (72, 96), 192)


def test_the_sheet_shows_what_was_judged(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image that is broken, and one that is too long for a detector, are told by the judging; the sheet goes on."""
    root, shown = tmp_path / "data", []
    shutil.copytree(data["detection"], root)
    (root / "val" / "images" / "0.png").write_bytes(b"broken")
    for folder, mode in (("images", "RGB"), ("masks", "L")):
        Image.new(mode, (3000, 2)).save(root / "val" / folder / "1.png")
    monkeypatch.setattr(dense, "drawn_sheet", lambda pictures, file: shown.append(len(pictures)) or file)
    task = TASKS["detection"](OBJECTS, run_in(root, tmp_path), torch.device("cpu"), Share())
    model, card = task.build()
    assert list(task.pictures(model.eval(), card, tmp_path)) == [tmp_path / "answers.png"]
    assert shown == [2]


def test_pixels_are_rounded_and_never_none() -> None:
    args = {"min_size": [3, 1], "crop": (6, 7), "width": 9}
    assert scaled(args, 0.3) == {"min_size": [1, 1], "crop": (2, 2), "width": 9}
