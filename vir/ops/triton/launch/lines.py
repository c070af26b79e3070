"""States of lines of tokens, and what tokens make of them."""

import torch
from torch import Tensor

from vir.ops.triton import lines, settings
from vir.ops.triton.launch.plans import Look, contiguous, kept, key, look, look_if, prepared, rows_whole, strides_of
from vir.ops.triton.runner import Call, Step, run_now


def line_states_call(
    k: Tensor, v: Tensor, gamma: Tensor, scale: float, cols: int, length: int, *, back: bool, dtype: torch.dtype
) -> tuple[Call, Tensor]:
    """The states of all lines of `length` rows of a grid with `cols` columns, `b h line k v`, not run yet."""
    k, v = rows_whole(k), rows_whole(v)
    b, n, h, dk = k.shape
    step = _line_states_plan(look(k), look(v), look(gamma), scale, cols, length, back, dtype)
    states = torch.empty(b, h, _lines(n, cols, length), dk, v.shape[3], device=k.device, dtype=torch.float32)
    return (step, (k, v, states, gamma)), states


line_states = run_now(line_states_call)


def _lines(n: int, cols: int, length: int) -> int:
    return -(-(n // cols) // length) * cols


@kept
def _line_states_plan(
    k: Look, v: Look, gamma: Look, scale: float, cols: int, length: int, back: bool, dtype: torch.dtype
) -> Step:
    count = _lines(k[0][1], cols, length)
    return line_states_step(k, v, scale, cols, length, back, count, count, 1, dtype)


def line_states_step(
    k: Look,
    v: Look,
    scale: float,
    cols: int,
    length: int,
    back: bool,
    made: int,
    room: int,
    pieces: int,
    dtype: torch.dtype,
) -> Step:
    """The states of so many lines, where there is room for so many, or of the pieces of each, side by side."""
    (b, n, h, dk), dv = k[0], v[0][3]
    set_ = settings.sized("LINES", *key(dk, dv, dtype, k[4]))
    return prepared(
        lines.line_states, (made * pieces, b * h), strides_of(k, v),
        (n // cols, cols, length, room * pieces, pieces, h, scale), dk, dv, dtype, set_.schedule,
        CHUNK=set_.chunk, BACK=back,
    )  # fmt: skip


def apply_states_call(
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
) -> tuple[Call, Tensor]:
    """What each token makes of the state of its column, `b n h v`, and `other` added to it, which is contiguous; the
    states are `b h x k v`, or `b h x v k`. Not run yet."""
    q, states = rows_whole(q), states.contiguous()
    step = _apply_states_plan(
        look(q), look(states), look(gamma), scale, back, transposed, dtype, out_dtype, look_if(other)
    )  # fmt: skip
    dv = states.shape[3 if transposed else 4]
    out = torch.empty(*q.shape[:3], dv, device=q.device, dtype=out_dtype)
    return (step, (q, states, out if other is None else other, out, gamma)), out


apply_states = run_now(apply_states_call)


@kept
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
    set_ = settings.sized("LINES", *key(dk, dv, dtype, q[4]))
    of_state = (1, dk) if transposed else (dv, 1)
    return prepared(
        lines.apply_states, (cols, b * h), [*strides_of(q), contiguous(n, h, dv)],
        (dk * dv, *of_state, n // cols, cols, h, scale), dk, dv, dtype, set_.schedule,
        CHUNK=set_.chunk, OTHER=other is not None, BACK=back,
    )  # fmt: skip
