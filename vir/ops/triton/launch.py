"""From tensors to kernels: shapes, strides, memory for the results, and the order of launches.

What depends on shapes alone is worked out once for each shape, in the functions marked `_once_per_shape`.
"""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vir.ops.triton import grid as kernels_2d
from vir.ops.triton import lines, sequence
from vir.ops.triton.runner import Numbers, Step
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
FEW_ROWS = 3  # of tiles: their states are added where they are seen, without a launch in between
Strides = tuple[int, ...]
_once_per_shape = lru_cache(maxsize=4096)


def _rows_whole(x: Tensor) -> Tensor:
    """Channels must lie side by side; they do in views of a qkv tensor. Only expanded gradients are copied."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


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


def _walk_length(n: int, walks: int, set_: Launch, device: torch.device, segments: int | None) -> int:
    """Tokens of a segment."""
    return segment_length(n, walks, set_.chunk, processors(device)) if segments is None else -(-n // segments)


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
    segments: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and, if asked for, the final state; a transposed state is `b h v k`."""
    b, n, h, dk = q.shape
    dv = v.shape[3]
    q, k, v = _rows_whole(q), _rows_whole(k), _rows_whole(v)
    out = torch.empty(b, n, h, dv, device=q.device, dtype=out_dtype)
    end = torch.empty(b, h, dk, dv, device=q.device) if final else out
    set_ = sized(WALK, *_key(dk, dv, dtype))
    length = _walk_length(n, b * h, set_, q.device, segments)
    strides = (1, dk) if transposed else (dv, 1)
    start = state
    if length < n:
        start = starts(k, v, gamma, 1.0, state, end if final else None, length, dtype=dtype, strides=strides)
        strides = (dv, 1)
    step = _walk_step(
        q.shape, dv, q.stride(), k.stride(), v.stride(), strides, length, scale, start is not None, final, dtype,
        set_, q.device,
    )  # fmt: skip
    step.run(q, k, v, out, out if start is None else start, end, gamma)
    return out, end if final else gamma.new_empty(0)


