"""2D retention: tiles of a grid, and bands of whole rows that a state passes through."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vir.ops.triton import grid as grid_kernels
from vir.ops.triton import lines, runner, settings
from vir.ops.triton import quadrant as quadrant_kernels
from vir.ops.triton.launch.lines import apply_states_call, line_states_call
from vir.ops.triton.launch.plans import (
    JOIN,
    JOINED,
    Look,
    block,
    contiguous,
    empty_as,
    kept,
    key,
    look,
    look_if,
    prepared,
    rows_whole,
    strides_of,
    whole,
    wide_loads,
)
from vir.ops.triton.runner import Call, Step, run_in_turn, run_now
from vir.ops.triton.settings import Tile

FEW_ROWS = 3  # of tiles: their states are added where they are seen, not joined before
REACH = 2**27  # numbers between the rows of a grid: for some rows of a tile, 32 bits hold how far that is


class Box(TensorDescriptor):
    """A tensor as the hardware copies it, box by box: what Triton checks of it at every call, a plan has seen to."""

    def __post_init__(self) -> None:
        pass


Sides = tuple[list[int], list[int], list[int]]  # of a tensor, its strides, and the sides of a box


class Grid(NamedTuple):
    states: tuple[int, ...] | None  # at corners, if there are any
    tiles: Step
    boxes: tuple[Sides, Sides, Sides] | None = None  # of q, k, v, if the hardware copies them


def grid_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    scale: float,
    rows: int,
    cols: int,
    *,
    back: bool = False,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    tile: Tile | None = None,
) -> tuple[Call, Tensor]:
    """2D retention, not run yet; one token more than rows * cols is the class token."""
    q, k, v = _in_reach(q, cols), _in_reach(k, cols), _in_reach(v, cols)
    plan = _grid_plan(
        look(q), look(k), look(v), look(gamma), scale, rows, cols, back, dtype, out_dtype, tile
    )  # fmt: skip
    out = empty_as(v, out_dtype)
    states = made = out
    if plan.states is not None:
        rounded = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        states = gamma.new_empty(plan.states, dtype=rounded)
        made = gamma.new_zeros(plan.states[:2], dtype=torch.int32)
    boxes: tuple[Any, Any, Any] = q, k, v
    if plan.boxes is not None:
        of_q, of_k, of_v = plan.boxes
        boxes = Box(q, *of_q), Box(k, *of_k), Box(v, *of_v)
    return (plan.tiles, (q, k, v, out, states, made, gamma, *boxes)), out


grid = run_now(grid_call)


def _in_reach(x: Tensor, cols: int) -> Tensor:
    """Channels side by side, and rows of the grid not further apart than a tile can tell: else a copy."""
    x = rows_whole(x)
    if abs(x.stride(1)) * cols <= REACH:
        return x
    x = x.contiguous()
    if x.stride(1) * cols > REACH:
        raise ValueError(
            f"form='kernel' with {cols} columns of {x.shape[2]} heads of {x.shape[3]}, expected at most {REACH} "
            "numbers in a row of patches. Use form='chunkwise'."
        )
    return x


def _in_boxes(x: Look, rows: int, cols: int, height: int, width: int, channels: int) -> Sides:
    """Boxes that reach from head to head."""
    (b, _, h, d), (of_image, of_token, *_), *_ = x
    return [b, rows, cols, h * d], [of_image, cols * of_token, of_token, 1], [1, height, width, channels]


def _in_boxes_of_heads(x: Look, rows: int, cols: int, height: int, width: int, channels: int) -> Sides:
    """Boxes that are zero beside their head."""
    (b, _, h, d), (of_image, of_token, of_head, _), *_ = x
    return [b, rows, cols, h, d], [of_image, cols * of_token, of_token, of_head, 1], [1, height, width, 1, channels]


def _fits_boxes(x: Look) -> bool:
    """Whether heads lie side by side, all beginning where the hardware's copies can: at multiples of 16 bytes."""
    (_, _, _, d), (of_image, of_token, of_head, _), dtype, begin, _ = x
    aligned = begin == of_image % 8 == of_token % 8 == d % 8 == 0
    return dtype == torch.bfloat16 and of_head == d and aligned and min(of_image, of_token) > 0


