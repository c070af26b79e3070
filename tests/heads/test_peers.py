"""torchvision's detector in the place of ours: same contract, same anchors, and nothing it does not know."""

import pytest
import torch

from tests.heads.small import scene
from vir.checkpoint import Card
from vir.heads.peers import PEERS, build_peer
from vir.heads.targets import TooLong
from vir.train.recipes import RECIPES

TWO = [((8, 10, 44, 40), 1), ((50, 30, 90, 66), 2)]


@pytest.mark.parametrize("name", PEERS)
def test_it_is_built_by_the_recipes_of_ours(name: str) -> None:
    recipe = RECIPES["nuclei"]()
    model = Card(name, ("nucleus",), recipe.size, recipe.model_args, task="detection").build()
    assert model.roi_heads.detections_per_img == recipe.model_args["detections"]
    assert model.rpn.anchor_generator.sizes == ((16.0,), (32.0,), (64.0,), (128.0,), (256.0,))
    assert model.transform.min_size == [320, 384, 448, 512]


def test_it_trains_and_answers_as_ours_do() -> None:
    model = build_peer("maskrcnn_resnet18_fpn", 2, min_size=64, max_size=96)
    image, target = scene(72, 96, TWO)
    losses = model([image], [target])
    assert sum(losses.values()).isfinite()
    model.eval().set_size(48)
    with torch.inference_mode():
        (found,) = model([image])
        with pytest.raises(TooLong, match="image 0 has 2 x 3000 pixels"):
            model([torch.rand(3, 2, 3000)])
    assert model.transform.min_size == (48,)
    assert found["masks"].shape[-2:] == (72, 96)


def test_what_it_does_not_know_is_said() -> None:
    with pytest.raises(ValueError, match="has no frozen_stages"):
        build_peer("maskrcnn_resnet18_fpn", 2, frozen_stages=1)
    with pytest.raises(ValueError, match="activation checkpointing"):
        build_peer("maskrcnn_resnet18_fpn", 2).set_grad_checkpointing()
