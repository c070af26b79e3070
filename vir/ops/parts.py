"""A CPU works on as many samples and heads at a time as keep their states in its cache.

It makes large batches about twice as fast, and the peak memory of a layer smaller.
"""

from collections.abc import Callable

import torch
from torch import Tensor

CACHE_FLOATS = 2**20  # of states: 4 MB, with a few copies of them in use at a time

# (q, k, v, gamma, scale, state) -> out, state
Stateful = Callable[[Tensor, Tensor, Tensor, Tensor, float, Tensor], tuple[Tensor, Tensor]]


def in_parts(form: Stateful, states: int) -> Stateful:
    """The same form, part by part where that pays; `states` is how many a head works on at once."""

    def run(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, scale: float, state: Tensor) -> tuple[Tensor, Tensor]:
        batch, heads = q.shape[:2]
        fit = max(1, CACHE_FLOATS // (states * q.shape[3] * v.shape[3]))
        if q.device.type != "cpu" or fit >= batch * heads or torch.compiler.is_compiling():
            return form(q, k, v, gamma, scale, state)
        samples, heads = max(1, fit // heads), min(fit, heads)
        outs, ends = [], []
        for sample in zip(*(x.split(samples) for x in (q, k, v, state)), strict=True):
            parts = zip(*(x.split(heads, dim=1) for x in sample), gamma.split(heads), strict=True)
            done = [form(q_i, k_i, v_i, gamma_i, scale, state_i) for q_i, k_i, v_i, state_i, gamma_i in parts]
            outs.append(concatenate([out for out, _ in done], dim=1))
            ends.append(concatenate([end for _, end in done], dim=1))
        return concatenate(outs, dim=0), concatenate(ends, dim=0)

    return run


def concatenate(parts: list[Tensor], dim: int) -> Tensor:
    """torch.cat without a copy when there is a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
