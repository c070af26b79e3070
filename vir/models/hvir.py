"""HViR, the hybrid Vision Retention Network: two convolutional stages, then two stages of retention.

"ViR: Towards Efficient Vision Retention Backbones", Hatamizadeh, Ranzinger, Lan, Alvarez, Fidler, Kautz, 2023.
"""

from collections.abc import Sequence
from typing import Any

from timm.layers import ClassifierHead, DropPath, calculate_drop_path_rates, get_device_dtype
from timm.models import build_model_with_cfg, checkpoint, generate_default_cfgs, register_model
from torch import Tensor, nn

from vir import ops
from vir.layers.blocks import Ablation, RetentionBlock, check_ablation, depth_for
from vir.layers.norm import InnerChannelNorm
from vir.layers.patches import both_ways, fold_both_ways, to_map, to_tokens
from vir.layers.retention import Retention, set_form
from vir.models.contract import check_output_fmt, init_linear, take_indices
from vir.weights import pretrained_cfgs

LAST_STRIDE = 32


def _conv3x3(inputs: int, outputs: int, stride: int = 1, **dd: Any) -> nn.Conv2d:
    # Padding by one makes every size fit: an odd side is halved upwards.
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False, **dd)


def _stem(inputs: int, hidden: int, outputs: int, **dd: Any) -> nn.Sequential:
    return nn.Sequential(
        _conv3x3(inputs, hidden, 2, **dd), nn.BatchNorm2d(hidden, **dd), nn.ReLU(inplace=True),
        _conv3x3(hidden, outputs, 2, **dd), nn.BatchNorm2d(outputs, **dd), nn.ReLU(inplace=True),
    )  # fmt: skip


def _downsample(inputs: int, outputs: int, **dd: Any) -> nn.Sequential:
    return nn.Sequential(InnerChannelNorm(inputs, **dd), _conv3x3(inputs, outputs, 2, **dd))


class ResBlock(nn.Module):
    """h' = GELU(BN(Conv(h))), then h = BN(Conv(h')) + h."""

    def __init__(self, dim: int, drop_path: float = 0.0, **dd: Any) -> None:
        super().__init__()
        self.conv1 = _conv3x3(dim, dim, **dd)
        self.norm1 = nn.BatchNorm2d(dim, **dd)
        self.act = nn.GELU()
        self.conv2 = _conv3x3(dim, dim, **dd)
        self.norm2 = nn.BatchNorm2d(dim, **dd)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.norm1(self.conv1(x)))
        return x + self.drop_path(self.norm2(self.conv2(hidden)))


class ConvStage(nn.Module):
    def __init__(self, downsample: nn.Module, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)
        self.grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        for block in self.blocks:
            x = checkpoint(block, x) if self.grad_checkpointing else block(x)
        return x


class RetentionStage(nn.Module):
    def __init__(self, downsample: nn.Module, blocks: Sequence[nn.Module], multipass: bool) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)
        self.multipass = multipass
        self.grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        rows, cols = x.shape[2], x.shape[3]
        tokens, grid = to_tokens(x), (rows, cols)
        if self.multipass:
            tokens, grid = both_ways(tokens), (2 * rows, cols)
        for block in self.blocks:
            tokens = checkpoint(block, tokens, grid) if self.grad_checkpointing else block(tokens, grid)
        tokens = fold_both_ways(tokens) if self.multipass else tokens
        return to_map(tokens, (rows, cols))


