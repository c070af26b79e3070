"""LayerNorm of tokens and of maps, by our kernel where it serves: with a few hundred channels PyTorch's takes a GPU
several times as long as the reading of them."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn

from vir.layers.patches import to_map, to_tokens
from vir.ops import kernels
from vir.ops.checks import carry_derivatives

MANY = 2**22  # numbers; with fewer, we think, the host counts, whom our kernel costs more than PyTorch's
MANY_LEARNED = 2**24  # where gradients are asked for: from here on a slow host has time for them, as measured


@register_notrace_module
class TokenNorm(nn.LayerNorm):
    """A LayerNorm of many tokens."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight  # a module takes its time to find it: once is enough
        if kernels.norm_serves(x) and self.pays(x, weight) and weight.shape == x.shape[-1:]:
            bias = self.bias
            # What carries derivatives is asked last: small images wait for the host.
            if bias is not None and not carry_derivatives(weight, bias):
                return kernels.layer_norm(x, weight, bias, self.eps, self.dtype_of(x, weight))
        return self.by_pytorch(x)

    def pays(self, x: Tensor, weight: Tensor) -> bool:
        """Whether our kernel does."""
        return x.numel() >= (MANY_LEARNED if kernels.learns(x, weight) else MANY)

    def by_pytorch(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def dtype_of(self, x: Tensor, weight: Tensor) -> torch.dtype:
        """Of what our kernel makes of x."""
        return x.dtype if x.dtype == weight.dtype else torch.promote_types(x.dtype, weight.dtype)


class InnerNorm(TokenNorm):
    """One before linear layers. Under autocast these would round what it makes of x: it rounds at once."""

    def dtype_of(self, x: Tensor, weight: Tensor) -> torch.dtype:
        if torch.is_autocast_enabled(x.device.type):
            return torch.get_autocast_dtype(x.device.type)
        return super().dtype_of(x, weight)


class ChannelNorm(TokenNorm):
    """One of a map's channels: a LayerNorm of its patches as tokens.

    Written so, torch.compile takes them in one pass; with the axes of a map, as timm's LayerNorm2d has them, it took a
    GPU nearly four times as long.
    """

    def __init__(self, channels: int, eps: float = 1e-6, **dd: Any) -> None:
        super().__init__(channels, eps=eps, **dd)

    def forward(self, x: Tensor) -> Tensor:
        return to_map(super().forward(to_tokens(x)), (x.shape[2], x.shape[3]))


class InnerChannelNorm(ChannelNorm, InnerNorm):
    """One before a convolution."""


class HeadsNorm(InnerNorm):
    """One that takes float32 from half-precision layers: fp16 sums come so, which may leave fp16's range."""

    def pays(self, x: Tensor, weight: Tensor) -> bool:
        return super().pays(x, weight) or (x.dtype != weight.dtype and not kernels.learns(x, weight))

    def by_pytorch(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return super().by_pytorch(x)
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        weight, bias = (None if own is None else own.to(dtype) for own in (self.weight, self.bias))
        return F.layer_norm(x.to(dtype), self.normalized_shape, weight, bias, self.eps)
