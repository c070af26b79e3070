"""The command as a newcomer meets it."""

import json
import re
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from typer.testing import CliRunner

import vir
from vir.checkpoint import Card, save_model
from vir.cli import app

run = CliRunner().invoke


def words(text: str) -> str:
    """What an error box says, wherever its lines were broken."""
    return " ".join(text.translate(str.maketrans("│╭╮╰╯─", "      ")).split())


def test_help_names_every_command() -> None:
    shown = run(app, ["--help"]).stdout
    for command in ("models", "demo", "bench"):
        assert command in shown
    assert "cpu" in run(app, ["bench", "--help"]).stdout


def test_version() -> None:
    assert vir.__version__ in run(app, ["--version"]).stdout


def test_models_shows_counts_and_errata() -> None:
    shown = run(app, ["models"]).stdout
    for text in ("vir_small_patch16_224", "22.07", "31.4*", "FasterViT-0", "hvir_4", "262.91", "397.2*"):
        assert text in shown


def test_demo_answers_and_draws(tmp_path: Path) -> None:
    out = tmp_path / "sheet.png"
    result = run(app, ["demo", "--out", str(out)])
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stdout.splitlines() if "a pavilion" in line)
    assert "church" in line, "the one of these photographs that shows what the model knows"
    with Image.open(out) as sheet:
        assert sheet.width > 800
    again = tmp_path / "again.png"
    assert run(app, ["demo", "--out", str(again)]).exit_code == 0
    assert out.read_bytes() == again.read_bytes()


def test_demo_takes_photographs_of_your_own(tmp_path: Path) -> None:
    Image.effect_noise((90, 60), 50).save(tmp_path / "fog $1.png")  # grey: must be read as colour
    result = run(app, ["demo", str(tmp_path / "fog $1.png"), "--out", str(tmp_path / "sheet.png")])
    assert result.exit_code == 0, result.output
    assert "fog $1.png" in result.stdout
    assert (tmp_path / "sheet.png").exists()


def test_demo_answers_for_photographs_of_the_same_name(tmp_path: Path) -> None:
    for folder in "ab":
        (tmp_path / folder).mkdir()
        Image.effect_noise((90, 60), 50).save(tmp_path / folder / "fog.png")
    result = run(app, ["demo", *(str(tmp_path / f / "fog.png") for f in "ab"), "--out", str(tmp_path / "sheet.png")])
    assert result.stdout.count("fog.png") == 2


def test_what_a_disk_refuses_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run(app, ["draw", "paper", "--out", str(tmp_path / "file" / "paper"), "--results", str(tmp_path)])
    assert result.exit_code == 2, result.output
    assert "Not a directory" in words(result.output)
    result = run(app, ["predict", str(tmp_path / "file"), "--out", str(tmp_path / "file")])
    assert "is a file" in words(result.output)


def test_a_model_of_one_size_is_asked_at_that_size(tmp_path: Path) -> None:
    args = {"img_size": 32, "depth": 1, "embed_dim": 48, "num_heads": 3}
    card, file = Card("vit_tiny_patch16_224", ("a", "b"), 32, args), tmp_path / "vit.safetensors"
    save_model(card.build(), card, file)
    Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
    assert run(app, ["predict", str(tmp_path / "a.png"), "--checkpoint", str(file), "--size", "32"]).exit_code == 0
    for command in (["predict", str(tmp_path / "a.png"), "--checkpoint", str(file)], ["evaluate", str(file)]):
        result = run(app, [*command, "--size", "64"])
        assert result.exit_code == 2
        assert "takes images of the 32 px it was trained with" in words(result.output)
    result = run(app, ["forms", "--checkpoint", str(file)])
    assert result.exit_code == 2
    assert "has no retention" in words(result.output)


def test_forms_answer_alike(tmp_path: Path) -> None:
    result = run(app, ["forms", "--size", "64", "--size", "96"])
    assert result.exit_code == 0, result.output
    for form in ("parallel", "recurrent", "chunkwise"):
        assert result.stdout.count(form) == 2
    differences = [float(number) for number in re.findall(r"\d\.\de[+-]\d\d", result.stdout)]
    assert len(differences) == 6
    assert max(differences) < 1e-4


