"""2D retention in plain PyTorch: four ways to compute the same numbers on a grid of patches.

Inside this file heads come before tokens, `b h n d`, and the query is already scaled. The state holds one
k x v matrix for each column of the last row: everything that a token in that place sees.
"""

from math import ceil

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from vir.ops.decay import mask_2d, powers
from vir.ops.forms_1d import carry

PANEL = 16  # columns of a tile in the chunkwise form


def parallel(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, grid: tuple[int, int]) -> Tensor:
    """Ret = (q k^T * M) v with the 2D mask: all tokens at once, n x n scores."""
    scores = q @ k.mT  # b h n n
    return scores.mul_(mask_2d(gamma, grid, class_token=q.shape[2] > grid[0] * grid[1])) @ v


def recurrent(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """r(x, y) = gamma r(x-1, y) + gamma r(x, y-1) - gamma^2 r(x-1, y-1) + k^T v: patch by patch."""
    forget = gamma[:, None, None]
    cols = state.shape[2]
    above = list(state.unbind(2))
    out = []
    for token, (q_n, k_n, v_n) in enumerate(zip(q.unbind(2), k.unbind(2), v.unbind(2), strict=True)):
        x = token % cols
        if x == 0:
            left = left_above = torch.zeros_like(above[0])
        added = k_n[..., :, None] * v_n[..., None, :]
        here = forget * left + forget * above[x] - forget**2 * left_above + added  # b h k v
        left, left_above, above[x] = here, above[x], here
        out.append((q_n[..., None, :] @ here).squeeze(-2))
    return torch.stack(out, dim=2), torch.stack(above, dim=2)


def scan(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """s_x(x, y) = gamma s_x(x-1, y) + k^T v along the row, then s(x, y) = gamma s(x, y-1) + s_x(x, y)."""
    forget = gamma[:, None, None, None]
    cols = state.shape[2]
    out = []
    for q_row, k_row, v_row in zip(*(x.split(cols, dim=2) for x in (q, k, v)), strict=True):
        along_row = carry(k_row[..., :, None] * v_row[..., None, :], gamma)
        state = forget * state + along_row  # b h x k v
        out.append((q_row[..., None, :] @ state).squeeze(-2))
    return torch.cat(out, dim=2), state


def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Bands of `chunk` rows one after the other, each cut into tiles: linear in the rows and in the columns."""
    cols = state.shape[2]
    out = []
    for q_band, k_band, v_band in zip(*(x.split(chunk * cols, dim=2) for x in (q, k, v)), strict=True):
        out_band, state = _band(q_band, k_band, v_band, gamma, state)
        out.append(out_band)
    return (out[0] if len(out) == 1 else torch.cat(out, dim=2)), state


def _band(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """What a token sees is its own tile, the rest of its band to the left, and all that is above the band."""
    cols = state.shape[2]
    rows = q.shape[2] // cols
    tiles = ceil(cols / PANEL)
    width = ceil(cols / tiles)
    missing = tiles * width - cols  # columns without content complete the last tile

    def tiled(x: Tensor) -> Tensor:
        x = F.pad(x.unflatten(2, (rows, cols)), (0, 0, 0, missing)) if missing else x.unflatten(2, (rows, cols))
        return rearrange(x, "b h y (t x) d -> b h t y x d", t=tiles)

    q, k, v = tiled(q), tiled(k), tiled(v)
    state = rearrange(F.pad(state, (0, 0, 0, 0, 0, missing)), "b h (t x) k v -> b h t x k v", t=tiles)

    # Its own tile: masked scores.
    q_tile, k_tile, v_tile = (x.flatten(3, 4) for x in (q, k, v))
    scores = (q_tile @ k_tile.mT).mul_(mask_2d(gamma, (rows, width))[:, None])
    out = (scores @ v_tile).unflatten(3, (rows, width))  # b h t y x v

    # Above the band: the state of its column, which already holds everything to the left.
    below = powers(gamma, rows, first=1)[:, None, :, None, None]
    out = out + (q.transpose(3, 4) @ state).transpose(3, 4) * below

    # What the band adds to each column, seen from its last row.
    fade_down = powers(gamma, rows).flip(-1)[:, None, :, None, None]
    columns = k.permute(0, 1, 2, 4, 5, 3) @ (v * fade_down).transpose(3, 4)  # b h t x k v
    state = gamma[:, None, None, None, None] ** rows * state + carry(columns, gamma, dim=3)

    # The band to the left of the tile: one state for each row at the tile's edge.
    if tiles > 1:
        fade_right = powers(gamma, width).flip(-1)[:, None, None, :, None]
        edges = k.mT @ (v * fade_right)  # b h t y k v
        edges = carry(edges[:, :, :-1], gamma**width)  # at the right edge of every tile but the last
        edges = carry(edges, gamma, dim=3)  # with the rows of the band above
        right = powers(gamma, width, first=1)
        from_left = (q[:, :, 1:] @ edges) * right[:, None, None, :, None]
        out = torch.cat([out[:, :, :1], out[:, :, 1:] + from_left], dim=2)
        left_state = edges[:, :, :, -1:] * right[:, None, :, None, None]
        state = torch.cat([state[:, :, :1], state[:, :, 1:] + left_state], dim=2)

    out = rearrange(out, "b h t y x d -> b h y (t x) d")[..., :cols, :]
    return out.flatten(2, 3), rearrange(state, "b h t x k v -> b h (t x) k v")[:, :, :cols]


def class_token(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The class token sees gamma times the state of the last patch, and itself."""
    state = gamma[:, None, None, None] * state
    itself = k.mT @ v  # b h k v
    state = torch.cat([state[:, :, :-1], (state[:, :, -1] + itself)[:, :, None]], dim=2)
    return q @ state[:, :, -1], state
