"""2D retention on many small grids: a program sees one tile of queries after another, of one image and the next.

A tile sees itself and all tiles above and left of it by weighted products: small grids have too few of them to pay for
the states at corners of `grid.py`. The blocks of keys of all tiles of a program come in one loop, so that loads run
ahead of the products from the first to the last.

The class token is a patch one row under the last, in a row that has no other; turned by half a turn, as BACK does, that
row is the first.
"""

import triton
import triton.language as tl

from vir.ops.triton.pieces import fading, load_rows, log2_decay, operand, power, product, store_rows

SIDE = tl.constexpr(8)  # patches of a tile


@triton.jit
def quadrant(
    q_ptr, k_ptr, v_ptr, out_ptr, _corner_ptr, _made_ptr, gamma_ptr, _q_box, _k_box, _v_box,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, out_b, out_n, out_h,
    rows, cols, images, programs, scale,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EVEN: tl.constexpr, CLASS: tl.constexpr, BACK: tl.constexpr,
    ALIGN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program, head = tl.program_id(0), tl.cast(tl.program_id(1), tl.int64)
    q_ptr += tl.multiple_of(head * q_h, ALIGN)
    k_ptr += tl.multiple_of(head * k_h, ALIGN)
    v_ptr += tl.multiple_of(head * v_h, ALIGN)
    out_ptr += tl.multiple_of(head * out_h, ALIGN)
    lg = log2_decay(gamma_ptr, head)
    i, dk, dv = tl.arange(0, SIDE * SIDE), tl.arange(0, BK), tl.arange(0, BV)
    x, y = i % SIDE, i // SIDE
    tiles_x, tiles_y = tl.cdiv(cols, SIDE), tl.cdiv(rows, SIDE)
    tiles = tiles_x * tiles_y

    # gamma^distance along either axis, inside a tile and to the tile beside it.
    across, down = x[:, None] - x[None, :], y[:, None] - y[None, :]
    across_own, across_left = fading(lg, across) * scale, power(lg, across + SIDE) * scale
    down_own, down_above = fading(lg, down), power(lg, down + SIDE)

    steps = 0
    for later in range(program, images * tiles, programs):
        steps += (later % tiles // tiles_x + 1) * (later % tiles % tiles_x + 1)
    at = program
    image, tile_y, tile_x = at // tiles, at % tiles // tiles_x, at % tiles % tiles_x
    left, above = 0, -1  # tiles from that of the queries to that of the keys
    out = tl.zeros([SIDE * SIDE, BV], tl.float32)
    for _ in range(0, steps):
        last_image, last_y, last_x = image, tile_y, tile_x
        above += 1
        if above > tile_y:
            above, left = 0, left + 1
        if left > tile_x:
            left, at = 0, at + programs
            image, tile_y, tile_x = at // tiles, at % tiles // tiles_x, at % tiles % tiles_x
        batch = tl.cast(image, tl.int64)
        first, inside, ok = places(tile_y, tile_x, x, y, rows, cols, EVEN, CLASS, BACK)
        q = load_rows(q_ptr + (batch * q_b + first * q_n), inside * q_n, ok, dk, DK, OPERAND)
        first, inside, ok = places(tile_y - above, tile_x - left, x, y, rows, cols, EVEN, CLASS, BACK)
        k = load_rows(k_ptr + (batch * k_b + first * k_n), inside * k_n, ok, dk, DK, OPERAND)
        v = load_rows(v_ptr + (batch * v_b + first * v_n), inside * v_n, ok, dv, DV, OPERAND)
        further = power(lg, (tl.maximum(left - 1, 0) + tl.maximum(above - 1, 0)) * SIDE)
        weights = tl.where(left == 0, across_own, across_left) * further * tl.where(above == 0, down_own, down_above)
        scores = product(q, tl.trans(k), PRECISION) * weights
        if left + above == 0:  # the first block of a tile: the last tile is done
            if at > program:
                first, inside, ok = places(last_y, last_x, x, y, rows, cols, EVEN, CLASS, BACK)
                to = out_ptr + (tl.cast(last_image, tl.int64) * out_b + first * out_n)
                store_rows(to, inside * out_n, ok, dv, DV, out)
            # Zero. Written so, the compiler does not move the store behind the next product, where it would make all
            # products wait for each other.
            out = tl.zeros([SIDE * SIDE, BV], tl.float32) + tl.cast(above, tl.float32)
        out = tl.dot(operand(scores, OPERAND, PRECISION), v, out, input_precision=PRECISION)
    first, inside, ok = places(tile_y, tile_x, x, y, rows, cols, EVEN, CLASS, BACK)
    store_rows(out_ptr + (tl.cast(image, tl.int64) * out_b + first * out_n), inside * out_n, ok, dv, DV, out)


@triton.jit
def places(tile_y, tile_x, x, y, rows, cols, EVEN: tl.constexpr, CLASS: tl.constexpr, BACK: tl.constexpr):
    """A tile's first token, where its others lie from there, and which of them there are."""
    turn = -1 if BACK else 1
    first = tile_y * SIDE * cols + tile_x * SIDE
    if BACK:
        first = rows * cols - 1 - first
    inside, ok = y * cols + x, x >= 0
    if not EVEN:
        ok = (x < cols - tile_x * SIDE) & (y < rows - tile_y * SIDE)
    if CLASS:
        is_class = y == (0 if BACK else rows - 1) - tile_y * SIDE
        ok &= ~is_class | (x == (0 if BACK else cols - 1) - tile_x * SIDE)
        inside -= tl.where(is_class, turn * (cols - 1), 0)  # no tokens stand before it in its row
    return tl.cast(first, tl.int64), turn * inside, ok