@kept
def _grid_plan(
    q: Look,
    k: Look,
    v: Look,
    gamma: Look,
    scale: float,
    rows: int,
    cols: int,
    back: bool,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    tile: Tile | None,
) -> Grid:
    (b, n, h, dk), dv = q[0], v[0][3]
    if tile is None and (step := _quadrant_plan(q, k, v, scale, rows, cols, back, dtype)) is not None:
        return Grid(None, step)
    tile = tile or settings.grid_tile(cols, *key(dk, dv, dtype, q[4]))
    tiles_x, tiles_y = -(-cols // tile.cols), -(-rows // tile.rows)
    above = tiles_y - 1
    corners, class_token = tiles_x > 1 and above > 0, n > rows * cols
    joined = corners and above > FEW_ROWS
    programs = tiles_x * tiles_y + class_token + corners * above + joined * (tiles_x - 1)
    ahead = -(-settings.AHEAD * (1 + joined) // programs)
    lines = b * h + ahead * (corners + joined)
    many = tiles_x * tiles_y * b * h >= settings.MANY_TILES * settings.processors(q[4])
    boxed = many and tile.height == tile.rows and settings.like_hopper(q[4]) and all(map(_fits_boxes, (q, k, v)))
    step = prepared(
        grid_kernels.grid, (programs * lines, 1), [*strides_of(q, k, v), contiguous(n, h, dv)],
        (rows, cols, h, b * h, ahead, scale), dk, dv, dtype, tile.schedule,
        ROWS=tile.rows, COLS=tile.cols, HEIGHT=tile.height, WIDE=tiles_x > 1,
        EVEN=rows % tile.rows == cols % tile.cols == 0, CORNERS=1 if joined else corners * above, JOINED=joined,
        CLASS=class_token, BACK=back, BOXES=boxed,
    )  # fmt: skip
    states = (b, h, above, tiles_x - 1, dk, dv) if corners else None
    if not boxed:
        return Grid(states, step)
    sides = rows, cols, tile.rows, tile.cols, block(max(dk, dv))
    return Grid(states, step, (_in_boxes_of_heads(q, *sides), _in_boxes(k, *sides), _in_boxes(v, *sides)))


def _quadrant_plan(
    q: Look, k: Look, v: Look, scale: float, rows: int, cols: int, back: bool, dtype: torch.dtype
) -> Step | None:
    """For small grids, if there are enough of them, if loads are wide (it has many), and if a class token needs no
    tiles of its own."""
    (b, n, h, dk), dv, side = q[0], v[0][3], quadrant_kernels.SIDE.value
    class_token = n > rows * cols
    if not wide_loads(strides_of(q, k, v)) or (class_token and rows % side == 0):
        return None
    rows += class_token
    found = settings.of_many_tiles(-(-rows // side) * -(-cols // side), b, h, *key(dk, dv, dtype, q[4])[:3])
    if found is None:
        return None
    set_, programs = found
    return prepared(
        quadrant_kernels.quadrant, (programs, h), [*strides_of(q, k, v), contiguous(n, h, dv)],
        (rows, cols, b, programs, scale), dk, dv, dtype, set_.schedule,
        EVEN=rows % side == cols % side == 0, CLASS=class_token, BACK=back,
    )  # fmt: skip


def rows(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float, cols: int, state: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """2D retention of whole rows, from the state of each column above them to that of the last row, `b h x k v`."""
    height, state = q.shape[1] // cols, whole(state)
    inside, out = grid_call(
        q, k, v, gamma, scale, height, cols, dtype=q.dtype, out_dtype=dtype if state is None else torch.float32
    )
    calls = [inside]
    if state is not None:
        above, out = apply_states_call(
            q, state, gamma, scale, back=False, transposed=False, dtype=q.dtype, out_dtype=dtype, other=out
        )
        calls.append(above)
    states, made = line_states_call(k, v, gamma, 1.0, cols, height, back=False, dtype=k.dtype)
    end = torch.empty_like(made)
    join = _join_columns_plan(look(made), look_if(state), look(gamma), height)
    run_in_turn(*calls, states, (join, (made, made if state is None else state, end, gamma)))
    return out, end


@kept
def _join_columns_plan(made: Look, state: Look | None, gamma: Look, height: int) -> Step:
    b, h, cols, dk, dv = made[0]
    constants = {"SIZE": dk * dv, **JOINED, "ABOVE": state is not None}
    return runner.Step(lines.join_columns, (-(-dk * dv // JOINED["PART"]), b * h), (cols, height, h), constants, JOIN)
