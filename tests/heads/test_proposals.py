"""Proposals chosen for all images at once are those that torchvision chooses image by image."""

import pytest
import torch
from torch import Tensor
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.ops import nms

from tests.heads.small import detector
from vir.heads import boxes as rules
from vir.heads.boxes import best_of_overlapping
from vir.heads.proposals import Proposer

LEVELS = [120, 60, 30, 7]
SIZES = [(60, 90), (64, 64), (40, 90)]


def some_boxes(*shape: int, side: int = 100) -> Tensor:
    """Of whole pixels, so that torchvision's way of telling levels apart, by moving boxes, rounds nothing."""
    corner = torch.randint(-10, side, (*shape, 2)).float()
    return torch.cat([corner, corner + torch.randint(0, 40, (*shape, 2))], -1)


@pytest.mark.parametrize("training", [False, True])
def test_the_same_as_image_by_image(training: bool, device: str) -> None:
    rpn = detector(proposals=40).rpn.train(training)
    boxes, logits = some_boxes(3, sum(LEVELS)), torch.randn(3, sum(LEVELS))
    logits[0, :20] = 30.0  # all of them are 1 as probabilities: those that come first stay first
    logits[1, 5] = torch.nan
    boxes[1, 70:80] = torch.nan
    boxes[2, :60, 2:] = boxes[2, :60, :2]  # without area
    given = boxes.to(device), logits[..., None].to(device), SIZES, LEVELS
    want, got = RegionProposalNetwork.filter_proposals(rpn, *given), rpn.choose_at_once(*given)
    assert [len(b) for b in want[0]] == [len(b) for b in got[0]]
    assert len({len(b) for b in want[0]}) > 1  # images differ in how many are left
    assert all(torch.equal(a, b) for a, b in zip(want[0], got[0], strict=True))
    for a, b in zip(want[1], got[1], strict=True):
        torch.testing.assert_close(a, b)  # a sigmoid's last digit moves with where numbers lie


def test_a_score_that_is_asked_for_is_asked_for() -> None:
    rpn = detector(proposals=40).rpn.eval()
    rpn.score_thresh = 0.6
    boxes, logits = some_boxes(2, sum(LEVELS)), torch.randn(2, sum(LEVELS), 1)
    want = RegionProposalNetwork.filter_proposals(rpn, boxes, logits, SIZES[:2], LEVELS)
    got = rpn.choose_at_once(boxes, logits, SIZES[:2], LEVELS)
    assert all(torch.equal(a, b) for a, b in zip(want[0], got[0], strict=True))
    assert min(scores.min() for scores in got[1]) >= 0.6


def test_nothing_to_propose() -> None:
    rpn = detector().rpn.eval()
    boxes, scores = rpn.choose_at_once(torch.zeros(2, 30, 4), torch.zeros(2, 30, 1), SIZES[:2], [20, 10])
    assert [tuple(b.shape) for b in boxes] == [(0, 4), (0, 4)]
    assert [tuple(s.shape) for s in scores] == [(0,), (0,)]


@pytest.mark.parametrize("pairs", [2**24, 1])
def test_suppression_is_torchvisions(pairs: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "PAIRS", pairs)  # groups together, or one by one
    boxes = torch.stack([some_boxes(150, side=side) for side in (5, 30, 200)])
    there = torch.rand(3, 150) > 0.1
    stay = best_of_overlapping(boxes.to(device), there.to(device), 0.4).cpu()
    for group, known, left in zip(boxes, there, stay, strict=True):
        index = known.nonzero()[:, 0]
        want = index[nms(group[index], torch.linspace(1, 0, len(index)), 0.4)]
        assert left.nonzero()[:, 0].tolist() == want.tolist()


def test_a_chain_in_which_each_covers_the_next_takes_as_many_rounds_as_it_must() -> None:
    left = torch.arange(23.0)
    boxes = torch.stack([left, torch.zeros(23), left + 3, torch.ones(23)], 1)[None]  # IoU of neighbours: 1/2
    stay = best_of_overlapping(boxes, torch.ones(1, 23, dtype=torch.bool), 0.4)
    assert stay[0].tolist() == [i % 2 == 0 for i in range(23)]


@pytest.mark.gpu
def test_a_detector_on_a_gpu_chooses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = detector().eval().cuda(), []
    usual = Proposer.choose_at_once
    monkeypatch.setattr(Proposer, "choose_at_once", lambda *args: asked.append(1) or usual(*args))
    model([torch.rand(3, 64, 64, device="cuda")])
    assert asked
