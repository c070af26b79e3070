"""The block that ViR and HViR share, and the paper's ablations of it."""

from math import ceil
from typing import Any, Literal

import torch
from timm.layers import DropPath, LayerScale, Mlp
from timm.models import register_notrace_module
from torch import Tensor, nn

from vir.layers.norm import InnerNorm
from vir.layers.patches import Grid
from vir.layers.residual import is_bare, plus, scaled_linear
from vir.layers.retention import MultiHeadRetention, Retention

SLICE_TOKENS = 2048

# The paper's component study (its section 5.1), each by name; None is the model itself.
Ablation = Literal["gated", "no_class_token", "scaled_key", "multipass"]
ABLATIONS: tuple[Ablation, ...] = ("gated", "no_class_token", "scaled_key", "multipass")


def check_ablation(model: str, ablation: Ablation | None, known: tuple[Ablation, ...] = ABLATIONS) -> None:
    if ablation is not None and ablation not in known:
        raise ValueError(f"{model}: ablation={ablation!r}, expected None or one of {', '.join(map(repr, known))}.")


def depth_for(depth: int, ablation: Ablation | None) -> int:
    """A gate adds a thirteenth matrix to the twelve of a block: fewer blocks keep the number of parameters."""
    return round(depth * 12 / 13) if ablation == "gated" else depth


@register_notrace_module
class SlicedMlp(Mlp):
    """An MLP that, in evaluation on a CPU, takes a part of the tokens at a time.

    Its wide hidden layer would else set the peak memory of the model, and leave the cache.
    """

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if not x.is_cpu or self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._scaled(x, scale)
        parts = ceil(x.shape[0] * x.shape[1] / SLICE_TOKENS)
        if parts == 1:
            return self._scaled(x, scale)
        dim = 0 if x.shape[0] >= parts else 1
        return torch.cat([self._scaled(part, scale) for part in x.tensor_split(parts, dim)], dim)

    def _scaled(self, x: Tensor, scale: Tensor | None) -> Tensor:
        hidden = self.act(self.fc1(x))
        if not self.training:  # nothing is dropped then; small images wait for the host, whom every call costs time
            return scaled_linear(self.fc2, hidden, scale)  # type: ignore[arg-type]
        return self.drop2(scaled_linear(self.fc2, self.drop1(hidden), scale))  # type: ignore[arg-type]


class RetentionBlock(nn.Module):
    """Z' = MHR(LN(Z)) + Z, then Z = MLP(LN(Z')) + Z', both scaled by LayerScale."""

    def __init__(
        self,
        dim: int,
        heads: int,
        retention: Retention,
        *,
        ablation: Ablation | None = None,
        init_values: float | None = 1e-5,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.norm1 = InnerNorm(dim, eps=1e-6, **dd)
        self.retention = MultiHeadRetention(
            dim,
            heads,
            retention,
            gated=ablation == "gated",
            scaled="key" if ablation == "scaled_key" else "query",
            **dd,
        )
        self.ls1 = LayerScale(dim, init_values, **dd) if init_values else nn.Identity()
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = InnerNorm(dim, eps=1e-6, **dd)
        self.mlp = SlicedMlp(dim, 4 * dim, drop=proj_drop, **dd)
        self.ls2 = LayerScale(dim, init_values, **dd) if init_values else nn.Identity()
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        scale1, scale2 = self._scales()
        # Gradients of a scale are less work with the weights; compilers fuse; autocast would copy what plus takes; who
        # traces (torch.fx) sees modules alone.
        alone = not self.training and not torch.is_grad_enabled() and isinstance(x, Tensor)
        if not alone or torch.compiler.is_compiling() or torch.is_autocast_enabled():
            x = x + self.drop_path1(self.retention(self.norm1(x), grid, scale1))
            return x + self.drop_path2(self.mlp(self.norm2(x), scale2))
        if is_bare(self.retention, MultiHeadRetention):
            x = self.retention.onto(x, self.norm1(x), grid, scale1)
        else:
            x = plus(x, self.retention(self.norm1(x), grid), scale1)
        return plus(x, self.mlp(self.norm2(x)), scale2)

    def stream(self, x: Tensor, cols: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """As forward in evaluation, of a band of whole rows: from the state above them to that below."""
        scale1, scale2 = self._scales()
        out, state = self.retention.stream(self.norm1(x), cols, state)
        x = plus(x, out, scale1)
        return plus(x, self.mlp(self.norm2(x)), scale2), state

    def _scales(self) -> tuple[Tensor | None, Tensor | None]:
        return getattr(self.ls1, "gamma", None), getattr(self.ls2, "gamma", None)
