"""The rules of the cascade, seen in what its built stages do."""

from math import log

import pytest
import torch
from torch import Tensor, nn

from tests.heads.small import detector, scene
from vir.heads.batch import Filled, Truth, choose
from vir.heads.cascade import Cascade, Maps


@pytest.fixture
def cascade() -> Cascade:
    return detector(samples=512).eval().roi_heads


def maps() -> Maps:
    return {str(i): torch.randn(1, 32, 64 // stride, 64 // stride) for i, stride in enumerate((4, 8, 16, 32))}


def always(layer: nn.Module, answer: list[float]) -> None:
    """Make a layer give the same answer whatever it sees."""
    nn.init.zeros_(layer.weight)
    layer.bias.data = torch.tensor(answer)


def test_stages_ask_for_more_and_more_overlap(cascade: Cascade) -> None:
    truth = torch.tensor([[0.0, 0, 100, 100]])
    proposals = torch.tensor([[0.0, 0, 100, side] for side in (45, 55, 65, 75)])  # IoU with the truth: side / 100
    target = {"boxes": truth, "labels": torch.tensor([2])}
    matched = []
    for stage in cascade.stages:
        samples = choose(Filled.up([proposals]), Truth.of([target]), stage.iou, cascade.samples, 0.25)
        boxes, own = samples.boxes[samples.positive], samples.own[samples.positive]
        # The truth itself is among them, and is told apart.
        assert sorted(boxes[own][:, 3].tolist()) == [side for side in (45, 55, 65, 75) if side >= 100 * stage.iou]
        assert (~own).sum() == 1
        assert samples.labels.tolist() == [2] * len(boxes) + [0] * (5 - len(boxes))
        matched.append(len(boxes) - 1)
    assert matched == [3, 2, 1]


def test_each_stage_moves_boxes_by_its_own_weights_and_scores_are_averaged(cascade: Cascade) -> None:
    logits = [[0.0, 2.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 3.0]]
    for stage, answer in zip(cascade.stages, logits, strict=True):
        always(stage.box_head.classifier, answer)
        always(stage.box_head.regressor, [3.0, 0.0, 0.0, 5 * log(1.2)])
    boxes = torch.tensor([[8.0, 20, 18, 30]])
    (scores,), (moved,) = cascade.scored(maps(), [boxes], [(64, 64)])
    assert torch.allclose(scores, torch.tensor(logits).softmax(1).mean(0, keepdim=True))
    right = 10 * (3 / 10 + 3 / 20 + 3 / 30)  # codes are in tenths, twentieths, thirtieths of a side
    high = 10 * 1.2 ** (1 + 1 / 2 + 1 / 3)
    assert torch.allclose(moved, torch.tensor([[8 + right, 25 - high / 2, 18 + right, 25 + high / 2]]), atol=1e-4)


def test_boxes_end_at_the_border(cascade: Cascade) -> None:
    for stage in cascade.stages:
        always(stage.box_head.regressor, [50.0, -50.0, 10.0, 10.0])
    _, (moved,) = cascade.scored(maps(), [torch.tensor([[8.0, 20, 18, 30]])], [(40, 50)])
    assert moved.min() >= 0
    assert (moved[:, 2:] <= torch.tensor([50.0, 40.0])).all()


def test_logits_of_masks_are_averaged_in_the_channel_of_the_class(cascade: Cascade) -> None:
    answers = [[9.0, 1.0, -4.0], [9.0, 3.0, 1.0], [9.0, -1.0, 0.0]]
    for stage, answer in zip(cascade.stages, answers, strict=True):
        always(stage.mask_head[-1].mask_fcn_logits, answer)
    boxes = torch.tensor([[8.0, 20, 18, 30], [0, 0, 30, 30]])
    (masks,) = cascade.masks(maps(), [boxes], [torch.tensor([1, 2])])
    assert masks.shape == (2, 1, 28, 28)
    expected = torch.tensor([1.0, -1.0]).sigmoid().view(2, 1, 1, 1)
    assert torch.allclose(masks, expected.expand_as(masks))


def test_losses_of_stages_weigh_less_and_less() -> None:
    model = detector(box_head="2fc").train()
    for stage in model.roi_heads.stages:
        always(stage.box_head.classifier, [0.0, 0.0, 0.0])
        always(stage.mask_head[-1].mask_fcn_logits, [0.0, 0.0, 0.0])
    image, target = scene(64, 64, [((8, 10, 44, 40), 1)])
    losses = model([image], [target])
    for number, weight in enumerate((1.0, 0.5, 0.25), 1):
        assert torch.allclose(losses[f"loss_class_{number}"], torch.tensor(weight * log(3)))
        assert torch.allclose(losses[f"loss_mask_{number}"], torch.tensor(weight * log(2)))


def test_a_stage_learns_from_the_boxes_of_the_one_before() -> None:
    """A first stage that moves every box onto the truth leaves no other negative to the second."""
    model = detector(box_head="2fc", samples=512).train()
    cascade = model.roi_heads
    truth = torch.tensor([[16.0, 16, 48, 48]])
    always(cascade.stages[0].box_head.regressor, [-5.0, 0.0, 0.0, 0.0])  # by half a side to the left
    seen: list[Tensor] = []
    cascade.stages[1].box_head.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    proposals = [truth + torch.tensor([16.0, 0, 16, 0])]
    target = {"boxes": truth, "labels": torch.tensor([1]), "masks": torch.ones(1, 64, 64)}
    features = maps()
    losses = cascade.losses(features, proposals, [(64, 64)], [target])
    assert all(loss.isfinite() for loss in losses.values())
    expected = cascade.box_pool(cascade.levels(features), truth, torch.tensor([0]))
    assert torch.allclose(seen[0], expected.expand_as(seen[0]), atol=1e-4)
    regressor = cascade.stages[0].box_head.regressor.bias
    assert torch.autograd.grad(losses["loss_box_2"], regressor, allow_unused=True) == (None,)
    assert len(seen[0]) == 2  # the moved proposal and the truth; the truth of the first stage did not go on


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("2fc", (4 - 0.5) + (10 * log(1.4) - 0.5)),  # a fifth of a side times 20, and a growth of 1.4 times 10
        ("4conv1fc", 10 * (1 - 100 / 140)),  # 100 of 140 pixels overlap, and nothing else is enclosed
    ],
)
def test_the_loss_of_a_box_is_a_mean_over_samples(kind: str, expected: float) -> None:
    cascade = detector(box_head=kind).roi_heads
    target = {"boxes": torch.tensor([[0.0, 0, 10, 14]]), "labels": torch.tensor([1])}
    proposals = torch.tensor([[0.0, 0, 10, 10], [40, 40, 50, 50]])
    stage = cascade.stages[1]
    samples = choose(Filled.up([proposals]), Truth.of([target]), 0.5, 16, 0.25)
    assert len(samples.boxes) == 3  # with the truth, which is where it should be
    _, loss = stage.box_losses(torch.zeros(3, 3), torch.zeros(3, 4), samples)
    assert torch.allclose(loss, torch.tensor(0.5 * expected / 3), rtol=1e-4)  # the second stage counts half