@pytest.mark.parametrize(("content", "says"), [(None, "does not exist"), (b"no image", "is not an image")])
def test_demo_refuses_what_is_no_image(tmp_path: Path, content: bytes | None, says: str) -> None:
    file = tmp_path / "photo.jpg"
    if content is not None:
        file.write_bytes(content)
    result = run(app, ["demo", str(file)])
    assert result.exit_code == 2
    assert says in words(result.output)


def test_bench_writes_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "cpu.json"
    result = run(app, ["bench", "cpu", "--size", "64", "--repeats", "1", "--json", str(out)])
    assert result.exit_code == 0, result.output
    figures = json.loads(out.read_text())
    assert [row["model"] for row in figures["rows"]] == ["ViT-S/16 (timm)", "ViR-S/16 1D", "ViR-S/16 2D"]
    assert figures["rows"][0]["ratio"] == 1
    assert {"hardware", "dtype", "torch", "commit"} <= set(figures["origin"])


def test_bench_asks_for_a_folder_before_it_measures(tmp_path: Path) -> None:
    result = run(app, ["bench", "cpu", "--json", str(tmp_path / "missing" / "cpu.json")])
    assert result.exit_code == 2
    assert "does not exist" in words(result.output)


@pytest.mark.parametrize(
    "arguments",
    [["bench", "stream", "--plot"], ["bench", "draw", "some.json", "--out"], ["mosaic", "--out"], ["demo", "--out"]],
    ids=" ".join,
)
@pytest.mark.parametrize(("file", "says"), [("a.foo", "expected .png"), ("missing/a.png", "does not exist")])
def test_pictures_that_cannot_be_drawn_are_refused_first(
    arguments: list[str], file: str, says: str, tmp_path: Path
) -> None:
    result = run(app, [*arguments, str(tmp_path / file)])
    assert result.exit_code == 2
    assert says in words(result.output)


def test_models_that_there_are_not_are_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result = run(app, ["bench", "models", "--model", "S", "--model", "Q"])
    assert result.exit_code == 2
    assert "--model Q: expected one of S, B, L" in words(result.output)


def test_bench_forms_compares_auto_with_the_best(tmp_path: Path) -> None:
    out = tmp_path / "forms.json"
    result = run(app, ["bench", "forms", "--side", "4", "--heads", "1", "--repeats", "1", "--json", str(out)])
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert [(row["retention"], row["gradients"]) for row in rows] == [
        ("1d", False), ("1d", True), ("2d", False), ("2d", True),
    ]  # fmt: skip
    assert all(row["chosen"] == "parallel" and row["tokens"] == 16 for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["ops", "models", "components", "hvir"])
def test_bench_of_a_gpu_says_that_there_is_none(command: str) -> None:
    result = run(app, ["bench", command])
    assert result.exit_code == 2
    assert "finds none here. On a CPU: vir bench cpu" in words(result.output)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "arguments",
    [
        ["ops", "--shape", "4x2", "--shape", "20x1"],
        ["models", "--model", "S", "--size", "64", "--batch", "2"],
        ["models", "--model", "S", "--size", "64", "--batch", "2", "--training"],
        ["models", "--model", "S", "--size", "64", "--batch", "2", "--how", "compiled"],
        ["models", "--model", "S", "--size", "64", "--batch", "2", "--how", "graphs"],
        ["models", "--model", "S", "--size", "64", "--batch", "2", "--how", "recorded"],
        ["components", "--model", "S", "--size", "64", "--batch", "2"],
        ["hvir", "--model", "hvir_0", "--size", "64x96", "--batch", "2"],
    ],
    ids=" ".join,
)
def test_bench_on_a_gpu(arguments: list[str], tmp_path: Path) -> None:
    files = tmp_path / "figures.json", tmp_path / "figures.png"
    result = run(app, ["bench", *arguments, "--repeats", "2", "--json", str(files[0]), "--plot", str(files[1])])
    assert result.exit_code == 0, result.output
    assert json.loads(files[0].read_text())["rows"]
    assert files[1].stat().st_size > 10_000


