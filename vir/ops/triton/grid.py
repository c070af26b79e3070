"""2D retention on tiles of patches: a program for each tile of queries, and one for the class token.

What a tile sees is the sum of its own patches, of those above it in the same tile column, of those left of it in the
same tile row (all by weighted products with blocks of HEIGHT rows, as wide as a tile), and of everything above and left
of both: one state at its corner. `row_states` makes each tile row's part of all corners; a tile adds up those of
CORNERS rows, or takes one where `join_rows` has added them. One row or column of tiles has none.

BACK turns the grid by half a turn: each patch then sees what is right of and below it, as the gradients of k and v do.
The class token sees all patches from one row under the last; turned, it is seen by all of them.

BOXES are loads by the hardware's own copies, a block of patches at once: they leave zeros where the grid ends, and need
no addresses of programs. A box is as wide as a block of channels, so that those of k and v reach into other heads: q is
zero there, which takes that out of k, and no such channel of v is stored. (Only numbers: an infinity in k makes NaN of
the head beside it as well.)
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
    within,
)


@triton.jit
def grid(
    q_ptr, k_ptr, v_ptr, out_ptr, corner_ptr, made_ptr, gamma_ptr, q_box, k_box, v_box,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, out_b, out_n, out_h,
    rows, cols, heads, lines, ahead, scale,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, HEIGHT: tl.constexpr,
    WIDE: tl.constexpr, EVEN: tl.constexpr, CORNERS: tl.constexpr, JOINED: tl.constexpr, CLASS: tl.constexpr,
    BACK: tl.constexpr, BOXES: tl.constexpr, ALIGN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The programs of a line, which is a head of an image, in their order: one for each tile row whose states are seen,
    one for each tile column whose states are joined, one for the class token, one for each tile, from the bottom up.

    Joins come some lines after the states, and tiles after these, and wait until those of their line are done: a GPU
    begins programs in their order, so that none waits for one that has not begun. States are bound by memory and tiles
    by the cache: side by side they take less time than one after the other.
    """
    tiles_x, tiles_y = tl.cdiv(cols, COLS), tl.cdiv(rows, ROWS)
    made = tiles_y - 1 if CORNERS > 0 else 0
    joins = tiles_x - 1 if JOINED else 0
    of_line = made + joins + tiles_x * tiles_y + (1 if CLASS else 0)
    line, program = tl.program_id(0) // of_line, tl.program_id(0) % of_line
    if CORNERS > 0 and program < made:
        if line < lines:
            row_states(
                k_ptr, v_ptr, corner_ptr, gamma_ptr, k_box, v_box, k_b, k_n, k_h, v_b, v_n, v_h,
                rows, cols, tiles_x - 1, tiles_y - 1, heads, line, program,
                DK, DV, BK, BV, ROWS, COLS, BACK, BOXES, ALIGN, OPERAND, PRECISION,
            )  # fmt: skip
            done(made_ptr + line)
    elif JOINED and program < made + joins:
        line -= ahead
        if (line >= 0) & (line < lines):
            wait_for(made_ptr + line, made)
            join_rows(
                corner_ptr, gamma_ptr, tiles_x - 1, tiles_y - 1, heads, line, program - made, DK, DV, BK, BV, ROWS
            )
            done(made_ptr + line)
    else:
        line -= ahead * ((1 if JOINED else 0) + (1 if CORNERS > 0 else 0))
        if line >= 0:
            batch, head = tl.cast(line // heads, tl.int64), line % heads
            q_ptr += first_of(batch, head, q_b, q_h, ALIGN)
            k_ptr += first_of(batch, head, k_b, k_h, ALIGN)
            v_ptr += first_of(batch, head, v_b, v_h, ALIGN)
            out_ptr += first_of(batch, head, out_b, out_h, ALIGN)
            corner_ptr += tl.cast(line, tl.int64) * (tiles_x - 1) * (tiles_y - 1) * DK * DV
            program -= made + joins + (1 if CLASS else 0)
            if CLASS and program < 0:
                class_token(
                    q_ptr, k_ptr, v_ptr, out_ptr, corner_ptr, made_ptr + line, made + joins, gamma_ptr, head,
                    q_n, k_n, v_n, out_n, rows, cols, scale, DK, DV, BK, BV, ROWS, COLS, CORNERS, BACK,
                )  # fmt: skip
            else:  # the longest loops, at the bottom, begin first
                tile(
                    q_ptr, k_ptr, v_ptr, out_ptr, corner_ptr, made_ptr + line, made + joins, gamma_ptr,
                    q_box, k_box, v_box, line // heads, head, q_n, k_n, v_n, out_n, rows, cols, scale,
                    tiles_y - 1 - program // tiles_x, program % tiles_x, tiles_x,
                    DK, DV, BK, BV, ROWS, COLS, HEIGHT, WIDE, EVEN, CORNERS, CLASS, BACK, BOXES, OPERAND, PRECISION,
                )  # fmt: skip


@triton.jit
def done(made_ptr):
    """One program of a line has stored its states."""
    tl.debug_barrier()  # all of its threads have
    tl.atomic_add(made_ptr, 1, sem="release")


@triton.jit
def wait_for(made_ptr, programs):
    """Until so many programs of a line have stored their states."""
    while tl.atomic_add(made_ptr, 0, sem="acquire") < programs:
        pass


@triton.jit
def corner(
    corner_ptr, lg, tile_x, tile_y, tiles_x, dk, dv,
    DK: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, CORNERS: tl.constexpr,
):  # fmt: skip
    """The state at a tile's corner: the sum over so many tile rows above it, or the nearest, as stored, if they are
    joined."""
    places = corner_ptr + tl.cast(tile_x - 1, tl.int64) * DK * DV + state_offsets(dk, dv, DV, 1)
    of_row = tl.cast(tiles_x - 1, tl.int64) * DK * DV
    state = tl.load(places + (tile_y - 1) * of_row, mask=state_mask(dk, dv, DK, DV), other=0.0)
    for above in tl.static_range(1, CORNERS):
        row = tile_y - 1 - above
        ok = (dk >= 0) & (dk < tl.where(row >= 0, DK, 0))
        ok = ok[:, None] & within(dv, DV)[None, :]
        part = tl.load(places + row * of_row, mask=ok, other=0.0).to(tl.float32)
        state = state.to(tl.float32) + part * power(lg, above * ROWS)
    return state


@triton.jit
def known(x, y, rows, cols, EVEN: tl.constexpr):
    """Which places of a tile are in the grid: all, if EVEN tiles fill it."""
    if EVEN:
        return x >= 0
    return (x < cols) & (y < rows)


@triton.jit
def patches_in(ROWS: tl.constexpr, COLS: tl.constexpr, BACK: tl.constexpr):
    """Column and row of each patch of a block, which has them as they lie in memory."""
    i = tl.arange(0, ROWS * COLS)
    x, y = i % COLS, i // COLS
    if BACK:
        x, y = COLS - 1 - x, ROWS - 1 - y
    return x, y


@triton.jit
def first_channel(head, D: tl.constexpr):
    """Of a head's box, from the first of its own: boxes that begin at multiples of 32 bytes load faster."""
    return -(head % 2) * 8 if D % 16 == 8 else 0


@triton.jit
def channels_in(head, D: tl.constexpr, B: tl.constexpr, BOXES: tl.constexpr):
    """Which channels a block has, from the first of its head."""
    channels = tl.arange(0, B)
    return channels + first_channel(head, D) if BOXES else channels


@triton.jit
def load_box(
    box, batch, head, y, x, rows, cols,
    ROWS: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
    OWN: tl.constexpr, BACK: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """The block that begins at row y and column x, zero where there is no patch; `patches_in` has its order,
    `channels_in` its channels. Those of other heads are zero in a box of its OWN head."""
    if BACK:
        y, x = rows - ROWS - y, cols - COLS - x
    channel = first_channel(head, D)
    block = box.load([batch, y, x, head, channel]) if OWN else box.load([batch, y, x, head * D + channel])
    return block.reshape(ROWS * COLS, B).to(OPERAND)


@triton.jit
def tile(
    q_ptr, k_ptr, v_ptr, out_ptr, corner_ptr, made_ptr, made, gamma_ptr,
    q_box, k_box, v_box, batch, head, q_n, k_n, v_n, out_n, rows, cols, scale, tile_y, tile_x, tiles_x,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, HEIGHT: tl.constexpr,
    WIDE: tl.constexpr, EVEN: tl.constexpr, CORNERS: tl.constexpr, CLASS: tl.constexpr, BACK: tl.constexpr,
    BOXES: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One loop over the blocks of keys, so that loads run ahead of the products from the first to the last: those of
    the tile itself, those above it, then those left of it. The corner comes after it: before, its loads would hold up
    those of the blocks."""
    BLOCKS: tl.constexpr = ROWS // HEIGHT  # of keys, in a tile
    dk, dv = channels_in(head, DK, BK, BOXES), channels_in(head, DV, BV, BOXES)
    x, y = patches_in(ROWS, COLS, BACK)
    f, g = patches_in(HEIGHT, COLS, BACK)
    turn = -1 if BACK else 1
    zero = tl.cast(rows, tl.int64) * 0
    origin = zero + tl.cast(rows, tl.int64) * cols - 1 if BACK else zero
    first_x, first_y = tile_x * COLS, tile_y * ROWS
    here = origin + turn * (tl.cast(first_y, tl.int64) * cols + first_x)
    ok = known(first_x + x, first_y + y, rows, cols, EVEN)
    if BOXES:
        q = load_box(q_box, batch, head, first_y, first_x, rows, cols, ROWS, COLS, DK, BK, True, BACK, OPERAND)
    else:
        q = load_rows(q_ptr + here * q_n, turn * (y * cols + x) * q_n, ok, dk, DK, OPERAND)
    lg = log2_decay(gamma_ptr, head)  # not before the loads: they would wait for it
    out = tl.zeros([ROWS * COLS, BV], tl.float32)
    inside = turn * (g * cols + f)
    # gamma^distance along either axis, inside a tile and to the block beside it. Down the rows one set of powers serves
    # both, half a block from either: registers are few. A gamma below the limit, where the next patch is less than
    # float32 resolves, would make them infinite.
    across, down = x[:, None] - f[None, :], y[:, None] - g[None, :]
    across_own, across_left = fading(lg, across) * scale, power(lg, across + COLS) * scale
    HALF: tl.constexpr = HEIGHT // 2
    lg_near = tl.maximum(lg, -200.0 / HEIGHT)
    down_near = power(lg_near, down + HALF)
    for step in range(0, BLOCKS * (1 + tile_y + tile_x)):
        # Where the block begins, from the tile's first patch.
        by_x, by_y = 0, tl.where(step < BLOCKS, step, BLOCKS - 1 - step) * HEIGHT
        if WIDE:
            left = step - BLOCKS * (1 + tile_y)
            by_x = tl.where(left >= 0, -(left // BLOCKS + 1) * COLS, 0)
            by_y = tl.where(left >= 0, left % BLOCKS * HEIGHT, by_y)
        there_x, there_y = first_x + by_x, first_y + by_y
        if BOXES:
            k = load_box(k_box, batch, head, there_y, there_x, rows, cols, HEIGHT, COLS, DK, BK, False, BACK, OPERAND)
            v = load_box(v_box, batch, head, there_y, there_x, rows, cols, HEIGHT, COLS, DV, BV, False, BACK, OPERAND)
        else:
            there = here + turn * (tl.cast(by_y, tl.int64) * cols + by_x)
            ok_k = known(there_x + f, there_y + g, rows, cols, EVEN)
            k = load_rows(k_ptr + there * k_n, inside * k_n, ok_k, dk, DK, OPERAND)
            v = load_rows(v_ptr + there * v_n, inside * v_n, ok_k, dv, DV, OPERAND)
        far = tl.maximum(-by_x - COLS, 0)
        weights = tl.where(by_x == 0, across_own, across_left) * power(lg, far)
        if BLOCKS == 1:
            weights *= power(lg_near, tl.where(by_y < 0, -by_y - HALF, -HALF))
            weights *= tl.where((by_y < 0) | (down >= 0), down_near, 0.0)
        else:  # more than two kinds: registers are too few to keep them
            weights *= fading(lg, down - by_y)
        scores = product(q, tl.trans(k), PRECISION) * weights
        out += product(operand(scores, OPERAND, PRECISION), v, PRECISION)
    if CORNERS > 0 and (tile_x > 0) & (tile_y > 0):
        wait_for(made_ptr, made)
        state = corner(corner_ptr, lg, tile_x, tile_y, tiles_x, dk, dv, DK, DV, ROWS, CORNERS)
        seen_there = product(q, operand(state, OPERAND, PRECISION), PRECISION)
        out += seen_there * (power(lg, x + y + 2) * scale)[:, None]
    if CLASS and BACK:  # the class token is seen from every patch
        last = tl.cast(rows, tl.int64) * cols
        class_k = tl.load(k_ptr + last * k_n + dk, mask=within(dk, DK), other=0.0).to(tl.float32)
        class_v = tl.load(v_ptr + last * v_n + dv, mask=within(dv, DV), other=0.0).to(tl.float32)
        score = tl.sum(q.to(tl.float32) * class_k[None, :], 1)
        score *= power(lg, first_x + x + first_y + y + 1) * scale
        out += score[:, None] * class_v[None, :]
    store_rows(out_ptr + here * out_n, turn * (y * cols + x) * out_n, ok, dv, DV, out)


@triton.jit
def class_token(
    q_ptr, k_ptr, v_ptr, out_ptr, corner_ptr, made_ptr, made, gamma_ptr, head,
    q_n, k_n, v_n, out_n, rows, cols, scale,
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
        lg = log2_decay(gamma_ptr, head)
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
        if CORNERS > 0:
            wait_for(made_ptr, made)
            state = corner(corner_ptr, lg, last_x, last_y, last_x + 1, dk, dv, DK, DV, ROWS, CORNERS)
            steps = cols - last_x * COLS + rows - last_y * ROWS + 1
            out += tl.sum(q[:, None] * state.to(tl.float32), 0) * power(lg, steps)
    tl.store(out_ptr + patches * out_n + dv, (out * scale).to(out_ptr.dtype.element_ty), mask=dv < DV)


@triton.jit
def row_states(
    k_ptr, v_ptr, corner_ptr, gamma_ptr, k_box, v_box,
    k_b, k_n, k_h, v_b, v_n, v_h,
    rows, cols, corners_x, corners_y, heads, bh, tile_y,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    BACK: tl.constexpr, BOXES: tl.constexpr, ALIGN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state at the last patch of each tile, of its own tile row. No corner needs the last tiles: all are full."""
    batch, head = tl.cast(bh // heads, tl.int64), bh % heads
    lg = log2_decay(gamma_ptr, head)
    dk, dv = channels_in(head, DK, BK, BOXES), channels_in(head, DV, BV, BOXES)
    x, y = patches_in(ROWS, COLS, BACK)
    turn = -1 if BACK else 1
    inside = turn * (y * cols + x)
    origin = tl.cast(rows, tl.int64) * cols - 1 if BACK else tl.cast(rows, tl.int64) * 0
    here = origin + turn * tl.cast(tile_y, tl.int64) * ROWS * cols
    k_ptr += first_of(batch, head, k_b, k_h, ALIGN) + here * k_n
    v_ptr += first_of(batch, head, v_b, v_h, ALIGN) + here * v_n
    corner_ptr += (tl.cast(bh, tl.int64) * corners_y + tile_y) * corners_x * DK * DV
    zeta = power(lg, COLS + ROWS - 2 - x - y)
    state = tl.zeros([BK, BV], tl.float32)
    for tile_x in range(0, corners_x):
        if BOXES:
            there_x, there_y = tile_x * COLS, tile_y * ROWS
            image = bh // heads
            k = load_box(k_box, image, head, there_y, there_x, rows, cols, ROWS, COLS, DK, BK, False, BACK, OPERAND)
            v = load_box(v_box, image, head, there_y, there_x, rows, cols, ROWS, COLS, DV, BV, False, BACK, OPERAND)
        else:
            k = load_rows(k_ptr, inside * k_n, x >= 0, dk, DK, OPERAND)
            v = load_rows(v_ptr, inside * v_n, x >= 0, dv, DV, OPERAND)
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
def join_rows(
    corner_ptr, gamma_ptr, corners_x, corners_y, heads, line, tile_x,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """In place, in a tile column: from the states of tile rows to those of all that is left of and above a tile's last
    patch."""
    fade = tl.exp2(log2_decay(gamma_ptr, line % heads) * ROWS)
    dk, dv = tl.arange(0, BK), tl.arange(0, BV)
    ok = state_mask(dk, dv, DK, DV)
    places = corner_ptr + (tl.cast(line, tl.int64) * corners_y * corners_x + tile_x) * DK * DV
    places += state_offsets(dk, dv, DV, 1)
    state = tl.zeros([BK, BV], tl.float32)
    for _ in range(0, corners_y):
        state = state * fade + tl.load(places, mask=ok, other=0.0).to(tl.float32)
        tl.store(places, state.to(corner_ptr.dtype.element_ty), mask=ok)
        places += corners_x * DK * DV
