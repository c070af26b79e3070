"""What stays the same under shifts, and what does not: the definition says it, and so does the drawing."""

from pathlib import Path

import pytest
import torch
from looked_into import FAMILIES, pixels, small
from PIL import Image

from vir.checkpoint import Card
from vir.ops import naive
from vir.viz.equivariance import MOVES, Move, change, qkv_of
from vir.viz.inside import retention_layers
from vir.viz.shift import draw_shifts
from vir.viz.style import CannotDraw

GAMMA = torch.tensor([0.7, 0.95], dtype=torch.float64)
EXACT: dict[str, set[Move]] = {"1d": {"down"}, "2d": {"right", "down", "wider"}}


def tokens(rows: int = 6, cols: int = 7) -> list[torch.Tensor]:
    return list(torch.randn(3, rows, cols, 2, 5, dtype=torch.float64).unbind(0))


@pytest.mark.parametrize("retention", ["1d", "2d"])
@pytest.mark.parametrize("move", MOVES)
def test_what_is_exact(move: Move, retention: str) -> None:
    qkv = tokens()
    assert change(qkv, GAMMA, retention, move, 0).relative == 0  # type: ignore[arg-type]
    for by in (1, 2):
        found = change(qkv, GAMMA, retention, move, by)  # type: ignore[arg-type]
        assert (found.relative < 1e-14) == (move in EXACT[retention])
        assert (found.relative > 0.01) == (move not in EXACT[retention])


@pytest.mark.parametrize("retention", ["1d", "2d"])
def test_change_is_the_definition(retention: str) -> None:
    qkv, by = tokens(3, 5), 1
    moved = [torch.cat([torch.zeros_like(x[:, :by]), x[:, :-by]], 1) for x in qkv]
    out = []
    for one in (qkv, moved):
        q, k, v = (x.flatten(0, 1)[None] for x in one)
        got = naive.retention_1d(q, k, v, GAMMA) if retention == "1d" else naive.retention_2d(q, k, v, GAMMA, (3, 5))
        out.append(got[0].unflatten(0, (3, 5)))
    before, after = out[0][:, :-by], out[1][:, by:]
    found = change(qkv, GAMMA, retention, "right", by)  # type: ignore[arg-type]
    assert found.relative == pytest.approx(float((after - before).norm() / before.norm()), abs=1e-14)
    assert found.patches.shape == (3, 4)
    assert float(found.patches.square().mean().sqrt()) == pytest.approx(found.relative, abs=1e-14)


@pytest.mark.parametrize("family", FAMILIES)
def test_q_k_v_are_those_of_the_model(family: str) -> None:
    model, image = small(family), pixels(64, 96)
    layer = retention_layers(model)[0]
    seen: list[torch.Tensor] = []
    layer.module.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    q, k, v = qkv_of(model, image, layer)
    heads = layer.module.heads
    assert q.shape[:3] == (4, 6, heads)
    with torch.inference_mode():
        expected = layer.module.qkv(seen[0])[0, :24].unflatten(-1, (3, heads, -1))
    for i, x in enumerate((q, k, v)):
        torch.testing.assert_close(x.flatten(0, 1), expected[:, i])
    assert not layer.module.qkv._forward_hooks


def test_the_same_drawing_gives_the_same_bytes(tmp_path: Path) -> None:
    model, card = small(FAMILIES[0]), Card("a small one", ("cat",), 64)
    photograph = Image.effect_noise((90, 60), 60).convert("RGB")
    for name in ("once.png", "again.png"):
        changes = draw_shifts(tmp_path / name, model, card, photograph, size=96, by=1)
    assert (tmp_path / "once.png").read_bytes() == (tmp_path / "again.png").read_bytes()
    assert len(changes["right"]["2d"]) == 3  # by 0, 1 and 2 of 6 x 9 patches
    with pytest.raises(CannotDraw, match="a shift by 3 patches, expected 1 to 2"):
        draw_shifts(tmp_path / "x.png", model, card, photograph, size=96, by=3)
