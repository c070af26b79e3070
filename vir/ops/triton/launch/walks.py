"""1D retention: the walk, and the states at the starts of segments where it is cut."""

from typing import NamedTuple

import torch
from torch import Tensor

from vir.ops.triton import lines, runner, sequence, settings
from vir.ops.triton.launch.lines import line_states_step
from vir.ops.triton.launch.plans import (
    JOIN,
    JOINED,
    Look,
    Strides,
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
)
from vir.ops.triton.runner import Call, Step, run_in_turn
from vir.ops.triton.settings import Launch


def _cut(n: int, walks: int, set_: Launch, device: torch.device) -> tuple[int, int]:
    """Tokens of a segment, and how many programs make its state."""
    return settings.segments(n, walks, set_.chunk, settings.processors(device))


class Starts(NamedTuple):
    """How the states at the starts of segments, or pieces of those at their ends, are made: `b h s k v`."""

    shape: tuple[int, ...]
    made: Step
    joined: Step | None  # before the walk, if it does not add them up
    pieces: int

    def into(
        self, states: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor | None, end: Tensor | None
    ) -> tuple[Call, ...]:
        """The final state goes into `end`, if there is one."""
        made = self.made, (k, v, states, gamma)
        if self.joined is None:
            return (made,)
        return made, (self.joined, (states, states if state is None else state, states if end is None else end, gamma))


def _starts(
    k: Look,
    v: Look,
    scale: float,
    length: int,
    pieces: int,
    start: bool,
    end: bool,
    strides: Strides,
    back: bool,
    dtype: torch.dtype,
) -> Starts:
    (b, n, h, dk), dv = k[0], v[0][3]
    segments = -(-n // length)
    earlier = (segments - 1) * pieces
    if earlier <= settings.MOST_ADDED and not start and not end:
        made = line_states_step(k, v, scale, 1, length, back, segments - 1, segments - 1, pieces, dtype)
        return Starts((b, h, earlier, dk, dv), made, None, pieces)
    made = line_states_step(k, v, scale, 1, length, back, segments if end else segments - 1, segments, 1, dtype)
    constants = {"DK": dk, "DV": dv, **JOINED, "START": start, "END": end}
    grid = -(-dk * dv // JOINED["PART"]), b * h
    joined = runner.Step(lines.join_segments, grid, (*strides, segments, n, length, h), constants, JOIN)
    return Starts((b, h, segments, dk, dv), made, joined, 1)


def _added(starts: Starts | None) -> dict[str, int]:
    """How many pieces of states the walk of the last segment adds up, and how many there are of each segment."""
    if starts is None or starts.joined is not None:
        return {"EARLIER": 0, "PIECES": 1}
    return {"EARLIER": starts.shape[2], "PIECES": starts.pieces}


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
) -> tuple[Tensor, Tensor | None]:
    """Output and, if asked for, the final state; a transposed state is `b h v k`."""
    q, k, v, state = rows_whole(q), rows_whole(k), rows_whole(v), whole(state)
    plan = _walk_plan(
        look(q), look(k), look(v), look(gamma), look_if(state), scale, final, transposed, dtype, out_dtype
    )  # fmt: skip
    out = empty_as(v, out_dtype)
    end = gamma.new_empty(q.shape[0], q.shape[2], q.shape[3], v.shape[3]) if final else None
    before: tuple[Call, ...] = ()
    if plan.starts is not None:
        states = gamma.new_empty(plan.starts.shape)
        before, state = plan.starts.into(states, k, v, gamma, state, end), states
    last = q, k, v, out, out if state is None else state, out if end is None else end, gamma
    run_in_turn(*before, (plan.step, last))
    return out, end


@kept
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
    set_ = settings.sized("WALK", *key(dk, dv, dtype, q[4]))
    length, pieces = _cut(n, b * h, set_, q[4])
    # Without a state they mean nothing, and so are the same: the gradient of q then takes the binary of the output.
    strides = (1, dk) if transposed and state is not None else (dv, 1)
    starts = None
    if length < n:
        starts = _starts(k, v, 1.0, length, pieces, state is not None, final, strides, False, dtype)
        strides = (dv, 1)
    start, end = state is not None or starts is not None, final and starts is None
    series = set_.programs is not None and not start and not end
    at_once = settings.images_at_once(b, h, set_.programs, q[4]) if series else b
    step = prepared(
        sequence.walk, (-(-n // length), at_once * h),
        [*strides_of(q, k, v), contiguous(n, h, dv)], (*strides, n, length, h, b, at_once, scale),
        dk, dv, dtype, set_.schedule, CHUNK=set_.chunk, START=start, END=end, SERIES=series, **_added(starts),
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
    grad, q, k, v, state = rows_whole(grad), rows_whole(q), rows_whole(k), rows_whole(v), whole(grad_state)
    plan = _walk_back_plan(
        look(grad), look(q), look(k), look(v), look(gamma), look_if(state), scale, first, dtype
    )  # fmt: skip
    dk, dv = empty_as(k, k.dtype), empty_as(v, v.dtype)
    end = gamma.new_empty(q.shape[0], q.shape[2], k.shape[3], v.shape[3]) if first else None
    before: tuple[Call, ...] = ()
    if plan.starts is not None:
        states = gamma.new_empty(plan.starts.shape)
        before, state = plan.starts.into(states, q, grad, gamma, state, end), states
    last = q, k, v, grad, dk, dv, dk if state is None else state, dk if end is None else end, gamma
    run_in_turn(*before, (plan.step, last))
    return dk, dv, gamma.new_empty(0) if end is None else end


@kept
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
    set_ = settings.sized("WALK_BACK", *key(dk, dv, dtype, q[4]))
    length, pieces = _cut(n, b * h, set_, q[4])
    starts = None
    if length < n:
        starts = _starts(q, grad, scale, length, pieces, state is not None, first, (dv, 1), True, dtype)
    made = contiguous(n, h, dk), contiguous(n, h, dv)
    step = prepared(
        sequence.walk_back, (-(-n // length), b * h),
        [*strides_of(q, k, v, grad), *made], (n, length, h, scale),
        dk, dv, dtype, set_.schedule,
        CHUNK=set_.chunk, START=state is not None or starts is not None, END=first and starts is None, **_added(starts),
    )  # fmt: skip
    return Walk(starts, step)
