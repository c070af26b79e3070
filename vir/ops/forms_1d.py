"""1D retention in plain PyTorch: three ways to compute the same numbers.

Inside this file heads come before tokens, `b h n d`, and the query is already scaled.
"""

import torch
from torch import Tensor

from vir.ops.decay import mask_1d, powers

CHUNKS_AT_ONCE = 16  # chunks that one batch of matrix products takes: enough work, still in the cache


def parallel(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
    """Ret = (q k^T * M) v: all tokens at once, n x n scores."""
    scores = q @ k.mT  # b h n n
    return scores.mul_(mask_1d(gamma, q.shape[2])) @ v


def recurrent(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """s_n = gamma s_(n-1) + k_n^T v_n and Ret_n = q_n s_n: one token after the other."""
    forget = gamma[:, None, None]
    out = []
    for q_n, k_n, v_n in zip(q.unbind(2), k.unbind(2), v.unbind(2), strict=True):
        state = forget * state + k_n[..., :, None] * v_n[..., None, :]  # b h k v
        out.append((q_n[..., None, :] @ state).squeeze(-2))
    return torch.stack(out, dim=2), state


def chunkwise(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Parallel inside a chunk, recurrent from chunk to chunk: linear in n, no n x n tensor."""
    n = q.shape[2]
    whole = n - n % chunk
    cuts = [*range(0, whole, chunk * CHUNKS_AT_ONCE), whole]
    out = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        piece = (x[:, :, start:stop].unflatten(2, (-1, chunk)) for x in (q, k, v))
        out_piece, state = _chunks(*piece, gamma, state)
        out.append(out_piece)
    if whole < n:  # what is left is one shorter chunk
        piece = (x[:, :, None, whole:] for x in (q, k, v))
        out_piece, state = _chunks(*piece, gamma, state)
        out.append(out_piece)
    return (out[0] if len(out) == 1 else torch.cat(out, dim=2)), state


def _chunks(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """R_m = gamma^C R_(m-1) + k_m^T (v_m * zeta); Ret_m = (q_m k_m^T * M) v_m + (q_m R_(m-1)) * xi."""
    chunks, length = q.shape[2:4]  # b h m c d
    mask = mask_1d(gamma, length)[:, None]
    xi = powers(gamma, length, first=1)[:, None, :, None]
    zeta = powers(gamma, length).flip(-1)[:, None, :, None]

    added = k.mT @ (v * zeta)  # b h m k v
    states = carry(torch.cat([state[:, :, None], added], dim=2), gamma**length)  # before, then after each chunk
    inside = (q @ k.mT).mul_(mask) @ v
    out = inside + (q @ states[:, :, :-1]) * xi
    return out.reshape(*q.shape[:2], chunks * length, -1), states[:, :, -1]


def carry(added: Tensor, gamma: Tensor, dim: int = 2) -> Tensor:
    """Running sum with decay along an axis behind the heads: s_m = gamma s_(m-1) + added_m."""
    mask = mask_1d(gamma, added.shape[dim])  # h m m
    mask = mask.reshape(mask.shape[0], *[1] * (dim - 2), *mask.shape[1:])
    return (mask @ added.flatten(dim + 1)).view_as(added)
