"""Masks of boxes laid into their image: as bilinear sampling says, and nearly as torchvision has it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection.roi_heads import paste_masks_in_image

from vir.heads.masks import ToSizeAndBack, masks_in_image

SIZE = 37, 53
BOXES = torch.tensor(
    [[3.2, 4.7, 20.1, 30.9], [-6.0, -3.5, 12.0, 9.0], [40.0, 20.0, 70.0, 60.0], [0.0, 0.0, 53.0, 37.0]]
)


def sampled(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """By PyTorch's sampling, one mask at a time."""
    found = []
    for mask, (left, top, right, bottom) in zip(masks, boxes.tolist(), strict=True):
        y = (torch.arange(size[0]) + 0.5 - top) / (bottom - top) * 2 - 1
        x = (torch.arange(size[1]) + 0.5 - left) / (right - left) * 2 - 1
        places = torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1], -1)
        found.append(F.grid_sample(mask[None], places[None], align_corners=False)[0])
    return torch.stack(found)


@pytest.mark.parametrize("side", [28, 7, 1])
def test_equal_to_bilinear_sampling(side: int) -> None:
    torch.manual_seed(0)
    masks = torch.rand(len(BOXES), 1, side, side)
    torch.testing.assert_close(masks_in_image(masks, BOXES, SIZE), sampled(masks, BOXES, SIZE), rtol=1e-4, atol=1e-5)


def test_nearly_what_torchvision_pastes() -> None:
    y, x = torch.meshgrid(torch.linspace(-1, 1, 28), torch.linspace(-1, 1, 28), indexing="ij")
    round_ones = (y**2 + x**2 < 0.8).float().expand(len(BOXES), 1, 28, 28)
    ours, theirs = masks_in_image(round_ones, BOXES, SIZE) > 0.5, paste_masks_in_image(round_ones, BOXES, SIZE) > 0.5
    both, either = (ours & theirs).flatten(1).sum(1), (ours | theirs).flatten(1).sum(1)
    assert (both / either).min() > 0.85  # torchvision rounds boxes to whole pixels


def test_a_full_mask_is_its_box() -> None:
    full = masks_in_image(torch.ones(1, 1, 28, 28), torch.tensor([[4.0, 2.0, 10.0, 9.0]]), (12, 15))[0, 0] > 0.5
    want = torch.zeros(12, 15, dtype=torch.bool)
    want[2:9, 4:10] = True
    assert torch.equal(full, want)


def test_none_without_area_and_beyond_the_image() -> None:
    assert masks_in_image(torch.ones(0, 1, 28, 28), torch.ones(0, 4), SIZE).shape == (0, 1, *SIZE)
    odd = torch.tensor([[5.0, 5.0, 5.0, 5.0], [200.0, 200.0, 210.0, 220.0]])
    found = masks_in_image(torch.ones(2, 1, 28, 28), odd, SIZE)
    assert found.isfinite().all()
    assert found[0].sum() <= 4
    assert found[1].sum() == 0


def test_half_precision_around_it_does_not_count() -> None:
    masks = torch.rand(len(BOXES), 1, 28, 28)
    with torch.autocast("cpu", torch.bfloat16):
        found = masks_in_image(masks, BOXES, SIZE)
    assert torch.equal(found, masks_in_image(masks, BOXES, SIZE))


def test_answers_come_back_to_the_size_of_the_image() -> None:
    back = ToSizeAndBack(64, 128, [0.0] * 3, [1.0] * 3).eval()
    found = {"boxes": torch.tensor([[8.0, 4.0, 24.0, 20.0]]), "masks": torch.ones(1, 1, 28, 28)}
    (answer,) = back.postprocess([found], [(64, 96)], [(32, 24)])
    assert answer["boxes"].tolist() == [[2.0, 2.0, 6.0, 10.0]]
    assert answer["masks"].shape == (1, 1, 32, 24)
    assert (answer["masks"] > 0.5).sum() == 4 * 8
