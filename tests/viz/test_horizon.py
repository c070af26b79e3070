"""How far heads see: by their decay against the masks, and by gradients against causality."""

import math
from pathlib import Path

import pytest
import torch
from looked_into import FAMILIES, pixels, small

from vir.layers.retention import stretch_decay
from vir.viz.fading import fading
from vir.viz.horizon import Reach, draw_horizon, reaches
from vir.viz.inside import retention_layers
from vir.viz.receptive import Field, receptive_field
from vir.viz.style import CannotDraw


def test_a_reach_is_where_the_mask_has_faded() -> None:
    reach = Reach(0, 0.9, stride=16)
    assert 0.9 ** reach.steps(0.01) == pytest.approx(0.01)
    gamma, share = torch.tensor([0.9], dtype=torch.float64), 0.9**8
    # Eight steps: two rows of four patches in 1D, eight rows in 2D.
    for retention, rows in (("1d", 2), ("2d", 8)):
        assert reach.upwards(share, retention, width=64) == pytest.approx(16 * rows)  # type: ignore[arg-type]
        seen = fading(gamma, (9, 4), (8, 3), retention)  # type: ignore[arg-type]
        assert seen[0, 8 - rows, 3] == pytest.approx(share)
    assert Reach(0, 1.0, 16).steps(0.5) == math.inf


def test_kinds_of_layers() -> None:
    model = small("hvir_tiny")
    assert [[reach.stride for reach in heads] for heads in reaches(retention_layers(model))] == [[16] * 2, [32] * 4]
    before = reaches(retention_layers(model))[0][0]
    stretch_decay(model, 0.5)  # as on an image twice as large
    assert reaches(retention_layers(model))[0][0].steps(0.01) == pytest.approx(2 * before.steps(0.01), rel=1e-4)
    assert len(reaches(retention_layers(small(FAMILIES[0])))) == 1


@pytest.mark.parametrize("retention", ["1d", "2d"])
def test_no_gradient_from_what_retention_does_not_see(retention: str) -> None:
    model = small(FAMILIES[0], retention=retention)  # patches do not overlap: what leaks would be a mistake
    field = receptive_field(model, [pixels(64, 96), pixels(64, 96)], (1, 2))
    assert field.strength.shape == (64, 96)
    assert field.images == 2
    seen = fading(torch.ones(1), (4, 6), (1, 2), retention)[0] > 0  # type: ignore[arg-type]
    by_patch = field.strength.unflatten(1, (6, 16)).unflatten(0, (4, 16)).sum((1, 3))
    assert ((by_patch > 0) == seen).all()
    assert (field.ahead() == 0) == (retention == "2d")


def test_the_class_token_sees_all_and_the_middle_is_the_default() -> None:
    model = small(FAMILIES[0], retention="2d")
    assert (receptive_field(model, [pixels(64, 64)], "class").strength > 0).float().mean() > 0.99
    assert receptive_field(model, [pixels(64, 96)]).query == (2, 3)


def test_a_field_is_the_gradient() -> None:
    model, image = small("hvir_tiny").double(), pixels(64, 64).double()
    field = receptive_field(model, [image], (1, 1))
    said: list[float] = []
    retention_layers(model)[-1].block.register_forward_hook(lambda m, a, out: said.append(float(out[0, 3].sum())))
    slopes = 0.0
    for colour in range(3):
        step = torch.zeros_like(image)
        step[0, colour, 40, 40] = 1e-5
        with torch.no_grad():
            model(image + step)
            model(image - step)
        slopes += abs(said[-2] - said[-1]) / 2e-5
    assert float(field.strength[40, 40]) == pytest.approx(slopes, rel=1e-3)


def test_how_a_field_gathers() -> None:
    strength = torch.zeros(32, 32, dtype=torch.float64)
    strength[7, 7], strength[7, 17] = 3, 1
    field = Field(strength, (0, 0), (2, 2), 16, images=1)
    assert field.centre == (7.5, 7.5)
    assert field.radius(0.5) == pytest.approx(math.sqrt(0.5))
    assert field.radius(0.9) == pytest.approx(math.hypot(0.5, 9.5))
    assert field.within(5) == 0.75
    assert field.ahead() == 0.25


def test_the_same_drawing_gives_the_same_bytes(tmp_path: Path) -> None:
    model = small("hvir_tiny")
    for name in ("once", "again"):
        field = receptive_field(model, [pixels(64, 64)])
        draw_horizon(tmp_path / f"{name}.svg", reaches(retention_layers(model)), [64, 128], "a small one", field)
    assert (tmp_path / "once.svg").read_bytes() == (tmp_path / "again.svg").read_bytes()


def test_mistakes_are_answered_in_words() -> None:
    model = small("hvir_tiny")
    with pytest.raises(CannotDraw, match="no image to measure on"):
        receptive_field(model, [])
    with pytest.raises(CannotDraw, match="the patch 2,2 lies outside"):
        receptive_field(model, [pixels(64, 64)], (2, 2))
    assert not retention_layers(model)[-1].block._forward_hooks
