"""The benchmark of streaming on images that are made on the way: every contender, and those that give up."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from vir.bench import streaming
from vir.cli import app


def test_made_pixels_do_not_depend_on_the_bands() -> None:
    image = streaming.MadePixels(2000, 8)
    whole = image.read_rows(0, 2000)
    parts = np.concatenate([image.read_rows(i, min(i + 300, 2000)) for i in range(0, 2000, 300)])
    np.testing.assert_array_equal(whole, parts)


def test_every_contender_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(streaming.KINDS, "S", "tiny")
    out, plot = tmp_path / "s.json", tmp_path / "s.png"
    arguments = ["bench", "stream", "--height", "32", "--height", "96", "--width", "64", "--json", str(out), "--plot"]
    done = CliRunner().invoke(app, [*arguments, str(plot)])
    assert done.exit_code == 0, done.output
    rows = json.loads(out.read_text())["rows"]
    assert {row["contender"] for row in rows} == set(streaming.contenders("S"))
    assert all(row["megapixels_per_second"] > 0 for row in rows)
    with Image.open(plot) as picture:
        assert min(picture.size) > 300
    again = CliRunner().invoke(app, ["bench", "draw", str(out), "--out", str(tmp_path / "again.png")])
    assert again.exit_code == 0
    assert (tmp_path / "again.png").read_bytes() == plot.read_bytes()


def test_what_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(streaming.KINDS, "S", "tiny")
    rows = list(streaming.compare("S", [32, 64], 64, torch.device("cpu"), 0.0))
    assert [row.missing for row in rows if row.height == 64] == ["too slow"] * 5
    assert all(row.peak_bytes is None for row in rows if row.height == 64)
