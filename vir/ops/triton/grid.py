"""2D retention on tiles of patches: a program for each tile of queries, and one for the class token.

What a tile sees is the sum of its own patches, of the tiles above it in the same tile column, of those left of it in
the same tile row (all by masked products), and of everything above and left of both: one state at its corner. The
corners of the whole grid are made first, by `tile_row_states` along the rows and `join_tile_rows` down the columns. A
grid no wider than a tile has no left (not WIDE), one of a single row or column of tiles has no CORNERS.

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
    q_ptr, k_ptr, v_ptr, out_ptr, corner_ptr, gamma_ptr,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, out_b, out_n, out_h,
    rows, cols, heads, scale,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
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
    corner_ptr += tl.cast(bh, tl.int64) * (tiles_x - 1) * (tiles_y - 1) * DK * DV
    program = tl.program_id(0)
    if CLASS:
        program -= 1
    if CLASS and program < 0:
        class_token(
            q_ptr, k_ptr, v_ptr, out_ptr, corner_ptr, lg, q_n, k_n, v_n, out_n, rows, cols, scale,
            DK, DV, BK, BV, ROWS, COLS, CORNERS, BACK,
        )  # fmt: skip
    else:  # the longest loops, at the bottom, begin first
        tile(
            q_ptr, k_ptr, v_ptr, out_ptr, corner_ptr, lg, q_n, k_n, v_n, out_n, rows, cols, scale,
            tiles_y - 1 - program // tiles_x, program % tiles_x, tiles_x,
            DK, DV, BK, BV, ROWS, COLS, WIDE, CORNERS, CLASS, BACK, OPERAND, PRECISION,
        )  # fmt: skip


@triton.jit
def tile(
    q_ptr, k_ptr, v_ptr, out_ptr, corner_ptr, lg, q_n, k_n, v_n, out_n, rows, cols, scale,
    tile_y, tile_x, tiles_x,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    WIDE: tl.constexpr, CORNERS: tl.constexpr, CLASS: tl.constexpr, BACK: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    dk, dv = tl.arange(0, BK), tl.arange(0, BV)
    i = tl.arange(0, ROWS * COLS)
    x, y = i % COLS, i // COLS
    inside = y * cols + x  # of the tile, in tokens
    turn = -1 if BACK else 1
    if BACK:
        inside = -inside
    origin = tl.cast(rows, tl.int64) * cols - 1 if BACK else tl.cast(rows, tl.int64) * 0
    q_in, k_in, v_in, out_in = inside * q_n, inside * k_n, inside * v_n, inside * out_n
    ok_x, ok_y = tile_x * COLS + x < cols, tile_y * ROWS + y < rows
    here = origin + turn * (tl.cast(tile_y, tl.int64) * ROWS * cols + tile_x * COLS)
    q = load_rows(q_ptr + here * q_n, q_in, ok_x & ok_y, dk, DK, OPERAND)
    k = load_rows(k_ptr + here * k_n, k_in, ok_x & ok_y, dk, DK, OPERAND)
    v = load_rows(v_ptr + here * v_n, v_in, ok_x & ok_y, dv, DV, OPERAND)
    if CORNERS:  # read early, used late
        at = tl.cast((tile_y - 1) * (tiles_x - 1) + tile_x - 1, tl.int64) * DK * DV
        ok = (dk < tl.where((tile_x > 0) & (tile_y > 0), DK, 0))[:, None] & (dv < DV)[None, :]
        corner = tl.load(corner_ptr + at + state_offsets(dk, dv, DV, 1), mask=ok, other=0.0)
    across, down = x[:, None] - x[None, :], y[:, None] - y[None, :]
    steps = across + down
    own = tl.where((across >= 0) & (down >= 0), power(lg, steps), 0.0) * scale
    scores = product(q, tl.trans(k), PRECISION) * own
    out = product(operand(scores, OPERAND, PRECISION), v, PRECISION)
    if CORNERS:
        corner = operand(corner.to(tl.float32), OPERAND, PRECISION)
        out += product(q, corner, PRECISION) * (power(lg, x + y + 2) * scale)[:, None]
    # Exponents are kept from being negative: the tile's distance is short by what is added here.
    mask = tl.where(across >= 0, power(lg, tl.maximum(steps + ROWS - 1, 0)), 0.0) * scale
    there = origin + turn * tl.cast(tile_x, tl.int64) * COLS
    for above in range(0, tile_y):
        k = load_rows(k_ptr + there * k_n, k_in, ok_x, dk, DK, OPERAND)
        v = load_rows(v_ptr + there * v_n, v_in, ok_x, dv, DV, OPERAND)
        scores = product(q, tl.trans(k), PRECISION) * (mask * power(lg, (tile_y - 1 - above) * ROWS + 1))
        out += product(operand(scores, OPERAND, PRECISION), v, PRECISION)
        there += turn * ROWS * cols
    if WIDE:
        mask = tl.where(down >= 0, power(lg, tl.maximum(steps + COLS - 1, 0)), 0.0) * scale
        there = origin + turn * tl.cast(tile_y, tl.int64) * ROWS * cols
        for left in range(0, tile_x):
            k = load_rows(k_ptr + there * k_n, k_in, ok_y, dk, DK, OPERAND)
            v = load_rows(v_ptr + there * v_n, v_in, ok_y, dv, DV, OPERAND)
            scores = product(q, tl.trans(k), PRECISION) * (mask * power(lg, (tile_x - 1 - left) * COLS + 1))
            out += product(operand(scores, OPERAND, PRECISION), v, PRECISION)
            there += turn * COLS
    if CLASS and BACK:  # the class token is seen from every patch
        last = tl.cast(rows, tl.int64) * cols
        class_k = tl.load(k_ptr + last * k_n + dk, mask=dk < DK, other=0.0).to(tl.float32)
        class_v = tl.load(v_ptr + last * v_n + dv, mask=dv < DV, other=0.0).to(tl.float32)
        score = tl.sum(q.to(tl.float32) * class_k[None, :], 1)
        score *= power(lg, tile_x * COLS + x + tile_y * ROWS + y + 1) * scale
        out += score[:, None] * class_v[None, :]
    store_rows(out_ptr + here * out_n, out_in, ok_x & ok_y, dv, DV, out)


@triton.jit
def narrow_grid(
    q_ptr, k_ptr, v_ptr, out_ptr, gamma_ptr,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, out_b, out_n, out_h,
    batches, rows, cols, heads, images, scale,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CLASS: tl.constexpr, BACK: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A grid no wider than a tile: the same tile of queries in several images of a batch, one after the other.

    One loop runs over the images and, in each, over the tiles of keys down to the queries' own, so that loads run ahead
    of the products across images.
    """
    head = tl.program_id(1) % heads
    first = tl.program_id(1) // heads * images
    walks = tl.minimum(images, batches - first)
    lg = log2_decay(gamma_ptr, head)
    q_ptr += tl.cast(first, tl.int64) * q_b + head * q_h
    k_ptr += tl.cast(first, tl.int64) * k_b + head * k_h
    v_ptr += tl.cast(first, tl.int64) * v_b + head * v_h
    out_ptr += tl.cast(first, tl.int64) * out_b + head * out_h
    program = tl.program_id(0)
    if CLASS:
        program -= 1
    if CLASS and program < 0:
        for _ in range(0, walks):
            class_token(
                q_ptr, k_ptr, v_ptr, out_ptr, out_ptr, lg, q_n, k_n, v_n, out_n, rows, cols, scale,
                DK, DV, BK, BV, ROWS, COLS, False, BACK,
            )  # fmt: skip
            q_ptr += q_b
            k_ptr += k_b
            v_ptr += v_b
            out_ptr += out_b
    else:
        tile_y = tl.cdiv(rows, ROWS) - 1 - program
        dk, dv = tl.arange(0, BK), tl.arange(0, BV)
        i = tl.arange(0, ROWS * COLS)
        x, y = i % COLS, i // COLS
        inside = y * cols + x
        turn = -1 if BACK else 1
        if BACK:
            inside = -inside
        last = tl.cast(rows, tl.int64) * cols
        origin = last - 1 if BACK else last * 0
        here = origin + turn * tile_y * ROWS * cols
        q_ptr += here * q_n
        k_ptr += origin * k_n
        v_ptr += origin * v_n
        out_ptr += here * out_n
        across, down = x[:, None] - x[None, :], y[:, None] - y[None, :]
        steps = across + down
        seen = across >= 0
        from_above = tl.where(seen, power(lg, tl.maximum(steps + ROWS - 1, 0)), 0.0) * scale
        own = tl.where(seen & (down >= 0), power(lg, tl.maximum(steps, 0)), 0.0) * scale
        out = tl.zeros([ROWS * COLS, BV], tl.float32)
        for step in range(0, walks * (tile_y + 1)):
            tile_k = step % (tile_y + 1)
            q = load_rows(q_ptr, inside * q_n, (x < cols) & (tile_y * ROWS + y < rows), dk, DK, OPERAND)
            ok = (x < cols) & (tile_k * ROWS + y < rows)
            k = load_rows(k_ptr, inside * k_n, ok, dk, DK, OPERAND)
            v = load_rows(v_ptr, inside * v_n, ok, dv, DV, OPERAND)
            ends = tile_k == tile_y
            fade = power(lg, tl.maximum((tile_y - 1 - tile_k) * ROWS + 1, 0))
            scores = product(q, tl.trans(k), PRECISION) * tl.where(ends, own, from_above * fade)
            out += product(operand(scores, OPERAND, PRECISION), v, PRECISION)
            image = tl.cast(tl.where(ends, 1, 0), tl.int64)
            if CLASS and BACK:  # the class token is seen from every patch
                class_at = last - origin - turn * tile_k * ROWS * cols
                class_k = tl.load(k_ptr + class_at * k_n + dk, mask=dk < DK, other=0.0).to(tl.float32)
                class_v = tl.load(v_ptr + class_at * v_n + dv, mask=dv < DV, other=0.0).to(tl.float32)
                score = tl.sum(q.to(tl.float32) * class_k[None, :], 1) * power(lg, x + tile_y * ROWS + y + 1)
                out += (score * (scale * image))[:, None] * class_v[None, :]
            written = (x < cols) & (y < tl.where(ends, rows - tile_y * ROWS, 0))
            store_rows(out_ptr, inside * out_n, written, dv, DV, out)
            out = tl.where(ends, 0.0, out)
            down_k = turn * tl.where(ends, -tile_y, 1) * ROWS * cols
            q_ptr += image * q_b
            k_ptr += image * k_b + tl.cast(down_k, tl.int64) * k_n
            v_ptr += image * v_b + tl.cast(down_k, tl.int64) * v_n
            out_ptr += image * out_b


