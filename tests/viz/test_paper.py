"""The paper's figures and tables from what lies in two folders."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from vir.bench.models import component_models
from vir.checkpoint import Card
from vir.cli import app
from vir.models.catalog import PAPER_COMPONENTS
from vir.viz import paper
from vir.viz.exhibits import Exhibit, Table, page
from vir.viz.runs import accuracies, by_size, untrained_at, with_ablations

ORIGIN = {"hardware": "some GPU", "commit": "abc"}


def keep_card(
    folder: Path,
    name: str,
    top1: float,
    model: str = "vir_tiny_patch16_224",
    size: int = 128,
    seed: int = 0,
    **args: Any,
) -> None:
    card = Card(
        model, ("a", "b"), size, {"img_size": size, **args}, metrics={"top1": top1}, data={"path": "/somewhere/pets"},
        recipe={"epochs": 50, "lr": 1e-3, "seed": seed},
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(asdict(card)))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    for seed, top1 in enumerate((70.0, 72.0, 71.0)):
        keep_card(folder / str(seed), "best", top1, seed=seed)
    keep_card(folder, "gated", 69.0, ablation="gated")
    keep_card(folder, "two_dimensions", 68.0, retention="2d")
    keep_card(folder, "larger", 75.0, size=160)
    keep_card(folder, "convolutions", 80.0, model="resnet18")
    (folder / "log.json").write_text("[1, 2]")
    (folder / "broken.json").write_text("{")
    return folder


def test_seeds_of_one_setting_make_one_line(runs: Path) -> None:
    found = accuracies(runs)
    told = {(one.setting.told, one.setting.size): one.told for one in found}
    assert told == {
        ("resnet18", 128): "80.00",
        ("vir_tiny_patch16_224", 160): "75.00",
        ("vir_tiny_patch16_224", 128): "71.00 (70.00, 72.00, 71.00)",
        ("vir_tiny_patch16_224, ablation=gated", 128): "69.00",
        ("vir_tiny_patch16_224, retention=2d", 128): "68.00",
    }
    assert [one.mean for one in found] == sorted((one.mean for one in found), reverse=True)
    assert {one.setting.data for one in found} == {"pets"}


def test_components_stand_beside_the_same_model_without_changes(runs: Path) -> None:
    found = with_ablations(accuracies(runs))
    assert [one.setting.argument("ablation") for one in found] == [None, "gated"]
    assert found[0].mean == 71.0
    assert with_ablations([one for one in accuracies(runs) if not one.setting.argument("ablation")]) == []


def test_components_tell_their_speed_beside_the_paper_s(runs: Path, tmp_path: Path) -> None:
    row = {"family": "ViR-S/16 components", "size": [224, 224], "how": "eager"}
    speeds = {"base": 1000.0, "gated": 800.0, "multipass": None}
    rows = [{**row, "model": name, "images_per_second": speed} for name, speed in speeds.items()]
    sources = paper.Sources(None, None, {}, [{"origin": {}, "rows": rows}], accuracies(runs))  # type: ignore[arg-type]
    table = paper.components(tmp_path, sources).table
    assert table is not None
    told = {line[0]: line[-3:] for line in table.rows}
    assert told == {"base": ("82.6", "1.00", "1.00"), "gated": ("82.1", "0.80", "0.93")}


def test_every_variant_of_the_component_study_is_in_the_paper() -> None:
    assert list(component_models("S", 64)) == list(PAPER_COMPONENTS)


def test_sizes_of_one_model_make_a_line(runs: Path) -> None:
    assert by_size(accuracies(runs)) == {"vir_tiny_patch16_224, 1D, pets": [(128, 71.0), (160, 75.0)]}


def test_sizes_that_a_model_was_not_trained_at_make_a_line_for_each_decay(tmp_path: Path) -> None:
    judged = {"model": "vir_tiny_patch16_224", "model_args": {"patch_size": 8, "retention": "2d"}, "data": "pets"}
    for size, decay, top1 in ((160, "keep", 60.0), (128, "keep", 70.0), (128, "rescale", 71.0)):
        told = {**judged, "size": size, "decay": decay, "top1": top1}
        (tmp_path / f"{size}_{decay}.json").write_text(json.dumps(told))
    other = {**judged, "model": "hvir_tiny", "size": 1, "decay": "keep", "top1": 1.0}
    (tmp_path / "other.json").write_text(json.dumps(other))
    (tmp_path / "list.json").write_text("[1]")
    name = "vir_tiny_patch16_224 with patches of 8 px, 2D, pets"
    assert untrained_at(tmp_path) == {(name, "keep"): [(128, 70.0), (160, 60.0)], (name, "rescale"): [(128, 71.0)]}


def test_a_folder_that_is_not_there_has_nothing(tmp_path: Path) -> None:
    assert accuracies(tmp_path / "nowhere") == []
    assert paper.read_benchmarks(tmp_path / "nowhere") == []


def test_words_on_the_page_are_words() -> None:
    made = page("a < b", "c & d", [Exhibit("<script>", "e > f", ("x.png",), Table(("<i>",), [("<b>",)]))])
    assert "<script>" not in made
    assert "<i>" not in made
    assert "<b>" not in made
    assert 'src="x.png"' in made


def test_what_cannot_be_made_says_how_it_could(tmp_path: Path) -> None:
    nothing = paper.Sources(None, None, {})  # type: ignore[arg-type]  # these need neither model nor photograph
    makers = (paper.accuracy_and_resolution, paper.throughput, paper.components, paper.trainings)
    for make, part in zip(makers, ("vir finetune", "vir bench models", "ablation=gated", "--runs"), strict=True):
        exhibit = make(tmp_path, nothing)
        assert not exhibit.there
        assert part in exhibit.words
    assert list(tmp_path.iterdir()) == []


def keep_benchmarks(folder: Path) -> None:
    folder.mkdir()
    rows = [
        {
            "family": family, "model": name, "size": [px, px], "batch": 16, "mode": "inference", "how": "eager",
            "images_per_second": speed / px, "spread": 0.01, "peak_bytes": 1, "missing": "",
        }
        for family, name, speed in (("B", "ViT-B/16", 2e5), ("B", "ViR-B/16 1D", 3e5))
        for px in (224, 1024)
    ]  # fmt: skip
    (folder / "models.json").write_text(json.dumps({"origin": ORIGIN, "rows": rows}))
    rows = [
        {
            "family": "HViR", "model": name, "size": [224, 224], "batch": 128, "mode": "inference", "how": "eager",
            "images_per_second": speed,
        }
        for name, speed in (("hvir_1", 1500.0), ("convnext_tiny", 1000.0))
    ]  # fmt: skip
    (folder / "hvir.json").write_text(json.dumps({"origin": ORIGIN, "rows": rows}))
    (folder / "other.json").write_text('{"origin": {}, "rows": [7]}')


def test_all_in_one_folder(runs: Path, tmp_path: Path) -> None:
    keep_benchmarks(tmp_path / "results")
    Image.effect_noise((160, 128), 90).save(tmp_path / "noise.png")
    given = ["--results", str(tmp_path / "results"), "--runs", str(runs), "--out", str(tmp_path / "new" / "paper")]
    answer = CliRunner().invoke(app, ["draw", "paper", str(tmp_path / "noise.png"), *given])
    assert answer.exit_code == 0, answer.output
    assert answer.output.count("missing") == 1
    assert "COCO" in answer.output
    index = (tmp_path / "new" / "paper" / "index.html").read_text()
    pictures = re.findall(r'src="([^"]+)"', index)
    assert set(pictures) == {"masks.png", "resolution.png", "throughput.png", "maps_0.png", "horizon.png", "shift.png"}
    for picture in pictures:
        with Image.open(tmp_path / "new" / "paper" / picture) as image:
            assert min(image.size) > 300
    assert "<td>1.15</td><td>1.50</td>" in index  # hvir_1, in the paper and here
    assert "<td>gated</td>" in index
    assert "<td>71.00 (70.00, 72.00, 71.00)</td><td>82.6</td>" in index
    assert "hardware some GPU" in index


def test_what_was_measured_again_is_drawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_benchmarks(tmp_path / "results")
    again = json.loads((tmp_path / "results" / "models.json").read_text())
    for row in again["rows"]:
        row["images_per_second"] *= 2
    (tmp_path / "results" / "models_again.json").write_text(json.dumps(again))
    figures = []
    monkeypatch.setattr(paper.plots, "_finish", lambda figure, *_: figures.append(figure))
    paper.throughput(tmp_path, paper.Sources(None, None, {}, paper.read_benchmarks(tmp_path / "results")))  # type: ignore[arg-type]
    lines = {line.get_label(): line.get_xydata().tolist() for line in figures[0].axes[0].get_lines()}
    assert lines["ViT-B/16"] == [[224, 4e5 / 224], [1024, 4e5 / 1024]]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    answer = CliRunner().invoke(app, ["draw", "paper", "--out", str(tmp_path / "file" / "paper")])
    assert answer.exit_code == 2
    assert "cannot be made" in answer.output
