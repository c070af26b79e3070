"""2D retention: tiles of a grid, and bands of whole rows that a state passes through."""

from typing import NamedTuple

import torch
from torch import Tensor

from vir.ops.triton import grid as grid_kernels
from vir.ops.triton import lines, runner, settings
from vir.ops.triton import quadrant as quadrant_kernels
from vir.ops.triton.launch.lines import apply_states, line_states
from vir.ops.triton.launch.plans import (
    JOIN,
    JOINED,
    Look,
    contiguous,
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
from vir.ops.triton.runner import Call, Step, run_in_turn
from vir.ops.triton.settings import Tile

FEW_ROWS = 3  # of tiles: their states are added where they are seen, without a launch in between


class Grid(NamedTuple):
    """What makes the corners of a grid, if it has any, and what sees them."""

    states: tuple[int, ...] | None
    rows: Step | None
    join: Step | None
    tiles: Step


def grid(
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
) -> Tensor:
    """2D retention; one token more than rows * cols is the class token."""
    q, k, v = rows_whole(q), rows_whole(k), rows_whole(v)
    plan = _grid_plan(
        look(q), look(k), look(v), look(gamma), scale, rows, cols, back, dtype, out_dtype, tile
    )  # fmt: skip
    out = torch.empty(*q.shape[:3], v.shape[3], device=q.device, dtype=out_dtype)
    states, before = out, list[Call]()
    if plan.states is not None and plan.rows is not None:
        rounded = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        states = torch.empty(plan.states, device=q.device, dtype=rounded)
        before = [(plan.rows, (k, v, states, gamma))]
        if plan.join is not None:
            before.append((plan.join, (states, gamma)))
    run_in_turn(*before, (plan.tiles, (q, k, v, out, states, gamma)))
    return out


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
        return Grid(None, None, None, step)
    tile = tile or settings.grid_tile(cols, *key(dk, dv, dtype, q[4]))
    tiles_x, tiles_y = -(-cols // tile.cols), -(-rows // tile.rows)
    above = tiles_y - 1
    joined = above > FEW_ROWS
    corners = 0 if tiles_x == 1 else 1 if joined else above
    class_token = n > rows * cols
    shared = {"ROWS": tile.rows, "COLS": tile.cols, "BACK": back}
    strides = [*strides_of(q, k, v), contiguous(n, h, dv)]
    tiles = prepared(
        grid_kernels.grid, (tiles_x * tiles_y + class_token, b * h), strides, (rows, cols, h, scale),
        dk, dv, dtype, tile.schedule,
        **shared, HEIGHT=tile.height, WIDE=tiles_x > 1, CORNERS=corners, CLASS=class_token,
        EVEN=rows % tile.rows == cols % tile.cols == 0,
    )  # fmt: skip
    if corners == 0:
        return Grid(None, None, None, tiles)
    by_row = prepared(
        grid_kernels.tile_row_states, (above, b * h), strides[1:3], (rows, cols, tiles_x - 1, h),
        dk, dv, dtype, (4, tile.stages, None), **shared,
    )  # fmt: skip
    join = None
    if joined:
        width, part = (tiles_x - 1) * dk * dv, 1024
        blocks, constants = (-(-width // part), b * h), {"ROWS": tile.rows, "PART": part}
        join = runner.Step(grid_kernels.join_tile_rows, blocks, (above, width, h), constants, JOIN)
    return Grid((b, h, above, tiles_x - 1, dk, dv), by_row, join, tiles)


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
    found = settings.of_many_tiles(-(-rows // side) * -(-cols // side), b, h, *key(dk, dv, dtype, q[4]))
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
    if state is None:
        out = grid(q, k, v, gamma, scale, height, cols, dtype=q.dtype, out_dtype=dtype)
    else:
        inside = grid(q, k, v, gamma, scale, height, cols, dtype=q.dtype, out_dtype=torch.float32)
        out = apply_states(
            q, state, gamma, scale, back=False, transposed=False, dtype=q.dtype, out_dtype=dtype, other=inside
        )  # fmt: skip
    made = line_states(k, v, gamma, 1.0, cols, height, back=False, dtype=k.dtype)
    end = torch.empty_like(made)
    step = _join_columns_plan(look(made), look_if(state), look(gamma), height)
    step.run(made, made if state is None else state, end, gamma)
    return out, end


@kept
def _join_columns_plan(made: Look, state: Look | None, gamma: Look, height: int) -> Step:
    b, h, cols, dk, dv = made[0]
    constants = {"SIZE": dk * dv, **JOINED, "ABOVE": state is not None}
    return runner.Step(lines.join_columns, (-(-dk * dv // JOINED["PART"]), b * h), (cols, height, h), constants, JOIN)
