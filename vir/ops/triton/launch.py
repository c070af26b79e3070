"""From tensors to kernels: shapes, strides, memory for the results, and the order of launches.

What depends on the looks of the tensors alone is worked out once and kept, as a plan: small images wait for the host,
not for the GPU, so that its microseconds count.
"""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vir.ops.triton import grid as kernels_2d
from vir.ops.triton import lines, sequence
from vir.ops.triton.runner import Call, Numbers, Step, run_in_turn
from vir.ops.triton.settings import (
    LINES,
    WALK,
    WALK_BACK,
    Launch,
    Schedule,
    Tile,
    grid_tile,
    processors,
    segment_length,
    sized,
)

INTERPRETED = not isinstance(sequence.walk, triton.JITFunction)
JOIN: Schedule = (4, 3, None)
JOINED = {"SOME": 16, "PART": 64}  # states at a time, and numbers of each
FEW_ROWS = 3  # of tiles: their states are added where they are seen, without a launch in between
Strides = tuple[int, ...]
_kept = lru_cache(maxsize=4096)


Look = tuple[torch.Size, Strides, torch.dtype, int, torch.device]


def _look(x: Tensor) -> Look:
    """All of a tensor that decides how kernels are started on it."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() % 16, x.device


def _look_if(x: Tensor | None) -> Look | None:
    return None if x is None else _look(x)


def _strides(*looks: Look) -> list[Strides]:
    """Of batch, token and head: channels lie side by side."""
    return [strides[:3] for _, strides, *_ in looks]


def forget() -> None:
    """Drop all plans: for whoever changes the settings."""
    for plans in (
        _walk_plan, _walk_back_plan, _line_states_plan, _apply_states_plan, _join_columns_plan, _grid_plan,
    ):  # fmt: skip
        plans.cache_clear()


def _rows_whole(x: Tensor) -> Tensor:
    """Channels must lie side by side; they do in views of a qkv tensor. Only expanded gradients are copied."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _whole(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _contiguous(n: int, h: int, d: int) -> Strides:
    return n * h * d, h * d, d


@cache
def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _key(dk: int, dv: int, dtype: torch.dtype) -> tuple[int, int]:
    return _block(max(dk, dv)), 2 if dtype == torch.bfloat16 else 4


def _precision(dtype: torch.dtype) -> dict[str, Any]:
    """How products are taken: bf16 as it is; fp16 as tf32, which holds it exactly and has float32's range; float32
    by three tf32 products, which give its precision."""
    if dtype == torch.bfloat16 and not INTERPRETED:  # the interpreter has no products of bf16
        return {"OPERAND": tl.bfloat16, "PRECISION": "tf32"}
    return {"OPERAND": tl.float32, "PRECISION": "tf32" if dtype == torch.float16 else "tf32x3"}


def _step(
    kernel: Any,
    grid: tuple[int, int],
    strides: list[Strides],
    numbers: Numbers,
    dk: int,
    dv: int,
    dtype: torch.dtype,
    schedule: Schedule,
    **constants: Any,
) -> Step:
    """Of a kernel that takes products. Blocks of channels are square, because Triton 3.6 gets products of 64 by 16
    wrong on Hopper; and Triton sees by itself only strides that are multiples of 16, not of 8."""
    block = _block(max(dk, dv))
    sizes = {"DK": dk, "DV": dv, "BK": block, "BV": block}
    align = {"ALIGN": 8 if all(of_head % 8 == 0 for _, _, of_head in strides) else 1}
    flat = tuple(stride for some in strides for stride in some)
    return Step(kernel, grid, (*flat, *numbers), {**sizes, **_precision(dtype), **align, **constants}, schedule)


def _walk_length(n: int, walks: int, set_: Launch, device: torch.device) -> int:
    """Tokens of a segment."""
    return segment_length(n, walks, set_.chunk, processors(device))


class Starts(NamedTuple):
    """How the states at the starts of segments are made: `b h s k v`."""

    shape: tuple[int, ...]
    made: Step
    joined: Step

    def into(
        self, states: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor | None, end: Tensor | None
    ) -> tuple[Call, Call]:
        """The final state goes into `end`, if there is one."""
        joined = states, states if state is None else state, states if end is None else end, gamma
        return (self.made, (k, v, states, gamma)), (self.joined, joined)


