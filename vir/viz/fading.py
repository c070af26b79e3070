"""How much one query sees of every patch by its place alone: one row of a decay mask, on the grid of patches."""

from typing import Literal

from torch import Tensor

from vir.layers.patches import Grid
from vir.layers.retention import Retention
from vir.ops.decay import powers
from vir.viz.style import CannotDraw

Query = tuple[int, int] | Literal["class"]  # row and column of a patch, from 0; or the class token
KINDS: tuple[Retention, ...] = ("1d", "2d")


def check_query(query: Query, grid: Grid, class_token: bool) -> None:
    rows, cols = grid
    if query == "class":
        if not class_token:
            raise CannotDraw("there is no class token here, expected a patch: name one, such as 0,0.")
        return
    row, col = query
    if not (0 <= row < rows and 0 <= col < cols):
        raise CannotDraw(
            f"the patch {row},{col} lies outside the grid of {rows} x {cols} patches, expected a row from 0 to "
            f"{rows - 1} and a column from 0 to {cols - 1}. Name one inside."
        )


def token_of(query: Query, grid: Grid) -> int:
    """The query's number in the sequence; the class token comes last."""
    return grid[0] * grid[1] if query == "class" else query[0] * grid[1] + query[1]


def fading(gamma: Tensor, grid: Grid, query: Query, retention: Retention) -> Tensor:
    """gamma to the power of the distance from the query to every patch it sees, else 0: O(n), not a mask of n x n."""
    rows, cols = grid
    seen = gamma.new_zeros(len(gamma), rows, cols)
    if retention == "1d":
        token = token_of(query, grid)
        steps = min(token + 1, rows * cols)  # patches that it sees; the class token stands after all of them
        seen.flatten(1)[:, :steps] = powers(gamma, steps, first=token + 1 - steps).flip(-1)
        return seen
    row, col = (rows, cols - 1) if query == "class" else query  # the class token stands under the last patch
    height = min(row + 1, rows)
    down, across = powers(gamma, height, first=row + 1 - height).flip(-1), powers(gamma, col + 1).flip(-1)
    seen[:, :height, : col + 1] = down[:, :, None] * across[:, None, :]
    return seen  # h rows cols
