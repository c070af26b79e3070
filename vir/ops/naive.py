"""Retention by its definition: sums in loops. Slow, obvious, and what everything else is compared with.

Layout `b n h d`; run it in float64 to get a reference.
"""

import torch
from torch import Tensor


def weight_1d(i: int, j: int) -> int | None:
    """Power of gamma between query i and key j; None where the query does not see the key."""
    return i - j if j <= i else None


def position_2d(token: int, grid: tuple[int, int]) -> tuple[int, int]:
    """(x, y) of a token; the one after the last patch is the class token, a row below it."""
    rows, cols = grid
    return (token % cols, token // cols) if token < rows * cols else (cols - 1, rows)


def weight_2d(i: int, j: int, grid: tuple[int, int]) -> int | None:
    """Power of gamma between two tokens on a grid: their L1 distance, if j is neither below nor right of i."""
    (x, y), (f, g) = position_2d(i, grid), position_2d(j, grid)
    return (x - f) + (y - g) if f <= x and g <= y else None


def _sum_over_keys(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float | None, weight) -> Tensor:  # type: ignore[no-untyped-def]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = []
    for i in range(q.shape[1]):
        total = torch.zeros_like(v[:, 0])  # b h e
        for j in range(q.shape[1]):
            power = weight(i, j)
            if power is not None:
                score = scale * (q[:, i] * k[:, j]).sum(-1) * gamma**power  # b h
                total = total + score[..., None] * v[:, j]
        out.append(total)
    return torch.stack(out, dim=1)  # b n h e


def retention_1d(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float | None = None) -> Tensor:
    """out_i = sum over j <= i of gamma^(i - j) (scale q_i . k_j) v_j."""
    return _sum_over_keys(q, k, v, gamma, scale, weight_1d)


def retention_2d(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, grid: tuple[int, int], scale: float | None = None
) -> Tensor:
    """out(x, y) = sum over f <= x, g <= y of gamma^(x - f + y - g) (scale q(x, y) . k(f, g)) v(f, g)."""
    return _sum_over_keys(q, k, v, gamma, scale, lambda i, j: weight_2d(i, j, grid))


def state_1d(k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    """What the last token sees: sum over j of gamma^(n - 1 - j) k_j^T v_j."""
    n = k.shape[1]
    return torch.stack(
        [gamma[:, None, None] ** (n - 1 - j) * k[:, j, :, :, None] * v[:, j, :, None, :] for j in range(n)]
    ).sum(0)  # b h k v


def state_2d(k: Tensor, v: Tensor, gamma: Tensor, grid: tuple[int, int]) -> Tensor:
    """What each column of the last row sees; with a class token, that row is the one it stands in."""
    cols, n = grid[1], k.shape[1]
    last = position_2d(n - 1, grid)[1]
    columns = []
    for x in range(cols):
        total = torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None, :])
        for j in range(n):
            f, g = position_2d(j, grid)
            if f <= x:
                seen = k[:, j, :, :, None] * v[:, j, :, None, :]
                total = total + gamma[:, None, None] ** (x - f + last - g) * seen
        columns.append(total)
    return torch.stack(columns, dim=2)  # b h x k v
