"""What is measured can be built and called; the figures themselves need a GPU."""

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from typer.testing import CliRunner

from vir.bench import models
from vir.bench.measure import in_a_fresh_process
from vir.bench.models import Row, dense_models, hierarchical_models, timed_calls
from vir.cli import app


@pytest.mark.parametrize("under", ["backbone", "detector", "segmentor"])
def test_backbones_under_the_same_heads(under: str) -> None:
    size = (64, 96)
    makers = dense_models(["hvir_tiny"], ["resnet18"], size, under)
    assert list(makers) == ["hvir_tiny", "resnet18"]
    for make in makers.values():
        model = make().eval()
        with torch.inference_mode():
            answer = model(torch.rand(2, 3, *size))
        if under == "detector":
            assert model.detector.transform.min_size == (64,)
            assert [set(one) for one in answer] == [{"boxes", "labels", "scores", "masks"}] * 2
        elif under == "segmentor":
            assert answer.shape == (2, 150, *size)
        else:
            assert [x.shape[-2:] for x in answer] == [(16, 24), (8, 12), (4, 6), (2, 3)]


@pytest.mark.parametrize("how", get_args(models.How))
def test_compiled_models_have_a_process_each_and_rows_are_kept_as_they_come(
    how: models.How, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart: list[str] = []
    kept: list[Row] = []

    def fresh(function: Callable, row: Row, makers: Callable, repeats: int) -> Any:
        apart.append(row.model)
        return function(row, pickle.loads(pickle.dumps(makers)), repeats)

    def measured(row: Row, make: Callable[[], Any], repeats: int) -> Row:
        count = sum(p.numel() for p in make().parameters())
        return replace(row, images_per_second=float(count), missing="")

    monkeypatch.setattr(models, "in_a_fresh_process", fresh)
    monkeypatch.setattr(models, "_row", measured)
    makers = partial(hierarchical_models, ["hvir_0"], ["resnet50"], (64, 64))
    (rows,) = models.compare("HViR", makers, (64, 64), [2], "inference", how, 3, keep=kept.append)
    assert rows == kept
    assert [row.model for row in rows] == ["hvir_0", "hvir_0 ceiling", "resnet50"]
    assert apart == ([row.model for row in rows] if how in ("compiled", "graphs") else [])
    whole, unmixed, _ = (row.images_per_second for row in rows)
    assert unmixed < whole  # each is the model of its name: without mixing its norms are gone


def test_a_run_that_is_killed_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is warmed up once, not at every size."""
    asked: list[tuple[str, int]] = []

    def measured(row: Row, make: Callable[[], Any], repeats: int) -> Row:
        asked.append((row.model, row.size[0]))
        if len(asked) == 7:  # one to warm up, four of the first size, one of the second
            raise KeyboardInterrupt
        return replace(row, images_per_second=1.0, spread=0.0, peak_bytes=1, missing="")

    monkeypatch.setattr(models, "_row", measured)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some GPU")
    file = tmp_path / "figures.json"
    arguments = ["models", "--model", "S", "--no-forms", "--size", "32", "--size", "48", "--json", str(file)]
    CliRunner().invoke(app, ["bench", *arguments])
    names = ["ViT-S/16", "ViR-S/16 1D", "ViR-S/16 2D", "ceiling S/16"]
    assert asked == [(names[0], 32), *((name, 32) for name in names), (names[0], 48), (names[1], 48)]
    kept = json.loads(file.read_text())["rows"]
    assert [(row["model"], row["size"][0]) for row in kept] == asked[1:6]


def test_a_fresh_process_is_another_one() -> None:
    assert in_a_fresh_process(os.getpid) != os.getpid()
    with pytest.raises(ZeroDivisionError):
        in_a_fresh_process(divmod, 1, 0)


@pytest.mark.parametrize(
    ("asked", "seconds", "timed"),
    [(5, 1.7, 3), (5, 0.05, 8), (5, 0.001, 100), (2, 1.7, 2), (1, 1.7, 1)],
    ids=["long", "short", "very short", "two asked for", "one asked for"],
)
def test_no_row_rests_on_one_call_unless_asked(asked: int, seconds: float, timed: int) -> None:
    assert timed_calls(asked, seconds) == timed


@pytest.mark.parametrize(
    ("spread", "options", "said"),
    [(0.04, [], []), (0.2, [], ["ViR-S/16 1D", "--how recorded"]), (0.2, ["--training"], ["ViR-S/16 1D"])],
    ids=["steady", "moved", "training"],
)
def test_figures_that_moved_are_told(
    spread: float, options: list[str], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(row: Row, make: Callable[[], Any], repeats: int) -> Row:
        moved = spread if row.model == "ViR-S/16 1D" else 0.01
        return replace(row, images_per_second=1.0, spread=moved, peak_bytes=1, repeats=9, missing="")

    monkeypatch.setattr(models, "_row", measured)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some GPU")
    run = CliRunner().invoke(app, ["bench", "models", "--model", "S", "--no-forms", "--size", "32", *options])
    assert run.exit_code == 0, run.output
    _, *told = " ".join(run.output.split()).split("Spreads above 5%:")
    assert len(told) == len(said[:1])
    for words in said:
        assert words in told[0]
    assert ("--how recorded" in "".join(told)) == ("--how recorded" in said)