class HybridVisionRetention(nn.Module):
    """Four levels at strides 4, 8, 16, 32: convolutions where the map is large, retention where it is small."""

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        stem_dim: int = 64,
        dims: tuple[int, int, int, int] = (64, 128, 256, 512),
        depths: tuple[int, int, int, int] = (2, 3, 6, 5),
        heads: tuple[int, int] = (8, 16),
        retention: Retention = "2d",
        ablation: Ablation | None = None,
        init_values: float | None = 1e-5,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if ablation == "no_class_token":
            raise ValueError("HViR has no class token: it averages already. Use this ablation with a ViR model.")
        check_ablation("HViR", ablation)
        dd = {"device": device, "dtype": dtype}
        self.num_classes, self.in_chans = num_classes, in_chans
        self.num_features = self.head_hidden_size = dims[-1]

        depths = (*depths[:2], *(depth_for(depth, ablation) for depth in depths[2:]))  # type: ignore[assignment]
        drop_path: list[Any] = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        self.stem = _stem(in_chans, stem_dim, dims[0], **dd)
        stages: list[nn.Module] = []
        for i, dim in enumerate(dims):
            downsample = _downsample(dims[i - 1], dim, **dd) if i else nn.Identity()
            if i < 2:
                stages.append(ConvStage(downsample, [ResBlock(dim, drop, **dd) for drop in drop_path[i]]))
                continue
            blocks = [
                RetentionBlock(
                    dim,
                    heads[i - 2],
                    retention,
                    ablation=ablation,
                    init_values=init_values,
                    proj_drop=proj_drop_rate,
                    drop_path=drop,
                    **dd,
                )
                for drop in drop_path[i]
            ]
            stages.append(RetentionStage(downsample, blocks, multipass=ablation == "multipass"))
        self.stages = nn.Sequential(*stages)
        self.feature_info = [
            {"module": f"stages.{i}", "num_chs": dim, "reduction": 4 * 2**i} for i, dim in enumerate(dims)
        ]
        self.norm: nn.Module = nn.BatchNorm2d(dims[-1], **dd)
        self.head = ClassifierHead(dims[-1], num_classes, global_pool, drop_rate, **dd)
        self.init_weights()

    def init_weights(self) -> None:
        self.apply(init_linear)

    def set_form(self, form: ops.Form, chunk: int | None = None) -> None:
        """Choose how retention is computed on this model; weights and logits stay the same."""
        set_form(self, form, chunk)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for stage in self.stages:
            stage.grad_checkpointing = enable  # type: ignore[assignment]

    def no_weight_decay(self) -> set[str]:
        return set()

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        fine = [
            (r"^stages\.(\d+)\.downsample", (0,)),
            (r"^stages\.(\d+)\.blocks\.(\d+)", None),
            (r"^norm", (99999,)),
        ]
        return {"stem": r"^stem", "blocks": r"^stages\.(\d+)" if coarse else fine}

    def get_classifier(self) -> nn.Module:
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        self.head.reset(num_classes, global_pool, **get_device_dtype(self))
        self.head.apply(init_linear)

    def forward_features(self, x: Tensor) -> Tensor:
        return self.norm(self.stages(self.stem(x)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Maps after the chosen stages; `norm` applies the final norm to the last stage, the only one it fits."""
        check_output_fmt(output_fmt, ("NCHW",))
        wanted = take_indices(len(self.stages), indices)
        last = len(self.stages) - 1
        x = self.stem(x)
        features = []
        for i, stage in enumerate(self.stages[: max(wanted) + 1] if stop_early else self.stages):
            x = stage(x)
            if i in wanted:
                features.append(self.norm(x) if norm and i == last else x)
        return features if intermediates_only else (self.norm(x), features)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the chosen features do not need."""
        wanted = take_indices(len(self.stages), indices)
        self.stages = self.stages[: max(wanted) + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return wanted


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: HybridVisionRetention) -> dict[str, Tensor]:
    """Unwrap a training checkpoint; nothing in HViR depends on the image size."""
    return dict(state_dict.get("model", state_dict.get("state_dict", state_dict)))


def _cfg(input_size: tuple[int, int, int] = (3, 224, 224), **kwargs: Any) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": input_size,
        "pool_size": tuple(-(-side // LAST_STRIDE) for side in input_size[1:]),
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "fixed_input_size": False,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "stem.0",
        "classifier": "head.fc",
        "license": "apache-2.0",
        **kwargs,
    }


def _size(stem: int, dims: tuple, depths: tuple, heads: tuple, drop_path: float) -> dict[str, Any]:
    return {"stem_dim": stem, "dims": dims, "depths": depths, "heads": heads, "drop_path_rate": drop_path}


# The tiny one is ours, for small work.
SIZES: dict[str, dict[str, Any]] = {
    "hvir_tiny": _size(32, (32, 64, 128, 256), (2, 2, 6, 4), (4, 8), 0.1),
    "hvir_0": _size(64, (64, 128, 256, 512), (2, 3, 6, 5), (8, 16), 0.2),
    "hvir_1": _size(32, (80, 160, 320, 640), (1, 3, 8, 5), (8, 16), 0.2),
    "hvir_2": _size(64, (96, 192, 384, 768), (3, 3, 8, 5), (8, 16), 0.2),
    "hvir_3": _size(64, (128, 256, 512, 1024), (3, 3, 12, 5), (8, 16), 0.3),
    "hvir_4": _size(64, (196, 392, 784, 1568), (3, 3, 12, 5), (16, 32), 0.3),
}
# The star, coming last, makes the one without weights the default: it has ImageNet's thousand classes.
_CFGS: dict[str, Any] = {tag: _cfg(**found) for name in SIZES for tag, found in pretrained_cfgs(name).items()}
_CFGS |= {f"{name}.*": _cfg() for name in SIZES}
default_cfgs = generate_default_cfgs(_CFGS)


def _create(name: str, pretrained: bool, **kwargs: Any) -> HybridVisionRetention:
    return build_model_with_cfg(
        HybridVisionRetention,
        name,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": kwargs.pop("out_indices", (0, 1, 2, 3)), "feature_cls": "getter"},
        **{**SIZES[name], **kwargs},
    )


@register_model
def hvir_tiny(pretrained: bool = False, **kwargs: Any) -> HybridVisionRetention:
    return _create("hvir_tiny", pretrained, **kwargs)


@register_model
def hvir_0(pretrained: bool = False, **kwargs: Any) -> HybridVisionRetention:
    return _create("hvir_0", pretrained, **kwargs)


@register_model
def hvir_1(pretrained: bool = False, **kwargs: Any) -> HybridVisionRetention:
    return _create("hvir_1", pretrained, **kwargs)


@register_model
def hvir_2(pretrained: bool = False, **kwargs: Any) -> HybridVisionRetention:
    return _create("hvir_2", pretrained, **kwargs)


@register_model
def hvir_3(pretrained: bool = False, **kwargs: Any) -> HybridVisionRetention:
    return _create("hvir_3", pretrained, **kwargs)


@register_model
def hvir_4(pretrained: bool = False, **kwargs: Any) -> HybridVisionRetention:
    return _create("hvir_4", pretrained, **kwargs)
