"""Detectors as a whole: they learn, answer in the image's own coordinates, and bear what data is like."""

import json
from typing import Any

import pytest
import torch
from torchvision.ops import box_iou

from tests.heads.small import DETECTOR, THIN_HVIR, detector, scene
from vir.heads import build_detector
from vir.layers.retention import MultiHeadRetention

TWO = [((8, 10, 44, 40), 1), ((50, 30, 90, 66), 2)]


def no_objects(height: int, width: int) -> dict[str, torch.Tensor]:
    return scene(height, width, [])[1]


@pytest.mark.parametrize("box_head", ["2fc", "4conv1fc"])
def test_it_learns_an_image_by_heart(box_head: Any) -> None:
    image, target = scene(72, 96, TWO)
    model = detector(box_head=box_head).train()
    steps = 80
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        optimizer.zero_grad()
        sum(model([image], [target]).values()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.inference_mode():
        (found,) = model.eval()([image])
    sure = found["scores"] > 0.5
    overlap, index = box_iou(target["boxes"], found["boxes"][sure]).max(1)
    assert (overlap > 0.7).all()
    assert torch.equal(found["labels"][sure][index], target["labels"])
    masks = found["masks"][sure][index, 0] >= 0.5
    truth = target["masks"].bool()
    assert ((masks & truth).sum((1, 2)) / (masks | truth).sum((1, 2)) > 0.7).all()


@pytest.mark.parametrize("name", ["hvir_tiny", "vir_tiny_patch16_224", "resnet18"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_are_finite_and_reach_everything(name: str, dtype: torch.dtype) -> None:
    """Images of several sizes, one of them without objects."""
    model = detector(name).train()
    image, target = scene(72, 96, TWO)
    images, targets = [image, torch.rand(3, 41, 33)], [target, no_objects(41, 33)]
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        losses = model(images, targets)
    assert len(losses) == 3 * 3 + 2
    assert all(loss.isfinite() and loss.dtype == torch.float32 for loss in losses.values())
    sum(losses.values()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    for part in (model.body.body, model.backbone.fpn, model.rpn, *model.roi_heads.stages):
        assert any((p.grad != 0).any() for p in part.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_answers_are_in_the_image(dtype: torch.dtype) -> None:
    model = detector().eval()
    images = [torch.rand(3, 72, 96), torch.rand(3, 200, 33), torch.rand(3, 1, 1)]
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        answers = model(images)
    for image, found in zip(images, answers, strict=True):
        height, width = image.shape[1:]
        count = len(found["scores"])
        assert count > 0
        assert found["boxes"].shape == (count, 4)
        assert found["boxes"].dtype == found["scores"].dtype == torch.float32
        assert found["masks"].shape == (count, 1, height, width)
        assert (found["boxes"] >= 0).all()
        assert (found["boxes"] <= torch.tensor([width, height, width, height]) + 1e-3).all()
        assert set(found["labels"].tolist()) <= {1, 2}


def test_anchors_and_proposals_keep_float32_in_autocast() -> None:
    model = detector().eval()
    seen: list[torch.Tensor] = []
    model.rpn.register_forward_hook(lambda module, args, out: seen.extend(out[0]))
    image = torch.rand(3, 64, 96)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        model([image])
    anchor = model.rpn.anchor_generator.cell_anchors[0]
    assert anchor.dtype == seen[0].dtype == torch.float32
    assert not torch.equal(seen[0], seen[0].bfloat16().float())


def test_images_without_objects_teach_background() -> None:
    model = detector().train()
    images, targets = [torch.rand(3, 64, 64)] * 2, [no_objects(64, 64)] * 2
    losses = model(images, targets)
    assert all(losses[f"loss_{part}_{i}"] == 0 for part in ("box", "mask") for i in (1, 2, 3))
    assert all(losses[f"loss_class_{i}"] > 0 for i in (1, 2, 3))
    sum(losses.values()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_an_image_with_nothing_to_say_has_empty_answers() -> None:
    model = detector(score_threshold=0.99).eval()
    with torch.inference_mode():
        (found,) = model([torch.rand(3, 40, 50)])
    assert {name: tuple(x.shape) for name, x in found.items()} == {
        "boxes": (0, 4), "labels": (0,), "scores": (0,), "masks": (0, 1, 40, 50),
    }  # fmt: skip


@pytest.mark.parametrize("retention", ["1d", "2d"])
def test_arguments_are_json_and_weights_come_back(retention: str) -> None:
    arguments = {"name": "hvir_tiny", "classes": 2, "retention": retention, **THIN_HVIR, **DETECTOR}
    model = build_detector(**arguments).eval()
    again = build_detector(**json.loads(json.dumps(arguments))).eval()
    again.load_state_dict(model.state_dict())
    layers = [m for m in again.modules() if isinstance(m, MultiHeadRetention)]
    assert {layer.retention for layer in layers} == {retention}
    image = torch.rand(3, 50, 70)
    with torch.inference_mode():
        (first,), (second,) = model([image]), again([image])
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_frozen_parts_and_checkpointing_are_reached_from_the_detector() -> None:
    model = detector(frozen_stages=1, batch_norm="frozen").train()
    model.set_grad_checkpointing()
    assert model.body.body.model.stages[2].grad_checkpointing
    image, target = scene(72, 96, TWO)
    sum(model([image], [target]).values()).backward()
    body = model.body.body.model
    assert all(p.grad is None for part in (body.stem, body.stages[0]) for p in part.parameters())
    assert all(p.grad is not None for p in body.stages[2].parameters())


def test_usual_sizes() -> None:
    model = build_detector("hvir_tiny", 80, **THIN_HVIR)
    assert (model.transform.min_size, model.transform.max_size) == ((800,), 1333)
    images, _ = model.transform.eval()([torch.rand(3, 480, 640)])
    assert images.tensors.shape[-2:] == (800, 1088)  # 800 x 1066, filled up


def test_images_are_normed_inside() -> None:
    usual, other = detector().eval(), detector(mean=[0.0] * 3, std=[1.0] * 3).eval()
    other.load_state_dict(usual.state_dict())
    image = torch.rand(3, 64, 64)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    with torch.inference_mode():
        (expected,), (found,) = usual([image]), other([(image - mean[:, None, None]) / std[:, None, None]])
    assert torch.allclose(found["boxes"], expected["boxes"], atol=1e-3)


def test_mistakes_are_answered_in_words() -> None:
    with pytest.raises(ValueError, match="box_head='3fc', expected one of '2fc', '4conv1fc'"):
        detector(box_head="3fc")
    with pytest.raises(ValueError, match="classes=0"):
        detector(classes=0)