@triton.jit
def class_token(
    q_ptr, k_ptr, v_ptr, out_ptr, corner_ptr, lg, q_n, k_n, v_n, out_n, rows, cols, scale,
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
            at = tl.cast(last_x * last_y - 1, tl.int64) * DK * DV
            ok = state_mask(dk, dv, DK, DV)
            corner = tl.load(corner_ptr + at + state_offsets(dk, dv, DV, 1), mask=ok, other=0.0).to(tl.float32)
            steps = cols - last_x * COLS + rows - last_y * ROWS + 1
            out += tl.sum(q[:, None] * corner, 0) * power(lg, steps)
    tl.store(out_ptr + patches * out_n + dv, (out * scale).to(out_ptr.dtype.element_ty), mask=dv < DV)


@triton.jit
def tile_row_states(
    k_ptr, v_ptr, corner_ptr, gamma_ptr,
    k_b, k_n, k_h, v_b, v_n, v_h,
    rows, cols, corners_x, heads,
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
    corner_ptr += (tl.cast(bh, tl.int64) * tl.num_programs(0) + tile_y) * corners_x * DK * DV
    zeta = power(lg, COLS + ROWS - 2 - x - y)
    state = tl.zeros([BK, BV], tl.float32)
    for _ in range(0, corners_x):
        k = load_rows(k_ptr, inside * k_n, i >= 0, dk, DK, OPERAND)
        v = load_rows(v_ptr, inside * v_n, i >= 0, dv, DV, OPERAND)
        made = product(tl.trans(scaled(k, zeta, OPERAND, PRECISION)), v, PRECISION)
        state = state * tl.exp2(lg * COLS) + made
        tl.store(
            corner_ptr + state_offsets(dk, dv, DV, 1),
            state.to(corner_ptr.dtype.element_ty),
            mask=state_mask(dk, dv, DK, DV),
        )
        k_ptr += turn * COLS * k_n
        v_ptr += turn * COLS * v_n
        corner_ptr += DK * DV


@triton.jit
def join_tile_rows(corner_ptr, gamma_ptr, corners_y, width, heads, ROWS: tl.constexpr, PART: tl.constexpr):
    """In place, from the states of tile rows to those of all that is left of and above a tile's last patch."""
    program, bh = tl.program_id(0), tl.program_id(1)
    fade = tl.exp2(log2_decay(gamma_ptr, bh % heads) * ROWS)
    e = program * PART + tl.arange(0, PART)
    places = corner_ptr + tl.cast(bh, tl.int64) * corners_y * width + e
    state = tl.zeros([PART], tl.float32)
    for _ in range(0, corners_y):
        state = state * fade + tl.load(places, mask=e < width, other=0.0).to(tl.float32)
        tl.store(places, state.to(corner_ptr.dtype.element_ty), mask=e < width)
        places += width


@triton.jit
def all_corners(
    k_ptr, v_ptr, corner_ptr, last_row_ptr, gamma_ptr,
    k_b, k_n, k_h, v_b, v_n, v_h,
    rows, cols, corners_y, corners_x, heads,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    BACK: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Both steps in one, for a part of the state's columns: tile after tile, with the tile row above kept in float32.

    For grids of few tiles and many heads. The row above is read a tile row, at least two tiles, after it was written:
    the threads of a program have met in between, at the wait for the loads of k and v.
    """
    part, bh = tl.program_id(0), tl.program_id(1)
    batch, head = tl.cast(bh // heads, tl.int64), bh % heads
    lg = log2_decay(gamma_ptr, head)
    dk, dv = tl.arange(0, BK), part * BV + tl.arange(0, BV)
    i = tl.arange(0, ROWS * COLS)
    x, y = i % COLS, i // COLS
    inside = y * cols + x
    turn = -1 if BACK else 1
    if BACK:
        inside = -inside
    origin = tl.cast(rows, tl.int64) * cols - 1 if BACK else tl.cast(rows, tl.int64) * 0
    k_ptr += batch * k_b + head * k_h + origin * k_n
    v_ptr += batch * v_b + head * v_h + origin * v_n
    corner_ptr += tl.cast(bh, tl.int64) * corners_y * corners_x * DK * DV
    last_row_ptr += tl.cast(bh, tl.int64) * corners_x * DK * DV
    places = state_offsets(dk, dv, DV, 1)
    ok = state_mask(dk, dv, DK, DV)
    ok_v = (i >= 0)[:, None] & (dv < DV)[None, :]
    zeta = power(lg, COLS + ROWS - 2 - x - y)
    state = tl.zeros([BK, BV], tl.float32)
    for tile_ in range(0, corners_y * corners_x):
        tile_y, tile_x = tile_ // corners_x, tile_ % corners_x
        there = turn * (tl.cast(tile_y, tl.int64) * ROWS * cols + tile_x * COLS)
        k = load_rows(k_ptr + there * k_n, inside * k_n, i >= 0, dk, DK, OPERAND)
        v = tl.load(v_ptr + there * v_n + (inside * v_n)[:, None] + dv[None, :], mask=ok_v, other=0.0).to(OPERAND)
        made = product(tl.trans(scaled(k, zeta, OPERAND, PRECISION)), v, PRECISION)
        state = state * tl.where(tile_x > 0, tl.exp2(lg * COLS), 0.0) + made
        kept = last_row_ptr + tl.cast(tile_x, tl.int64) * DK * DV + places
        ok_above = (dk < tl.where(tile_y > 0, DK, 0))[:, None] & (dv < DV)[None, :]
        above = tl.load(kept, mask=ok_above, other=0.0)
        seen = state + above * tl.exp2(lg * ROWS)
        tl.store(kept, seen, mask=ok)
        tl.store(
            corner_ptr + tl.cast(tile_, tl.int64) * DK * DV + places, seen.to(corner_ptr.dtype.element_ty), mask=ok
        )
