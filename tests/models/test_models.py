"""ViR and HViR: forms, sizes, ablations, precision, compilation."""

import pytest
import timm
import torch
from small import FAMILIES, RETENTIONS, image, small
from timm.models import GraphExtractNet
from torch import nn

from vir import ops
from vir.layers.blocks import ABLATIONS
from vir.layers.retention import FORMS, MultiHeadRetention, Retention, stretch_decay
from vir.models.vir import checkpoint_filter_fn

SIZES = [(64, 64), (48, 80), (33, 71), (16, 16), (7, 130)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("retention", RETENTIONS)
@pytest.mark.parametrize("size", [(224, 224), (70, 150)], ids=str)
def test_every_form_gives_the_same_logits(family: str, retention: str, size: tuple[int, int], device: str) -> None:
    model = small(family, retention=retention).to(device).eval()
    with torch.inference_mode():
        expected = model(image(*size).to(device))
        assert expected.std() > 0.01
        for form in (form for form in FORMS[retention] if form != "kernel"):
            for chunk in (None, 5) if form == "chunkwise" else (None,):
                model.set_form(form, chunk=chunk)
                assert (model(image(*size).to(device)) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("retention", RETENTIONS)
def test_gradients_do_not_depend_on_the_form(family: str, retention: str) -> None:
    model = small(family, retention=retention).train()
    grads = {}
    for form in (form for form in FORMS[retention] if form != "kernel"):
        model.set_form(form)
        model.zero_grad()
        model(image(96, 64)).square().mean().backward()
        grads[form] = torch.cat([p.grad.flatten() for p in model.parameters()])
    for form, grad in grads.items():
        assert (grad - grads["parallel"]).norm() < 1e-4 * grads["parallel"].norm(), form


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kept", [torch.contiguous_format, torch.channels_last], ids=str)
def test_one_image_teaches_what_two_like_it_teach(family: str, kept: torch.memory_format, device: str) -> None:
    """PyTorch's BatchNorm takes some strides of a single image for others."""
    model = small(family).to(device).eval().to(memory_format=kept)
    grads = []
    for batch in (1, 2):
        model.zero_grad()
        x = image(96, 64, batch=1).expand(batch, -1, -1, -1).to(device).contiguous(memory_format=kept)
        model(x).square().mean().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (grads[0] - grads[1]).norm() < 1e-4 * grads[1].norm()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("retention", RETENTIONS)
def test_any_image_size_one_after_the_other(family: str, retention: str, device: str) -> None:
    model = small(family, retention=retention).to(device).eval()
    with torch.inference_mode():
        for size in SIZES:
            out = model(image(*size).to(device))
            assert out.shape == (2, 10)
            assert out.isfinite().all()


@pytest.mark.parametrize("batch", [1, 4])
def test_slices_of_the_mlp_change_nothing(batch: int) -> None:
    """A CPU without gradients runs the MLP in parts: by samples, or by tokens where they are more than the samples."""
    model = small("vir_tiny_patch16_224").eval()
    pixels = image(800, 1056, batch=batch)  # 3,301 tokens
    expected = model(pixels).detach()
    with torch.inference_mode():
        assert torch.allclose(model(pixels), expected, atol=1e-5)


def test_the_grid_is_rows_by_columns() -> None:
    """In 2D a wide image and its content turned on its side are different things: the grid must not be swapped."""
    model = small("hvir_tiny", retention="2d").eval()
    grids = []
    for module in model.modules():
        if isinstance(module, MultiHeadRetention):
            module.register_forward_pre_hook(lambda _, args: grids.append(args[1]))
    model(image(64, 192))
    assert set(grids) == {(4, 12), (2, 6)}


def test_the_class_token_sees_all_and_is_seen_by_none() -> None:
    model = small("vir_tiny_patch16_224", retention="2d").eval()
    with torch.no_grad():
        before = model.forward_features(image(64, 64))
        model.cls_token += 1
        after = model.forward_features(image(64, 64))
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


@pytest.mark.parametrize("retention", RETENTIONS)
@pytest.mark.parametrize("ablation", ABLATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ablations(family: str, ablation: str, retention: str) -> None:
    if family == "hvir_tiny" and ablation == "no_class_token":
        with pytest.raises(ValueError, match="HViR has no class token"):
            small(family, ablation=ablation)
        return
    torch.manual_seed(0)
    model = small(family, ablation=ablation, retention=retention)
    out = model(image(64, 64))
    assert out.shape == (2, 10)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    features = model.eval().forward_intermediates(image(64, 96), intermediates_only=True)
    assert all(f.shape[3] * 2 == f.shape[2] * 3 for f in features), "maps keep the shape of the image"


def test_the_key_carries_the_scale_in_its_ablation() -> None:
    """By the formulas it makes no difference which of the two is scaled."""
    models = [small("vir_tiny_patch16_224", ablation=a).eval() for a in (None, "scaled_key")]
    models[1].load_state_dict(models[0].state_dict())
    assert torch.allclose(models[0](image(64, 64)), models[1](image(64, 64)), atol=1e-5)


def test_gated_keeps_the_number_of_parameters() -> None:
    base, gated = (
        sum(p.numel() for p in timm.create_model("vir_base_patch16_224", ablation=a, device="meta").parameters())
        for a in (None, "gated")
    )
    assert abs(gated / base - 1) < 0.01


def test_multipass_reads_the_sequence_and_its_flip() -> None:
    """Every patch is seen from both sides: the last pixel changes the features of the first patch."""
    for ablation, changes in ((None, False), ("multipass", True)):
        model = small("vir_tiny_patch16_224", ablation=ablation).eval()
        pixels = image(64, 64)
        before = model.forward_intermediates(pixels, indices=1, intermediates_only=True)[0]
        pixels[..., -1, -1] += 10
        after = model.forward_intermediates(pixels, indices=1, intermediates_only=True)[0]
        assert (not torch.equal(before[..., 0, 0], after[..., 0, 0])) == changes


def test_no_class_token_averages() -> None:
    model = small("vir_tiny_patch16_224", ablation="no_class_token").eval()
    features = model.forward_features(image(64, 64))
    assert features.shape[1] == 16
    assert torch.allclose(model(image(64, 64)), model.head(features.mean(1)), atol=1e-6)


def test_mistakes_are_explained() -> None:
    with pytest.raises(ValueError, match="expected None or one of 'gated'"):
        small("vir_tiny_patch16_224", ablation="gate")
    with pytest.raises(ValueError, match="retention='3d', expected '1d' or '2d'"):
        small("hvir_tiny", retention="3d")
    with pytest.raises(ValueError, match="img_size=15 has no whole patch of 16 pixels: choose at least 16"):
        timm.create_model("vir_tiny_patch16_224", img_size=15)
    with pytest.raises(ValueError, match=r"img_size=\(32, 8\) has no whole patch"):
        timm.create_model("vir_tiny_patch16_224", depth=1).set_input_size((32, 8))
    with pytest.raises(ValueError, match="not divisible by heads=5"):
        small("vir_tiny_patch16_224", heads=5)
    with pytest.raises(ValueError, match="form='scan', expected one of 'auto', 'parallel', 'recurrent', 'chunkwise'"):
        small("vir_tiny_patch16_224", retention="1d").set_form("scan")
    with pytest.raises(ValueError, match="global_pool='token', expected one of '', 'avg'"):
        small("vir_tiny_patch16_224", ablation="no_class_token", global_pool="token")


PRECISIONS = [None, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("retention", RETENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_training_stays_finite(family: str, retention: str, dtype: torch.dtype | None, device: str) -> None:
    torch.manual_seed(0)
    model = small(family, retention=retention).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
    pixels, labels = image(64, 64, batch=8).to(device), torch.arange(8, device=device)
    losses = []
    for _ in range(20):
        with torch.autocast(device, dtype, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(model(pixels), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if dtype != torch.float16:  # its scaler is meant to meet overflows and skip them
            assert all(p.grad.isfinite().all() for p in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert all(p.isfinite().all() for p in model.parameters())
    assert losses[-1] < 0.5 * losses[0], "it learns eight images by heart"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_weights(family: str, dtype: torch.dtype, device: str) -> None:
    """`model.bfloat16()` must not round the decay, nor fp16 overflow before the norm."""
    model = small(family).to(device).eval()
    with torch.inference_mode():
        expected = model(image(224, 224).to(device))
        for module in model.modules():  # queries and keys as large as a trained model may have them
            if isinstance(module, MultiHeadRetention):
                module.qkv.weight.mul_(30)
        large = model(image(224, 224).to(device))
        half = model.to(dtype)(image(224, 224).to(device, dtype))
    assert half.dtype == dtype
    assert half.isfinite().all()
    assert (half.float() - large).norm() < 0.1 * large.norm()
    assert not torch.equal(large, expected)


@pytest.mark.parametrize(("family", "retention"), [("vir_tiny_patch16_224", "1d"), ("hvir_tiny", "2d")])
def test_compiles_whole_and_agrees(family: str, retention: str, device: str) -> None:
    torch._dynamo.reset()
    model = small(family, retention=retention).to(device).eval()
    with torch.inference_mode():
        compiled = torch.compile(model, fullgraph=True)
        assert (compiled(image(96, 80).to(device)) - model(image(96, 80).to(device))).abs().max() < 1e-4


@pytest.mark.parametrize("retention", RETENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_traced_graph_agrees_at_every_size(family: str, retention: str, device: str) -> None:
    """The graph that is compiled, run without a code generator: quick enough for several sizes and long grids."""
    torch._dynamo.reset()
    model = small(family, retention=retention).to(device).eval()
    with torch.inference_mode():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for size in ((70, 150), (320, 320)):
            assert (compiled(image(*size).to(device)) - model(image(*size).to(device))).abs().max() < 1e-4


def test_compilers_are_given_the_decays_and_follow_their_stretching(device: str) -> None:
    """Else every layer has a kernel that makes them."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []
    model = small("hvir_tiny").to(device).eval()
    compiled = torch.compile(model, fullgraph=True, backend=lambda graph, inputs: graphs.append(graph) or graph)
    with torch.no_grad():
        for power in (1.0, 0.5, 0.7):
            stretch_decay(model, power)
            assert (compiled(image(64, 64).to(device)) - model(image(64, 64).to(device))).abs().max() < 1e-5
    for graph in graphs:
        nodes = list(graph.graph.nodes)
        assert not any("linspace" in str(node.target) for node in nodes)
        assert sum("given" in node.name for node in nodes if node.op == "placeholder") == 2  # of 2 and of 4 heads


@pytest.mark.parametrize("name", sorted(timm.list_models(["vir_*", "hvir_*"])))
def test_no_graph_break_in_any_model(name: str) -> None:
    """Traced without weights."""
    torch._dynamo.reset()
    with torch.device("meta"):
        model = timm.create_model(name).eval()
        pixels = torch.empty(1, 3, 256, 256)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert compiled(pixels).shape == (1, 1000)


def test_compiled_training_step_agrees() -> None:
    torch._dynamo.reset()
    model = small("vir_tiny_patch16_224", retention="2d")
    model(image(64, 64)).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.compile(model, fullgraph=True, backend="aot_eager")(image(64, 64)).square().mean().backward()
    for want, p in zip(expected, model.parameters(), strict=True):
        assert torch.allclose(p.grad, want, atol=1e-5)


def test_the_decay_is_constant_and_not_in_the_checkpoint() -> None:
    model = small("hvir_tiny")
    assert not [name for name in model.state_dict() if "gamma" in name and ".ls" not in name]
    assert ops.decay(4).requires_grad is False


def test_positions_of_as_many_patches_in_another_grid_are_not_taken_for_these() -> None:
    square = timm.create_model("vir_tiny_patch16_224", img_size=64, depth=1)
    wide = timm.create_model("vir_tiny_patch16_224", img_size=(32, 128), depth=1)
    assert square.pos_embed.shape == wide.pos_embed.shape
    with pytest.raises(ValueError, match=r"of a grid of 4 x 4 or of this model's 2 x 8.*set_input_size"):
        checkpoint_filter_fn(square.state_dict(), wide)
    assert torch.equal(checkpoint_filter_fn(square.state_dict(), square)["pos_embed"], square.pos_embed)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("retention", RETENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_traced_by_modules(family: str, retention: Retention, learned: bool) -> None:
    """As timm's feature extractors do, by torch.fx."""
    model, x = small(family, retention=retention).eval(), image(64, 64)
    with torch.set_grad_enabled(learned):
        traced = GraphExtractNet(model, [f"{model.feature_info[-1]['module']}", "head"], squeeze_out=False)
        *_, logits = traced(x)
        assert torch.allclose(logits, model(x), atol=1e-5)


def test_frozen_positions_stay_frozen_at_another_size() -> None:
    model = small("vir_tiny_patch16_224").requires_grad_(False)
    model.set_input_size((96, 64))
    assert model.pos_embed.shape[1] == 6 * 4
    assert not model.pos_embed.requires_grad


@pytest.mark.parametrize("family", FAMILIES)
def test_channels_are_told_as_by_timm(family: str) -> None:
    assert small(family, in_chans=4).in_chans == 4
