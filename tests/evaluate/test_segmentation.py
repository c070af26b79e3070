"""IoU counted by hand, and sums that do not depend on how the images came."""

import math

import pytest
import torch
from torch import Tensor, nn

from vir.data.dense import DenseBatch
from vir.data.scenes import VOID
from vir.evaluate.segmentation import SegmentationJudgement, judge_segmentation, labels_of

CLASSES = ("sky", "road", "tree", "car")
TRUTH = torch.tensor([[0, 0, 1, 1], [0, 0, 1, VOID]])
ANSWER = torch.tensor([[0, 0, 1, 0], [0, 2, 1, 3]])


def judged(*pairs: tuple[Tensor, Tensor]) -> SegmentationJudgement:
    seen = SegmentationJudgement.of(CLASSES)
    for truth, answer in pairs:
        seen.add(truth, answer)
    return seen


def test_counted_by_hand() -> None:
    seen = judged((TRUTH, ANSWER))
    iou = seen.per_class()
    assert iou["sky"] == pytest.approx(3 / 5)  # three met, one missed, one too many
    assert iou["road"] == pytest.approx(2 / 3)
    assert iou["tree"] == 0  # answered, but not there
    assert math.isnan(iou["car"])  # answered only where the truth is void
    metrics = seen.metrics()
    assert metrics["miou"] == pytest.approx((3 / 5 + 2 / 3 + 0) / 3, abs=1e-6)
    assert metrics["pixel_accuracy"] == pytest.approx(5 / 7, abs=1e-6)
    assert metrics["class_accuracy"] == pytest.approx((3 / 4 + 2 / 3) / 2, abs=1e-6)
    assert metrics["images"] == 1


def test_perfect_and_all_wrong_and_nothing() -> None:
    assert judged((TRUTH, TRUTH.where(TRUTH != VOID, 0))).miou == 1
    assert judged((TRUTH, torch.full_like(TRUTH, 3))).miou == 0
    void = judged((torch.full_like(TRUTH, VOID), ANSWER))
    assert void.metrics()["miou"] == void.metrics()["pixel_accuracy"] == 0
    assert judged().metrics()["miou"] == 0


def test_sums_over_images_and_processes() -> None:
    maps = [(torch.randint(0, 4, (5, 7)), torch.randint(0, 4, (5, 7))) for _ in range(6)]
    whole = judged(*maps)
    one, two = judged(*maps[:2]), judged(*maps[2:])
    one.join(two)
    assert torch.equal(one.counts, whole.counts)
    assert one.metrics() == whole.metrics()
    together = judged((torch.cat([t for t, _ in maps]), torch.cat([a for _, a in maps])))
    assert together.miou == pytest.approx(whole.miou)
    assert int(whole.counts.sum()) == 6 * 35


class LooksLeft(nn.Module):
    """Sure of a class on the left half of what it is shown, and of another, less, on the right."""

    def forward(self, images: Tensor) -> Tensor:
        logits = torch.zeros(len(images), len(CLASSES), *images.shape[-2:])
        half = images.shape[-1] // 2
        logits[:, 1, :, :half], logits[:, 2, :, half:] = 5.0, 1.0
        return logits


@pytest.mark.parametrize(("mirrored", "right"), [(False, 0.5), (True, 1.0)])
def test_a_mirror_image_shows_the_other_side(mirrored: bool, right: float) -> None:
    batch = DenseBatch([torch.zeros(3, 4, 6)], [torch.ones(4, 6, dtype=torch.long)], [(4, 6)], torch.tensor([0]), [])
    seen = judge_segmentation(LooksLeft(), [batch], CLASSES, torch.device("cpu"), mirrored=mirrored)
    assert seen.pixel_accuracy == right


def test_what_does_not_fit_is_answered_in_words() -> None:
    seen = SegmentationJudgement.of(CLASSES)
    with pytest.raises(ValueError, match="shape"):
        seen.add(TRUTH, ANSWER[:1])
    with pytest.raises(ValueError, match="truth has numbers from 0 to 9"):
        seen.add(TRUTH.where(TRUTH != 1, 9), ANSWER)
    with pytest.raises(ValueError, match="answer has numbers from 0 to 4"):
        seen.add(TRUTH, ANSWER.where(ANSWER != 2, 4))
    assert int(seen.counts.sum()) == 0


class ByBrightness(nn.Module):
    """Dark is class 0 and bright is class 1, told at half the size."""

    def forward(self, images: Tensor) -> Tensor:
        grey = nn.functional.avg_pool2d(images[:, :1], 2)
        return torch.cat([0.5 - grey, grey - 0.5], 1)


def test_a_model_is_asked_and_answers_in_the_size_of_the_truth() -> None:
    truth = torch.zeros(12, 16, dtype=torch.long)
    truth[:, 8:] = 1
    image = truth.repeat_interleave(2, 0).repeat_interleave(2, 1).float().expand(3, -1, -1)
    batch = DenseBatch([image, image], [truth, None], [(12, 16), (12, 16)], torch.tensor([0, 1]), ["b: broken"])
    seen = judge_segmentation(ByBrightness(), [batch], ("dark", "bright"), torch.device("cpu"))
    assert seen.miou == 1
    assert seen.images == 1
    assert seen.unreadable == ["b: broken"]
    assert labels_of(torch.rand(2, 5, 6, 8), (13, 17)).shape == (2, 13, 17)
