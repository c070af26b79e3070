"""2D retention on tiles of patches: a program for each tile of queries, and one for the class token.

What a tile sees is the sum of its own patches, of those above it in the same tile column, of those left of it in the
same tile row (all by masked products with blocks of KEYS patches), and of everything above and left of both: one state
at its corner. The corner is a sum over tile rows; `tile_row_states` makes each row's part of all corners first. A grid
no wider than a tile has no left (not WIDE), one of a single row or column of tiles has no CORNERS.

BACK turns the grid by half a turn: each patch then sees what is right of and below it, as the gradients of k and v do.
The class token sees all patches from one row under the last; turned, it is seen by all of them.
"""

import triton
import triton.language as tl

from vir.ops.triton.pieces import (
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
def grid(
    q_ptr, k_ptr, v_ptr, out_ptr, state_ptr, gamma_ptr,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, out_b, out_n, out_h,
    rows, cols, heads, scale,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, KEYS: tl.constexpr,
    WIDE: tl.constexpr, CORNERS: tl.constexpr, CLASS: tl.constexpr, BACK: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(1)
    batch, head = tl.cast(bh // heads, tl.int64), bh % heads
    lg = log2_decay(gamma_ptr, head)
    q_ptr += batch * q_b + head * q_h
    k_ptr += batch * k_b + head * k_h
    v_ptr += batch * v_b + head * v_h
    out_ptr += batch * out_b + head * out_h
    tiles_x, tiles_y = tl.cdiv(cols, COLS), tl.cdiv(rows, ROWS)
    state_ptr += tl.cast(bh, tl.int64) * (tiles_x - 1) * (tiles_y - 1) * DK * DV
    program = tl.program_id(0)
    if CLASS:
        program -= 1
    if CLASS and program < 0:
        class_token(
            q_ptr, k_ptr, v_ptr, out_ptr, state_ptr, lg, q_n, k_n, v_n, out_n, rows, cols, scale,
            DK, DV, BK, BV, ROWS, COLS, CORNERS, BACK,
        )  # fmt: skip
    else:  # the longest loops, at the bottom, begin first
        tile(
            q_ptr, k_ptr, v_ptr, out_ptr, state_ptr, lg, q_n, k_n, v_n, out_n, rows, cols, scale,
            tiles_y - 1 - program // tiles_x, program % tiles_x, tiles_x,
            DK, DV, BK, BV, ROWS, COLS, KEYS, WIDE, CORNERS, CLASS, BACK, OPERAND, PRECISION,
        )  # fmt: skip


@triton.jit
def tile(
    q_ptr, k_ptr, v_ptr, out_ptr, state_ptr, lg, q_n, k_n, v_n, out_n, rows, cols, scale,
    tile_y, tile_x, tiles_x,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, KEYS: tl.constexpr,
    WIDE: tl.constexpr, CORNERS: tl.constexpr, CLASS: tl.constexpr, BACK: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = ROWS * COLS // KEYS  # of keys, in a tile
    dk, dv = tl.arange(0, BK), tl.arange(0, BV)
    i, j = tl.arange(0, ROWS * COLS), tl.arange(0, KEYS)
    x, y = i % COLS, i // COLS
    turn = -1 if BACK else 1
    zero = tl.cast(rows, tl.int64) * 0
    origin = zero + tl.cast(rows, tl.int64) * cols - 1 if BACK else zero
    ok = (tile_x * COLS + x < cols) & (tile_y * ROWS + y < rows)
    here = origin + turn * (tl.cast(tile_y, tl.int64) * ROWS * cols + tile_x * COLS)
    q = load_rows(q_ptr + here * q_n, turn * (y * cols + x) * q_n, ok, dk, DK, OPERAND)

    # Blocks of whole rows of the tile column: the tile's own, then those above.
    HEIGHT: tl.constexpr = KEYS // COLS
    f, g = j % COLS, j // COLS
    inside = turn * (g * cols + f)
    across = x[:, None] - f[None, :]
    down = y[:, None] - g[None, :]
    ok_x = tile_x * COLS + f < cols
    out = tl.zeros([ROWS * COLS, BV], tl.float32)
    for block in tl.static_range(0, BLOCKS):
        there = here + turn * block * HEIGHT * cols
        ok_k = ok_x & (tile_y * ROWS + block * HEIGHT + g < rows)
        k = load_rows(k_ptr + there * k_n, inside * k_n, ok_k, dk, DK, OPERAND)
        v = load_rows(v_ptr + there * v_n, inside * v_n, ok_k, dv, DV, OPERAND)
        steps = across + down - block * HEIGHT
        seen = (across >= 0) & (down >= block * HEIGHT)
        own = tl.where(seen, power(lg, tl.maximum(steps, 0)), 0.0) * scale
        scores = product(q, tl.trans(k), PRECISION) * own
        out += product(operand(scores, OPERAND, PRECISION), v, PRECISION)
    # Exponents are kept from being negative: the block's distance is short by what is added here.
    mask = tl.where(across >= 0, power(lg, tl.maximum(across + down + HEIGHT - 1, 0)), 0.0) * scale
    there = origin + turn * tl.cast(tile_x, tl.int64) * COLS
    corner = tl.zeros([BK, BV], tl.float32)
    if CORNERS:
        state_ptr += tl.cast(tile_x - 1, tl.int64) * DK * DV + state_offsets(dk, dv, DV, 1)
        ok_state = (dk < tl.where(tile_x > 0, DK, 0))[:, None] & (dv < DV)[None, :]
    for above in range(0, tile_y):
        for block in tl.static_range(0, BLOCKS):
            k = load_rows(k_ptr + there * k_n, inside * k_n, ok_x, dk, DK, OPERAND)
            v = load_rows(v_ptr + there * v_n, inside * v_n, ok_x, dv, DV, OPERAND)
            fade = power(lg, (tile_y - above) * ROWS - (block + 1) * HEIGHT + 1)
            scores = product(q, tl.trans(k), PRECISION) * (mask * fade)
            out += product(operand(scores, OPERAND, PRECISION), v, PRECISION)
            there += turn * HEIGHT * cols
        if CORNERS:
            row = tl.load(state_ptr, mask=ok_state, other=0.0).to(tl.float32)
            corner = corner * tl.exp2(lg * ROWS) + row
            state_ptr += (tiles_x - 1) * DK * DV
    if CORNERS:
        corner_seen = product(q, operand(corner, OPERAND, PRECISION), PRECISION)
        out += corner_seen * (power(lg, x + y + 2) * scale)[:, None]
    if WIDE:  # blocks of whole columns of the tile row
        WIDTH: tl.constexpr = KEYS // ROWS
        f, g = j % WIDTH, j // WIDTH
        inside = turn * (g * cols + f)
        across = x[:, None] - f[None, :]
        down = y[:, None] - g[None, :]
        ok_y = tile_y * ROWS + g < rows
        mask = tl.where(down >= 0, power(lg, tl.maximum(across + down + WIDTH - 1, 0)), 0.0) * scale
        there = origin + turn * tl.cast(tile_y, tl.int64) * ROWS * cols
        for left in range(0, tile_x * BLOCKS):
            k = load_rows(k_ptr + there * k_n, inside * k_n, ok_y, dk, DK, OPERAND)
            v = load_rows(v_ptr + there * v_n, inside * v_n, ok_y, dv, DV, OPERAND)
            fade = power(lg, tile_x * COLS - (left + 1) * WIDTH + 1)
            scores = product(q, tl.trans(k), PRECISION) * (mask * fade)
            out += product(operand(scores, OPERAND, PRECISION), v, PRECISION)
            there += turn * WIDTH
    if CLASS and BACK:  # the class token is seen from every patch
        last = tl.cast(rows, tl.int64) * cols
        class_k = tl.load(k_ptr + last * k_n + dk, mask=dk < DK, other=0.0).to(tl.float32)
        class_v = tl.load(v_ptr + last * v_n + dv, mask=dv < DV, other=0.0).to(tl.float32)
        score = tl.sum(q.to(tl.float32) * class_k[None, :], 1)
        score *= power(lg, tile_x * COLS + x + tile_y * ROWS + y + 1) * scale
        out += score[:, None] * class_v[None, :]
    store_rows(out_ptr + here * out_n, turn * (y * cols + x) * out_n, ok, dv, DV, out)


@triton.jit
def class_token(
    q_ptr, k_ptr, v_ptr, out_ptr, state_ptr, lg, q_n, k_n, v_n, out_n, rows, cols, scale,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CORNERS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """It sees itself, the last tile column, the last tile row, and the state at the corner that these leave."""
    dk, dv = tl.arange(0, BK), tl.arange(0, BV)
    patches = tl.cast(rows, tl.int64) * cols
    q = tl.load(q_ptr + patches * q_n + dk, mask=dk < DK, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + patches * k_n + dk, mask=dk < DK, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + patches * v_n + dv, mask=dv < DV, other=0.0).to(tl.float32)
    out = tl.sum(q * k, 0) * v
    if not BACK:
        last_x, last_y = tl.cdiv(cols, COLS) - 1, tl.cdiv(rows, ROWS) - 1
        i = tl.arange(0, ROWS * COLS)
        for tile_ in range(0, last_y + last_x + 1):
            x = tl.where(tile_ < last_y, last_x, tile_ - last_y) * COLS + i % COLS
            y = tl.minimum(tile_, last_y) * ROWS + i // COLS
            ok = (x < cols) & (y < rows)
            token = tl.cast(y, tl.int64) * cols + x
            keys = load_rows(k_ptr, token * k_n, ok, dk, DK, tl.float32)
            values = load_rows(v_ptr, token * v_n, ok, dv, DV, tl.float32)
            scores = tl.sum(keys * q[None, :], 1) * power(lg, tl.maximum(cols - 1 - x + rows - y, 0))
            out += tl.sum(scores[:, None] * values, 0)
        if CORNERS:
            state_ptr += tl.cast(last_x - 1, tl.int64) * DK * DV + state_offsets(dk, dv, DV, 1)
            corner = tl.zeros([BK, BV], tl.float32)
            for _ in range(0, last_y):
                row = tl.load(state_ptr, mask=state_mask(dk, dv, DK, DV), other=0.0).to(tl.float32)
                corner = corner * tl.exp2(lg * ROWS) + row
                state_ptr += last_x * DK * DV
            steps = cols - last_x * COLS + rows - last_y * ROWS + 1
            out += tl.sum(q[:, None] * corner, 0) * power(lg, steps)
    tl.store(out_ptr + patches * out_n + dv, (out * scale).to(out_ptr.dtype.element_ty), mask=dv < DV)


@triton.jit
def tile_row_states(
    k_ptr, v_ptr, state_ptr, gamma_ptr,
    k_b, k_n, k_h, v_b, v_n, v_h,
    rows, cols, states_x, heads,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    BACK: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state at the last patch of each tile, of its own tile row. No corner needs the last tiles: all are full."""
    tile_y, bh = tl.program_id(0), tl.program_id(1)
    batch, head = tl.cast(bh // heads, tl.int64), bh % heads
    lg = log2_decay(gamma_ptr, head)
    dk, dv = tl.arange(0, BK), tl.arange(0, BV)
    i = tl.arange(0, ROWS * COLS)
    x, y = i % COLS, i // COLS
    inside = y * cols + x
    turn = -1 if BACK else 1
    if BACK:
        inside = -inside
    origin = tl.cast(rows, tl.int64) * cols - 1 if BACK else tl.cast(rows, tl.int64) * 0
    here = origin + turn * tl.cast(tile_y, tl.int64) * ROWS * cols
    k_ptr += batch * k_b + head * k_h + here * k_n
    v_ptr += batch * v_b + head * v_h + here * v_n
    state_ptr += (tl.cast(bh, tl.int64) * tl.num_programs(0) + tile_y) * states_x * DK * DV
    zeta = power(lg, COLS + ROWS - 2 - x - y)
    state = tl.zeros([BK, BV], tl.float32)
    for _ in range(0, states_x):
        k = load_rows(k_ptr, inside * k_n, i >= 0, dk, DK, OPERAND)
        v = load_rows(v_ptr, inside * v_n, i >= 0, dv, DV, OPERAND)
        made = product(tl.trans(scaled(k, zeta, OPERAND, PRECISION)), v, PRECISION)
        state = state * tl.exp2(lg * COLS) + made
        tl.store(
            state_ptr + state_offsets(dk, dv, DV, 1),
            state.to(state_ptr.dtype.element_ty),
            mask=state_mask(dk, dv, DK, DV),
        )
        k_ptr += turn * COLS * k_n
        v_ptr += turn * COLS * v_n
        state_ptr += DK * DV
