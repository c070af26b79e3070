"""The effective receptive field: how much the pixels of an image move what the last block says of one patch."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vir.layers.patches import Grid
from vir.viz.fading import Query, check_query, token_of
from vir.viz.inside import device_of, retention_layers
from vir.viz.style import CannotDraw


@dataclass(frozen=True)
class Field:
    """The mean over images of |gradient|, summed over colours, for every pixel."""

    strength: Tensor  # height width
    query: Query
    grid: Grid
    stride: int
    images: int

    @property
    def centre(self) -> tuple[float, float]:
        """Row and column of the pixel in the middle of the patch; of the class token, below the last one."""
        row, col = (self.grid[0], self.grid[1] - 1) if self.query == "class" else self.query
        return (row + 0.5) * self.stride - 0.5, (col + 0.5) * self.stride - 0.5

    def within(self, pixels: float) -> float:
        """Share of the gradient that is not farther from the patch's middle than this."""
        return float(self.strength[self._distances() <= pixels].sum() / self.strength.sum())

    def radius(self, share: float) -> float:
        """Pixels from the patch's middle within which this share of the gradient lies."""
        distances, order = self._distances().flatten().sort()
        total = self.strength.flatten()[order].cumsum(0)
        return float(distances[int((total < share * total[-1]).sum())])

    def ahead(self) -> float:
        """Share of the gradient below the patch or to its right, where retention itself never looks in 2D."""
        if self.query == "class":
            return 0.0
        row, col = ((place + 1) * self.stride for place in self.query)
        return 1 - float(self.strength[:row, :col].sum() / self.strength.sum())

    def _distances(self) -> Tensor:
        rows, cols = (torch.arange(side, dtype=torch.float64) for side in self.strength.shape)
        return torch.hypot(rows[:, None] - self.centre[0], cols[None] - self.centre[1])


def receptive_field(model: nn.Module, images: Iterable[Tensor], query: Query | None = None) -> Field:
    """Gradient of the sum of the features that the last block gives to a patch, the middle one by default."""
    layer = retention_layers(model)[-1]
    total, count, looked = None, 0, query
    grid: Grid = (0, 0)
    kept: list[Tensor] = []
    hook = layer.block.register_forward_hook(lambda block, args, out: kept.append(out))
    try:
        for pixels in images:
            grid = layer.grid(*pixels.shape[-2:])
            looked = (grid[0] // 2, grid[1] // 2) if query is None else query
            pixels = pixels.to(device_of(model)).clone().requires_grad_()
            with torch.enable_grad():
                model(pixels)
                tokens = kept.pop()[0]
                check_query(looked, grid, class_token=len(tokens) > grid[0] * grid[1])
                (gradient,) = torch.autograd.grad(tokens[token_of(looked, grid)].sum(), pixels)
            strength = gradient[0].abs().sum(0).double().cpu()
            total, count = strength if total is None else total + strength, count + 1
    finally:
        hook.remove()
    if total is None or looked is None:
        raise CannotDraw("no image to measure on, expected at least one. Name some.")
    return Field(total / count, looked, grid, layer.stride, count)
