"""The pictures of the benchmarks, drawn from rows like those of a run."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from vir.bench import plots
from vir.cli import app

ORIGIN = {"hardware": "some GPU", "dtype": "bf16"}


def looks_drawn(file: Path) -> bool:
    with Image.open(file) as picture:
        return min(picture.size) > 300 and len(set(picture.convert("L").resize((64, 64)).get_flattened_data())) > 10


def test_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"attention": 1.8, "fla chunk": 0.4, "fla parallel": 0.9, "kernel 1D": 0.12, "kernel 2D": 0.4}
    rows = [
        {"tokens": n, "batch": b, "limit": 0.09, "forward": times, "backward": times}
        for n, b in ((196, 128), (4096, 16))
    ]
    plots.operators(rows, ORIGIN, tmp_path / "ops.png")
    assert looks_drawn(tmp_path / "ops.png")
    named: list[str] = []
    monkeypatch.setattr(
        plots, "_finish", lambda figure, *_: named.extend(x.get_text() for x in figure.axes[1].get_legend().texts)
    )
    plots.operators(rows, ORIGIN, tmp_path / "ops.png")
    assert named == ["attention", "best of fla", "kernel 1D", "kernel 2D", "memory limit"]


def rows_of_models(batch: int = 16, missing: str = "out of memory") -> list[dict[str, Any]]:
    speeds = {"ViT-B/16": [2000.0, 30.0, None], "ViR-B/16 1D": [2100.0, 120.0, 30.0]}
    return [
        {
            "family": "B",
            "model": name,
            "size": (px, px),
            "batch": batch,
            "mode": "inference",
            "how": "eager",
            "images_per_second": s,
            "missing": "" if s else missing,
        }
        for name, some in speeds.items()
        for px, s in zip((224, 1024, 4096), some, strict=True)
    ]


@pytest.mark.parametrize(("missing", "mark"), [("out of memory", "x"), ("too slow", "+")])
def test_a_mark_says_why_there_is_no_figure(missing: str, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(plots, "_finish", lambda figure, *_: drawn.append(figure))
    plots.models(rows_of_models(missing=missing), ORIGIN, Path("nowhere.png"))
    panel = drawn[0].axes[0]
    marks = {line.get_marker(): list(line.get_xdata()) for line in panel.get_lines() if len(line.get_xdata()) == 1}
    assert marks == {mark: [4096]}
    assert f"{mark}: {missing}" in panel.get_ylabel()


def test_a_family_has_the_sizes_that_it_ran_at(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(plots, "_finish", lambda figure, *_: drawn.append(figure))
    large = [row | {"family": "L"} for row in rows_of_models() if row["size"][0] < 4096]
    plots.models(rows_of_models() + large, ORIGIN, Path("nowhere.png"))
    assert [list(panel.get_xticks()) for panel in drawn[0].axes] == [[224, 1024, 4096], [224, 1024]]


def test_one_batch_of_many(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    file.write_text(json.dumps({"origin": ORIGIN, "rows": rows_of_models(16) + rows_of_models(128)}))
    widths = {}
    for batches in ("16", "16 128", "64"):
        chosen = [word for batch in batches.split() for word in ("--batch", batch)]
        out = tmp_path / f"{batches}.png"
        answer = CliRunner().invoke(app, ["bench", "draw", str(file), *chosen, "--out", str(out)])
        assert (answer.exit_code == 0) == out.exists()
        widths[batches] = Image.open(out).width if out.exists() else 0
    assert widths["16 128"] > widths["16"] > widths["64"] == 0


def test_models_that_ran_out_of_memory_are_shown(tmp_path: Path) -> None:
    rows = rows_of_models()
    plots.models(rows, ORIGIN, tmp_path / "models.png")
    assert looks_drawn(tmp_path / "models.png")
    plots.headline(rows, ORIGIN, tmp_path / "headline.png")
    assert looks_drawn(tmp_path / "headline.png")


def test_hierarchy(tmp_path: Path) -> None:
    rows = [
        {"family": "HViR", "model": name, "size": (224, 224), "how": how, "images_per_second": speed}
        for how in ("eager", "compiled")
        for name, speed in (("hvir_1", 16000.0), ("hvir_1 ceiling", 17000.0), ("convnext_tiny", 10000.0))
    ]
    plots.hierarchy(rows, ORIGIN, tmp_path / "hvir.png")
    assert looks_drawn(tmp_path / "hvir.png")


def test_drawn_again_from_files(tmp_path: Path) -> None:
    rows = [{"family": "HViR", "model": "hvir_1", "size": [224, 224], "how": "eager", "images_per_second": 16000.0}]
    whole, half = tmp_path / "whole.json", tmp_path / "half.json"
    whole.write_text(json.dumps({"origin": ORIGIN, "rows": rows}))
    half.write_text("{")
    answer = CliRunner().invoke(app, ["bench", "draw", str(whole), str(whole), "--out", str(tmp_path / "x.png")])
    assert answer.exit_code == 0
    assert looks_drawn(tmp_path / "x.png")
    answer = CliRunner().invoke(app, ["bench", "draw", str(half), "--out", str(tmp_path / "y.png")])
    assert answer.exit_code == 2
    assert "half.json" in answer.output
    assert not (tmp_path / "y.png").exists()


def test_panels_by_batch_then_by_how_a_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(plots, "_finish", lambda figure, *_: drawn.append(figure))
    rows = [row | {"how": how} for batch in (128, 16) for how in plots.HOW for row in rows_of_models(batch)]
    plots.models(rows, ORIGIN, Path("nowhere.png"))
    titles = [panel.get_title() for panel in drawn[0].axes]
    batches = [int(title.split("batch ")[1].split(",")[0]) for title in titles]
    assert batches == [16] * len(plots.HOW) + [128] * len(plots.HOW)
    assert [title.split(", ", 2)[2] for title in titles] == list(plots.HOW.values()) * 2
