"""Boxes: moved and moved back, matched, sampled, judged; against cases worked out by hand."""

import pytest
import torch
from torchvision.ops import box_iou, generalized_box_iou

from vir.heads.box_heads import BOX_LOSSES
from vir.heads.boxes import decode, encode, match, overlaps, sample

ONES = (1.0, 1.0, 1.0, 1.0)
WEIGHTS = (10.0, 10.0, 5.0, 5.0)


def some_boxes(count: int) -> torch.Tensor:
    corner = 100 * torch.rand(count, 2)
    return torch.cat([corner, corner + 1 + 50 * torch.rand(count, 2)], 1)


def test_a_code_by_hand() -> None:
    box, truth = torch.tensor([[0.0, 0, 10, 20]]), torch.tensor([[5.0, 10, 25, 30]])  # 10 x 20 -> 20 x 20
    expected = torch.tensor([[1.0, 0.5, 2.0, 1.0]])  # by a side, by half a side, twice, as it is
    expected[:, 2:] = expected[:, 2:].log()
    assert torch.allclose(encode(truth, box, ONES), expected)
    assert torch.allclose(encode(truth, box, WEIGHTS), expected * torch.tensor(WEIGHTS))
    assert torch.allclose(decode(expected, box, ONES), truth, atol=1e-5)


def test_decode_is_the_inverse_of_encode() -> None:
    truth, boxes = some_boxes(50), some_boxes(50)
    assert torch.allclose(decode(encode(truth, boxes, WEIGHTS), boxes, WEIGHTS), truth, atol=1e-3)


def test_wild_codes_and_boxes_of_no_area_stay_finite() -> None:
    boxes = torch.tensor([[3.0, 3, 3, 3], [0, 0, 10, 10]])
    assert decode(torch.full((2, 4), 1e4), boxes, WEIGHTS).isfinite().all()
    assert encode(boxes, boxes.flip(0), WEIGHTS).isfinite().all()


def test_boxes_stay_in_float32() -> None:
    """At 1333 pixels bf16 knows every eighth pixel only."""
    box = torch.tensor([[1200.3, 700.7, 1290.1, 790.9]])
    with torch.autocast("cpu", torch.bfloat16):
        same = decode(torch.zeros(1, 4, dtype=torch.bfloat16), box, WEIGHTS)
    assert same.dtype == torch.float32
    assert torch.allclose(same, box, atol=1e-3)


def test_matching_takes_the_best_overlap_from_the_threshold_on() -> None:
    truth = torch.tensor([[0.0, 0, 10, 10], [20, 0, 30, 10]])
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 5], [21, 0, 31, 10], [50, 50, 60, 60]])  # IoU 1, 0.5, 9/11, 0
    for threshold, expected in ((0.5, [0, 0, 1, -1]), (0.6, [0, -1, 1, -1]), (0.9, [0, -1, -1, -1])):
        assert match(boxes[None], truth[None], threshold)[0].tolist() == expected
    none = torch.zeros(1, 1, 4)  # what fills up
    assert match(torch.cat([boxes[None], none], 1), none, 0.5)[0].tolist() == [-1] * 5
    assert match(torch.zeros(1, 0, 4), truth[None], 0.5)[0].tolist() == []


def test_overlaps_are_those_of_torchvision() -> None:
    boxes, truth = some_boxes(2 * 13).view(2, 13, 4), some_boxes(2 * 5).view(2, 5, 4)
    expected = torch.stack([box_iou(b, t) for b, t in zip(boxes, truth, strict=True)])
    assert torch.allclose(overlaps(boxes, truth), expected)


@pytest.mark.parametrize(
    ("positives", "negatives", "expected"),
    [(100, 100, (8, 24)), (3, 100, (3, 29)), (100, 5, (8, 5)), (0, 0, (0, 0)), (0, 40, (0, 32))],
)
def test_sampling(positives: int, negatives: int, expected: tuple[int, int]) -> None:
    matched = torch.cat([torch.zeros(positives), torch.full((negatives,), -1)]).long()
    matched = torch.stack([matched[torch.randperm(len(matched))], torch.zeros(len(matched)).long()])
    there = torch.tensor([[True], [False]]).expand_as(matched)  # of the second image nothing
    index, taken = sample(matched, there, 32, 0.25)
    assert not taken[1].any()
    chosen = index[0][taken[0]]
    assert len(chosen.unique()) == len(chosen)
    chosen = matched[0][chosen]
    assert ((chosen >= 0).sum().item(), (chosen < 0).sum().item()) == expected
    assert (chosen[: expected[0]] >= 0).all()


def test_sampling_is_by_chance_and_fair() -> None:
    matched = torch.full((1, 10), -1)
    counts = torch.zeros(10)
    for _ in range(300):
        index, taken = sample(matched, torch.ones(1, 10, dtype=torch.bool), 5, 0.25)
        counts[index[taken]] += 1
    assert (counts - 150).abs().max() < 50  # five times the deviation


def test_giou_loss() -> None:
    boxes, truth = some_boxes(20), some_boxes(20)
    code = torch.zeros(20, 4)
    expected = (1 - generalized_box_iou(boxes, truth).diag()).sum()
    assert torch.allclose(BOX_LOSSES["giou"](code, boxes, truth, WEIGHTS), expected, rtol=1e-4)
    half = BOX_LOSSES["giou"](code[:1], torch.tensor([[0.0, 0, 10, 10]]), torch.tensor([[5.0, 0, 15, 10]]), WEIGHTS)
    assert torch.allclose(half, torch.tensor(2 / 3))  # 50 of 150 overlap, and nothing else is enclosed


def test_smooth_l1_loss_by_hand() -> None:
    box, truth = torch.tensor([[0.0, 0, 10, 10]]), torch.tensor([[5.0, 0, 15, 10]])
    loss = BOX_LOSSES["smooth_l1"](torch.zeros(1, 4), box, truth, WEIGHTS)
    assert torch.allclose(loss, torch.tensor(4.5))  # half a side times 10, beyond 1: 5 - 0.5


@pytest.mark.parametrize("name", ["giou", "smooth_l1"])
def test_losses_pull_a_box_to_its_truth(name: str) -> None:
    box, truth = torch.tensor([[0.0, 0, 10, 10]]), torch.tensor([[4.0, 3, 20, 15]])
    code = torch.zeros(1, 4, requires_grad=True)
    optimizer = torch.optim.Adam([code], 0.3)
    for _ in range(100):
        optimizer.zero_grad()
        BOX_LOSSES[name](code, box, truth, WEIGHTS).backward()  # type: ignore[index]
        optimizer.step()
    assert torch.allclose(decode(code.detach(), box, WEIGHTS), truth, atol=0.5)
