"""Attention of a ViT beside retention: one query's row of the softmax that timm's own module computes in full."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from looked_into import FAMILIES, SIZES, pixels, small
from PIL import Image
from timm.models import VisionTransformer
from torch import Tensor
from typer.testing import CliRunner

from vir.checkpoint import Card, save_model
from vir.cli import app
from vir.viz.attention import Attended, attended, check_vit, same_depth
from vir.viz.fading import Query
from vir.viz.maps import draw_maps
from vir.viz.retained import Retained, same_place
from vir.viz.style import CannotDraw

VIT = "vit_tiny_patch16_224"
TINY: dict[str, Any] = {"depth": 3, "embed_dim": 42, "num_heads": 3, "img_size": (48, 80)}  # 3 x 5 patches
NO_CLASS: dict[str, Any] = {"class_token": False, "global_pool": "avg"}
KINDS: dict[str, dict[str, Any]] = {
    "class token": {},
    "norms of q and k": {"qk_norm": True},
    "registers": {"reg_tokens": 4},
    "patches alone": NO_CLASS,
    "registers without a class token": {"reg_tokens": 2, **NO_CLASS},
}
CARD, VIT_CARD = Card("a small one", ("cat",), 64), Card("a small ViT", ("cat",), 48)

run = CliRunner().invoke


def vit(**options: Any) -> VisionTransformer:
    """With weights large enough for a softmax that is far from even, and norms that do something."""
    model = timm.create_model(VIT, num_classes=3, **{**TINY, **options}).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            x.add_(torch.randn_like(x) * (0.5 if "norm" in name else 0.2))
    return model


def in_full(model: VisionTransformer, image: Tensor, number: int) -> Tensor:
    """All rows of timm's attention, taken where its own module drops some of them out: `h n n`."""
    found: list[Tensor] = []
    module: Any = model.blocks[number].attn
    module.fused_attn = False  # the way on which the whole matrix exists
    hook = module.attn_drop.register_forward_hook(lambda m, args, out: found.append(out[0]))
    with torch.no_grad():
        model(image)
    hook.remove()
    module.fused_attn = True
    return found[0]


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_a_row_of_the_full_softmax(kind: str, number: int) -> None:
    model = vit(**KINDS[kind]).double()
    image = pixels(48, 80).double()
    full = in_full(model, image, number)
    prefix = full.shape[-1] - 15
    assert prefix == model.num_prefix_tokens
    queries: list[Query] = [(row, col) for row in range(3) for col in range(5)]
    for query in [*queries, *(["class"] if model.has_class_token else [])]:
        found = attended(model, image, number, query)  # type: ignore[arg-type]
        row = full[:, 0 if query == "class" else prefix + query[0] * 5 + query[1]]  # type: ignore[operator]
        assert (found.number, found.query) == (number, query)
        torch.testing.assert_close(found.weights, row[:, prefix:].unflatten(1, (3, 5)), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.own, row[:, :prefix].sum(-1), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.weights.sum((1, 2)) + found.own, torch.ones(3).double())


def test_an_image_of_another_size() -> None:
    model = vit(dynamic_img_size=True).double()
    image = pixels(32, 112).double()
    found, full = attended(model, image, 1, (1, 3)), in_full(model, image, 1)
    torch.testing.assert_close(found.weights, full[:, 1 + 7 + 3, 1:].unflatten(1, (2, 7)), rtol=1e-9, atol=1e-12)


def test_who_looks() -> None:
    image, model, patches = pixels(48, 80), vit(), vit(**NO_CLASS)
    assert attended(model, image).query == "class"
    assert attended(model, image).number == 2
    assert attended(patches, image).query == (2, 4)
    assert attended(model, image, query=(0, 1), asked_in=(2, 2)).query == (1, 4)
    with pytest.raises(CannotDraw, match="there is no class token here"):
        attended(patches, image, query="class")
    with pytest.raises(CannotDraw, match="the patch 3,0 lies outside the grid of 3 x 5"):
        attended(model, image, query=(3, 0))


def test_the_same_place() -> None:
    assert same_place("class", (2, 3), (14, 14)) == "class"
    assert same_place((1, 2), (2, 3), (14, 14)) == (13, 13)  # the last stays the last
    assert same_place((0, 0), (2, 3), (14, 14)) == (6, 4)  # the lower right part
    assert same_place((3, 5), (14, 14), (2, 3)) == (0, 1)  # in a coarser grid, the patch around it


def test_the_same_depth() -> None:
    assert [same_depth(i, 12, 12) for i in range(12)] == list(range(12))
    assert [same_depth(i, 2, 12) for i in range(2)] == [5, 11]
    assert [same_depth(i, 10, 3) for i in range(10)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2]


