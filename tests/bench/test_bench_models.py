"""What is measured can be built and called; the figures themselves need a GPU."""

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import torch

from vir.bench import models
from vir.bench.measure import in_a_fresh_process
from vir.bench.models import Row, dense_models, hierarchical_models, timed_calls


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
