"""How much a token is forgotten with distance: gamma per head, its powers, and the masks made of them.

The one place that says which way causality points: a query sees the keys before it, never those after it.
"""

import math
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vir.ops.checks import carry_derivatives

DecayKind = Literal["log", "retnet"]
LARGEST_REMEMBERED = 600  # patches of a grid


def decay(
    heads: int,
    kind: DecayKind = "log",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Gamma of every head: `log` spreads 1 - gamma from 1/32 to 1/512, `retnet` takes 1 - 2^(-5-h)."""
    if heads < 1:
        raise ValueError(f"decay: got heads={heads}, expected at least 1.")
    if kind == "log":
        forget = torch.linspace(math.log(1 / 32), math.log(1 / 512), heads, device=device, dtype=dtype).exp()
    elif kind == "retnet":
        forget = torch.exp2(-5.0 - torch.arange(heads, device=device, dtype=dtype))
    else:
        raise ValueError(f"decay: got kind={kind!r}, expected 'log' or 'retnet'.")
    return 1 - forget  # h


def powers(gamma: Tensor, count: int, first: int = 0) -> Tensor:
    """gamma^first, gamma^(first + 1), ...: `count` of them for every head."""
    exponents = torch.arange(first, first + count, device=gamma.device)
    return gamma[:, None] ** exponents  # h n


def mask_1d(gamma: Tensor, n: int) -> Tensor:
    """M[i, j] = gamma^(i - j) where the key j is not after the query i, else 0."""
    return mask_1d_from_the_last(gamma, n).flip(-2)  # h query key


def mask_1d_from_the_last(gamma: Tensor, n: int) -> Tensor:
    """`mask_1d` with its rows turned round, the last query first: a view that takes 2 n numbers, not n^2."""
    # Each row is a window on gamma^(n-1) ... gamma^0 0 ... 0: no power is taken twice.
    line = F.pad(powers(gamma, n).flip(-1), (0, n - 1))
    return line.unfold(-1, n, 1)


def mask_2d(gamma: Tensor, grid: tuple[int, int], class_token: bool = False) -> Tensor:
    """M = gamma^(dx + dy) where the key is neither below nor right of the query, else 0.

    It is the product of two 1D masks, one per axis. The class token stands under the last patch, at
    (x = cols - 1, y = rows), so that it sees every patch and no patch sees it.
    """
    rows, cols = grid
    across = mask_1d(gamma, cols)
    down = across if rows == cols else mask_1d(gamma, rows)
    mask = (down[:, :, None, :, None] * across[:, None, :, None, :]).reshape(-1, rows * cols, rows * cols)
    if class_token:
        from_class = gamma[:, None] * mask[:, -1]  # one step below the last patch
        mask = torch.cat([F.pad(mask, (0, 1)), F.pad(from_class, (0, 1), value=1.0)[:, None]], dim=1)
    return mask  # h query key


def remembered_mask_2d(gamma: Tensor, grid: tuple[int, int]) -> Tensor:
    """`mask_2d` for small grids, kept on a CPU: the layers of a model ask for the same one again and again."""
    if gamma.device.type != "cpu" or grid[0] * grid[1] > LARGEST_REMEMBERED or torch.compiler.is_compiling():
        return mask_2d(gamma, grid)
    if type(gamma) is not Tensor or carry_derivatives(gamma):  # traced, or more than its numbers
        return mask_2d(gamma, grid)
    with torch.inference_mode(False):  # what is kept must serve training as well
        return _mask_2d_of(tuple(gamma.tolist()), gamma.dtype, grid)


@lru_cache(maxsize=8)
def _mask_2d_of(gammas: tuple[float, ...], dtype: torch.dtype, grid: tuple[int, int]) -> Tensor:
    return mask_2d(torch.tensor(gammas, dtype=dtype, device="cpu"), grid)  # whatever the default device is now