def test_hooks_are_taken_off_again() -> None:
    model = vit()
    for side in (48, 50):  # the second is refused by the model itself
        with suppress(AssertionError):
            attended(model, pixels(side, 80))
    assert not any(part._forward_hooks for part in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_both_look_from_the_same_place(family: str, tmp_path: Path) -> None:
    model, photograph = small(family), Image.effect_noise((96, 64), 60).convert("RGB")
    file, beside = tmp_path / "maps.png", (vit(), VIT_CARD)

    def draw(**options: Any) -> tuple[Retained, Attended]:
        one, other = draw_maps(file, model, CARD, photograph, **{"beside": beside, **options})
        assert isinstance(one, Retained)
        assert isinstance(other, Attended)
        return one, other

    one, other = draw()
    assert other.number == 2
    assert one.query == ("class" if family == FAMILIES[0] else (1, 2))
    assert other.query == ("class" if family == FAMILIES[0] else (2, 4))
    assert draw(query=(0, 0))[1].query == ((0, 0) if family == FAMILIES[0] else (1, 1))
    assert draw(layers=(0,))[1].number == (1 if family == FAMILIES[0] else 0)
    assert draw(beside=(vit(**NO_CLASS), VIT_CARD))[1].query == (2, 4)


def test_the_vit_gets_the_whole_photograph_in_its_own_size_and_colours(tmp_path: Path) -> None:
    model, colours = vit(), Card("a small ViT", ("cat",), 48, mean=(0.1, 0.2, 0.3), std=(0.2, 0.3, 0.4))
    photograph = Image.effect_noise((90, 60), 60).convert("RGB")
    found = draw_maps(tmp_path / "maps.png", small(FAMILIES[0]), CARD, photograph, beside=(model, colours))[-1]
    seen = torch.frombuffer(
        bytearray(photograph.resize((80, 48), Image.Resampling.BICUBIC).tobytes()), dtype=torch.uint8
    )
    image = (seen.view(48, 80, 3) / 255 - torch.tensor(colours.mean)) / torch.tensor(colours.std)
    expected = in_full(model, image.permute(2, 0, 1)[None], 2)[:, 0, 1:].unflatten(1, (3, 5))
    torch.testing.assert_close(found.weights, expected, rtol=1e-4, atol=1e-6)


def test_mistakes_are_answered_in_words(tmp_path: Path) -> None:
    photograph, file = Image.new("RGB", (64, 64)), tmp_path / "maps.png"
    model, beside = small(FAMILIES[0]), (vit(), VIT_CARD)

    def draw(**options: Any) -> None:
        draw_maps(file, model, CARD, photograph, **{"beside": beside, **options})

    with pytest.raises(CannotDraw, match="a small ViT is a VisionRetention, expected timm's VisionTransformer"):
        draw(beside=(model, VIT_CARD))
    with pytest.raises(CannotDraw, match="a small ViT is a ResNet, expected timm's VisionTransformer"):
        draw(beside=(timm.create_model("resnet10t"), VIT_CARD))
    with pytest.raises(CannotDraw, match="has blocks without the attention of a plain ViT"):
        draw(beside=(vit(attn_layer="diff", embed_dim=48), VIT_CARD))
    with pytest.raises(CannotDraw, match="trained for segmentation, expected a classifier"):
        draw(beside=(vit(), Card("a segmentor", ("cat",), 64, task="segmentation")))
    for layers in (None, (0, 1)):
        with pytest.raises(CannotDraw, match="2 layers beside a ViT, expected one: choose a single layer"):
            draw(layers=layers)
    with pytest.raises(CannotDraw, match="there is no class token here"):
        draw(query="class", beside=(vit(**NO_CLASS), VIT_CARD))
    assert not file.exists()
    assert check_vit(*beside) is beside[0]


def test_the_command_draws_both(tmp_path: Path) -> None:
    photograph, virt, other = tmp_path / "noise.png", tmp_path / "vir.safetensors", tmp_path / "vit.safetensors"
    Image.effect_noise((96, 64), 60).save(photograph)
    for name, sizes, file in ((FAMILIES[0], SIZES[FAMILIES[0]], virt), (VIT, {**TINY, "img_size": 48}, other)):
        card = Card(name, ("cat", "dog"), 48, model_args=sizes)
        save_model(card.build(), card, file)
    arguments = ["draw", "maps", str(photograph), "--checkpoint", str(virt)]
    pictures = [tmp_path / name for name in ("once.png", "again.png", "alone.png")]
    for out in pictures[:2]:
        result = run(app, [*arguments, "--beside", str(other), "--out", str(out)])
        assert result.exit_code == 0, result.output
        assert f"3 heads of 1 layers of {FAMILIES[0]}, 3 heads of {VIT} below" in " ".join(result.stdout.split())
    assert run(app, [*arguments, "--out", str(pictures[2])]).exit_code == 0
    once, again, alone = (Image.open(out) for out in pictures)
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert once.width == again.width == alone.width
    assert once.height > 1.4 * alone.height  # a row more
    for more, says in (
        (["--beside", str(virt)], "expected timm's VisionTransformer"),
        (["--beside", "x"], "not exist"),
    ):
        result = run(app, [*arguments, *more, "--out", str(tmp_path / "none.png")])
        assert result.exit_code == 2
        assert says in " ".join(result.output.replace("│", " ").split())  # wherever its lines were broken
    assert not (tmp_path / "none.png").exists()
