"""What a block adds to its tokens: a linear layer with a scale, the sum, and the norm before both."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vir.layers.norm import MANY, HeadsNorm
from vir.ops import kernels

MANY_TOKENS = 4  # for each input channel of a linear layer
# Whether there are hooks of all modules, as counters of FLOPs set them; a PyTorch that cannot tell has none for us.
any_global_hook = getattr(torch.nn.modules.module, "_has_any_global_hook", bool)


def scaled_linear(linear: nn.Linear, x: Tensor, scale: Tensor | None) -> Tensor:
    """scale * linear(x). Where there are many tokens the weights are scaled instead: there is less of them, and the
    gradient of the scale is then a sum over weights, not over tokens."""
    if scale is None:
        return linear(x)
    compiled = torch.compiler.is_compiling()  # compilers fuse it by themselves
    if compiled or _are_few(x) or not _is_only_weights(linear, nn.Linear):
        return linear(x) * scale
    bias = None if linear.bias is None else linear.bias * scale
    return F.linear(x, linear.weight * scale[:, None], bias)


def plus(x: Tensor, part: Tensor, scale: Tensor | None) -> Tensor:
    """x + scale * part, in one pass; without gradients."""
    if scale is None:
        return x + part
    if x.numel() >= MANY and kernels.scaled_sum_serves(x, part, scale):
        return kernels.scaled_sum(x, part, scale)
    return torch.addcmul(x, part, scale)


def plus_normed(x: Tensor, rows: Tensor, norm: HeadsNorm, linear: nn.Linear, scale: Tensor | None) -> Tensor:
    """x + scale * linear(norm(rows)); without gradients. Where there are many tokens the norm goes into the weights of
    the layer and into the sum: its own pass over the tokens is spared."""
    plain = _is_only_weights(norm, HeadsNorm) and _is_only_weights(linear, nn.Linear)
    if x.numel() >= MANY and plain and not _are_few(rows):
        given = linear.weight, linear.bias, norm.weight, norm.bias, scale
        weights = [weight for weight in given if weight is not None]
        if len(weights) == len(given) and kernels.normed_sum_serves(x, rows, *weights):
            return kernels.normed_sum(x, rows, *weights, eps=norm.eps)
    return plus(x, linear(norm(rows).to(x.dtype)), scale)


def _are_few(tokens: Tensor) -> bool:
    """So few that work on the weights of a layer is not small beside them."""
    return tokens.shape[0] * tokens.shape[1] < MANY_TOKENS * tokens.shape[2]


def is_bare(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Of this very kind, without hooks, without a forward of its own, and not compiled by itself."""
    if type(module) is not kind or "forward" in vars(module) or module._compiled_call_impl is not None:
        return False
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return not (hooks or any_global_hook())


def _is_only_weights(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Bare, and no weights of another kind, as pruning, spectral norms and adapters add them. Else it is called as it
    is."""
    return is_bare(layer, kind) and type(layer.weight) in (nn.Parameter, Tensor)