@pytest.mark.parametrize(("kind", "loss", "weight"), [("2fc", "smooth_l1", 1.0), ("4conv1fc", "giou", 10.0)])
def test_kinds_of_box_heads(kind: str, loss: str, weight: float) -> None:
    stages = detector(box_head=kind).roi_heads.stages
    for stage in stages:
        assert (stage.box_loss, stage.box_loss_weight) == (loss, weight)
        convolutions = [m for m in stage.box_head.modules() if isinstance(m, nn.Conv2d)]
        assert len(convolutions) == (4 if kind == "4conv1fc" else 0)
        assert stage.box_head.regressor.out_features == 4  # one box, whatever the class
        assert stage.box_head.classifier.out_features == 3


def test_the_best_of_an_image(cascade: Cascade) -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [30, 30, 40, 40], [50, 50, 50, 60]])
    scores = torch.tensor([[0.1, 0.9, 0.0], [0.2, 0.8, 0.0], [0.36, 0.04, 0.6], [0.0, 1.0, 0.0]])
    found = cascade.best(scores, boxes)
    assert found["boxes"].tolist() == [boxes[0].tolist(), boxes[2].tolist()]  # one twice, one without area
    assert found["labels"].tolist() == [1, 2]
    assert torch.allclose(found["scores"], torch.tensor([0.9, 0.6]))
