"""Images side by side: the pixels are theirs, and the figures of a map are what its patches say."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from vir.checkpoint import Card, load_model, save_model
from vir.cli import app
from vir.data.sets import open_images
from vir.demo.mosaic import Mosaic, in_regions, judge_map

CLASSES = ("dark", "light")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name, low in (("dark", 0), ("light", 180)):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(7):
            pixels = rng.integers(low, low + 70, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{i}.png")
    return tmp_path / "data"


def checkpoint(folder: Path, model: str = "vir_tiny_patch16_224") -> Path:
    """A block that hardly counts, and a head that tells light from dark by the first channel."""
    args = {"patch_size": 8, "depth": 1, "embed_dim": 16, "heads": 2, "img_size": 16, "global_pool": "avg"}
    card = Card(model, CLASSES, 16, args if model.startswith("vir") else {})
    built = card.build()
    if model.startswith("vir"):
        with torch.no_grad():
            built.pos_embed.zero_()
            built.patch_embed.proj.weight.zero_()
            built.patch_embed.proj.bias.zero_()
            built.patch_embed.proj.weight[0] = 1 / 192
            built.head.weight.zero_()
            built.head.weight[1, 0] = 1
    file = folder / "model.safetensors"
    save_model(built, card, file)
    return file


def test_pixels_are_those_of_the_images(images: Path) -> None:
    mosaic = Mosaic(open_images(images, CLASSES), 16, 4)
    assert mosaic.shape == (48, 64, 3)
    whole = np.concatenate([np.concatenate([mosaic.image(y, x) for x in range(4)], 1) for y in range(3)])
    for start, stop in ((0, 48), (5, 17), (16, 32), (47, 48)):
        assert np.array_equal(mosaic.read_rows(start, stop), whole[start:stop])
    light = np.stack([np.stack([mosaic.image(y, x).mean() > 128 for x in range(4)]) for y in range(3)])
    assert np.array_equal(light, mosaic.truth.astype(bool))


def test_in_regions_every_image_lies_once_and_those_of_a_class_together(images: Path) -> None:
    targets = np.random.default_rng(0).integers(0, 3, 20 * 30)
    places = in_regions(targets, 20, 30, seed=0)
    assert sorted(places) == list(range(600))
    laid = targets[places].reshape(20, 30)
    alike = np.mean(laid[:, 1:] == laid[:, :-1]), np.mean(laid[1:] == laid[:-1])
    assert min(alike) > 0.7  # at random it would be a third
    assert not np.array_equal(places, in_regions(targets, 20, 30, seed=1))
    mosaic = Mosaic(open_images(images, CLASSES), 16, 4, regions=True)
    light = np.stack([np.stack([mosaic.image(y, x).mean() > 128 for x in range(4)]) for y in range(3)])
    assert np.array_equal(light, mosaic.truth.astype(bool))


def test_a_model_that_knows_draws_the_truth(images: Path, tmp_path: Path) -> None:
    model, card = load_model(checkpoint(tmp_path))
    mosaic = Mosaic(open_images(images, CLASSES), 16, 4)
    judged = judge_map(model, card, mosaic)
    assert (judged.patches, judged.images, judged.alone) == (1, 1, 1)
    assert np.array_equal(judged.map, mosaic.truth.repeat(2, 0).repeat(2, 1))
    mosaic.truth[0, 0] = 1 - mosaic.truth[0, 0]
    assert judge_map(model, card, mosaic).images == pytest.approx(11 / 12)


def test_the_command(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "map.png"
    arguments = ["mosaic", "--data", str(images), "--columns", "4", "--out", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--checkpoint", str(checkpoint(tmp_path))])
    assert result.exit_code == 0, result.output
    assert "12 images as one of 64 x 48 px, streamed: 100.00 % of the images right" in " ".join(result.output.split())
    with Image.open(out) as sheet:
        assert sheet.width > 1500
    result = CliRunner().invoke(app, [*arguments, "--checkpoint", str(checkpoint(tmp_path, "hvir_tiny"))])
    assert result.exit_code == 2
    assert "stream" in result.output
    result = CliRunner().invoke(app, [*arguments, "--columns", "40", "--checkpoint", str(checkpoint(tmp_path))])
    assert result.exit_code == 2
    assert "choose fewer columns" in " ".join(result.output.split())
