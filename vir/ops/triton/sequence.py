"""1D retention: one walk over the sequence, chunk by chunk, with the state in registers.

A walk reads q, k, v once and writes the output once. Where batch and heads give too few walks to fill the GPU, the
sequence is cut into segments: `lines.py` makes the state at the start of each, and every segment is walked on its own.
Where they give more than run at once, a program walks the same head of several images, one after another: it begins
with the next while it ends the last, and makes its mask once.
"""

import triton
import triton.language as tl

from vir.ops.triton.pieces import (
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


@triton.jit
def onward(last, of_image, of_token, at_once, chunks, CHUNK: tl.constexpr, SERIES: tl.constexpr):
    """From a chunk to the next, or from an image's last to the first of the next image of a program."""
    if SERIES:
        back = tl.cast(chunks - 1, tl.int64) * CHUNK * of_token
        return tl.where(last, tl.cast(at_once, tl.int64) * of_image - back, CHUNK * of_token)
    return tl.cast(CHUNK * of_token, tl.int64)


@triton.jit
def added_up(
    made_ptr, lg, line, segment, length, dk, dv,
    DK: tl.constexpr, DV: tl.constexpr, EARLIER: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """The state in which a segment begins: the sum of what those before it make, PIECES each; there are EARLIER before
    the last segment."""
    state = tl.zeros([dk.shape[0], dv.shape[0]], tl.float32)
    before = segment * PIECES
    places = made_ptr + (tl.cast(line, tl.int64) * EARLIER + before) * DK * DV + state_offsets(dk, dv, DV, 1)
    for back in tl.static_range(1, EARLIER + 1):
        ok = (dk < tl.where(back <= before, DK, 0))[:, None] & (dv < DV)[None, :]
        state += tl.load(places - back * DK * DV, mask=ok, other=0.0) * power(lg, (back - 1) // PIECES * length)
    return state


@triton.jit
def walk(
    q_ptr, k_ptr, v_ptr, out_ptr, start_ptr, end_ptr, gamma_ptr,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, out_b, out_n, out_h, start_k, start_v,
    tokens, length, heads, batches, at_once, scale,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
    START: tl.constexpr, EARLIER: tl.constexpr, PIECES: tl.constexpr, END: tl.constexpr, SERIES: tl.constexpr,
    ALIGN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out_i = scale * sum over j <= i of gamma^(i - j) (q_i . k_j) v_j, from the state at the segment's start.

    The state is that of the token before a chunk: sum of gamma^(steps to that token) k_j^T v_j.
    """
    segment, line = tl.program_id(0), tl.program_id(1)
    batch, head = tl.cast(line // heads, tl.int64), line % heads
    lg = log2_decay(gamma_ptr, head)
    i, dk, dv = tl.arange(0, CHUNK), tl.arange(0, BK), tl.arange(0, BV)
    first = tl.cast(segment, tl.int64) * length
    count = tl.minimum(length, tokens - segment * length)
    q_ptr += first_of(batch, head, q_b, q_h, ALIGN) + first * q_n
    k_ptr += first_of(batch, head, k_b, k_h, ALIGN) + first * k_n
    v_ptr += first_of(batch, head, v_b, v_h, ALIGN) + first * v_n
    out_ptr += first_of(batch, head, out_b, out_h, ALIGN) + first * out_n
    states = (tl.cast(line, tl.int64) * tl.num_programs(0) + segment) * DK * DV

    steps = i[:, None] - i[None, :]
    mask = tl.where(steps >= 0, power(lg, tl.maximum(steps, 0)), 0.0) * scale
    xi = power(lg, i + 1) * scale
    zeta, fade = power(lg, CHUNK - 1 - i), tl.exp2(lg * CHUNK)
    state = tl.zeros([BK, BV], tl.float32)
    if EARLIER > 0:
        state = added_up(start_ptr, lg, line, segment, length, dk, dv, DK, DV, EARLIER, PIECES)
    elif START:
        offsets = state_offsets(dk, dv, start_k, start_v)
        state = tl.load(start_ptr + states + offsets, mask=state_mask(dk, dv, DK, DV), other=0.0)
    chunks, left = tl.cdiv(count, CHUNK), count
    images = tl.cdiv(batches - line // heads, at_once)
    for _ in range(0, chunks * images):
        ok = i < left
        q = load_rows(q_ptr, i * q_n, ok, dk, DK, OPERAND)
        k = load_rows(k_ptr, i * k_n, ok, dk, DK, OPERAND)
        v = load_rows(v_ptr, i * v_n, ok, dv, DV, OPERAND)
        scores = product(q, tl.trans(k), PRECISION) * mask
        out = product(q, operand(state, OPERAND, PRECISION), PRECISION) * xi[:, None]
        out += product(operand(scores, OPERAND, PRECISION), v, PRECISION)
        store_rows(out_ptr, i * out_n, ok, dv, DV, out)
        if END:  # only the final state is read after a chunk that may be short
            size = tl.minimum(CHUNK, left)
            zeta, fade = power(lg, tl.maximum(size - 1 - i, 0)), power(lg, size)
        state = state * fade + product(tl.trans(k), scaled(v, zeta, OPERAND, PRECISION), PRECISION)
        left -= CHUNK
        last = left <= 0
        if SERIES:  # on to an image of which nothing was seen
            left = tl.where(last, count, left)
            state = tl.where(last, 0.0, state)
        q_ptr += onward(last, q_b, q_n, at_once, chunks, CHUNK, SERIES)
        k_ptr += onward(last, k_b, k_n, at_once, chunks, CHUNK, SERIES)
        v_ptr += onward(last, v_b, v_n, at_once, chunks, CHUNK, SERIES)
        out_ptr += onward(last, out_b, out_n, at_once, chunks, CHUNK, SERIES)
    if END:
        tl.store(end_ptr + states + state_offsets(dk, dv, DV, 1), state, mask=state_mask(dk, dv, DK, DV))


@triton.jit
def walk_back(
    q_ptr, k_ptr, v_ptr, grad_ptr, dk_ptr, dv_ptr, start_ptr, end_ptr, gamma_ptr,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, grad_b, grad_n, grad_h, dk_b, dk_n, dk_h, dv_b, dv_n, dv_h,
    tokens, length, heads, scale,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CHUNK: tl.constexpr,
    START: tl.constexpr, EARLIER: tl.constexpr, PIECES: tl.constexpr, END: tl.constexpr,
    ALIGN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of k and v, from the last token to the first; `grad` is that of the output.

    dk_j = scale * sum over i >= j of gamma^(i - j) (v_j . grad_i) q_i, and dv_j likewise with (k_j . q_i) grad_i.
    Both see one state, that of the last token of a chunk: sum of scale gamma^(steps) q_i^T grad_i over what comes
    after the chunk, and the gradient of the final state. What is left of it at the front is that of the first state.
    """
    segment, line = tl.program_id(0), tl.program_id(1)  # segments counted from the end
    batch, head = tl.cast(line // heads, tl.int64), line % heads
    lg = log2_decay(gamma_ptr, head)
    i, dk, dv = tl.arange(0, CHUNK), tl.arange(0, BK), tl.arange(0, BV)
    last = tl.cast(tokens - 1, tl.int64) - tl.cast(segment, tl.int64) * length
    count = tl.minimum(length, tokens - segment * length)
    q_ptr += first_of(batch, head, q_b, q_h, ALIGN) + last * q_n
    k_ptr += first_of(batch, head, k_b, k_h, ALIGN) + last * k_n
    v_ptr += first_of(batch, head, v_b, v_h, ALIGN) + last * v_n
    grad_ptr += first_of(batch, head, grad_b, grad_h, ALIGN) + last * grad_n
    dk_ptr += first_of(batch, head, dk_b, dk_h, ALIGN) + last * dk_n
    dv_ptr += first_of(batch, head, dv_b, dv_h, ALIGN) + last * dv_n
    states = (tl.cast(line, tl.int64) * tl.num_programs(0) + segment) * DK * DV

    steps = i[:, None] - i[None, :]  # i counts from the end as well
    mask = tl.where(steps >= 0, power(lg, steps), 0.0) * scale
    xi = power(lg, i)
    state = tl.zeros([BK, BV], tl.float32)
    if EARLIER > 0:
        state = added_up(start_ptr, lg, line, segment, length, dk, dv, DK, DV, EARLIER, PIECES)
    elif START:
        offsets = state_offsets(dk, dv, DV, 1)
        state = tl.load(start_ptr + states + offsets, mask=state_mask(dk, dv, DK, DV), other=0.0)
    for done in range(0, count, CHUNK):
        ok = i < count - done
        q = load_rows(q_ptr, -i * q_n, ok, dk, DK, OPERAND)
        k = load_rows(k_ptr, -i * k_n, ok, dk, DK, OPERAND)
        v = load_rows(v_ptr, -i * v_n, ok, dv, DV, OPERAND)
        grad = load_rows(grad_ptr, -i * grad_n, ok, dv, DV, OPERAND)
        seen = operand(state, OPERAND, PRECISION)
        grad_k = product(v, tl.trans(seen), PRECISION) * xi[:, None]
        scores = product(v, tl.trans(grad), PRECISION) * mask
        grad_k += product(operand(scores, OPERAND, PRECISION), q, PRECISION)
        store_rows(dk_ptr, -i * dk_n, ok, dk, DK, grad_k)
        grad_v = product(k, seen, PRECISION) * xi[:, None]
        scores = product(k, tl.trans(q), PRECISION) * mask
        grad_v += product(operand(scores, OPERAND, PRECISION), grad, PRECISION)
        store_rows(dv_ptr, -i * dv_n, ok, dv, DV, grad_v)
        size = tl.minimum(CHUNK, count - done)  # computed anew, because registers are scarce here
        zeta, fade = power(lg, tl.maximum(size - i, 0)) * scale, power(lg, size)
        state = state * fade + product(tl.trans(scaled(q, zeta, OPERAND, PRECISION)), grad, PRECISION)
        q_ptr -= CHUNK * q_n
        k_ptr -= CHUNK * k_n
        v_ptr -= CHUNK * v_n
        grad_ptr -= CHUNK * grad_n
        dk_ptr -= CHUNK * dk_n
        dv_ptr -= CHUNK * dv_n
    if END:
        tl.store(end_ptr + states + state_offsets(dk, dv, DV, 1), state, mask=state_mask(dk, dv, DK, DV))
