"""vir train, finetune, evaluate, predict as a user types them."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from vir.cli import app
from vir.train.place import the_only_one
from vir.train.recipes import Recipe
from vir.train.setup import fitting_batch

SMALL = ["--model", "hvir_tiny", "--epochs", "1", "--batch", "8", "--size", "32", "--workers", "0", "--seed", "1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("squares")
    for split in ("train", "val"):
        for name, colour in (("black", 20), ("white", 230)):
            (root / split / name).mkdir(parents=True)
            for i in range(8):
                Image.new("RGB", (40, 40), (colour + i, colour, colour)).save(root / split / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    said = told(["train", "--data", str(data), "--out", str(out), "--terms", "CC0", *SMALL])
    assert "16 images to learn from, 16 to judge by, 2 classes" in said
    assert "epoch 1/1" in said
    for name in ("curves.png", "confusion.png", "mistakes.png"):
        assert (out / name).stat().st_size > 5000
    return out / "best.safetensors"


def told(arguments: list[str], code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return " ".join(result.output.replace("│", " ").split())


def test_the_accuracy_told_after_training_is_the_one_that_evaluate_tells(
    trained: Path, data: Path, tmp_path: Path
) -> None:
    card = json.loads(trained.with_suffix(".json").read_text())
    said = told(["evaluate", str(trained), "--data", str(data), "--workers", "0"])
    assert float(re.search(r"top-1 ([\d.]+) %", said).group(1)) == pytest.approx(card["metrics"]["top1"], abs=0.005)
    assert "on 16 images" in said
    larger = ["--size", "64", "--decay", "rescale", "--workers", "0", "--json", str(tmp_path / "figures.json")]
    assert "at 64 px" in told(["evaluate", str(trained), "--data", str(data), *larger])
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["trained_size"], figures["size"], figures["decay"]) == (card["size"], 64, "rescale")
    assert {"model": card["model"], "images": 16}.items() <= figures.items()


def test_evaluate_says_what_it_did_not_judge(trained: Path, data: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "renamed"
    shutil.copytree(data, renamed)
    first = sorted((renamed / "val").iterdir())[0]
    first.rename(first.with_name("[another] name"))
    said = told(["evaluate", str(trained), "--data", str(renamed), "--workers", "0"])
    assert "classes have no images" in said
    assert "'[another] name'" in said
    assert "on 8 images" in said
    first.with_name("[another] name").rename(renamed / "train" / "more")
    said = told(["evaluate", str(trained), "--data", str(renamed), "--split", "train", "--workers", "0"])
    assert "on 16 images" in said
    assert "'more'" in said
    assert "has no folder 'test'" in told(["evaluate", str(trained), "--data", str(renamed), "--split", "test"], 2)


def test_predict_answers_and_names_what_it_cannot_read(trained: Path, data: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"no image")
    photo = data / "val" / "white" / "1.png"
    said = told(["predict", str(photo), str(broken), "--checkpoint", str(trained)], code=1)
    assert re.search(r"(black|white) [\d.]+ %, (black|white) [\d.]+ %", said)
    assert "is not an image" in said
    for name in ("[old] a.png", "more/[old] a.png", "more/b.png"):
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(photo, tmp_path / "folder" / name)
    said = told(["predict", str(tmp_path / "folder"), "--checkpoint", str(trained)])
    assert said.count("[old] a.png: ") == 2
    assert "b.png: " in said
    (tmp_path / "empty").mkdir()
    assert "there is no image in it" in told(["predict", str(tmp_path / "empty"), "--checkpoint", str(trained)], 2)
    lines = CliRunner().invoke(app, ["predict", str(photo), "--checkpoint", str(trained), "--json"]).stdout.splitlines()
    answer = json.loads(lines[0])
    assert set(answer["names"]) == {"black", "white"}
    assert sum(answer["probabilities"]) == pytest.approx(1, abs=1e-5)


def test_finetune_at_a_higher_size(trained: Path, data: Path, tmp_path: Path) -> None:
    arguments = ["--data", str(data), "--size", "64", "--epochs", "1", "--batch", "8", "--workers", "0"]
    told(["finetune", str(trained), "--out", str(tmp_path), "--decay", "rescale", "--terms", "ours", *arguments])
    card = json.loads((tmp_path / "best.json").read_text())
    assert card["size"] == 64
    assert card["stretch"] == 0.5
    assert card["data"]["terms"] == "ours; of the weights it began with: CC0"


@pytest.mark.parametrize("name", ["best", "last"])
def test_a_run_never_writes_over_what_it_began_with(name: str, trained: Path, data: Path, tmp_path: Path) -> None:
    start = tmp_path / f"{name}.safetensors"
    shutil.copy(trained, start)
    arguments = ["finetune", str(start), "--data", str(data), "--out", str(tmp_path), "--epochs", "1"]
    for more in ([], ["--restart"], ["--dry-run"]):
        assert "this run's own checkpoints go: choose another --out" in told([*arguments, *more], 2)
    assert start.read_bytes() == trained.read_bytes()


def test_a_run_that_began_with_other_weights_is_not_gone_on_with(trained: Path, data: Path, tmp_path: Path) -> None:
    arguments = ["--data", str(data), "--epochs", "1", "--batch", "8", "--workers", "0"]
    out = ["--out", str(tmp_path / "out")]
    told(["finetune", str(trained), *arguments, *out])
    moved = tmp_path / "moved.safetensors"
    shutil.copy(trained, moved)
    assert "it is at its end" in told(["finetune", str(moved), *arguments, *out])
    other = tmp_path / "out" / "best.safetensors"
    shutil.copy(other, tmp_path / "other.safetensors")
    assert "other settings (checkpoint)" in told(["finetune", str(tmp_path / "other.safetensors"), *arguments, *out], 2)
    assert "other settings (decay)" in told(["finetune", str(trained), *arguments, *out, "--decay", "rescale"], 2)


def test_one_run_at_a_time_in_a_folder(data: Path, tmp_path: Path) -> None:
    arguments = ["train", "--data", str(data), "--out", str(tmp_path), *SMALL]
    with the_only_one(tmp_path):
        assert "another process trains in" in told(arguments, 2)
    assert "epoch 1/1" in told(arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--out", "file/run"], "file/run cannot be written to"),
        (["--form", "kernel"], "--form kernel is of a CUDA GPU"),
        (["--model", "vir_tiny_patch16_224", "--set", "patch_size=0"], "cannot be made with patch_size=0"),
        (["--data", "broken", "--workers", "1"], "Error: none of the 74 images can be read; "),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_cannot_be_trained_is_said_in_words(
    arguments: list[str], says: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "kernel" in arguments and torch.cuda.is_available():
        pytest.skip("it can be, on a GPU")
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    for i in range(80):
        file = Path("broken", "ab"[i % 2], f"{i}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"broken")
    said = told(["train", "--data", str(data), "--out", "out", *SMALL, *arguments], 2)
    assert says in said
    assert "Traceback" not in said


def test_a_dry_run_tells_the_plan_and_writes_nothing(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "none"
    said = told(["train", "--data", str(data), "--out", str(out), *SMALL, "--dry-run"])
    for words in ("16 to learn from", "2: black, white", "1 epochs of 2 steps of 8 images", "PFLOP", "GB"):
        assert words in said
    assert not out.exists()


def test_of_several_processes_one_speaks(data: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "vir"]
    arguments = ["train", "--data", str(data), "--out", str(tmp_path), *SMALL]
    run = subprocess.run([*launch, *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "on 2 x " in run.stdout
    assert run.stdout.count("best:") == 1
    assert run.stdout.count("written:") == 3


def test_restart_forgets_the_run_and_nothing_else(data: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    arguments = ["train", "--data", str(data), "--out", str(tmp_path), *SMALL]
    told(arguments)
    assert "other settings (lr)" in told([*arguments, "--lr", "0.01"], code=2)
    state = (tmp_path / "state.safetensors").read_bytes()
    told([*arguments, "--restart", "--data", "nowhere"], code=2)
    told([*arguments, "--restart", "--batch", "7"], code=2)
    assert (tmp_path / "state.safetensors").read_bytes() == state
    assert "going on" not in told([*arguments, "--lr", "0.01", "--restart"])
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_other_runs_in_the_same_folder_are_told_apart(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["train", "--out", str(out), *SMALL]
    told([*arguments, "--data", str(data)])
    assert f"of a run on {data} it is at its end" in told([*arguments, "--data", str(data)])
    more = tmp_path / "more"
    shutil.copytree(data, more)
    shutil.copy(more / "train" / "white" / "1.png", more / "train" / "white" / "new.png")
    said = told([*arguments, "--data", str(more)], code=2)
    assert f"other data: 16 images of {data}, where {more} has 17. Choose another --out" in said
    (more / "train" / "grey").mkdir()
    (more / "train" / "white" / "new.png").rename(more / "train" / "grey" / "1.png")
    assert "other settings (classes) on other data: 16" in told([*arguments, "--data", str(more)], code=2)
    wider = [*arguments, "--data", str(data), "--model", "vir_tiny_patch16_224"]
    assert "other settings (model)" in told(wider, code=2)


@pytest.mark.parametrize(("images", "batch"), [(1000, 128), (120, 32), (130, 128), (17, 16), (16, 16), (3, 2), (1, 2)])
def test_a_fitting_batch_leaves_out_no_more_than_a_quarter(images: int, batch: int) -> None:
    assert fitting_batch(Recipe("hvir_tiny", batch=128), images) == batch


def test_a_small_set_has_small_batches_unless_asked(data: Path, tmp_path: Path) -> None:
    arguments = ["train", "--data", str(data), "--out", str(tmp_path), "--dry-run", "--size", "32"]
    assert "50 epochs of 1 steps of 16 images" in told(arguments)
    assert "--batch 32 is more than the 16 images" in told([*arguments, "--batch", "32"], code=2)


def test_the_recipes_are_listed() -> None:
    said = told(["train", "list"])
    assert "hvir_0_imagenet" in said
    assert "Paper: 81.1 %" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "nosuch"], "no recipe 'nosuch'"),
        (["train", "--model", "nosuch"], "no model 'nosuch'"),
        (["train", "--data", "/nowhere"], "does not exist"),
        (["train", "--out", __file__], "is a file"),
        (["evaluate", "/nowhere.safetensors"], "does not exist"),
        (["evaluate", "[old].safetensors"], "[old].safetensors does not exist"),
        (["predict", "x.jpg", "--checkpoint", __file__], "not a whole safetensors file"),
        (["finetune", __file__], "not a whole safetensors file"),
    ],
)
def test_mistakes_are_answered_in_words(arguments: list[str], says: str) -> None:
    assert says in told(arguments, code=2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "foo=3"], "hvir_tiny cannot be made with foo=3: "),
        (["--model", "resnet18", "--retention", "2d"], "resnet18 cannot be made with retention=2d: "),
        (["--model", "vir_tiny_patch16_224", "--size", "8"], "no whole patch of 16 pixels"),
    ],
    ids=" ".join,
)
def test_models_that_cannot_be_made_are_told(arguments: list[str], says: str, data: Path, tmp_path: Path) -> None:
    given = ["train", "--data", str(data), "--out", str(tmp_path), "--batch", "8", *arguments]
    for more in ([], ["--dry-run"]):
        assert says in told([*given, *more], code=2)
    assert not (tmp_path / "state.safetensors").exists()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(lock: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr("vir.train.place.FileLock._acquire", refused)
    with the_only_one(tmp_path / "out"):
        assert (tmp_path / "out").is_dir()
