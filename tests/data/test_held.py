"""Images held on the device: the same batches for the same numbers, and nothing that cannot be read."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from vir.data.augment import Augment
from vir.data.held import Held, held_batches, hold
from vir.data.loading import Share
from vir.data.sets import open_images


def test_a_run_goes_on_in_the_middle_and_processes_share() -> None:
    held = Held(torch.randint(0, 255, (10, 3, 16, 16), dtype=torch.uint8), torch.arange(10), [])
    augment = Augment(16, crop_scale=(0.3, 1.0), flip=0.5, tilt=20, colour_jitter=0.3, erasing=0.5)
    whole = list(held_batches(held, augment, 7, 4, 3, Share()))
    rest = list(held_batches(held, augment, 7, 4, 3, Share(), 2, 1))
    assert len(whole) == 6
    assert torch.equal(whole[-1].images, rest[0].images)
    shared = [list(held_batches(held, augment, 7, 4, 3, Share(rank, 2))) for rank in range(2)]
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
