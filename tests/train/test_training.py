"""Real runs on a few coloured squares: they learn, can be killed and go on, and say what is wrong."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file

import vir
from vir import checkpoint
from vir.checkpoint import load_model
from vir.data.loading import Batch, Share
from vir.train import loop
from vir.train.loop import train
from vir.train.recipes import RECIPES, Recipe
from vir.train.setup import CannotTrain, Run, check_batch, precision
from vir.train.tasks import Classification

COLOURS = {"blue": (40, 40, 200), "green": (40, 200, 40), "red": (200, 40, 40)}
SMALL = Recipe(
    "vir_tiny_patch16_224", {"patch_size": 8, "depth": 2, "embed_dim": 48}, size=24, epochs=3, batch=12,
    warmup_epochs=1, lr=3e-3, ema=0.9, mixup=0.2, cutmix=0.2, erasing=0.2, colour_jitter=0.2, drop_path=0.1,
)  # fmt: skip
LONG = replace(SMALL, epochs=8)  # there is time to kill it in the middle
PLAIN = replace(SMALL, mixup=0.0, cutmix=0.0, drop_path=0.0, ema=None, erasing=0.0)
SILENT = Console(quiet=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng = tmp_path_factory.mktemp("squares"), np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 5)):
        for name, colour in COLOURS.items():
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                noise = rng.integers(-40, 40, (30, 36, 3))
                Image.fromarray((np.array(colour) + noise).astype(np.uint8)).save(folder / f"{i}.png")
    return root


def run_in(data: Path, out: Path, **options: object) -> Run:
    return replace(Run(str(data), out, workers=0), **options)


def test_it_learns_and_the_checkpoint_says_all(data: Path, tmp_path: Path) -> None:
    card = train(SMALL, run_in(data, tmp_path, terms="ours"), SILENT)
    assert card.metrics["top1"] > 80
    assert card.classes == ("blue", "green", "red")
    assert card.data["terms"] == "ours"
    assert card.recipe["lr"] == SMALL.lr
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert max(float(row["val_top1"]) for row in rows) == pytest.approx(card.metrics["top1"])
    assert json.loads((tmp_path / "best.json").read_text())["classes"] == ["blue", "green", "red"]
    assert any((tmp_path / "tensorboard").iterdir())
    model, _ = load_model(tmp_path / "best.safetensors")
    assert not model.training


SCRIPT = """
import sys, torch
from pathlib import Path
sys.path.insert(0, {tests!r})
torch.set_num_threads(1)
from test_training import LONG, SILENT, run_in
from vir.train.loop import train
train(LONG, run_in(Path(sys.argv[1]), Path(sys.argv[2]), save_minutes=0.0), SILENT)
"""


def test_a_killed_run_ends_with_the_same_bits(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 in the middle, twice; then the same command again."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    monkeypatch.setattr(loop, "CHECKED_STEPS", 1)
    script = SCRIPT.format(tests=str(Path(__file__).parent)).replace(
        "from vir.train.loop import train", "from vir.train import loop\nloop.CHECKED_STEPS = 1\ntrain = loop.train"
    )
    seen: set[int] = set()
    for kill_after in (1, 4):
        process = subprocess.Popen([sys.executable, "-c", script, str(data), str(broken)], env=os.environ)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if len(saves_since(broken, seen)) >= kill_after:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.005)
        assert process.wait() == -signal.SIGKILL, "the run must still be in the middle when it is killed"
    train(LONG, run_in(data, broken, save_minutes=0.0), SILENT)
    train(LONG, run_in(data, whole, save_minutes=0.0), SILENT)
    torch.set_num_threads(threads)
    for name in ("state", "last", "best"):
        a, b = (load_file(folder / f"{name}.safetensors") for folder in (whole, broken))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), name
    logs = [(folder / "log.csv").read_text().splitlines() for folder in (whole, broken)]
    assert [row.split(",")[:7] for row in logs[0]] == [row.split(",")[:7] for row in logs[1]]  # times differ


def saves_since(out: Path, seen: set[int]) -> set[int]:
    """Every save is a new file in the place of the old one."""
    file = out / "state.safetensors"
    if file.exists():
        seen.add(file.stat().st_ino * 1_000_003 + file.stat().st_mtime_ns)
    return seen


def test_two_processes_are_one_with_the_double_batch(data: Path, tmp_path: Path) -> None:
    """On the CPU, by gloo; they save in the middle of an epoch as well."""
    recipe = "replace(PLAIN, epochs=2)"
    script = SCRIPT.format(tests=str(Path(__file__).parent)).replace("LONG, SILENT", "PLAIN, SILENT")
    script = script.replace("train(LONG", f"from dataclasses import replace\ntrain({recipe}")
    file = tmp_path / "run.py"
    file.write_text(script)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]
    subprocess.run(
        [*launch, str(data), str(tmp_path / "two")], check=True, env=os.environ | {"ACCELERATE_USE_CPU": "1"}
    )
    train(replace(PLAIN, epochs=2), run_in(data, tmp_path / "one"), SILENT)
    one, two = (list(csv.DictReader((tmp_path / name / "log.csv").open())) for name in ("one", "two"))
    assert len(one) == len(two) == 2
    for a, b in zip(one, two, strict=True):
        for column in ("loss", "val_loss", "val_top1", "train_top1"):
            assert float(a[column]) == pytest.approx(float(b[column]), rel=1e-4), column


def test_a_batch_in_parts_is_the_same_batch(data: Path, tmp_path: Path) -> None:
    losses = []
    for parts in (1, 3):
        train(replace(PLAIN, epochs=1, accumulate=parts), run_in(data, tmp_path / str(parts)), SILENT)
        losses.append(next(csv.DictReader((tmp_path / str(parts) / "log.csv").open()))["val_loss"])
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-4)


def test_every_form_learns_the_same(data: Path, tmp_path: Path) -> None:
    curves = {}
    for form in ("parallel", "chunkwise", "recurrent"):
        train(replace(PLAIN, form=form), run_in(data, tmp_path / form), SILENT)
        rows = csv.DictReader((tmp_path / form / "log.csv").open())
        curves[form] = [float(row[name]) for row in rows for name in ("loss", "val_loss")]
    assert curves["parallel"] == pytest.approx(curves["chunkwise"], rel=1e-4)
    assert curves["parallel"] == pytest.approx(curves["recurrent"], rel=1e-4)
    assert curves["parallel"] != curves["recurrent"], "sums in another order differ in their last digits"


def test_workers_change_nothing(data: Path, tmp_path: Path) -> None:
    for workers in (0, 2):
        train(replace(SMALL, epochs=1), run_in(data, tmp_path / str(workers), workers=workers), SILENT)
    a, b = (load_file(tmp_path / name / "last.safetensors") for name in ("0", "2"))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_finetuning_at_another_size_with_other_classes(data: Path, tmp_path: Path) -> None:
    train(replace(SMALL, epochs=1), run_in(data, tmp_path / "first"), SILENT)
    start = tmp_path / "first" / "best.safetensors"
    fewer = tmp_path / "fewer"
    for split in ("train", "val"):
        for name in ("blue", "red"):
            (fewer / split).mkdir(parents=True, exist_ok=True)
            (fewer / split / name).symlink_to(data / split / name)
    recipe = replace(PLAIN, size=48, epochs=1, layer_decay=0.8, model_args={})
    card = train(recipe, run_in(fewer, tmp_path / "second", start=start, decay="rescale"), SILENT)
    assert card.classes == ("blue", "red")
    assert card.stretch == 0.5
    model, _ = load_model(tmp_path / "second" / "best.safetensors")
    assert model.pos_embed.shape[1] == 36
    assert {m.stretch for m in model.modules() if hasattr(m, "stretch")} == {0.5}


def test_a_loss_that_is_not_finite_stops_the_run(data: Path, tmp_path: Path) -> None:
    train(replace(PLAIN, epochs=1), run_in(data, tmp_path), SILENT)
    tensors, header = checkpoint.read(tmp_path / "state.safetensors")
    tensors["model/head.bias"][:] = torch.inf
    header["recipe"]["epochs"] = 2
    checkpoint.write(tensors, header, tmp_path / "state.safetensors")
    before = (tmp_path / "state.safetensors").read_bytes()
    with pytest.raises(CannotTrain, match=r"the loss is nan in epoch 2.*lower --lr.*kept in"):
        train(replace(PLAIN, epochs=2), run_in(data, tmp_path), SILENT)
    assert (tmp_path / "state.safetensors").read_bytes() == before


def test_other_settings_in_the_same_folder(data: Path, tmp_path: Path) -> None:
    train(replace(PLAIN, epochs=1), run_in(data, tmp_path), SILENT)
    with pytest.raises(CannotTrain, match=r"other settings \(lr\).*--restart"):
        train(replace(PLAIN, epochs=1, lr=1e-4), run_in(data, tmp_path), SILENT)


def test_unreadable_images_are_listed_and_too_many_stop_the_run(data: Path, tmp_path: Path) -> None:
    broken = tmp_path / "data"
    for split in ("train", "val"):
        for name in COLOURS:
            (broken / split / name).mkdir(parents=True)
            for image in (data / split / name).iterdir():
                (broken / split / name / image.name).write_bytes(image.read_bytes())
    (broken / "train" / "red" / "3.png").write_bytes(b"not an image")
    (broken / "val" / "red" / "3.png").write_bytes(b"")
    card = train(replace(PLAIN, epochs=1), run_in(broken, tmp_path / "some", most_unreadable=0.05), SILENT)
    assert card.metrics["images"] == 14  # of 15
    assert "red/3.png" in (tmp_path / "some" / "unreadable.txt").read_text()
    for i in range(6):
        (broken / "train" / "green" / f"{i}.png").write_bytes(b"not an image")
    with pytest.raises(CannotTrain, match=r"images cannot be read, more than the limit.*--most-unreadable"):
        train(replace(PLAIN, epochs=1), run_in(broken, tmp_path / "many", most_unreadable=0.05), SILENT)


def test_a_full_disk_keeps_the_last_checkpoint(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(replace(PLAIN, epochs=1), run_in(data, tmp_path), SILENT)
    before = (tmp_path / "best.safetensors").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.write({"x": torch.ones(3)}, {}, tmp_path / "best.safetensors")
    assert (tmp_path / "best.safetensors").read_bytes() == before
    assert not list(tmp_path.glob(".best*"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch": 100}, "more than the 48 images"),
        ({"accumulate": 5}, "cannot be shared by 1 processes in 5 parts"),
        ({"batch": 9, "mixup": 0.5}, "need an even number"),
        ({"tilt": 5.0}, "turns images"),
        ({"quarter_turns": 0.5}, "turns images"),
        ({"form": "parallel", "model": "resnet10t", "model_args": {}}, "ResNet has none"),
        ({"form": "scan"}, "form='scan'"),
    ],
)
def test_settings_that_do_not_fit(changes: dict, says: str, data: Path, tmp_path: Path) -> None:
    with pytest.raises(CannotTrain, match=says):
        train(replace(PLAIN, **changes), run_in(data, tmp_path), SILENT)


def test_steps_of_classifiers_alone_are_recorded() -> None:
    with pytest.raises(CannotTrain, match="--recorded is of classification"):
        check_batch(replace(PLAIN, recorded=True, task="detection"), 48, Share())


@pytest.mark.parametrize(("emulated", "taken"), [(True, "no"), (False, "bf16")])
def test_half_precision_only_where_it_is_no_emulation(
    emulated: bool, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or not emulated
    )
    assert precision(replace(PLAIN, precision="auto")) == taken


def test_recipes_are_complete() -> None:
    for make in RECIPES.values():
        assert make().model
        assert make.__doc__


MOSAIC = replace(
    RECIPES["land_use_map"](), model_args={"patch_size": 8, "depth": 2, "embed_dim": 48, "heads": 3, "retention": "2d",
    "global_pool": "avg"}, size=24, mosaic=2, epochs=3, batch=12, lr=3e-3, warmup_epochs=1, judged_every=1, ema=None,
)  # fmt: skip


def test_a_mosaic_teaches_every_patch_its_own_image(data: Path, tmp_path: Path) -> None:
    card = train(MOSAIC, run_in(data, tmp_path), SILENT)
    assert card.model_args["img_size"] == 48
    assert card.metrics["top1"] > 80, "one image alone is still answered"
    model, _ = load_model(tmp_path / "best.safetensors")
    colours = [COLOURS[name] for name in ("red", "green", "blue", "red")]
    tiles = (torch.tensor(colours) / 127.5 - 1)[:, :, None, None].expand(-1, -1, 24, 24)
    scene = torch.cat([torch.cat([tiles[2 * y + x] for x in range(2)], 2) for y in range(2)], 1)
    *bands, _ = vir.stream(model, Pixels(scene), band_rows=2)
    best = torch.cat([band.scores for band in bands]).argmax(-1)
    assert best.shape == (6, 6)
    corners = [card.classes[int(best[y, x])] for y, x in ((2, 2), (2, 5), (5, 2), (5, 5))]
    assert corners == ["red", "green", "blue", "red"]


class ByColour(torch.nn.Module):
    """Every patch of 8 px by its own colours, without any doubt, and a class token behind them."""

    global_pool = "avg"

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        assert self.global_pool == ""
        patches = torch.nn.functional.avg_pool2d(images, 8).flatten(2).transpose(1, 2)
        return torch.cat([100 * patches, torch.zeros(len(images), 1, 3)], 1)


def test_patches_of_a_mosaic_have_the_labels_of_their_images(data: Path, tmp_path: Path) -> None:
    task = Classification(replace(MOSAIC, smoothing=0.0), run_in(data, tmp_path), torch.device("cpu"), Share())
    labels = torch.tensor([0, 1, 2, 2, 1, 0, 0, 2])  # two mosaics; none is its own transpose
    images = torch.eye(3)[labels][:, :, None, None].expand(-1, -1, 24, 24)
    model = ByColour()
    loss, right = task.loss(model, Batch(images, labels, torch.arange(8), []), (0, 0, 0, 0, 0))
    assert loss < 1e-6
    assert right == 8
    assert model.global_pool == "avg"


class Pixels:
    """An image in memory, as a reader."""

    def __init__(self, scene: torch.Tensor) -> None:
        self.pixels = ((scene + 1) * 127.5).permute(1, 2, 0).round().to(torch.uint8).numpy()
        self.shape = self.pixels.shape

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return self.pixels[start:stop]


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"batch": 10}, "multiple of the 4"), ({"model": "hvir_tiny"}, "are for a ViR"), ({"mixup": 0.2}, "--mixup 0")],
)
def test_mosaics_that_cannot_be_are_said(data: Path, tmp_path: Path, changes: dict, says: str) -> None:
    with pytest.raises(CannotTrain, match=says):
        train(replace(MOSAIC, **changes), run_in(data, tmp_path), SILENT)


def test_a_run_that_is_stopped_says_where_it_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, once before anything is saved and once after."""
    step = loop.Trainer._step

    def stopped_at(epoch: int) -> None:
        def stopping(trainer: loop.Trainer, *given: object) -> None:
            if trainer.standing.epoch == epoch:
                raise KeyboardInterrupt
            step(trainer, *given)

        monkeypatch.setattr(loop.Trainer, "_step", stopping)

    monkeypatch.setattr(loop, "SHORT", 0.0)
    for epoch, says in ((0, "stopped. The same command begins anew."), (2, "goes on from epoch 2, step 0.")):
        stopped_at(epoch)
        console = Console(record=True, quiet=False, width=200, file=io.StringIO())
        with pytest.raises(KeyboardInterrupt):
            train(PLAIN, run_in(data, tmp_path), console)
        assert says in console.export_text()
    stopped_at(1)
    with pytest.raises(KeyboardInterrupt):
        train(PLAIN, replace(run_in(data, tmp_path), restart=True), console)
    assert "stopped. Without --restart the same command goes on from epoch 1, step 0." in console.export_text()
