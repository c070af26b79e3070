"""LayerNorm of tokens, by our kernel where it pays."""

import torch
from timm.models import register_notrace_module
from torch import Tensor, nn

from vir.ops import kernels

MANY = 2**22  # numbers: with fewer a GPU waits for its host, whom our kernel costs more than PyTorch's


@register_notrace_module
class TokenNorm(nn.LayerNorm):
    """A LayerNorm. With a few hundred channels PyTorch's takes a GPU several times as long as the reading of them."""

    def forward(self, x: Tensor) -> Tensor:
        if kernels.norm_serves(x, self.weight) and x.numel() >= MANY:
            dtype = torch.promote_types(x.dtype, self.weight.dtype)
            return kernels.layer_norm(x, self.weight, self.bias, self.eps, dtype)
        return super().forward(x)
