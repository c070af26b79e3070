"""A streamed image gives the numbers of the whole image at once, whatever its size and the height of the bands."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from vir.data.images import UnreadableImage
from vir.layers.retention import stretch_decay
from vir.streaming import Band, CannotStream, Streamer, stream
from vir.streaming.engine import default_rows
from vir.streaming.positions import Positions
from vir.streaming.readers import ArrayReader

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)


def made(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 3, "embed_dim": 48, "heads": 3}
    model = timm.create_model("vir_tiny_patch16_224", num_classes=5, init_values=0.5, **{**sizes, **options})
    return model.eval()


def photograph(height: int, width: int, dtype: Any = np.uint8) -> np.ndarray:
    generator = np.random.default_rng(0)
    return generator.integers(0, np.iinfo(dtype).max, (height, width, 3), dtype=dtype)


def whole(model: nn.Module, pixels: np.ndarray) -> tuple[Tensor, Tensor]:
    """Features of all patches and logits, the image at once."""
    x = torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1) / np.iinfo(pixels.dtype).max
    x = (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    with torch.inference_mode():
        return model.forward_features(x[None])[0], model(x[None])[0]


@pytest.mark.parametrize("retention", ["1d", "2d"])
@pytest.mark.parametrize(("height", "width"), [(64, 64), (61, 83), (8, 100), (200, 8), (5, 3)])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_equal_to_the_whole_image(retention: str, height: int, width: int, rows: int) -> None:
    model, pixels = made(retention=retention), photograph(height, width)
    features, logits = whole(model, pixels)
    *bands, answer = stream(model, ArrayReader(pixels), band_rows=rows, mean=MEAN, std=STD)
    torch.testing.assert_close(answer, logits, rtol=1e-4, atol=1e-4)
    streamed = torch.cat([band.features.flatten(0, 1) for band in bands])
    torch.testing.assert_close(streamed, features[:-1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bands[0].scores, model.head(bands[0].features))
    assert [band.top for band in bands] == list(range(0, -(-height // 8), rows))


def test_paths_and_arrays_are_streamed_without_a_reader(tmp_path: Path) -> None:
    model, pixels = made(), photograph(40, 56)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    np.save(tmp_path / "x.npy", pixels)
    still = pixels.copy()
    still.flags.writeable = False
    *_, want = stream(model, ArrayReader(pixels))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of arrays that may not be written to
        for image in (pixels, still, tmp_path / "x.png", str(tmp_path / "x.npy")):
            *_, answer = stream(model, image)
            assert torch.equal(answer, want)
    for image, says in ((torch.zeros(40, 56, 3), "a Tensor cannot"), (pixels / 255, "float64")):
        with pytest.raises(UnreadableImage, match=says):
            next(stream(model, image))
    with pytest.warns(UserWarning, match="nearly black"):
        next(stream(model, pixels.astype(np.uint16)))


@pytest.mark.parametrize("options", [{"ablation": "gated"}, {"ablation": "scaled_key"}, {"ablation": "no_class_token"}])
def test_ablations_stream_too(options: dict[str, Any]) -> None:
    model, pixels = made(retention="2d", **options), photograph(40, 56)
    *_, answer = stream(model, ArrayReader(pixels), band_rows=2, mean=MEAN, std=STD)
    torch.testing.assert_close(answer, whole(model, pixels)[1], rtol=1e-4, atol=1e-4)


def test_the_mean_of_the_patches_can_answer_instead() -> None:
    model, pixels = made(), photograph(40, 56)
    *_, answer = stream(model, ArrayReader(pixels), band_rows=2, mean=MEAN, std=STD, pool="avg")
    model.global_pool = "avg"
    torch.testing.assert_close(answer, whole(model, pixels)[1], rtol=1e-4, atol=1e-4)


def test_sixteen_bits_and_another_decay() -> None:
    model, pixels = made(), photograph(40, 56, np.uint16)
    *_, answer = stream(model, ArrayReader(pixels), band_rows=2, stretch=0.25, mean=MEAN, std=STD)
    assert not torch.allclose(answer, whole(model, pixels)[1], rtol=1e-3, atol=1e-3)
    stretch_decay(model, 0.25)
    torch.testing.assert_close(answer, whole(model, pixels)[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("retention", ["1d", "2d"])
def test_a_model_without_positions(retention: str) -> None:
    model, pixels = made(retention=retention, pos_embed="none"), photograph(45, 56)
    assert model.pos_embed is None
    assert "pos_embed" not in model.state_dict()
    *_, answer = stream(model, ArrayReader(pixels), band_rows=2, mean=MEAN, std=STD)
    torch.testing.assert_close(answer, whole(model, pixels)[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grid", [(4, 4), (9, 5), (3, 40), (1, 1), (257, 2)])
def test_positions_by_band_are_those_of_the_whole(grid: tuple[int, int]) -> None:
    learned = torch.randn(1, 4 * 4, 6)
    want = resample_abs_pos_embed(learned, list(grid), [4, 4], num_prefix_tokens=0)
    positions = Positions(learned, (4, 4), grid)
    got = torch.cat([positions.of_rows(i, min(i + 2, grid[0])) for i in range(0, grid[0], 2)], 1)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_bands_that_do_not_fit_are_refused() -> None:
    streamer = Streamer(made(), 40, 24)
    good = photograph(16, 24)
    cases = [
        (photograph(16, 16), "16 px wide"),
        (photograph(12, 24), "multiple of 8"),
        (photograph(48, 24), "ends at row 48"),
        (good[..., :2], "shape"),
        (good.astype(float), "float64"),
    ]
    for bad, says in cases:
        with pytest.raises(CannotStream, match=says):
            streamer.pass_band(bad)
    assert isinstance(streamer.pass_band(good), Band)
    with pytest.raises(CannotStream, match="2 of 5"):
        streamer.answer()


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: timm.create_model("hvir_tiny"), "vir_small_patch16_224"),
        (lambda: timm.create_model("vit_tiny_patch16_224"), "attention"),
        (lambda: made(ablation="multipass"), "multipass"),
    ],
)
def test_models_that_look_both_ways_are_refused(model: Any, says: str) -> None:
    with pytest.raises(CannotStream, match=says):
        Streamer(model(), 64, 64)


def test_the_mean_of_patches_is_summed_in_full_precision() -> None:
    streamer = Streamer(made().bfloat16(), 64, 64, pool="avg")
    band = streamer.pass_band(photograph(64, 64))
    torch.testing.assert_close(streamer.sum, band.features.double().sum((0, 1)), rtol=1e-9, atol=1e-9)


def test_a_band_has_a_row_however_wide_the_image_is() -> None:
    assert default_rows(5000, "cpu") == 1


@pytest.mark.parametrize("retention", ["1d", "2d"])
def test_a_stream_has_a_decay_of_its_own(retention: str) -> None:
    """The model keeps its own, and two streams of one model do not meet."""
    model, image = made(retention=retention), np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    alone = {power: list(stream(model, image, band_rows=1, stretch=power))[-1] for power in (None, 0.25, 0.5)}
    assert not any(torch.allclose(alone[None], alone[power], atol=1e-4) for power in (0.25, 0.5))
    assert torch.equal(list(stream(model, image, band_rows=1))[-1], alone[None])
    first, second = (stream(model, image, band_rows=1, stretch=power) for power in (0.25, 0.5))
    for _ in range(8 + 1):
        ends = next(first), next(second)
    assert torch.equal(ends[0], alone[0.25])
    assert torch.equal(ends[1], alone[0.5])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pool": "max"}, "pool='max', expected 'token', 'avg'"),
        ({"band_rows": 0}, "band_rows=0, expected at least one"),
        ({"band_rows": -1}, "band_rows=-1, expected at least one"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(options: dict, says: str) -> None:
    with pytest.raises(CannotStream, match=says):
        list(stream(made(), np.zeros((64, 64, 3), np.uint8), **options))


def test_what_is_no_plain_model_of_colours_is_refused() -> None:
    with pytest.raises(CannotStream, match="a model of 4 channels cannot stream"):
        Streamer(made(in_chans=4), 64, 64)
    with pytest.raises(CannotStream, match="not compiled or wrapped"):
        Streamer(torch.compile(made(), backend="eager"), 64, 64)
    for dtype in (torch.float32, torch.int64):
        with pytest.raises(CannotStream, match=f"numbers of {dtype}, expected uint8 or uint16"):
            Streamer(made(), 64, 64).pass_band(torch.zeros(64, 64, 3, dtype=dtype))


def test_sides_may_be_numbers_of_numpy() -> None:
    pixels = np.zeros((64, 64, 3), np.uint8)
    band = Streamer(made(retention="2d"), np.int64(64), np.int64(64)).pass_band(pixels)
    assert torch.equal(band.scores, Streamer(made(retention="2d"), 64, 64).pass_band(pixels).scores)