@_once_per_shape
def _walk_step(
    shape: torch.Size,
    dv: int,
    q: Strides,
    k: Strides,
    v: Strides,
    state: Strides,
    length: int,
    scale: float,
    start: bool,
    final: bool,
    dtype: torch.dtype,
    set_: Launch,
    device: torch.device,
) -> Step:
    b, n, h, dk = shape
    count = -(-n // length)
    return _step(
        sequence.walk, (count, b * h), [q[:3], k[:3], v[:3], _contiguous(n, h, dv)], (*state, n, length, h, scale),
        dk, dv, dtype, set_.schedule, CHUNK=set_.chunk, START=start, END=final and count == 1,
    )  # fmt: skip


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
    segments: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of k, of v and, if asked for, of the first state."""
    b, n, h, _ = q.shape
    grad, q, k, v = _rows_whole(grad), _rows_whole(q), _rows_whole(k), _rows_whole(v)
    dk = torch.empty(k.shape, device=k.device, dtype=k.dtype)
    dv = torch.empty(v.shape, device=v.device, dtype=v.dtype)
    end = torch.empty(b, h, k.shape[3], v.shape[3], device=q.device) if first else dk
    set_ = sized(WALK_BACK, *_key(k.shape[3], v.shape[3], dtype))
    length = _walk_length(n, b * h, set_, q.device, segments)
    start = grad_state
    if length < n:
        start = starts(
            q, grad, gamma, scale, grad_state, end if first else None, length, dtype=dtype, strides=(v.shape[3], 1),
            back=True,
        )  # fmt: skip
    step = _walk_back_step(
        q.shape, v.shape[3], q.stride(), k.stride(), v.stride(), grad.stride(), length, scale, start is not None,
        first, dtype, set_, q.device,
    )  # fmt: skip
    step.run(q, k, v, grad, dk, dv, dk if start is None else start, end, gamma)
    return dk, dv, end if first else gamma.new_empty(0)


@_once_per_shape
def _walk_back_step(
    shape: torch.Size,
    channels: int,
    q: Strides,
    k: Strides,
    v: Strides,
    grad: Strides,
    length: int,
    scale: float,
    start: bool,
    first: bool,
    dtype: torch.dtype,
    set_: Launch,
    device: torch.device,
) -> Step:
    b, n, h, d = shape
    count = -(-n // length)
    made = _contiguous(n, h, d), _contiguous(n, h, channels)
    return _step(
        sequence.walk_back, (count, b * h), [q[:3], k[:3], v[:3], grad[:3], *made], (n, length, h, scale),
        d, channels, dtype, set_.schedule, CHUNK=set_.chunk, START=start, END=first and count == 1,
    )  # fmt: skip


def starts(
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    scale: float,
    state: Tensor | None,
    end: Tensor | None,
    length: int,
    *,
    dtype: torch.dtype,
    strides: Strides,
    back: bool = False,
) -> Tensor:
    """The state at the start of each segment, `b h s k v`; the final one goes into `end`, if there is one."""
    b, n, h, dk = k.shape
    states = line_states(k, v, gamma, scale, 1, length, back=back, dtype=dtype, last=end is not None)
    step = _join_step(b, n, h, dk, v.shape[3], length, strides, state is not None, end is not None, k.device)
    step.run(states, states if state is None else state, states if end is None else end, gamma)
    return states


@_once_per_shape
def _join_step(
    b: int, n: int, h: int, dk: int, dv: int, length: int, state: Strides, start: bool, end: bool, device: torch.device
) -> Step:
    segments, part = -(-n // length), 64
    constants = {"DK": dk, "DV": dv, "SEGMENTS": _block(segments), "PART": part, "START": start, "END": end}
    grid = -(-dk * dv // part), b * h
    return Step(lines.join_segments, grid, (*state, segments, n, length, h), constants, JOIN)


def line_states(
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    scale: float,
    cols: int,
    length: int,
    *,
    back: bool,
    dtype: torch.dtype,
    last: bool = True,
) -> Tensor:
    """The states of all lines of `length` rows of a grid with `cols` columns, `b h line k v`; the last if asked for."""
    b, n, h, dk = k.shape
    k, v = _rows_whole(k), _rows_whole(v)
    dv = v.shape[3]
    count = -(-(n // cols) // length) * cols
    states = torch.empty(b, h, count, dk, dv, device=k.device)
    set_ = sized(LINES, *_key(dk, dv, dtype))
    step = _line_states_step(
        k.shape, dv, k.stride(), v.stride(), cols, length, count, scale, back, last, dtype, set_, k.device
    )  # fmt: skip
    step.run(k, v, states, gamma)
    return states


@_once_per_shape
def _line_states_step(
    shape: torch.Size,
    dv: int,
    k: Strides,
    v: Strides,
    cols: int,
    length: int,
    count: int,
    scale: float,
    back: bool,
    last: bool,
    dtype: torch.dtype,
    set_: Launch,
    device: torch.device,
) -> Step:
    b, n, h, dk = shape
    return _step(
        lines.line_states, (count if last else count - 1, b * h), [k[:3], v[:3]],
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
) -> Tensor:
    """What each token makes of the state of its column, `b n h v`; the states are `b h x k v`, or `b h x v k`."""
    b, n, h, dk = q.shape
    q, states = _rows_whole(q), states.contiguous()
    cols = states.shape[2]
    dv = states.shape[3 if transposed else 4]
    out = torch.empty(b, n, h, dv, device=q.device, dtype=out_dtype)
    set_ = sized(LINES, *_key(dk, dv, dtype))
    of_state = (1, dk) if transposed else (dv, 1)
    step = _step(
        lines.apply_states, (cols, b * h), [q.stride()[:3], _contiguous(n, h, dv)],
        (dk * dv, *of_state, n // cols, cols, h, scale), dk, dv, dtype, set_.schedule, CHUNK=set_.chunk, BACK=back,
    )  # fmt: skip
    step.run(q, states, out, gamma)
    return out


class GridSteps(NamedTuple):
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
    b, n, h, dk = q.shape
    dv = v.shape[3]
    q, k, v = _rows_whole(q), _rows_whole(k), _rows_whole(v)
    out = torch.empty(b, n, h, dv, device=q.device, dtype=out_dtype)
    if tile is None:
        tile = grid_tile(cols, *_key(dk, dv, dtype))
    steps = _grid_steps(q.shape, dv, q.stride(), k.stride(), v.stride(), scale, rows, cols, back, dtype, tile, q.device)
    states = out
    if steps.states is not None and steps.rows is not None:
        kept = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        states = torch.empty(steps.states, device=q.device, dtype=kept)
        steps.rows.run(k, v, states, gamma)
        if steps.join is not None:
            steps.join.run(states, gamma)
    steps.tiles.run(q, k, v, out, states, gamma)
    return out


@_once_per_shape
def _grid_steps(
    shape: torch.Size,
    dv: int,
    q: Strides,
    k: Strides,
    v: Strides,
    scale: float,
    rows: int,
    cols: int,
    back: bool,
    dtype: torch.dtype,
    tile: Tile,
    device: torch.device,
) -> GridSteps:
    b, n, h, dk = shape
    tiles_x, tiles_y = -(-cols // tile.cols), -(-rows // tile.rows)
    above = tiles_y - 1
    joined = above > FEW_ROWS
    corners = 0 if tiles_x == 1 else 1 if joined else above
    class_token = n > rows * cols
    shared = {"ROWS": tile.rows, "COLS": tile.cols, "BACK": back}
    tiles = _step(
        kernels_2d.grid, (tiles_x * tiles_y + class_token, b * h), [q[:3], k[:3], v[:3], _contiguous(n, h, dv)],
        (rows, cols, h, scale), dk, dv, dtype, tile.schedule,
        **shared, HEIGHT=tile.height, WIDE=tiles_x > 1, CORNERS=corners, CLASS=class_token,
    )  # fmt: skip
    if corners == 0:
        return GridSteps(None, None, None, tiles)
    by_row = _step(
        kernels_2d.tile_row_states, (above, b * h), [k[:3], v[:3]], (rows, cols, tiles_x - 1, h),
        dk, dv, dtype, (4, tile.stages, None), **shared,
    )  # fmt: skip
    join = None
    if joined:
        width, part = (tiles_x - 1) * dk * dv, 1024
        grid, constants = (-(-width // part), b * h), {"ROWS": tile.rows, "PART": part}
        join = Step(kernels_2d.join_tile_rows, grid, (above, width, h), constants, JOIN)
    return GridSteps((b, h, above, tiles_x - 1, dk, dv), by_row, join, tiles)
