"""vir draw as a newcomer meets it."""

from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from vir.checkpoint import Card, save_model
from vir.cli import app

run = CliRunner().invoke


def words(text: str) -> str:
    """What an error says, wherever its lines were broken."""
    return " ".join(text.translate(str.maketrans("│╭╮╰╯─", "      ")).split())


def test_masks(tmp_path: Path) -> None:
    out = tmp_path / "masks.svg"
    result = run(app, ["draw", "masks", "--grid", "3x4", "--patch", "class", "--head", "5", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "gamma = 0.9980" in result.stdout
    assert out.read_text().startswith("<?xml")


def test_maps(tmp_path: Path) -> None:
    photograph, out = tmp_path / "noise.png", tmp_path / "maps.png"
    Image.effect_noise((96, 64), 60).save(photograph)
    arguments = ["draw", "maps", str(photograph), "--size", "64", "--out", str(out)]
    for more, says in (([], "8 heads of 1 layers"), (["--layer", "0", "--patch", "3,1"], "4 heads of 1 layers")):
        result = run(app, [*arguments, *more])
        assert result.exit_code == 0, result.output
        assert says in result.stdout
        assert out.stat().st_size > 10_000
    for more, says in ((["--patch", "9,1"], "outside the grid of 2 x 3 patches"), (["--checkpoint", "x"], "not exist")):
        result = run(app, [*arguments, *more])
        assert result.exit_code == 2
        assert says in words(result.output)


def test_maps_of_a_checkpoint_with_a_class_token(tmp_path: Path) -> None:
    photograph, out, file = tmp_path / "noise.png", tmp_path / "maps.png", tmp_path / "vir.safetensors"
    Image.effect_noise((96, 64), 60).save(photograph)
    sizes = {"depth": 2, "embed_dim": 48, "heads": 3, "img_size": 64}
    card = Card("vir_tiny_patch16_224", ("cat", "dog"), 64, model_args=sizes)
    save_model(card.build(), card, file)
    arguments = ["draw", "maps", str(photograph), "--checkpoint", str(file), "--out", str(out)]
    for more, says in (([], "3 heads of 1 layers"), (["--patch", "class", "--every-layer"], "6 heads of 2 layers")):
        result = run(app, [*arguments, *more])
        assert result.exit_code == 0, result.output
        assert says in result.stdout


def test_horizon(tmp_path: Path) -> None:
    photograph, out = tmp_path / "noise.png", tmp_path / "horizon.png"
    Image.effect_noise((96, 64), 60).save(photograph)
    arguments = ["draw", "horizon", "--out", str(out)]
    measured = ["--measured", str(photograph), "--measured", str(photograph)]
    result = run(app, [*arguments, *measured, "--at", "64"])
    assert result.exit_code == 0, result.output
    assert "measured at 64 px: half of the gradient within" in words(result.stdout)
    assert "2,356" in result.stdout  # patches of the last head, log(0.01) / log(511 / 512)
    assert out.stat().st_size > 10_000
    for more, says in (
        (["--measured", str(tmp_path / "none.png")], "does not exist"),
        ([*measured, "--patch", "4,0"], "outside the grid of 4 x 4 patches"),
        ([*measured, "--at", "20"], "20 pixels of a side, expected at least the 32 of a patch"),
        ([*measured, "--patch", "class"], "there is no class token here"),
    ):
        result = run(app, [*arguments, *more])
        assert result.exit_code == 2
        assert says in words(result.output)


def test_shift(tmp_path: Path) -> None:
    out = tmp_path / "shift.svg"
    result = run(app, ["draw", "shift", "--size", "192", "--by", "2", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "content moved right" in result.stdout
    assert out.stat().st_size > 10_000
    result = run(app, ["draw", "shift", "--size", "192", "--by", "3", "--out", str(out)])
    assert result.exit_code == 2
    assert "a shift by 3 patches, expected 1 to 2, a third of a side of 6 x 9 patches" in words(result.output)
    result = run(app, ["draw", "shift", "--size", "32", "--out", str(out)])
    assert result.exit_code == 2
    assert "expected at least 3 of a side: content moves by up to a third of it. Take a larger" in words(result.output)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["masks", "--patch", "20,1"], "the patch 20,1 lies outside the grid of 14 x 14"),
        (["masks", "--patch", "first"], "expected row and column of a patch, or the word class"),
        (["masks", "--grid", "14"], "expected rows and columns: two whole numbers with a x between"),
        (["masks", "--head", "6"], "head 6 of 6 heads, expected a number from 0 to 5"),
        (["masks", "--gamma", "2"], "gamma=2.0, expected a number from 0"),
        (["maps", "no such photograph.jpg"], "does not exist"),
        (["shift", "no such photograph.jpg"], "does not exist"),
        (["shift", "--layer", "10"], "layer 10 of 10 retention layers, expected 0 to 9"),
        (["maps"], "Missing argument"),
        (["masks", "--out", "masks.jpg"], "ends in '.jpg', expected .png or .svg"),
    ],
    ids=" ".join,
)
def test_mistakes(arguments: list[str], says: str) -> None:
    result = run(app, ["draw", *arguments])
    assert result.exit_code == 2
    assert says in words(result.output)


@pytest.mark.parametrize("command", ["draw maps", "draw shift", "draw horizon --measured", "demo"])
def test_a_photograph_is_not_drawn_over(command: str, tmp_path: Path) -> None:
    photograph = tmp_path / "noise.png"
    Image.effect_noise((96, 64), 60).save(photograph)
    before = photograph.read_bytes()
    result = run(app, [*command.split(), str(photograph), "--out", str(tmp_path / ".." / tmp_path.name / "noise.png")])
    assert result.exit_code == 2
    assert "choose another --out" in words(result.output)
    assert photograph.read_bytes() == before


def log(folder: Path, scores: list[str], column: str = "val_top1") -> Path:
    folder.mkdir()
    lines = [f"{epoch},{2 / epoch},{score}" for epoch, score in enumerate(scores, 1)]
    (folder / "log.csv").write_text("\n".join([f"epoch,loss,{column}", *lines, ""]))
    return folder


def test_curves_of_several_trainings(tmp_path: Path) -> None:
    out = tmp_path / "curves.png"
    one, other = log(tmp_path / "one", ["50", "", "70.5"]), log(tmp_path / "other", ["", "61.25"])
    result = run(app, ["draw", "curves", str(one), str(other / "log.csv"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "70.50" in result.stdout
    assert "61.25" in result.stdout
    with Image.open(out) as both:
        wide = both.size
    assert wide[0] > 1000


@pytest.mark.parametrize(
    ("scores", "column", "says"),
    [
        ([], "val_top1", "no complete epoch"),
        (["", ""], "val_top1", "score in common"),
        (["1"], "val_miou", "in common"),
    ],
)
def test_trainings_that_cannot_be_compared(tmp_path: Path, scores: list[str], column: str, says: str) -> None:
    runs = [log(tmp_path / "one", ["50"]), log(tmp_path / "other", scores, column)]
    result = run(app, ["draw", "curves", *map(str, runs), "--out", str(tmp_path / "curves.png")])
    assert result.exit_code == 2
    assert says in words(result.output)
    result = run(app, ["draw", "curves", str(tmp_path), "--out", str(tmp_path / "curves.png")])
    assert "holds no log" in words(result.output)
    assert not (tmp_path / "curves.png").exists()
