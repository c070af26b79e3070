"""Weights of classifiers in backbones: they fit and answer alike, or it is said what does not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.heads.small import DETECTOR, SEGMENTOR, THIN
from vir.checkpoint import BadCheckpoint, Card, save_model
from vir.heads import build_detector, build_segmentor
from vir.heads.backbone import Backbone
from vir.transfer import from_classifier, load_classifier


def classifier(folder: Path, name: str, task: str = "classification", **options: Any) -> tuple[nn.Module, Path]:
    model_args = {**THIN.get(name, {}), **options}
    card = Card(name, ("cat", "dog"), 64, model_args, stretch=0.5, task=task)
    model, file = card.build().eval(), folder / "classifier.safetensors"
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
    save_model(model, card, file)
    return model, file


@pytest.mark.parametrize("name", ["hvir_tiny", "vir_tiny_patch16_224", "resnet18"])
def test_a_backbone_gives_the_features_of_its_classifier(tmp_path: Path, name: str) -> None:
    model, file = classifier(tmp_path, name)
    arguments = from_classifier(file)
    assert (arguments["mean"], arguments["stretch"]) == ([0.5, 0.5, 0.5], 0.5)
    segmentor = build_segmentor(classes=3, output_norm="none", **arguments, **SEGMENTOR).eval()
    left = load_classifier(segmentor.body, file)
    assert {each.partition(".")[0] for each in left} == {"fc"} if name == "resnet18" else {"norm", "head"}
    image = torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        expected = model.forward_intermediates(image, intermediates_only=True)[-1]
        found = segmentor.body.body(image)[-1]
    assert torch.equal(found, expected)


def test_positions_are_fitted_to_another_image_size(tmp_path: Path) -> None:
    _, file = classifier(tmp_path, "vir_tiny_patch16_224")
    arguments = {**from_classifier(file), "img_size": 96}
    detector = build_detector(classes=3, **arguments, **DETECTOR)
    load_classifier(detector.body, file)
    assert detector.body.body.model.pos_embed.shape[1] == 6 * 6


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    _, file = classifier(tmp_path, "hvir_tiny")

    def backbone(**options: Any) -> Backbone:
        return build_segmentor(classes=3, **{**from_classifier(file), **SEGMENTOR, **options}).body

    with pytest.raises(BadCheckpoint, match=r"stages.0.blocks.1.conv1.weight is missing.*and \d+ more.*from_classif"):
        load_classifier(backbone(depths=[2, 1, 1, 1]), file)
    with pytest.raises(BadCheckpoint, match=r"is \(16, 3, 3, 3\), expected \(8, 3, 3, 3\)"):
        load_classifier(backbone(stem_dim=8), file)
    with pytest.raises(BadCheckpoint, match="trained with retention 2d, and the backbone has 1d"):
        load_classifier(backbone(retention="1d"), file)
    _, deeper = classifier(tmp_path, "hvir_tiny", depths=[1, 1, 2, 1])
    with pytest.raises(BadCheckpoint, match=r"stages\.2\.blocks\.1\.\S+ has no place"):
        load_classifier(backbone(depths=[1, 1, 1, 1]), deeper)


def test_only_classifiers_are_taken(tmp_path: Path) -> None:
    _, file = classifier(tmp_path, "hvir_tiny", task="segmentation")
    with pytest.raises(BadCheckpoint, match="a model for segmentation, expected one for classification"):
        from_classifier(file)
