"""1D retention in plain PyTorch: three ways to compute the same numbers.

Inside this file heads come before tokens: q, k are `b h n d`, v is `b h n e`, a state is `b h d e`.
"""

from itertools import pairwise

import torch
from torch import Tensor

from vir.ops.decay import mask_1d, mask_1d_from_the_last, powers
from vir.ops.parts import concatenate

CHUNKS_AT_ONCE = 16  # chunks that one batch of matrix products takes: enough work, still in the cache


def parallel(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float) -> Tensor:
    """Ret = (q k^T * M) v: all tokens at once, n x n scores. The last query comes first, so that M takes no memory."""
    scores = (q.flip(2) * scale) @ k.mT  # b h n n
    return (scores.mul_(mask_1d_from_the_last(gamma, q.shape[2])) @ v).flip(2)


def recurrent(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float, state: Tensor) -> tuple[Tensor, Tensor]:
    """s_n = gamma s_(n-1) + k_n^T v_n and Ret_n = q_n s_n: one token after the other."""
    forget = gamma[:, None, None]
    pieces = []
    # In pieces, since thousands of small outputs between the states would shred the memory.
    for q_m, k_m, v_m in zip(*(x.split(256, dim=2) for x in (q * scale, k, v)), strict=True):
        out = []
        for q_n, k_n, v_n in zip(q_m.unbind(2), k_m.unbind(2), v_m.unbind(2), strict=True):
            state = forget * state + k_n[..., :, None] * v_n[..., None, :]
            out.append((q_n[..., None, :] @ state).squeeze(-2))
        pieces.append(torch.stack(out, dim=2))
    return concatenate(pieces, dim=2), state


def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Parallel inside a chunk, recurrent from chunk to chunk: linear in n, no n x n tensor."""
    n = q.shape[2]
    whole = n - n % chunk
    starts = [*range(0, whole, chunk * CHUNKS_AT_ONCE), whole]
    pieces = [(start, stop, chunk) for start, stop in pairwise(starts)]
    if whole < n:
        pieces.append((whole, n, n - whole))  # what is left is one shorter chunk
    out = []
    for start, stop, length in pieces:
        q_m, k_m, v_m = (x[:, :, start:stop].unflatten(2, (-1, length)).contiguous() for x in (q, k, v))
        out_piece, state = _chunks(q_m, k_m, v_m, gamma, scale, state)
        out.append(out_piece)
    return concatenate(out, dim=2), state


def _chunks(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float, state: Tensor) -> tuple[Tensor, Tensor]:
    """R_m = gamma^C R_(m-1) + k_m^T (v_m * zeta) and Ret_m = (q_m k_m^T * M) v_m + (q_m R_(m-1)) * xi."""
    chunks, length = q.shape[2:4]  # b h m c d
    mask = mask_1d(gamma, length)[:, None] * scale
    xi = powers(gamma, length, first=1)[:, None, :, None] * scale
    zeta = powers(gamma, length).flip(-1)[:, None, :, None]

    added = torch.cat([state[:, :, None], k.mT @ (v * zeta)], dim=2)
    states = carry(added, mask_1d(gamma**length, chunks + 1))  # before the first chunk, then after each
    inside = (q @ k.mT).mul_(mask) @ v
    out = torch.addcmul(inside, q @ states[:, :, :-1], xi)
    return out.flatten(2, 3), states[:, :, -1]


def carry(added: Tensor, mask: Tensor) -> Tensor:
    """Running sum with decay, by its mask, along the axis before the last two: s_m = gamma s_(m-1) + added_m."""
    return (mask @ added.flatten(-2)).view_as(added)  # b h ... m k v
