"""What a detector is given: cut, dropped or refused."""

from typing import Any

import pytest
import torch

from tests.heads.small import detector, scene
from vir.heads.targets import check_images, check_targets

IMAGE, TARGET = scene(40, 50, [((8, 10, 30, 35), 1), ((20, 5, 45, 25), 2)])


def test_boxes_without_area_are_left_out_and_others_cut_at_the_border() -> None:
    boxes = torch.tensor([[10.0, 10, 10, 30], [-5, -5, 20, 60], [60, 10, 80, 20], [5, 5, 20, 20]])
    target = {
        "boxes": boxes,
        "labels": torch.tensor([1, 2, 1, 1]),
        "masks": torch.arange(4).view(4, 1, 1).expand(4, 40, 50),
    }
    (checked,) = check_targets([IMAGE], [target], 2)
    assert checked["boxes"].tolist() == [[0, 0, 20, 40], [5, 5, 20, 20]]
    assert checked["labels"].tolist() == [2, 1]
    assert checked["masks"][:, 0, 0].tolist() == [1, 3]
    assert torch.equal(target["boxes"], boxes)  # what was given stays as it was
    losses = detector().train()([IMAGE], [target])
    assert all(loss.isfinite() for loss in losses.values())


def test_only_boxes_without_area() -> None:
    target = {"boxes": torch.tensor([[3.0, 3, 3, 3]]), "labels": torch.tensor([1]), "masks": torch.zeros(1, 40, 50)}
    losses = detector().train()([IMAGE], [target])
    assert all(loss.isfinite() for loss in losses.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"boxes": torch.tensor([[8.0, 10, 4, 35], [0, 0, 9, 9]])}, "ends before it begins"),
        ({"boxes": torch.tensor([[8.0, 10, float("nan"), 35], [0, 0, 9, 9]])}, "not finite"),
        ({"boxes": torch.zeros(3, 4)}, r"boxes have shape \(3, 4\), expected \(2, 4\)"),
        ({"labels": torch.tensor([0, 1])}, "expected 1 to 2; 0 is background"),
        ({"labels": torch.tensor([1, 3])}, "expected 1 to 2"),
        ({"masks": torch.zeros(2, 50, 40)}, "an image of 40 x 50 pixels"),
    ],
)
def test_wrong_targets_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_targets([IMAGE], [TARGET | change], 2)


def test_missing_targets_are_asked_for() -> None:
    model = detector().train()
    with pytest.raises(ValueError, match="no targets for 1 images"):
        model([IMAGE])
    with pytest.raises(ValueError, match="1 targets for 2 images"):
        model([IMAGE, IMAGE], [TARGET])
    with pytest.raises(ValueError, match="target 0 has no masks"):
        model([IMAGE], [{name: TARGET[name] for name in ("boxes", "labels")}])


def test_wrong_images_are_refused() -> None:
    with pytest.raises(ValueError, match="list of images is empty"):
        check_images([], 1333)
    with pytest.raises(ValueError, match=r"image 1 is torch.uint8 of shape \(3, 4, 4\), expected floats in 0..1"):
        check_images([IMAGE, torch.zeros(3, 4, 4, dtype=torch.uint8)], 1333)
    with pytest.raises(ValueError, match="1 x 8000 pixels"):
        check_images([torch.rand(3, 1, 8000)], 1333)
    check_images([torch.rand(3, 8, 8000), torch.rand(3, 1, 1)], 1333)
