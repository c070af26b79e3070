"""Images held on the device: the same crops for the same numbers, and the pixels that they should show."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from vir.data.held import Augment, Held, cropped, held_batches, hold
from vir.data.loading import Share
from vir.data.sets import open_images

PLAIN = Augment(16, (1.0, 1.0), 0.0, 0.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), 0)


def ramp(n: int = 1) -> torch.Tensor:
    """Red grows to the right, green downwards."""
    line = torch.linspace(0, 255, 16)
    image = torch.stack([line.expand(16, 16), line[:, None].expand(16, 16), torch.zeros(16, 16)])
    return image.round().to(torch.uint8).expand(n, 3, 16, 16).contiguous()


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_a_whole_square_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vir.data.held.ASPECT", (1.0, 1.0))
    assert torch.allclose(cropped(ramp(), PLAIN, generator()), ramp() / 255, atol=1e-5)
    mirrored = cropped(ramp(), replace(PLAIN, flip=1.0), generator())
    assert torch.allclose(mirrored, ramp().flip(3) / 255, atol=1e-5)
    turned = cropped(ramp(), replace(PLAIN, upside_down=1.0), generator())
    assert torch.allclose(turned, ramp().flip(2) / 255, atol=1e-5)


def test_crops_are_parts_drawn_for_each_image() -> None:
    images = cropped(ramp(64), replace(PLAIN, crop_scale=(0.25, 0.25)), generator())
    left, right = images[:, 0, 8, 0], images[:, 0, 8, -1]
    share = right - left  # of the width that a crop shows
    assert share.min() > 0.3
    assert share.max() < 0.7
    assert left.std() > 0.1, "the crops are all at one place"
    assert torch.allclose(images[:, 0, 0], images[:, 0, -1], atol=1e-4), "red does not change downwards"


def test_numbers_are_scaled_as_the_model_wants() -> None:
    scaled = cropped(ramp(), replace(PLAIN, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)), generator())
    assert torch.allclose(scaled, (cropped(ramp(), PLAIN, generator()) - 0.5) / 0.25, atol=1e-5)


def test_a_run_goes_on_in_the_middle_and_processes_share() -> None:
    held = Held(torch.randint(0, 255, (10, 3, 16, 16), dtype=torch.uint8), torch.arange(10), [])
    augment = replace(PLAIN, crop_scale=(0.3, 1.0), flip=0.5)
    whole = list(held_batches(held, augment, 4, 3, Share()))
    rest = list(held_batches(held, augment, 4, 3, Share(), 2, 1))
    assert len(whole) == 6
    assert torch.equal(whole[-1].images, rest[0].images)
    shared = [list(held_batches(held, augment, 4, 3, Share(rank, 2))) for rank in range(2)]
    for step in range(6):
        assert torch.equal(torch.cat([shared[rank][step].targets for rank in range(2)]), whole[step].targets)


def test_holding_leaves_out_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "red").mkdir()
    for i in range(3):
        Image.new("RGB", (40 + i, 30), (200, 0, 0)).save(tmp_path / "red" / f"{i}.png")
    (tmp_path / "red" / "9.png").write_bytes(b"no image")
    held = hold(open_images(tmp_path, ("red",)), 16, 0, torch.device("cpu"))
    assert held.pixels.shape == (3, 3, 19, 19)
    assert held.pixels[:, 0].float().mean() == pytest.approx(200, abs=1)
    assert "9.png" in held.unreadable[0]
