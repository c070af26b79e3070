"""From tensors to kernels: shapes, strides, memory for the results, and the order of launches."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vir.ops.triton import grid as kernels_2d
from vir.ops.triton import lines, sequence
from vir.ops.triton.runner import run
from vir.ops.triton.settings import (
    LINES,
    WALK,
    WALK_BACK,
    Tile,
    grid_tile,
    processors,
    segment_length,
    sized,
)

INTERPRETED = not isinstance(sequence.walk, triton.JITFunction)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Of batch, tokens and heads, of each tensor; those of the channels are 1."""
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def _rows_whole(x: Tensor) -> Tensor:
    """Channels must lie side by side; they do in views of a qkv tensor. Only expanded gradients are copied."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _aligned(*tensors: Tensor) -> int:
    """What the strides of heads are multiples of: Triton itself sees only multiples of 16, not 40."""
    return 8 if all(x.stride(2) % 8 == 0 for x in tensors) else 1


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


@cache
def _precision(dtype: torch.dtype) -> dict[str, Any]:
    """How products are taken: bf16 as it is; fp16 as tf32, which holds it exactly and has float32's range; float32
    by three tf32 products, which give its precision."""
    if dtype == torch.bfloat16 and not INTERPRETED:  # the interpreter has no products of bf16
        return {"OPERAND": tl.bfloat16, "PRECISION": "tf32"}
    return {"OPERAND": tl.float32, "PRECISION": "tf32" if dtype == torch.float16 else "tf32x3"}


@cache
def _sizes(dk: int, dv: int) -> dict[str, int]:
    """Of states: blocks are square, because Triton 3.6 gets products of 64 by 16 channels wrong on Hopper."""
    block = _block(max(dk, dv))
    return {"DK": dk, "DV": dv, "BK": block, "BV": block}


@cache
def _key(dk: int, dv: int, dtype: torch.dtype) -> tuple[int, int]:
    return _block(max(dk, dv)), 2 if dtype == torch.bfloat16 else 4


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
    end = torch.empty(b, h, dk, dv, device=q.device) if final else gamma.new_empty(0)
    set_ = sized(WALK, *_key(dk, dv, dtype))
    length = segment_length(n, b * h, set_.chunk, processors(q.device)) if segments is None else -(-n // segments)
    count = -(-n // length)
    state_strides = (1, dk) if transposed else (dv, 1)
    start = state
    if count > 1:
        start = starts(k, v, gamma, 1.0, state, end, length, dtype=dtype, strides=state_strides)
        state_strides = (dv, 1)
    constants = {
        **_sizes(dk, dv), **_precision(dtype), "ALIGN": _aligned(q, k, v, out),
        "CHUNK": set_.chunk, "START": start is not None, "END": final and count == 1,
    }  # fmt: skip
    run(
        sequence.walk, (count, b * h), (q, k, v, out, out if start is None else start, end, gamma),
        (*_strides(q, k, v, out), *state_strides, n, length, h, scale), constants, *set_.schedule,
    )  # fmt: skip
    return out, end


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
    end = torch.empty(b, h, k.shape[3], v.shape[3], device=q.device) if first else gamma.new_empty(0)
    set_ = sized(WALK_BACK, *_key(k.shape[3], v.shape[3], dtype))
    length = segment_length(n, b * h, set_.chunk, processors(q.device)) if segments is None else -(-n // segments)
    count = -(-n // length)
    start = grad_state
    if count > 1:
        start = starts(q, grad, gamma, scale, grad_state, end, length, dtype=dtype, strides=(v.shape[3], 1), back=True)
    constants = {
        **_sizes(k.shape[3], v.shape[3]), **_precision(dtype), "ALIGN": _aligned(q, k, v, grad, dk, dv),
        "CHUNK": set_.chunk, "START": start is not None, "END": first and count == 1,
    }  # fmt: skip
    run(
        sequence.walk_back, (count, b * h), (q, k, v, grad, dk, dv, dk if start is None else start, end, gamma),
        (*_strides(q, k, v, grad, dk, dv), n, length, h, scale), constants, *set_.schedule,
    )  # fmt: skip
    return dk, dv, end


def starts(
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    scale: float,
    state: Tensor | None,
    end: Tensor,
    length: int,
    *,
    dtype: torch.dtype,
    strides: tuple[int, int],
    back: bool = False,
) -> Tensor:
    """The state at the start of each segment, `b h s k v`; the final one goes into `end`, unless that is empty."""
    b, n, h, dk = k.shape
    dv = v.shape[3]
    final = end.numel() > 0
    states = line_states(k, v, gamma, scale, 1, length, back=back, dtype=dtype, last=final)
    segments = states.shape[2]
    part = 64
    constants = {
        "DK": dk, "DV": dv, "SEGMENTS": _block(segments), "PART": part, "START": state is not None, "END": final,
    }  # fmt: skip
    run(
        lines.join_segments, (-(-dk * dv // part), b * h), (states, states if state is None else state, end, gamma),
        (*strides, segments, n, length, h), constants,
    )  # fmt: skip
    return states


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
    rows = n // cols
    count = -(-rows // length) * cols
    dv = v.shape[3]
    states = torch.empty(b, h, count, dk, dv, device=k.device)
    set_ = sized(LINES, *_key(dk, dv, dtype))
    constants = {
        **_sizes(dk, dv), **_precision(dtype), "ALIGN": _aligned(k, v), "CHUNK": set_.chunk, "BACK": back,
    }  # fmt: skip
    run(
        lines.line_states, (count if last else count - 1, b * h), (k, v, states, gamma),
        (*_strides(k, v), rows, cols, length, count, h, scale), constants, *set_.schedule,
    )  # fmt: skip
    return states


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
    constants = {
        **_sizes(dk, dv), **_precision(dtype), "ALIGN": _aligned(q, out), "CHUNK": set_.chunk, "BACK": back,
    }  # fmt: skip
    of_state = (1, dk) if transposed else (dv, 1)
    run(
        lines.apply_states, (cols, b * h), (q, states, out, gamma),
        (*_strides(q, out), dk * dv, *of_state, n // cols, cols, h, scale), constants, *set_.schedule,
    )  # fmt: skip
    return out


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
    tiles_x, tiles_y = -(-cols // tile.cols), -(-rows // tile.rows)
    corners = tiles_x > 1 and tiles_y > 1
    shared = {
        **_sizes(dk, dv), **_precision(dtype), "ALIGN": _aligned(q, k, v, out),
        "ROWS": tile.rows, "COLS": tile.cols, "BACK": back,
    }  # fmt: skip
    states = out
    if corners:
        kept = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        states = torch.empty(b, h, tiles_y - 1, tiles_x - 1, dk, dv, device=q.device, dtype=kept)
        run(
            kernels_2d.tile_row_states, (tiles_y - 1, b * h), (k, v, states, gamma),
            (*_strides(k, v), rows, cols, tiles_x - 1, h), shared, stages=tile.stages,
        )  # fmt: skip
        if tiles_y > 2:
            width, part = (tiles_x - 1) * dk * dv, 1024
            run(
                kernels_2d.join_tile_rows, (-(-width // part), b * h), (states, gamma),
                (tiles_y - 1, width, h), {"ROWS": tile.rows, "PART": part},
            )  # fmt: skip
    class_token = n > rows * cols
    constants = {**shared, "HEIGHT": tile.height, "WIDE": tiles_x > 1, "CORNERS": corners, "CLASS": class_token}
    run(
        kernels_2d.grid, (tiles_x * tiles_y + class_token, b * h), (q, k, v, out, states, gamma),
        (*_strides(q, k, v, out), rows, cols, h, scale), constants, *tile.schedule,
    )  # fmt: skip
    return out
