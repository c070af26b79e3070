"""Backbones as four maps: strides at any size, what is frozen, what is not."""

from typing import Any

import pytest
import timm
import torch
from torch import nn

from tests.heads.small import THIN, THIN_HVIR
from vir.bench.measure import peak_memory
from vir.heads.backbone import STRIDES, Backbone
from vir.heads.builders import build_backbone

NAMES = ["hvir_tiny", "vir_tiny_patch16_224", "resnet18", "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"]


def backbone(name: str, **options: Any) -> Backbone:
    return build_backbone(name, **{**THIN.get(name, {}), **options})


@pytest.mark.parametrize(
    ("name", "size"), [(name, (33, 51)) for name in NAMES] + [("hvir_tiny", (1, 1)), ("hvir_tiny", (333, 517))]
)
def test_four_maps_at_exact_strides(name: str, size: tuple[int, int]) -> None:
    model = backbone(name).eval()
    filled = [-(-side // 32) * 32 for side in size]
    with torch.inference_mode():
        maps = model(torch.randn(2, 3, *size))
    assert len(maps) == len(STRIDES)
    for x, channels, stride in zip(maps, model.channels, STRIDES, strict=True):
        assert x.shape == (2, channels, filled[0] // stride, filled[1] // stride)


def test_filling_up_changes_no_map_of_a_whole_size() -> None:
    """The maps of an image are those of the same image with zeros at its right and below."""
    model = backbone("hvir_tiny").eval()
    image = torch.randn(1, 3, 50, 70)
    filled = torch.zeros(1, 3, 64, 96)
    filled[..., :50, :70] = image
    with torch.inference_mode():
        assert all(torch.equal(a, b) for a, b in zip(model(image), model(filled), strict=True))


def test_levels_are_those_of_the_backbone_itself() -> None:
    model = backbone("hvir_tiny", output_norm="none").eval()
    image = torch.randn(1, 3, 64, 96)
    with torch.inference_mode():
        x = model.body.model.stem(image)
        for stage, level in zip(model.body.model.stages, model(image), strict=True):
            x = stage(x)
            assert torch.equal(x, level)


@pytest.mark.parametrize("name", ["hvir_tiny", "vir_tiny_patch16_224"])
def test_the_norm_of_a_level(name: str) -> None:
    normed, plain = backbone(name).eval(), backbone(name, output_norm="none").eval()
    image = 10 * torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        for x in normed(image):
            assert torch.allclose(x.mean(1), torch.zeros(()), atol=1e-5)
            assert torch.allclose(x.var(1, correction=0), torch.ones(()), atol=1e-2)
        assert not any(torch.allclose(x.mean(1), torch.zeros(()), atol=1e-5) for x in plain(image))


@pytest.mark.parametrize(
    ("name", "count", "frozen", "trained"),
    [
        ("hvir_tiny", 2, ["model.stem", "model.stages.0", "model.stages.1"], ["model.stages.2", "model.stages.3"]),
        ("resnet18", 1, ["conv1", "bn1", "layer1"], ["layer2", "layer4"]),
        ("vir_tiny_patch16_224", 1, ["model.patch_embed", "model.pos_drop", "model.blocks.0"], ["model.blocks.1"]),
        ("convnext_atto", 1, ["stem_0", "stem_1", "stages_0"], ["stages_1", "stages_3"]),
    ],
)
def test_frozen_stages(name: str, count: int, frozen: list[str], trained: list[str]) -> None:
    model = backbone(name, frozen_stages=count).train()
    sum(x.square().mean() for x in model(torch.randn(2, 3, 64, 64))).backward()
    for part in frozen:
        module = model.body.get_submodule(part)
        assert not module.training
        assert all(p.grad is None and not p.requires_grad for p in module.parameters())
    for part in trained:
        module = model.body.get_submodule(part)
        assert module.training
        assert all(p.grad is not None and p.requires_grad for p in module.parameters())
    if name.startswith("vir"):  # positions enter with the stem
        assert not model.body.model.pos_embed.requires_grad
    assert all(p.grad is not None for p in model.norms.parameters())


def test_nothing_is_frozen_unless_asked() -> None:
    model = backbone("hvir_tiny").train()
    assert all(module.training for module in model.modules())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", ["hvir_tiny", "resnet18"])
def test_frozen_batch_norm(name: str) -> None:
    model = backbone(name, batch_norm="frozen").train()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms
    before = [m.running_mean.clone() for m in norms]
    sum(x.square().mean() for x in model(3 + torch.randn(2, 3, 64, 64))).backward()
    assert all(torch.equal(m.running_mean, kept) for m, kept in zip(norms, before, strict=True))
    assert all(m.weight.grad is None and m.bias.grad is None for m in norms)
    convolutions = [m for m in model.body.modules() if isinstance(m, nn.Conv2d)]
    assert all(m.weight.grad is not None for m in convolutions)
    trained = backbone(name).train()
    trained(3 + torch.randn(2, 3, 64, 64))
    assert any((m.running_mean != 0).any() for m in trained.modules() if isinstance(m, nn.BatchNorm2d))


@pytest.mark.parametrize(
    ("name", "frozen_stages"), [("hvir_tiny", 0), ("hvir_tiny", 1), ("vir_tiny_patch16_224", 1), ("resnet18", 0)]
)
def test_checkpointing_computes_the_same_gradients(name: str, frozen_stages: int) -> None:
    model = backbone(name, frozen_stages=frozen_stages, batch_norm="frozen").train()
    image = torch.randn(1, 3, 64, 64)
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x.nbytes) or x, lambda x: x):
            loss = sum(x.square().sum() for x in model(image))
        model.zero_grad()
        loss.backward()
        gradients.append((sum(kept), [p.grad for p in model.parameters() if p.requires_grad]))
    (all_kept, whole), (few_kept, again) = gradients
    assert few_kept < all_kept
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(whole, again, strict=True))