def _starts(
    k: Look,
    v: Look,
    scale: float,
    length: int,
    start: bool,
    end: bool,
    strides: Strides,
    back: bool,
    dtype: torch.dtype,
) -> Starts:
    (b, n, h, dk), dv = k[0], v[0][3]
    segments = -(-n // length)
    shape = (b, h, segments, dk, dv)
    made = _line_states_step(k, v, scale, 1, length, back, end, dtype)
    constants = {"DK": dk, "DV": dv, **JOINED, "START": start, "END": end}
    grid = -(-dk * dv // JOINED["PART"]), b * h
    joined = Step(lines.join_segments, grid, (*strides, segments, n, length, h), constants, JOIN)
    return Starts(shape, made, joined)


class Walk(NamedTuple):
    starts: Starts | None  # where the sequence is cut into segments
    step: Step


def walk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    scale: float,
    state: Tensor | None,
    final: bool,
    *,
    transposed: bool = False,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Output and, if asked for, the final state; a transposed state is `b h v k`."""
    q, k, v, state = _rows_whole(q), _rows_whole(k), _rows_whole(v), _whole(state)
    b, n, h, dk = q.shape
    dv = v.shape[3]
    plan = _walk_plan(
        _look(q), _look(k), _look(v), _look(gamma), _look_if(state), scale, final, transposed, dtype, out_dtype
    )  # fmt: skip
    out = torch.empty(b, n, h, dv, device=q.device, dtype=out_dtype)
    end = torch.empty(b, h, dk, dv, device=q.device) if final else None
    before: tuple[Call, ...] = ()
    if plan.starts is not None:
        states = torch.empty(plan.starts.shape, device=k.device)
        before, state = plan.starts.into(states, k, v, gamma, state, end), states
    last = q, k, v, out, out if state is None else state, out if end is None else end, gamma
    run_in_turn(*before, (plan.step, last))
    return out, gamma.new_empty(0) if end is None else end


@_kept
def _walk_plan(
    q: Look,
    k: Look,
    v: Look,
    gamma: Look,
    state: Look | None,
    scale: float,
    final: bool,
    transposed: bool,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Walk:
    (b, n, h, dk), dv = q[0], v[0][3]
    set_ = sized(WALK, *_key(dk, dv, dtype))
    length = _walk_length(n, b * h, set_, q[4])
    # Without a state they mean nothing, and so are the same: the gradient of q then takes the binary of the output.
    strides = (1, dk) if transposed and state is not None else (dv, 1)
    starts = None
    if length < n:
        starts = _starts(k, v, 1.0, length, state is not None, final, strides, False, dtype)
        strides = (dv, 1)
    step = _step(
        sequence.walk, (-(-n // length), b * h),
        [*_strides(q, k, v), _contiguous(n, h, dv)], (*strides, n, length, h, scale),
        dk, dv, dtype, set_.schedule,
        CHUNK=set_.chunk, START=state is not None or starts is not None, END=final and starts is None,
    )  # fmt: skip
    return Walk(starts, step)


def walk_back(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    scale: float,
    grad_state: Tensor | None,
    first: bool,
    *,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of k, of v and, if asked for, of the first state."""
    b, _, h, _ = q.shape
    grad, q, k, v, state = _rows_whole(grad), _rows_whole(q), _rows_whole(k), _rows_whole(v), _whole(grad_state)
    plan = _walk_back_plan(
        _look(grad), _look(q), _look(k), _look(v), _look(gamma), _look_if(state), scale, first, dtype
    )  # fmt: skip
    dk = torch.empty(k.shape, device=k.device, dtype=k.dtype)
    dv = torch.empty(v.shape, device=v.device, dtype=v.dtype)
    end = torch.empty(b, h, k.shape[3], v.shape[3], device=q.device) if first else None
    before: tuple[Call, ...] = ()
    if plan.starts is not None:
        states = torch.empty(plan.starts.shape, device=k.device)
        before, state = plan.starts.into(states, q, grad, gamma, state, end), states
    last = q, k, v, grad, dk, dv, dk if state is None else state, dk if end is None else end, gamma
    run_in_turn(*before, (plan.step, last))
    return dk, dv, gamma.new_empty(0) if end is None else end


@_kept
def _walk_back_plan(
    grad: Look,
    q: Look,
    k: Look,
    v: Look,
    gamma: Look,
    state: Look | None,
    scale: float,
    first: bool,
    dtype: torch.dtype,
) -> Walk:
    (b, n, h, dk), dv = q[0], v[0][3]
    set_ = sized(WALK_BACK, *_key(dk, dv, dtype))
    length = _walk_length(n, b * h, set_, q[4])
    starts = None
    if length < n:
        starts = _starts(q, grad, scale, length, state is not None, first, (dv, 1), True, dtype)
    made = _contiguous(n, h, dk), _contiguous(n, h, dv)
    step = _step(
        sequence.walk_back, (-(-n // length), b * h),
        [*_strides(q, k, v, grad), *made], (n, length, h, scale),
        dk, dv, dtype, set_.schedule,
        CHUNK=set_.chunk, START=state is not None or starts is not None, END=first and starts is None,
    )  # fmt: skip
    return Walk(starts, step)


def line_states(
    k: Tensor, v: Tensor, gamma: Tensor, scale: float, cols: int, length: int, *, back: bool, dtype: torch.dtype
) -> Tensor:
    """The states of all lines of `length` rows of a grid with `cols` columns, `b h line k v`."""
    k, v = _rows_whole(k), _rows_whole(v)
    b, n, h, dk = k.shape
    step = _line_states_plan(_look(k), _look(v), _look(gamma), scale, cols, length, back, dtype)
    states = torch.empty(b, h, _lines(n, cols, length), dk, v.shape[3], device=k.device)
    step.run(k, v, states, gamma)
    return states


def _lines(n: int, cols: int, length: int) -> int:
    return -(-(n // cols) // length) * cols


@_kept
def _line_states_plan(
    k: Look, v: Look, gamma: Look, scale: float, cols: int, length: int, back: bool, dtype: torch.dtype
) -> Step:
    return _line_states_step(k, v, scale, cols, length, back, True, dtype)


def _line_states_step(
    k: Look, v: Look, scale: float, cols: int, length: int, back: bool, last: bool, dtype: torch.dtype
) -> Step:
    """All lines, or all but the last."""
    (b, n, h, dk), dv = k[0], v[0][3]
    set_ = sized(LINES, *_key(dk, dv, dtype))
    count = _lines(n, cols, length)
    return _step(
        lines.line_states, (count if last else count - 1, b * h), _strides(k, v),
        (n // cols, cols, length, count, h, scale), dk, dv, dtype, set_.schedule, CHUNK=set_.chunk, BACK=back,
    )  # fmt: skip


def apply_states(
    q: Tensor,
    states: Tensor,
    gamma: Tensor,
    scale: float,
    *,
    back: bool,
    transposed: bool,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    other: Tensor | None = None,
) -> Tensor:
    """What each token makes of the state of its column, `b n h v`, and `other` added to it, which is contiguous; the
    states are `b h x k v`, or `b h x v k`."""
    q, states = _rows_whole(q), states.contiguous()
    step = _apply_states_plan(
        _look(q), _look(states), _look(gamma), scale, back, transposed, dtype, out_dtype, _look_if(other)
    )  # fmt: skip
    dv = states.shape[3 if transposed else 4]
    out = torch.empty(*q.shape[:3], dv, device=q.device, dtype=out_dtype)
    step.run(q, states, out if other is None else other, out, gamma)
    return out


@_kept
def _apply_states_plan(
    q: Look,
    states: Look,
    gamma: Look,
    scale: float,
    back: bool,
    transposed: bool,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    other: Look | None,
) -> Step:
    (b, n, h, dk), of_states = q[0], states[0]
    cols, dv = of_states[2], of_states[3 if transposed else 4]
    set_ = sized(LINES, *_key(dk, dv, dtype))
    of_state = (1, dk) if transposed else (dv, 1)
    return _step(
        lines.apply_states, (cols, b * h), [*_strides(q), _contiguous(n, h, dv)],
        (dk * dv, *of_state, n // cols, cols, h, scale), dk, dv, dtype, set_.schedule,
        CHUNK=set_.chunk, OTHER=other is not None, BACK=back,
    )  # fmt: skip


def rows(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float, cols: int, state: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """2D retention of whole rows, from the state of each column above them to that of the last row, `b h x k v`."""
    height, state = q.shape[1] // cols, _whole(state)
    if state is None:
        out = grid(q, k, v, gamma, scale, height, cols, dtype=q.dtype, out_dtype=dtype)
    else:
        inside = grid(q, k, v, gamma, scale, height, cols, dtype=q.dtype, out_dtype=torch.float32)
        out = apply_states(
            q, state, gamma, scale, back=False, transposed=False, dtype=q.dtype, out_dtype=dtype, other=inside
        )  # fmt: skip
    made = line_states(k, v, gamma, 1.0, cols, height, back=False, dtype=k.dtype)
    end = torch.empty_like(made)
    _join_columns_plan(_look(made), _look(gamma), height, state is not None).run(
        made, made if state is None else state, end, gamma
    )
    return out, end


@_kept
def _join_columns_plan(made: Look, gamma: Look, height: int, above: bool) -> Step:
    b, h, cols, dk, dv = made[0]
    constants = {"SIZE": dk * dv, **JOINED, "ABOVE": above}
    return Step(lines.join_columns, (-(-dk * dv // JOINED["PART"]), b * h), (cols, height, h), constants, JOIN)


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
    q, k, v = _rows_whole(q), _rows_whole(k), _rows_whole(v)
    plan = _grid_plan(
        _look(q), _look(k), _look(v), _look(gamma), scale, rows, cols, back, dtype, out_dtype, tile
    )  # fmt: skip
    out = torch.empty(*q.shape[:3], v.shape[3], device=q.device, dtype=out_dtype)
    states, before = out, list[Call]()
    if plan.states is not None and plan.rows is not None:
        kept = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        states = torch.empty(plan.states, device=q.device, dtype=kept)
        before = [(plan.rows, (k, v, states, gamma))]
        if plan.join is not None:
            before.append((plan.join, (states, gamma)))
    run_in_turn(*before, (plan.tiles, (q, k, v, out, states, gamma)))
    return out


@_kept
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
    tile = tile or grid_tile(cols, *_key(dk, dv, dtype))
    tiles_x, tiles_y = -(-cols // tile.cols), -(-rows // tile.rows)
    above = tiles_y - 1
    joined = above > FEW_ROWS
    corners = 0 if tiles_x == 1 else 1 if joined else above
    class_token = n > rows * cols
    shared = {"ROWS": tile.rows, "COLS": tile.cols, "BACK": back}
    strides = [*_strides(q, k, v), _contiguous(n, h, dv)]
    tiles = _step(
        kernels_2d.grid, (tiles_x * tiles_y + class_token, b * h), strides, (rows, cols, h, scale),
        dk, dv, dtype, tile.schedule,
        **shared, HEIGHT=tile.height, WIDE=tiles_x > 1, CORNERS=corners, CLASS=class_token,
    )  # fmt: skip
    if corners == 0:
        return Grid(None, None, None, tiles)
    by_row = _step(
        kernels_2d.tile_row_states, (above, b * h), strides[1:3], (rows, cols, tiles_x - 1, h),
        dk, dv, dtype, (4, tile.stages, None), **shared,
    )  # fmt: skip
    join = None
    if joined:
        width, part = (tiles_x - 1) * dk * dv, 1024
        blocks, constants = (-(-width // part), b * h), {"ROWS": tile.rows, "PART": part}
        join = Step(kernels_2d.join_tile_rows, blocks, (above, width, h), constants, JOIN)
    return Grid((b, h, above, tiles_x - 1, dk, dv), by_row, join, tiles)
