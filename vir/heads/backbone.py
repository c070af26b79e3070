"""Any backbone of timm as four maps at strides 4, 8, 16, 32, which is what detection and segmentation start from."""

from typing import Any, Literal

import timm
import torch.nn.functional as F
from torch import Tensor, nn

import vir.models  # noqa: F401  (registers the models in timm)
from vir.heads.pyramid import PLAIN_STRIDE, SimplePyramid
from vir.layers.norm import ChannelNorm

STRIDES = (4, 8, 16, 32)

OutputNorm = Literal["layer", "none"]
OUTPUT_NORMS: dict[OutputNorm, Any] = {"layer": ChannelNorm, "none": lambda channels: nn.Identity()}
BatchNorm = Literal["trained", "frozen"]
BATCH_NORMS: tuple[BatchNorm, ...] = ("trained", "frozen")

# What some models of timm need to be told to take images of any size, by the beginning of their names.
ANY_SIZE: dict[str, dict[str, Any]] = {
    "swin": {"strict_img_size": False},
    **{name: {"dynamic_img_size": True} for name in ("vit_tiny_", "vit_small_", "vit_base_", "vit_large_", "deit")},
}


def create_body(name: str, **model_args: Any) -> nn.Module:
    """timm's model as a list of maps, told to take any image size where it must be told."""
    free = next((args for start, args in ANY_SIZE.items() if name.startswith(start)), {})
    return timm.create_model(name, features_only=True, **{**free, **model_args})


class Backbone(nn.Module):
    """Images `b 3 height width` to four maps; sides are filled up to a multiple of 32, so that strides are exact.

    Every level has a norm of its own. Blocks add to their input and end without a norm, and the model's last one is for
    its last level and goes with the classifier. It is a LayerNorm because detection has few images in a batch.
    """

    def __init__(
        self,
        body: nn.Module,
        *,
        output_norm: OutputNorm = "layer",
        frozen_stages: int = 0,
        batch_norm: BatchNorm = "trained",
    ) -> None:
        super().__init__()
        if output_norm not in OUTPUT_NORMS:
            raise ValueError(f"output_norm={output_norm!r}, expected one of {', '.join(map(repr, OUTPUT_NORMS))}.")
        if batch_norm not in BATCH_NORMS:
            raise ValueError(f"batch_norm={batch_norm!r}, expected one of {', '.join(map(repr, BATCH_NORMS))}.")
        self.body = body
        info: Any = body.feature_info
        strides, channels = info.reduction(), info.channels()
        self.pyramid = SimplePyramid(channels[-1]) if len(set(strides)) == 1 else None
        if self.pyramid is not None:
            self._check_plain(strides[-1])
            self.levels = [-1]
            self.channels = self.pyramid.channels
            stages = [level["module"] for level in info.info]
        else:
            self.levels = self._levels(strides)
            self.channels = tuple(channels[i] for i in self.levels)
            stages = [info.module_name()[i] for i in self.levels]
        self.norms = nn.ModuleList(OUTPUT_NORMS[output_norm](dim) for dim in self.channels)
        self.batch_norm = batch_norm
        self.frozen = self._freeze(stages, frozen_stages)
        if batch_norm == "frozen":
            for module in self._batch_norms():
                module.requires_grad_(False)
        self.train(self.training)

    @staticmethod
    def _check_plain(stride: int) -> None:
        if stride != PLAIN_STRIDE:
            raise ValueError(
                f"the backbone has one stride, {stride}; a plain backbone needs {PLAIN_STRIDE} to make maps at strides "
                f"{STRIDES}: choose a model with patches of {PLAIN_STRIDE} pixels, or give patch_size={PLAIN_STRIDE}."
            )

    @staticmethod
    def _levels(strides: list[int]) -> list[int]:
        """Which of the backbone's maps are wanted: the last one of each stride."""
        last = {stride: i for i, stride in enumerate(strides)}
        if not set(STRIDES) <= set(last):
            raise ValueError(
                f"the backbone gives maps at strides {strides}, expected {STRIDES} among them, or one stride of "
                f"{PLAIN_STRIDE}: choose another model, or other out_indices."
            )
        return [last[stride] for stride in STRIDES]

    def _freeze(self, stages: list[str], count: int) -> list[str]:
        """Take the gradients from the stem and the first stages; their names, so that they can stay in evaluation."""
        if not 0 <= count <= len(stages):
            raise ValueError(
                f"frozen_stages={count}, expected 0 (none) to {len(stages)} (all): the stages are {', '.join(stages)}."
            )
        if not count:
            return []
        modules = dict(self.body.named_modules())
        # timm's wrappers put `model.` before a name, or fold `stages.0` into `stages_0`.
        names = [stages[count - 1], f"model.{stages[count - 1]}", stages[count - 1].replace(".", "_", 1)]
        last = next((name for name in names if name in modules), None)
        if last is None:
            raise ValueError(f"frozen_stages={count}: the backbone has no module {names[0]!r}; leave it at 0.")
        frozen = []
        for name, module in modules.items():  # in the order in which an image meets them
            if name == "" or last.startswith(f"{name}."):  # holds later stages too; what it owns itself is the stem's
                for parameter in module.parameters(recurse=False):
                    parameter.requires_grad_(False)
                continue
            module.requires_grad_(False)
            frozen.append(name)
            if name == last:
                break
        return frozen

    def _batch_norms(self) -> list[nn.Module]:
        return [module for module in self.body.modules() if isinstance(module, (nn.BatchNorm2d, nn.SyncBatchNorm))]

    def train(self, mode: bool = True) -> "Backbone":
        super().train(mode)
        frozen = [self.body.get_submodule(name) for name in self.frozen]
        for module in frozen + (self._batch_norms() if self.batch_norm == "frozen" else []):
            module.eval()
        return self

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Less memory for more time: timm's model keeps the inputs of its blocks alone and computes the rest again."""
        model = self.body if hasattr(self.body, "set_grad_checkpointing") else self.body.model
        model.set_grad_checkpointing(enable)  # type: ignore[operator, union-attr]

    def forward(self, images: Tensor) -> list[Tensor]:
        below, right = (-side % STRIDES[-1] for side in images.shape[-2:])
        maps = self.body(F.pad(images, (0, right, 0, below)) if below or right else images)
        maps = [maps[i] for i in self.levels]
        if getattr(self.body, "output_fmt", "NCHW") == "NHWC":
            maps = [x.permute(0, 3, 1, 2) for x in maps]
        if self.pyramid is not None:
            maps = self.pyramid(maps[0])
        return [norm(x) for norm, x in zip(self.norms, maps, strict=True)]