def test_no_n_x_n_mask_at_1280_x_800() -> None:
    """The 4,000 tokens of the third stage, in two heads: the scores of the parallel form take 128 MB."""
    model = build_backbone("hvir_tiny", **THIN_HVIR).eval()
    image = torch.randn(1, 3, 800, 1280)
    peaks = []
    for form in ("auto", "parallel"):
        model.body.model.set_form(form)
        with torch.inference_mode():
            peak = peak_memory(lambda: model(image))
        if peak is None:
            pytest.skip("this system does not tell the peak memory of a process")
        peaks.append(peak)
    scores = 2 * 4000**2 * 4
    assert peaks[1] > scores  # the ruler sees it
    assert peaks[0] < scores


def test_stretched_decay_reaches_the_layers() -> None:
    layers = [m for m in backbone("hvir_tiny", stretch=0.5).modules() if hasattr(m, "stretch")]
    assert layers
    assert all(layer.stretch == 0.5 for layer in layers)


def test_mistakes_are_answered_in_words() -> None:
    with pytest.raises(ValueError, match="patch_size=16"):
        build_backbone("vir_large_patch14_224", depth=3, embed_dim=48, heads=3)
    with pytest.raises(ValueError, match=r"strides \[8, 16\], expected \(4, 8, 16, 32\)"):
        Backbone(timm.create_model("hvir_tiny", features_only=True, out_indices=(1, 2)))
    with pytest.raises(ValueError, match=r"frozen_stages=5, expected 0 \(none\) to 4"):
        backbone("hvir_tiny", frozen_stages=5)
    with pytest.raises(ValueError, match="output_norm='batch', expected one of 'layer', 'none'"):
        backbone("hvir_tiny", output_norm="batch")
    with pytest.raises(ValueError, match="batch_norm='off', expected one of 'trained', 'frozen'"):
        backbone("hvir_tiny", batch_norm="off")
