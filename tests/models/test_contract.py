"""What timm promises of a model, by timm's public names; `make timm-tests` runs timm's own tests as well."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from small import FAMILIES, image, small
from timm.optim import create_optimizer_v2
from torchvision.models.feature_extraction import get_graph_node_names

import vir

NAMES = [
    "vir_tiny_patch16_224",
    "vir_small_patch16_224",
    "vir_base_patch16_224",
    "vir_large_patch16_224",
    "vir_large_patch14_224",
    *(f"hvir_{size}" for size in ("tiny", 0, 1, 2, 3, 4)),
]


def test_all_models_are_registered() -> None:
    assert set(timm.list_models(["vir_*", "hvir_*"])) == set(NAMES)
    assert vir.models.VisionRetention.__name__ == "VisionRetention"


@pytest.mark.parametrize("name", timm.list_models("hvir_*", pretrained=True))
def test_weights_that_ship_come_with_the_sizes_they_were_trained_at(name: str) -> None:
    model = timm.create_model(name, pretrained=True).eval()
    assert model.forward_features(torch.rand(1, *model.pretrained_cfg["input_size"])).shape[2:] == tuple(
        model.pretrained_cfg["pool_size"]
    )


@pytest.mark.parametrize("name", NAMES)
def test_defaults_as_in_the_paper(name: str) -> None:
    model = timm.create_model(name, device="meta")
    kinds = {m.retention for m in model.modules() if isinstance(m, vir.layers.retention.MultiHeadRetention)}
    assert kinds == ({"2d"} if name.startswith("hvir") else {"1d"})
    assert all(m.init_values == 1e-5 for m in model.modules() if isinstance(m, timm.layers.LayerScale))


def test_features_of_hvir_are_four_levels() -> None:
    model = timm.create_model("hvir_tiny", features_only=True).eval()
    assert model.feature_info.channels() == [32, 64, 128, 256]
    assert model.feature_info.reduction() == [4, 8, 16, 32]
    for size in ((64, 96), (70, 101)):
        for level, stride in zip(model(image(*size)), (4, 8, 16, 32), strict=True):
            assert level.shape[2:] == tuple(-(-side // stride) for side in size)


def test_features_of_vir_follow_the_habit_of_vit() -> None:
    ours = timm.create_model("vir_tiny_patch16_224", features_only=True).eval()
    theirs = timm.create_model("vit_tiny_patch16_224", features_only=True).eval()
    assert [f.shape for f in ours(image(224, 224))] == [f.shape for f in theirs(image(224, 224))]
    assert ours.feature_info.channels() == theirs.feature_info.channels()


def test_some_levels_only() -> None:
    model = timm.create_model("hvir_tiny", features_only=True, out_indices=(1, 3)).eval()
    assert [f.shape[1] for f in model(image(64, 64))] == [64, 256]
    with pytest.raises(ValueError, match="do not fit a model of 4 levels"):
        small("hvir_tiny").forward_intermediates(image(64, 64), indices=[4])


@pytest.mark.parametrize("family", FAMILIES)
def test_intermediates_end_in_the_features(family: str) -> None:
    model = small(family).eval()
    final, features = model.forward_intermediates(image(64, 64))
    assert torch.equal(final, model.forward_features(image(64, 64)))
    early = model.forward_intermediates(image(64, 64), indices=[0], stop_early=True, intermediates_only=True)
    assert torch.equal(early[0], features[0])
    with pytest.raises(ValueError, match="output_fmt='NHWC', expected one of"):
        model.forward_intermediates(image(64, 64), output_fmt="NHWC")


def test_the_class_token_comes_beside_the_features() -> None:
    model = small("vir_tiny_patch16_224").eval()
    (patches, token), *_ = model.forward_intermediates(
        image(64, 64), indices=1, return_prefix_tokens=True, norm=True, output_fmt="NLC", intermediates_only=True
    )
    features = model.forward_features(image(64, 64))
    assert torch.equal(torch.cat([patches, token], 1), features)
    assert torch.equal(model.head(token[:, 0]), model(image(64, 64)))


@pytest.mark.parametrize("family", FAMILIES)
def test_classifier_can_be_swapped(family: str) -> None:
    model = small(family).eval()
    assert model.get_classifier().out_features == 10
    pooled = model.forward_head(model.forward_features(image(64, 64)), pre_logits=True)
    model.reset_classifier(0)
    assert torch.equal(model(image(64, 64)), pooled)
    model.reset_classifier(7, "avg")
    assert model(image(64, 64)).shape == (2, 7)


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_decay_reaches_every_parameter(family: str) -> None:
    model = small(family)
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.7)
    scales = {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    assert set(scales) == {id(p) for p in model.parameters()}
    assert scales[id(model.get_classifier().weight)] == 1
    stem = model.patch_embed.proj.weight if family.startswith("vir") else model.stem[0].weight
    assert scales[id(stem)] == min(scales.values())
    no_decay = {id(p) for group in optimizer.param_groups if group["weight_decay"] == 0 for p in group["params"]}
    assert all(id(p) in no_decay for name, p in model.named_parameters() if name in model.no_weight_decay())


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_changes_nothing(family: str) -> None:
    model = small(family).train()
    grads = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(image(64, 64)).square().mean().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.allclose(*grads, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_safetensors_load_with_another_head_and_size(family: str, tmp_path: Path) -> None:
    trained = small(family)
    file = tmp_path / "model.safetensors"
    save_file(trained.state_dict(), file)
    options = {"img_size": 96} if family.startswith("vir") else {}
    overlay = {"file": str(file), "num_classes": 10}
    loaded = small(family, num_classes=4, pretrained=True, pretrained_cfg_overlay=overlay, **options)
    fresh, old = loaded.state_dict(), trained.state_dict()
    changed = {name for name in old if fresh[name].shape != old[name].shape or not torch.equal(fresh[name], old[name])}
    head = {name for name in old if name.startswith("head")}
    assert changed == head | ({"pos_embed"} if options else set())
    assert loaded.eval()(image(96, 96)).shape == (2, 4)


def test_positions_are_resampled_not_invented() -> None:
    """A model moved to another size answers as the old one does at that size."""
    model = small("vir_tiny_patch16_224").eval()
    expected = model(image(96, 128))
    model.set_input_size((96, 128))
    assert model.pos_embed.shape[1] == 6 * 8
    assert torch.allclose(model(image(96, 128)), expected, atol=1e-5)


def test_positions_that_are_no_square_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "wide.safetensors"
    save_file(small("vir_tiny_patch16_224", img_size=(64, 128)).state_dict(), file)
    with pytest.raises(ValueError, match="32 positions, which are no square grid"):
        small("vir_tiny_patch16_224", pretrained=True, pretrained_cfg_overlay={"file": str(file), "num_classes": 10})


def test_other_numbers_of_channels() -> None:
    for family in FAMILIES:
        assert small(family, in_chans=5)(torch.randn(2, 5, 64, 64)).shape == (2, 10)


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_fx_can_trace(family: str) -> None:
    """timm and torchvision take features from a traced graph: what looks at shapes must be a leaf of it."""
    leaves = {
        "leaf_modules": timm.models.get_notrace_modules(),
        "autowrap_functions": timm.models.get_notrace_functions(),
        "param_shapes_constant": True,
    }
    _, nodes = get_graph_node_names(small(family).eval(), tracer_kwargs=leaves)
    assert any("mlp" in node for node in nodes)
