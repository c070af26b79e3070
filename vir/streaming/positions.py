"""Learned positions of a huge grid, a band of rows at a time, equal to those resampled as a whole."""

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor

from vir.layers.patches import Grid


def weights_along(trained: int, wanted: int) -> Tensor:
    """How much each of the trained positions of an axis counts at each of the wanted ones: `wanted trained`.

    Resampling is linear and goes axis by axis: resampled unit vectors tell all of it.
    """
    units = torch.eye(trained)[None]  # trained positions of one column, as many channels
    return resample_abs_pos_embed(units, [wanted, 1], [trained, 1], num_prefix_tokens=0)[0]


class Positions:
    """Of one image: rows x cols patches, whatever grid the positions were learned on."""

    def __init__(self, learned: Tensor, trained_grid: Grid, grid: Grid) -> None:
        device = learned.device
        self.learned = learned.detach()[0].float().unflatten(0, trained_grid)  # y x c
        self.dtype = learned.dtype
        self.down = weights_along(trained_grid[0], grid[0]).to(device)
        self.across = weights_along(trained_grid[1], grid[1]).to(device)

    def of_rows(self, start: int, stop: int) -> Tensor:
        """`1 n c`, of the patches of some rows."""
        band = torch.einsum("ry,yxc->rxc", self.down[start:stop], self.learned)
        return torch.einsum("qx,rxc->rqc", self.across, band).flatten(0, 1)[None].to(self.dtype)