def test_the_ceiling_has_no_token_mixing() -> None:
    from vir.bench.models import ceiling
    from vir.layers.retention import MultiHeadRetention

    model = ceiling(timm.create_model("vir_tiny_patch16_224", img_size=64, depth=2)).eval()
    assert not any(isinstance(module, MultiHeadRetention) for module in model.modules())
    pixels = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        tokens, moved = model.forward_features(pixels), model.forward_features(pixels.roll(16, 3))
    assert torch.allclose(tokens[:, -1], moved[:, -1])  # the class token sees no patch


@pytest.mark.parametrize("shape", ["64", "0x3", "axb"])
def test_bench_asks_for_two_numbers(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result = run(app, ["bench", "ops", "--shape", shape])
    assert result.exit_code == 2
    assert "expected two whole numbers with an x between them" in words(result.output)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bench", "cpu", "--size", "224", "--size", "10"], "--size 10: expected at least 16 pixels"),
        (["bench", "models", "--training", "--how", "recorded"], "expected --how eager, compiled or graphs"),
        (["bench", "hvir", "--under", "detector", "--how", "recorded"], "Expected --how eager or compiled"),
        (["forms", "--checkpoint", "upernet_hvir_tiny.camvid"], "trained for segmentation, expected a classifier"),
        (["demo", "--checkpoint", "cascade_hvir_tiny.nuclei"], "trained for detection, expected a classifier"),
        (["predict", "a.png", "--size", "2000000"], "got 2000000, expected at most 4096"),
        (["predict", "a.png", "--out", "drawn"], "--out drawn: hvir_tiny.imagenette is a classifier"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_a_command_cannot_do_is_said_first(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (20, 20)).save("a.png")
    result = run(app, arguments)
    assert result.exit_code == 2, result.output
    assert says in words(result.output)
    assert not Path("drawn").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xd8\xff" + 20_000 * b"x", "it is no JSON"),
        (b'{"origin": {}, "rows": [{"retention": "1d", "tokens": 16}]}', "it has no figures of these"),
        (b'{"origin": {}, "rows": [{"family": "B", "compiled": false}]}', "it has no figures of these"),
        (None, "it cannot be read (No such file or directory)"),
    ],
    ids=["a photograph", "of bench forms", "of models by an earlier version", "missing"],
)
def test_bench_draw_says_in_short_what_it_cannot_draw(content: bytes | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    if content is not None:
        file.write_bytes(content)
    result = run(app, ["bench", "draw", str(file), "--out", str(tmp_path / "a.png")])
    assert result.exit_code == 2
    assert says in words(result.output)
    assert len(result.output) < 1000


@pytest.mark.parametrize(
    ("checkpoint", "size", "says"),
    [
        ("cascade_hvir_tiny.nuclei", (3000, 2), "with its longer side at most 1024 nothing is left of the shorter one"),
        ("hvir_tiny.imagenette", (60_000, 1), "with 128 of its shorter side it would have more than 512,000,000"),
    ],
)
def test_predict_names_what_a_model_cannot_take_and_answers_the_others(
    checkpoint: str, size: tuple[int, int], says: str, tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("a.png", "b.png", "c.png")]
    for file, sides in zip(files, [(40, 40), size, (50, 40)], strict=True):
        Image.new("RGB", sides).save(file)
    result = run(app, ["predict", str(tmp_path), "--checkpoint", checkpoint])
    assert result.exit_code == 1, result.output
    first, refused, last = result.stdout.splitlines()
    assert first.startswith(f"{files[0]}: ")
    assert last.startswith(f"{files[2]}: ")
    assert refused.startswith(f"{files[1]} has {size[1]} x {size[0]} pixels: {says}")


def test_predict_names_what_it_cannot_read_once(tmp_path: Path) -> None:
    file = tmp_path / "text.jpg"
    file.write_text("no image")
    result = run(app, ["predict", str(file)])
    assert result.exit_code == 1
    assert result.stdout.startswith(f"{file} is not an image")
    assert result.stdout.count("text.jpg") == 1
