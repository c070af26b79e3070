"""What a query sees by its place, against the definition; and its picture."""

from pathlib import Path

import matplotlib
import pytest
import torch

from vir.ops import naive
from vir.ops.decay import mask_1d, mask_2d
from vir.viz.fading import Query, fading, token_of
from vir.viz.masks import draw_masks
from vir.viz.style import CannotDraw

GRIDS = [(1, 1), (3, 5), (5, 3), (1, 7), (7, 1)]
GAMMA = torch.tensor([0.5, 0.9, 1.0], dtype=torch.float64)


def queries(grid: tuple[int, int]) -> list[Query]:
    return [(row, col) for row in range(grid[0]) for col in range(grid[1])] + ["class"]


@pytest.mark.parametrize("retention", ["1d", "2d"])
@pytest.mark.parametrize("grid", GRIDS)
def test_fading_is_a_row_of_the_mask(grid: tuple[int, int], retention: str) -> None:
    n = grid[0] * grid[1]
    mask = mask_1d(GAMMA, n + 1) if retention == "1d" else mask_2d(GAMMA, grid, class_token=True)
    for query in queries(grid):
        seen = fading(GAMMA, grid, query, retention)  # type: ignore[arg-type]
        assert seen.shape == (3, *grid)
        torch.testing.assert_close(seen.flatten(1), mask[:, token_of(query, grid), :n], rtol=1e-12, atol=0)


@pytest.mark.parametrize("retention", ["1d", "2d"])
def test_fading_is_the_definition(retention: str) -> None:
    grid = (3, 5)
    for query in queries(grid):
        i, seen = token_of(query, grid), fading(GAMMA, grid, query, retention)  # type: ignore[arg-type]
        for j in range(15):
            power = naive.weight_1d(i, j) if retention == "1d" else naive.weight_2d(i, j, grid)
            expected = torch.zeros(3, dtype=torch.float64) if power is None else GAMMA**power
            torch.testing.assert_close(seen[:, j // 5, j % 5], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["png", "svg"])
@pytest.mark.parametrize(("grid", "query"), [((3, 5), (1, 2)), ((1, 1), "class"), ((30, 2), (29, 0))])
def test_the_same_drawing_gives_the_same_bytes(kind: str, grid: tuple[int, int], query: Query, tmp_path: Path) -> None:
    once, again = tmp_path / f"once.{kind}", tmp_path / f"again.{kind}"
    for file in (once, again):
        draw_masks(file, grid, query, 0.9)
    assert once.read_bytes() == again.read_bytes()
    other = tmp_path / f"other.{kind}"
    draw_masks(other, grid, query, 0.8)
    assert once.read_bytes() != other.read_bytes()
    assert b"atplotlib v" not in once.read_bytes()
    assert b"<dc:date>" not in once.read_bytes()


def test_the_users_own_style_is_left_alone_and_does_not_matter(tmp_path: Path) -> None:
    draw_masks(tmp_path / "plain.png", (3, 5), (1, 2), 0.9)
    with matplotlib.rc_context({"font.size": 30, "savefig.dpi": 20, "image.cmap": "gray"}):
        before = dict(matplotlib.rcParams)
        draw_masks(tmp_path / "styled.png", (3, 5), (1, 2), 0.9)
        assert dict(matplotlib.rcParams) == before
    assert (tmp_path / "plain.png").read_bytes() == (tmp_path / "styled.png").read_bytes()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"query": (3, 0)}, "the patch 3,0 lies outside the grid of 3 x 5 patches, expected a row from 0 to 2"),
        ({"query": (0, -1)}, "a column from 0 to 4"),
        ({"query": "class", "class_token": False}, "there is no class token here"),
        ({"grid": (0, 5)}, "expected at least 1 x 1"),
        ({"grid": (80, 80)}, "6401 tokens, expected at most 4096"),
        ({"gamma": 1.5}, "gamma=1.5, expected a number from 0"),
        ({"file": Path("masks.jpg")}, r"ends in '.jpg', expected .png or .svg"),
        ({"file": Path("no such folder/masks.png")}, "the folder no such folder does not exist"),
    ],
    ids=str,
)
def test_mistakes_are_answered_in_words(changes: dict, says: str, tmp_path: Path) -> None:
    wishes = {"file": tmp_path / "x.png", "grid": (3, 5), "query": (1, 2), "gamma": 0.9, "class_token": True}
    with pytest.raises(CannotDraw, match=says):
        draw_masks(**{**wishes, **changes})
    assert not (tmp_path / "x.png").exists()
