"""What a query retains: the weights with which the layer itself sums its values."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from looked_into import FAMILIES, pixels, small
from PIL import Image
from torch import Tensor, nn

from vir.checkpoint import Card
from vir.layers.retention import stretch_decay
from vir.ops import naive
from vir.viz import retained as module
from vir.viz.fading import Query, token_of
from vir.viz.inside import check_side, chosen, retention_layers, whole
from vir.viz.maps import draw_maps
from vir.viz.retained import retained, weights
from vir.viz.style import CannotDraw

CARD = Card("a small one", ("cat",), 64)


@pytest.mark.parametrize("retention", ["1d", "2d"])
@pytest.mark.parametrize("chunk", [4, 16_384])
def test_weights_are_the_definition(retention: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    grid, gamma = (3, 5), torch.tensor([0.5, 0.95], dtype=torch.float64)
    q, k, v = torch.randn(3, 1, 16, 2, 7, dtype=torch.float64).unbind(0)
    out = naive.retention_1d(q, k, v, gamma) if retention == "1d" else naive.retention_2d(q, k, v, gamma, grid)
    queries: list[Query] = [(row, col) for row in range(3) for col in range(5)]
    for query in [*queries, "class"]:
        at = token_of(query, grid)
        found = weights(q[0, at], k[0, :15], gamma, grid, query, retention, 7**-0.5)  # type: ignore[arg-type]
        total = torch.einsum("hn,nhe->he", found.flatten(1), v[0, :15])
        if query == "class":
            total += 7**-0.5 * (q[0, at] * k[0, at]).sum(-1, keepdim=True) * v[0, at]  # itself
        torch.testing.assert_close(total, out[0, at], rtol=1e-10, atol=1e-12)


def sums_of(model: nn.Module, image: Tensor) -> list[dict[str, Tensor]]:
    """What every retention layer multiplies and what it gets, taken out of the model as it runs."""
    found: list[dict[str, Tensor]] = []
    for layer in retention_layers(model):
        layer.module.qkv.register_forward_hook(lambda m, a, out: found.append({"qkv": out}))
        layer.module.norm.register_forward_pre_hook(lambda m, args: found[-1].update(sum=args[0]))
    with torch.no_grad():
        model(image)
    return list(found)


@pytest.mark.parametrize("ablation", [None, "scaled_key", "gated", "no_class_token"])
@pytest.mark.parametrize("retention", ["1d", "2d"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_model(family: str, retention: str, ablation: Any) -> None:
    if family == "hvir_tiny" and ablation == "no_class_token":
        return
    model = small(family, retention=retention, ablation=ablation).double()
    stretch_decay(model, 1.5)
    image = pixels(72, 104).double()  # whole patches neither of 16 nor of 32 pixels
    layers, expected = retention_layers(model), sums_of(model, image)
    for query in (None, (0, 0), (1, 2)):
        found = retained(model, image, layers, query)
        assert [one.layer.number for one in found] == list(range(len(layers)))
        for one, sums in zip(found, expected, strict=True):
            rows, cols = one.weights.shape[1:]
            assert (rows, cols) == one.layer.grid(72, 104)
            heads, at = one.layer.module.heads, token_of(one.query, (rows, cols))
            v = sums["qkv"][0].unflatten(-1, (3, heads, -1))[:, 2]
            total = torch.einsum("hn,nhe->he", one.weights.flatten(1), v[: rows * cols])
            if one.query == "class":
                assert one.own is not None
                total += one.own[:, None] * v[-1]
            torch.testing.assert_close(total.flatten(), sums["sum"][0, at], rtol=1e-9, atol=1e-11)


def test_who_looks() -> None:
    image = pixels(64, 96)
    virt, hvir = small(FAMILIES[0]), small(FAMILIES[1])
    assert retained(virt, image, retention_layers(virt))[0].query == "class"
    layers = retention_layers(hvir)
    assert [one.query for one in retained(hvir, image, layers)] == [(3, 5), (3, 5), (1, 2), (1, 2)]
    # In the finer grid, the lower right part of the patch.
    assert [one.query for one in retained(hvir, image, layers, (0, 1))] == [(1, 3), (1, 3), (0, 1), (0, 1)]
    assert [one.query for one in retained(hvir, image, layers[:2], (0, 1))] == [(0, 1), (0, 1)]


def test_hooks_are_taken_off_again() -> None:
    model = small(FAMILIES[0])
    for query in (None, (9, 9)):
        with suppress(CannotDraw):
            retained(model, pixels(64, 64), retention_layers(model), query)
    for part in model.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks


@pytest.mark.parametrize(
    ("family", "layers"), [(FAMILIES[0], None), (FAMILIES[0], (-1,)), (FAMILIES[1], (0, 1)), (FAMILIES[1], (1, 3))]
)
def test_the_same_drawing_gives_the_same_bytes(family: str, layers: Any, tmp_path: Path) -> None:
    model = small(family)
    photograph = Image.effect_noise((90, 60), 60).convert("RGB")
    for name in ("once.png", "again.png"):
        draw_maps(tmp_path / name, model, CARD, photograph, layers=layers)
    assert (tmp_path / "once.png").read_bytes() == (tmp_path / "again.png").read_bytes()


def test_the_whole_image_is_shown() -> None:
    assert whole(Image.new("RGB", (640, 427)), 128, 32).size == (192, 128)
    assert whole(Image.new("RGB", (10, 5000)), 64, 32).size == (64, 32000)
    with pytest.raises(CannotDraw, match="16 pixels of a side, expected at least the 32 of a patch"):
        check_side(16, retention_layers(small("hvir_tiny")))


def test_mistakes_are_answered_in_words(tmp_path: Path) -> None:
    photograph, file = Image.new("RGB", (64, 64)), tmp_path / "maps.png"
    with pytest.raises(CannotDraw, match="VisionTransformer has no retention layers"):
        draw_maps(file, timm.create_model("vit_tiny_patch16_224", depth=1), CARD, photograph)
    with pytest.raises(CannotDraw, match="forth and back"):
        draw_maps(file, small(FAMILIES[0], ablation="multipass"), CARD, photograph)
    model = small(FAMILIES[1])
    with pytest.raises(CannotDraw, match="the patch 2,0 lies outside the grid of 2 x 2"):
        draw_maps(file, model, CARD, photograph, query=(2, 0))
    with pytest.raises(CannotDraw, match="there is no class token here"):
        draw_maps(file, model, CARD, photograph, query="class")
    with pytest.raises(CannotDraw, match="layer 7 of 4 retention layers, expected 0 to 3"):
        draw_maps(file, model, CARD, photograph, layers=(7,))
    with pytest.raises(CannotDraw, match="trained for detection, expected a classifier"):
        draw_maps(file, model, Card("a detector", ("cat",), 64, task="detection"), photograph)
    assert not file.exists()
    assert [layer.number for layer in chosen(retention_layers(model), (-1, 0, 3))] == [0, 3]
