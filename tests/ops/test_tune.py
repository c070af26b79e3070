"""The search for launch settings: it must see wrong numbers and survive a candidate that takes its process down."""

import os
from typing import Any

import pytest
import torch

from vir.bench import tune
from vir.ops.triton import quadrant, runner, settings
from vir.ops.triton.settings import Launch, Tile


@pytest.mark.parametrize(
    ("table", "kernel", "candidate", "shape"),
    [
        ("WALK", "walk", Launch(16, 8, 1), (37, 2)),
        ("WALK", "walk", Launch(16, 8, 1, programs=1), (37, 2)),
        ("WALK_BACK", "walk_back", Launch(16, 8, 1), (37, 2)),
        ("LINES", "line_states", Launch(16, 8, 1), (70, 2)),
        ("NARROW", "grid", Tile(2, 16, 2, 8, 1), (9, 1)),
        ("WIDE", "grid", Tile(4, 8, 4, 8, 1), (17, 1)),
    ],
)
def test_the_candidate_is_what_runs(
    table: str, kernel: str, candidate: Any, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, run = runner.Step, []

    def step(kernel: Any, grid: Any, numbers: Any, constants: Any, schedule: Any) -> Any:
        run.append((kernel.fn.__name__, schedule))
        return usual(kernel, grid, numbers, constants, schedule)

    monkeypatch.setattr(runner, "Step", step)
    assert tune.error_of(tune.Group(table, 16, torch.float32), candidate, shape) < 1e-4
    assert (kernel, candidate.schedule) in run


def test_the_candidate_for_many_tiles_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only in half precision, of which the interpreter has no products: it takes what went into them as float32."""
    run, candidate = [], Launch(64, 8, 1, programs=2)
    usual = runner.Step.run
    monkeypatch.setattr(
        runner.Step, "run", lambda step, *x: run.append((step.kernel, step.schedule)) or usual(step, *x)
    )
    assert tune.error_of(tune.Group("QUADRANT", 16, torch.bfloat16), candidate, (9, 1)) < 5e-3
    assert run == [(quadrant.quadrant, candidate.schedule)]


def test_wrong_numbers_are_seen() -> None:
    higher_than_its_tile = Tile(4, 8, 8, 4, 1)  # a block of keys: the tile's own are left out
    assert tune.error_of(tune.Group("WIDE", 16, torch.float32), higher_than_its_tile, (17, 1)) > 0.1


@pytest.mark.parametrize("table", tune.SHAPES)
def test_the_settings_of_today_are_among_the_candidates(table: str) -> None:
    for group, setting in zip(tune.groups_of(table), settings.TABLES[table].values(), strict=True):
        assert setting in tune.candidates(group)


@pytest.mark.parametrize(
    "text", ["Launch(64, 4, 3)", "Launch(64, 4, 3, programs=2)", "Tile(4, 8, 4, 4, 2, registers=128)"]
)
def test_a_setting_is_printed_as_it_is_written(text: str) -> None:
    assert tune.written(eval(text)) == text


def check(group: tune.Group, candidate: int) -> bool:
    if candidate == 2:
        os._exit(3)
    return candidate % 2 == 1


def test_a_candidate_that_ends_its_process_is_left_out() -> None:
    group = tune.Group("WALK", 16, torch.float32)
    assert tune.right_ones(group, [0, 1, 2, 3, 4, 5], check=check) == [1, 3, 5]
    assert tune.right_ones(group, [1, 2], check=check) == [1]
