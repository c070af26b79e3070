"""2D retention in plain PyTorch: four ways to compute the same numbers on a grid of patches.

Inside this file heads come before tokens: q, k are `b h n d`, v is `b h n e`. A state is `b h x d e`: for each
column of the last row, everything that a token in that place sees.
"""

from math import ceil

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from vir.ops.decay import mask_1d, powers, remembered_mask_2d
from vir.ops.forms_1d import carry
from vir.ops.parts import concatenate

TILE_COLS = 16  # of a tile in the chunkwise form; its rows are those of the band


def parallel(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float, grid: tuple[int, int]) -> Tensor:
    """Ret = (q k^T * M) v with the 2D mask: all tokens at once, n x n scores."""
    n = grid[0] * grid[1]
    scores = (q * scale) @ k.mT  # b h n n
    mask = remembered_mask_2d(gamma, grid)
    scores[:, :, :n, :n].mul_(mask)
    if q.shape[2] > n:  # the class token: in place, since one more row would cost a copy of the mask
        scores[:, :, n, :n].mul_(gamma[:, None] * mask[:, -1])
        scores[:, :, :n, n] = 0
    return scores @ v


def recurrent(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float, state: Tensor) -> tuple[Tensor, Tensor]:
    """r(x, y) = gamma r(x-1, y) + gamma r(x, y-1) - gamma^2 r(x-1, y-1) + k^T v: patch by patch."""
    forget = gamma[:, None, None]
    above = list(state.unbind(2))
    rows = []
    for q_y, k_y, v_y in zip(*(x.split(len(above), dim=2) for x in (q * scale, k, v)), strict=True):
        left = above_left = torch.zeros_like(above[0])
        out = []
        for x, (q_n, k_n, v_n) in enumerate(zip(q_y.unbind(2), k_y.unbind(2), v_y.unbind(2), strict=True)):
            added = k_n[..., :, None] * v_n[..., None, :]
            here = forget * left + forget * above[x] - forget**2 * above_left + added
            left, above_left, above[x] = here, above[x], here
            out.append((q_n[..., None, :] @ here).squeeze(-2))
        rows.append(torch.stack(out, dim=2))
    return concatenate(rows, dim=2), torch.stack(above, dim=2)


def scan(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float, state: Tensor) -> tuple[Tensor, Tensor]:
    """s_x(x, y) = gamma s_x(x-1, y) + k^T v along the row, then s(x, y) = gamma s(x, y-1) + s_x(x, y)."""
    forget = gamma[:, None, None, None]
    cols = state.shape[2]
    across = mask_1d(gamma, cols)
    out = []
    for q_row, k_row, v_row in zip(*(x.split(cols, dim=2) for x in (q * scale, k, v)), strict=True):
        along_row = carry(k_row[..., :, None] * v_row[..., None, :], across)
        state = torch.addcmul(along_row, forget, state)
        out.append((q_row[..., None, :] @ state).squeeze(-2))
    return concatenate(out, dim=2), state


def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Bands of `chunk` rows one after the other, each cut into tiles: linear in the rows and in the columns."""
    band = chunk * state.shape[2]
    out = []
    for q_band, k_band, v_band in zip(*(x.split(band, dim=2) for x in (q, k, v)), strict=True):
        out_band, state = _band(q_band, k_band, v_band, gamma, scale, state)
        out.append(out_band)
    return concatenate(out, dim=2), state


def _band(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float, state: Tensor) -> tuple[Tensor, Tensor]:
    """A token sees its own tile, what is above the band, and the rest of the band to the left of its tile."""
    cols = state.shape[2]
    rows = q.shape[2] // cols
    tiles = ceil(cols / TILE_COLS)
    width = ceil(cols / tiles)
    missing = tiles * width - cols  # empty columns complete the last tile

    def tiled(x: Tensor) -> Tensor:
        x = x.unflatten(2, (rows, cols))
        x = F.pad(x, (0, 0, 0, missing)) if missing else x
        return rearrange(x, "b h y (t x) d -> b h t y x d", t=tiles).contiguous()

    q, k, v = tiled(q), tiled(k), tiled(v)
    state = F.pad(state, (0, 0, 0, 0, 0, missing)) if missing else state
    state = state.unflatten(2, (tiles, width))  # b h t x k v
    down, across = powers(gamma, rows + 1), powers(gamma, width + 1)  # from 0 steps up

    out = _own_tile(q, k, v, remembered_mask_2d(gamma, (rows, width)), scale)
    # Above the band: the state of the token's column, which holds everything to the left as well.
    above = (q.transpose(3, 4) @ state).transpose(3, 4)
    out = torch.addcmul(out, above, scale * down[:, None, 1:, None, None])
    columns = _added_to_columns(k, v, down)
    if tiles > 1:
        edges = _left_of_tile(k, v, gamma, across)
        out = torch.addcmul(out, q @ edges, scale * across[:, None, None, 1:, None])
        # Its last row goes on into the tile's columns, through the first of them.
        columns[:, :, :, 0] += gamma[:, None, None, None] * edges[:, :, :, -1]
        del edges
    columns = carry(columns, mask_1d(gamma, width)[:, None])
    state = torch.addcmul(columns, state, down[:, -1, None, None, None, None])

    out = rearrange(out, "b h t y x d -> b h y (t x) d")[..., :cols, :]
    return out.flatten(2, 3), state.flatten(2, 3)[:, :, :cols]


def _own_tile(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    q, k, flat = q.flatten(3, 4) * scale, k.flatten(3, 4), v.flatten(3, 4)
    return ((q @ k.mT).mul_(mask[:, None]) @ flat).view_as(v)  # b h t y x v


def _added_to_columns(k: Tensor, v: Tensor, down: Tensor) -> Tensor:
    """What the band adds to each column by itself, seen from the band's last row."""
    fading = v * down[:, None, :-1, None, None].flip(2)
    return k.permute(0, 1, 2, 4, 5, 3) @ fading.transpose(3, 4)  # b h t x k v


def _left_of_tile(k: Tensor, v: Tensor, gamma: Tensor, across: Tensor) -> Tensor:
    """For each row at a tile's left edge, what the band holds to the left of the tile and not below the row."""
    tiles, rows, width = k.shape[2:5]
    edges = k.mT @ (v * across[:, None, None, :-1, None].flip(3))  # b h t y k v
    edges = carry(edges, mask_1d(gamma, rows)[:, None])  # down the rows, then along the tiles before this one
    earlier = F.pad(mask_1d(gamma**width, tiles - 1), (0, 1, 1, 0))
    return (earlier @ edges.flatten(3)).view_as(edges)


def class_token(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float, state: Tensor) -> tuple[Tensor, Tensor]:
    """The class token sees gamma times the state of the last patch, and itself."""
    state = gamma[:, None, None, None] * state
    state = torch.cat([state[:, :, :-1], state[:, :, -1:] + (k.mT @ v)[:, :, None]], dim=2)
    return (q * scale) @ state[:, :, -1], state
