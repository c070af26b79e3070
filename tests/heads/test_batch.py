"""Boxes of all images at once give what each image would give by itself."""

import torch

from vir.heads.batch import Filled, Truth, borders, choose, joined

TRUTHS = [torch.tensor([[0.0, 0, 10, 10], [20, 20, 40, 40]]), torch.zeros(0, 4), torch.tensor([[5.0, 5, 25, 25]])]
LABELS = [torch.tensor([3, 1]), torch.zeros(0).long(), torch.tensor([2])]
PROPOSALS = [
    torch.tensor([[0.0, 0, 10, 9], [21, 20, 41, 40], [60, 60, 70, 70]]),
    torch.tensor([[1.0, 1, 9, 9]]),
    torch.zeros(0, 4),
]


def known() -> Truth:
    return Truth.of([{"boxes": b, "labels": label} for b, label in zip(TRUTHS, LABELS, strict=True)])


def test_what_fills_up_is_told_apart() -> None:
    filled = Filled.up(PROPOSALS)
    assert filled.there.sum(1).tolist() == [3, 1, 0]
    assert [b[t].tolist() for b, t in zip(filled.boxes, filled.there, strict=True)] == [b.tolist() for b in PROPOSALS]
    assert Filled.up([torch.zeros(0, 4)] * 2).boxes.shape == (2, 1, 4)


def test_each_image_is_matched_with_its_own_truth() -> None:
    samples = choose(Filled.up(PROPOSALS), known(), 0.5, 512, 1.0)
    assert samples.image.bincount().tolist() == [5, 1, 1]  # proposals and truths
    boxes, matched = samples.by_image(samples.boxes[samples.positive], samples.matched)
    assert [len(b) for b in boxes] == [4, 0, 1]
    for b, index, truth in zip(boxes, matched, TRUTHS, strict=True):
        assert torch.allclose(b, truth[index], atol=1)
    assert torch.equal(samples.truth, torch.cat([t[m] for t, m in zip(TRUTHS, matched, strict=True)]))
    expected = torch.cat([label[m] for label, m in zip(LABELS, matched, strict=True)])
    assert torch.equal(samples.labels[samples.positive], expected)
    assert samples.labels.count_nonzero() == len(samples.positive)
    assert samples.own.sum() == 4


def test_moved_boxes_are_the_next_proposals() -> None:
    samples = choose(Filled.up(PROPOSALS), known(), 0.5, 512, 1.0)
    moved = samples.boxes + 1
    moved[samples.boxes[:, 0] == 60, 2] = 0  # nothing is left of it
    after = samples.proposals(moved)
    left = [sorted(b[t].tolist()) for b, t in zip(after.boxes, after.there, strict=True)]
    assert left == [(PROPOSALS[0][:2] + 1).tolist(), (PROPOSALS[1] + 1).tolist(), []]


def test_a_batch_without_any_object() -> None:
    nothing = Truth.of([{"boxes": torch.zeros(0, 4), "labels": torch.zeros(0).long()}] * 2)
    samples = choose(Filled.up(PROPOSALS[:2]), nothing, 0.5, 512, 0.25)
    assert len(samples.boxes) == 4
    assert not len(samples.positive)
    assert not samples.labels.any()


def test_joined_boxes_know_their_image_and_its_border() -> None:
    every, image, counts = joined(PROPOSALS)
    assert counts == [3, 1, 0]
    assert image.tolist() == [0, 0, 0, 1]
    assert borders([(4, 5), (6, 7), (8, 9)], every)[image].tolist() == [[5, 4, 5, 4]] * 3 + [[7, 6, 7, 6]]
