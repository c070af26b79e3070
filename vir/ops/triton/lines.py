"""States of lines of tokens: the segments of a sequence, or the columns of a grid.

A line is `length` tokens, `cols` apart, of a grid of rows and columns; a sequence is a grid of one column. The walk
from the last row to the first, which the backward pass takes, counts rows from the end.
"""

import triton
import triton.language as tl

from vir.ops.triton.pieces import (
    fading,
    first_of,
    load_rows,
    log2_decay,
    operand,
    power,
    product,
    scaled,
    state_mask,
    state_offsets,
    store_rows,
)

FADED = tl.constexpr(16)  # bits below the last of a number that goes into a product


@triton.jit
def line_states(
    k_ptr, v_ptr, state_ptr, gamma_ptr,
    k_b, k_n, k_h, v_b, v_n, v_h,
    rows, cols, length, lines, pieces, heads, scale,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
    BACK: tl.constexpr, ALIGN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scale * sum over the line of gamma^(steps to its last token) k_j^T v_j; one step more on the way back.

    Of a line that is made in pieces, counted from its end, each has a program and gives its part of the sum.
    """
    # From the last to the first: the walk that follows begins with what is still in the cache.
    line, bh = tl.num_programs(0) - 1 - tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    batch, head = tl.cast(bh // heads, tl.int64), bh % heads
    lg = log2_decay(gamma_ptr, head)
    i, dk, dv = tl.arange(0, CHUNK), tl.arange(0, BK), tl.arange(0, BV)
    piece, of = line % pieces, line // pieces
    first_row = of // cols * length
    count = tl.minimum(length, rows - first_row)
    row, step = first_row, cols
    if BACK:
        row, step = rows - 1 - first_row, -cols
    token = tl.cast(row, tl.int64) * cols + of % cols
    k_ptr += first_of(batch, head, k_b, k_h, ALIGN) + token * k_n
    v_ptr += first_of(batch, head, v_b, v_h, ALIGN) + token * v_n
    # Tokens so far from the end that nothing of them is left are not read: pieces share the others.
    bits = FADED.value + (8 if tl.bfloat16 == OPERAND else 24)
    seen = (bits / tl.maximum(-lg, 1e-6)).to(tl.int32) + CHUNK
    chunks = tl.cdiv(tl.minimum(count, seen), CHUNK)
    each = tl.cdiv(chunks, pieces)
    chunks = tl.minimum(tl.maximum(chunks - piece * each, 0), each)
    after = piece * each * CHUNK  # tokens between the piece and the end
    done = count - after - chunks * CHUNK  # the last chunk ends with the line, the first may begin before it
    k_ptr += tl.cast(done, tl.int64) * step * k_n
    v_ptr += tl.cast(done, tl.int64) * step * v_n
    zeta, fade = power(lg, CHUNK - 1 - i + (1 if BACK else 0)) * scale, tl.exp2(lg * CHUNK)
    state = tl.zeros([BK, BV], tl.float32)
    for _ in range(0, chunks):
        ok = i >= -done
        k = load_rows(k_ptr, tl.cast(i * step, tl.int64) * k_n, ok, dk, DK, OPERAND)
        v = load_rows(v_ptr, tl.cast(i * step, tl.int64) * v_n, ok, dv, DV, OPERAND)
        state = state * fade + product(tl.trans(k), scaled(v, zeta, OPERAND, PRECISION), PRECISION)
        done += CHUNK
        k_ptr += tl.cast(CHUNK * step, tl.int64) * k_n
        v_ptr += tl.cast(CHUNK * step, tl.int64) * v_n
    state_ptr += (tl.cast(bh, tl.int64) * lines + line) * DK * DV
    state *= power(lg, after)
    tl.store(state_ptr + state_offsets(dk, dv, DV, 1), state, mask=state_mask(dk, dv, DK, DV))


@triton.jit
def apply_states(
    q_ptr, state_ptr, other_ptr, out_ptr, gamma_ptr,
    q_b, q_n, q_h, out_b, out_n, out_h, state_line, state_k, state_v,
    rows, cols, heads, scale,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
    OTHER: tl.constexpr, BACK: tl.constexpr, ALIGN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out_i = scale * gamma^(steps from the state to i) q_i . state, a state for each column, and what else i saw."""
    col, bh = tl.program_id(0), tl.program_id(1)
    batch, head = tl.cast(bh // heads, tl.int64), bh % heads
    lg = log2_decay(gamma_ptr, head)
    i, dk, dv = tl.arange(0, CHUNK), tl.arange(0, BK), tl.arange(0, BV)
    q_ptr += first_of(batch, head, q_b, q_h, ALIGN) + tl.cast(col, tl.int64) * q_n
    out_ptr += first_of(batch, head, out_b, out_h, ALIGN) + tl.cast(col, tl.int64) * out_n
    other_ptr += first_of(batch, head, out_b, out_h, ALIGN) + tl.cast(col, tl.int64) * out_n
    state_ptr += (tl.cast(bh, tl.int64) * tl.num_programs(0) + col) * state_line
    ok = state_mask(dk, dv, DK, DV)
    state = tl.load(state_ptr + state_offsets(dk, dv, state_k, state_v), mask=ok, other=0.0)
    state = operand(state, OPERAND, PRECISION)
    for done in range(0, rows, CHUNK):
        row = done + i
        q = load_rows(q_ptr, tl.cast(i * cols, tl.int64) * q_n, row < rows, dk, DK, OPERAND)
        steps = (rows - 1 - row) if BACK else row + 1
        out = product(q, state, PRECISION) * (power(lg, tl.maximum(steps, 0)) * scale)[:, None]
        if OTHER:
            out += load_rows(other_ptr, tl.cast(i * cols, tl.int64) * out_n, row < rows, dv, DV, tl.float32)
            other_ptr += tl.cast(CHUNK * cols, tl.int64) * out_n
        store_rows(out_ptr, tl.cast(i * cols, tl.int64) * out_n, row < rows, dv, DV, out)
        q_ptr += tl.cast(CHUNK * cols, tl.int64) * q_n
        out_ptr += tl.cast(CHUNK * cols, tl.int64) * out_n


@triton.jit
def join_segments(
    state_ptr, start_ptr, end_ptr, gamma_ptr, start_k, start_v,
    segments, tokens, length, heads,
    DK: tl.constexpr, DV: tl.constexpr, SOME: tl.constexpr, PART: tl.constexpr,
    START: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    """In place, from the state that each segment makes to the state in which it begins; and the final one.

    A part of the state per program, some segments at a time: the sum over earlier ones among them is a small product
    with their decays. The state from outside stands before the first.
    """
    part, bh = tl.program_id(0), tl.program_id(1)
    lg = log2_decay(gamma_ptr, bh % heads)
    s, e = tl.arange(0, SOME), part * PART + tl.arange(0, PART)
    known = segments - (0 if END else 1)  # no segment follows the last
    places = state_ptr + (tl.cast(bh, tl.int64) * segments * DK * DV + s[:, None] * (DK * DV) + e[None, :])
    weights = fading(lg, (s[:, None] - 1 - s[None, :]) * length)
    state, final = tl.zeros([PART], tl.float32), tl.zeros([PART], tl.float32)
    if START:
        offsets = tl.cast(bh, tl.int64) * DK * DV + e // DV * start_k + e % DV * start_v
        state = tl.load(start_ptr + offsets, mask=e < DK * DV, other=0.0)
        final = power(lg, tokens) * state
    for first in range(0, segments, SOME):
        made = tl.load(places, mask=(first + s < known)[:, None] & (e < DK * DV)[None, :], other=0.0)
        begun = tl.dot(weights, made, input_precision="ieee") + power(lg, s * length)[:, None] * state[None, :]
        tl.store(places, begun, mask=(first + s < segments)[:, None] & (e < DK * DV)[None, :])
        if END:
            after = tl.maximum(tokens - (first + s + 1) * length, 0)
            final += tl.sum(made * power(lg, after)[:, None], 0)
        state = power(lg, SOME * length) * state + tl.sum(made * power(lg, (SOME - 1 - s) * length)[:, None], 0)
        places += SOME * DK * DV
    if END:
        tl.store(end_ptr + tl.cast(bh, tl.int64) * DK * DV + e, final, mask=e < DK * DV)


@triton.jit
def join_columns(
    made_ptr, above_ptr, end_ptr, gamma_ptr, cols, rows, heads,
    SIZE: tl.constexpr, SOME: tl.constexpr, PART: tl.constexpr, ABOVE: tl.constexpr,
):  # fmt: skip
    """From the state that each column makes of its own rows to that of all columns up to it, and of what lies above.

    As segments are joined, but that a column sees itself; what lies above has its columns joined already.
    """
    part, bh = tl.program_id(0), tl.program_id(1)
    lg = log2_decay(gamma_ptr, bh % heads)
    s, e = tl.arange(0, SOME), part * PART + tl.arange(0, PART)
    places = tl.cast(bh, tl.int64) * cols * SIZE + s[:, None] * SIZE + e[None, :]
    weights = fading(lg, s[:, None] - s[None, :])
    state = tl.zeros([PART], tl.float32)
    for first in range(0, cols, SOME):
        ok = (first + s < cols)[:, None] & (e < SIZE)[None, :]
        made = tl.load(made_ptr + places, mask=ok, other=0.0)
        end = tl.dot(weights, made, input_precision="ieee") + power(lg, s + 1)[:, None] * state[None, :]
        state = power(lg, SOME) * state + tl.sum(made * power(lg, SOME - 1 - s)[:, None], 0)
        if ABOVE:
            end += power(lg, rows) * tl.load(above_ptr + places, mask=ok, other=0.0)
        tl.store(end_ptr + places, end, mask=ok)
        places += SOME * SIZE
