"""Four maps from the one of a plain backbone.

"Exploring Plain Vision Transformer Backbones for Object Detection", Li, Mao, Girshick, He, 2022.
"""

from torch import Tensor, nn

from vir.layers.norm import InnerChannelNorm

PLAIN_STRIDE = 16


def _twice_as_large(inputs: int, outputs: int) -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(inputs, outputs, 2, stride=2)


class SimplePyramid(nn.Module):
    """From a map at stride 16 to maps at 4, 8, 16, 32: two enlarged, one as it is, one halved."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.channels = (dim // 4, dim // 2, dim, dim)
        four_times = nn.Sequential(
            _twice_as_large(dim, dim // 2), InnerChannelNorm(dim // 2), nn.GELU(), _twice_as_large(dim // 2, dim // 4)
        )
        self.levels = nn.ModuleList([four_times, _twice_as_large(dim, dim // 2), nn.Identity(), nn.MaxPool2d(2)])

    def forward(self, x: Tensor) -> list[Tensor]:
        return [level(x) for level in self.levels]
