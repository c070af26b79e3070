"""The benchmark of streaming on images that are made on the way: every contender, and those that give up."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from vir.bench import streaming
from vir.cli import app
from vir.streaming import engine
from vir.streaming.engine import Band


def test_made_pixels_do_not_depend_on_the_bands() -> None:
    image = streaming.MadePixels(2000, 8)
    whole = image.read_rows(0, 2000)
    parts = np.concatenate([image.read_rows(i, min(i + 300, 2000)) for i in range(0, 2000, 300)])
    np.testing.assert_array_equal(whole, parts)


@pytest.mark.parametrize("name", ["ViR-S/16 2D streamed", "ViR-S/16 1D in tiles", "ViT-S/16 at once"])
def test_contenders_are_measured_and_drawn(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {name: streaming.contenders("S")[name]}
    monkeypatch.setattr(streaming, "contenders", lambda kind, band_rows: chosen)
    out, plot = tmp_path / "s.json", tmp_path / "s.png"
    arguments = ["bench", "stream", "--height", "96", "--width", "64", "--json", str(out), "--plot", str(plot)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    (row,) = json.loads(out.read_text())["rows"]
    assert row["contender"] == name
    assert row["megapixels_per_second"] > 0
    assert row["peak_bytes"] > 0
    with Image.open(plot) as picture:
        assert min(picture.size) > 300
    again = CliRunner().invoke(app, ["bench", "draw", str(out), "--out", str(tmp_path / "again.png")])
    assert again.exit_code == 0
    assert (tmp_path / "again.png").read_bytes() == plot.read_bytes()


@pytest.mark.parametrize(("band_rows", "tops"), [(2, [0, 2, 4]), (None, [0])])
def test_bands_are_as_high_as_asked(band_rows: int | None, tops: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def bands(*arguments: Any) -> Iterator[Band]:
        for band in engine.bands(*arguments):
            seen.append(band.top)
            yield band

    monkeypatch.setattr(streaming, "bands", bands)
    make, run = streaming.contenders("S", band_rows)["ViR-S/16 1D streamed"]
    run(make(), streaming.MadePixels(96, 64), torch.device("cpu"), torch.float32)
    assert seen == tops


def test_tiles_at_the_border_are_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "TILE", 64)
    seen: list[torch.Tensor] = []

    class Model(torch.nn.Module):
        head = torch.nn.Identity()

        def forward_features(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x)
            return x.mean((1, 2, 3))

    image = streaming.MadePixels(150, 100)
    streaming.in_tiles(Model(), image, torch.device("cpu"), torch.float32)
    tiles = torch.cat(seen)
    assert tiles.shape == (3 * 2, 3, 64, 64)
    whole = torch.cat([torch.cat(list(row), 2) for row in tiles.split(2)], 1)
    expected = torch.from_numpy(image.read_rows(0, 150)).permute(2, 0, 1).float() / 127.5 - 1
    assert torch.allclose(whole[:, :150, :100], expected, atol=1e-6)


def test_what_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(streaming.KINDS, "S", "tiny")
    monkeypatch.setattr(streaming, "in_a_fresh_process", lambda *_: 1)
    rows = list(streaming.compare("S", [32, 64], 64, torch.device("cpu"), 0.0))
    assert [row.missing for row in rows if row.height == 64] == ["too slow"] * 6
    assert all(row.peak_bytes is None for row in rows if row.height == 64)
