"""Augmentation of a batch: what each kind of it does to pixels whose change can be told."""

from dataclasses import replace

import pytest
import torch

from vir.data.augment import Augment, augmented

PLAIN = Augment(16, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@pytest.fixture(autouse=True)
def _square_crops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vir.data.augment.ASPECT", (1.0, 1.0))


def ramp(n: int = 1) -> torch.Tensor:
    """Red grows to the right, green downwards."""
    line = torch.linspace(0, 255, 16)
    image = torch.stack([line.expand(16, 16), line[:, None].expand(16, 16), torch.zeros(16, 16)])
    return image.round().to(torch.uint8).expand(n, 3, 16, 16).contiguous()


def made(n: int = 1, **changes: object) -> torch.Tensor:
    return augmented(ramp(n), replace(PLAIN, **changes), torch.Generator().manual_seed(0))


def test_without_any_the_image_stays_as_it_is() -> None:
    assert torch.allclose(made(), ramp() / 255, atol=1e-5)


def test_flips() -> None:
    assert torch.allclose(made(flip=1.0), ramp().flip(3) / 255, atol=1e-5)
    assert torch.allclose(made(upside_down=1.0), ramp().flip(2) / 255, atol=1e-5)


def test_quarter_turns() -> None:
    assert torch.allclose(made(quarter_turns=1.0), ramp().rot90(1, (2, 3)) / 255, atol=1e-5)
    some = made(64, quarter_turns=0.5)
    turned = (some - made(quarter_turns=1.0)).abs().amax((1, 2, 3)) < 1e-4
    assert 16 < turned.sum() < 48
    assert torch.allclose(some[~turned], ramp() / 255, atol=1e-5)


def test_a_quarter_turn_of_a_crop_is_the_same_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vir.data.augment.ASPECT", (0.5, 0.5))
    upright, turned = (made(8, crop_scale=(0.3, 0.3), quarter_turns=share) for share in (1e-9, 1.0))
    assert torch.allclose(turned, upright.rot90(1, (2, 3)), atol=1e-4)


def test_crops_are_parts_drawn_for_each_image() -> None:
    images = made(64, crop_scale=(0.25, 0.25))
    left, right = images[:, 0, 8, 0], images[:, 0, 8, -1]
    assert torch.allclose(right - left, torch.tensor(0.5), atol=0.05), "a quarter of the area is half of the width"
    assert left.std() > 0.1, "the crops are all at one place"
    assert torch.allclose(images[:, 0, 0], images[:, 0, -1], atol=1e-4), "red does not change downwards"


def test_crops_have_shapes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vir.data.augment.ASPECT", (0.5, 2.0))
    images = made(64, crop_scale=(0.25, 0.25))
    width, height = images[:, 0, 8, -1] - images[:, 0, 8, 0], images[:, 1, -1, 8] - images[:, 1, 0, 8]
    assert (width / height).min() < 0.7
    assert (width / height).max() > 1.4
    assert torch.allclose(width * height, torch.tensor(0.25), atol=0.04)


def test_a_tilt_turns_about_the_middle_without_stretching() -> None:
    images = made(64, tilt=45.0)
    middle = images[:, :2, 7:9, 7:9].mean((2, 3))
    assert torch.allclose(middle, torch.tensor(0.5), atol=0.01)
    # How red and green change along a row, near the middle: cosine and sine of the angle.
    red, green = (images[:, c, 8, 10] - images[:, c, 8, 5] for c in (0, 1))
    step = (ramp()[0, 0, 8, 10].float() - ramp()[0, 0, 8, 5].float()) / 255
    assert torch.allclose((red**2 + green**2).sqrt(), step, atol=0.02)
    assert green.abs().max() > 0.6 * step
    # Down a column they change at a right angle to that.
    red_down, green_down = (images[:, c, 10, 8] - images[:, c, 5, 8] for c in (0, 1))
    assert torch.allclose(red * red_down + green * green_down, torch.zeros(64), atol=0.01)
    assert ((red * green_down - green * red_down) > 0).all(), "turned, not mirrored"
    assert green.min() < 0 < green.max()


def test_colour_jitter_changes_light_contrast_and_colour_of_each_image() -> None:
    images = made(256, colour_jitter=0.5)
    assert images.min() >= 0
    assert images.max() <= 1
    light = images.mean((1, 2, 3))
    assert light.std() > 0.03
    colour = (images[:, 0] - images[:, 1]).abs().mean((1, 2))
    assert (colour / light).std() > 0.1, "colours fade and glow by themselves"
    grey = augmented(
        torch.full((4, 3, 16, 16), 100, dtype=torch.uint8),
        replace(PLAIN, colour_jitter=0.5),
        torch.Generator().manual_seed(0),
    )
    assert torch.allclose(grey, grey[:, :1, :1, :1].expand_as(grey), atol=1e-6), "an even grey stays even and grey"


def test_erasing_takes_one_rectangle_of_some_images() -> None:
    changed = (made(400, erasing=0.5) - ramp(400) / 255).abs().sum(1) > 1e-4
    touched = changed.flatten(1).any(1)
    assert 0.4 < touched.float().mean() < 0.6
    for mask in changed[touched]:
        rows, cols = mask.any(1), mask.any(0)
        assert mask.sum() >= 0.98 * rows.sum() * cols.sum(), "a rectangle"
    assert changed[touched].float().mean((1, 2)).max() < 0.45


def test_numbers_are_scaled_as_the_model_wants() -> None:
    scaled = made(mean=(0.5, 0.4, 0.3), std=(0.25, 0.2, 0.1))
    mean, std = (torch.tensor(x)[:, None, None] for x in ((0.5, 0.4, 0.3), (0.25, 0.2, 0.1)))
    assert torch.allclose(scaled, (made() - mean) / std, atol=1e-5)
