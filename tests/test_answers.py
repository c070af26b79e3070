"""Answers for programs: JSON that COCO's tools take, in the image's own pixels."""

import json

import numpy as np
import pytest
import torch
from pycocotools import mask as coco

from vir.answers import Detections, Segmentation

MASKS = torch.zeros(3, 1, 10, 20)
MASKS[0, :, 2:5, 4:9] = MASKS[1, :, 6:9, 1:3] = 0.9
OUTPUT = {
    "boxes": torch.tensor([[4.0, 2, 9, 5], [1, 6, 3, 9], [0, 0, 1, 1]]),
    "labels": torch.tensor([2, 1, 1]),
    "scores": torch.tensor([0.6, 0.9, 0.1]),
    "masks": MASKS,
}


def test_detections_are_sorted_named_and_json() -> None:
    answer = Detections.from_output("a.png", (10, 20), OUTPUT, ("cat", "dog"), category_ids=(17, 18), least=0.5)
    assert answer.names == ("cat", "dog")
    assert answer.boxes == ((1, 6, 3, 9), (4, 2, 9, 5))
    told = json.loads(json.dumps(answer.as_dict()))
    assert (told["width"], told["height"]) == (20, 10)
    first = told["objects"][0]
    assert first["bbox"] == [1, 6, 2, 3]
    assert (first["category_id"], first["category_name"]) == (17, "cat")
    assert first["score"] == pytest.approx(0.9)
    assert (coco.decode(first["segmentation"]) == (MASKS[1, 0] > 0.5).numpy()).all()
    assert (answer.mask(1) == (MASKS[0, 0] > 0.5).numpy()).all()


def test_detections_without_masks_or_objects() -> None:
    boxes = {name: value for name, value in OUTPUT.items() if name != "masks"}
    answer = Detections.from_output("a.png", (10, 20), boxes, ("cat", "dog"))
    assert answer.category_ids == (1, 2, 1)
    assert "segmentation" not in answer.as_dict()["objects"][0]
    with pytest.raises(ValueError, match="no masks"):
        answer.mask(0)
    none = Detections.from_output("a.png", (10, 20), OUTPUT, ("cat", "dog"), least=0.95)
    assert len(none) == 0
    assert none.as_dict()["objects"] == []


def test_segmentation_tells_shares_and_masks() -> None:
    labels = np.array([[0, 0, 0, 2], [0, 0, 2, 255]], np.uint8)
    answer = Segmentation("a.png", labels, ("road", "sky", "tree"))
    assert answer.shares == {"road": 5 / 8, "tree": 2 / 8}
    told = json.loads(json.dumps(answer.as_dict()))
    assert [one["category_name"] for one in told["classes"]] == ["road", "tree"]
    assert (coco.decode(told["classes"][1]["segmentation"]) == (labels == 2)).all()
    assert told["classes"][1]["category_id"] == 2
    assert (answer.mask("sky") == 0).all()
