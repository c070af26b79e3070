"""What is measured can be built and called; the figures themselves need a GPU."""

import pytest
import torch

from vir.bench.models import dense_models


@pytest.mark.parametrize("under", ["backbone", "detector", "segmentor"])
def test_backbones_under_the_same_heads(under: str) -> None:
    size = (64, 96)
    makers = dense_models(["hvir_tiny"], ["resnet18"], size, under)
    assert list(makers) == ["hvir_tiny", "resnet18"]
    for make in makers.values():
        model = make().eval()
        with torch.inference_mode():
            answer = model(torch.rand(2, 3, *size))
        if under == "detector":
            assert model.detector.transform.min_size == (64,)
            assert [set(one) for one in answer] == [{"boxes", "labels", "scores", "masks"}] * 2
        elif under == "segmentor":
            assert answer.shape == (2, 150, *size)
        else:
            assert [x.shape[-2:] for x in answer] == [(16, 24), (8, 12), (4, 6), (2, 3)]
