"""ViR, the isotropic Vision Retention Network: a ViT whose attention is retention.

"ViR: Towards Efficient Vision Retention Backbones", Hatamizadeh, Ranzinger, Lan, Alvarez, Fidler, Kautz, 2023.
"""

from collections.abc import Sequence
from math import isqrt
from typing import Any, Literal

import torch
from timm.layers import (
    PatchEmbed,
    get_device_dtype,
    resample_abs_pos_embed,
    resample_patch_embed,
    trunc_normal_,
)
from timm.models import build_model_with_cfg, checkpoint, generate_default_cfgs, register_model
from torch import Tensor, nn

from vir import ops
from vir.layers.blocks import Ablation, RetentionBlock, check_ablation, depth_for
from vir.layers.norm import TokenNorm
from vir.layers.patches import Grid, add_positions, append_class_token, both_ways, fold_both_ways, to_map
from vir.layers.retention import Retention, set_form
from vir.models.contract import check_output_fmt, init_linear, take_indices

Pool = Literal["token", "avg", ""]
Positions = Literal["learn", "none"]  # none: nothing is learned about places, for maps of any size


class VisionRetention(nn.Module):
    """Patches, positions, class token last, retention blocks; any image size at run time."""

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: Pool | None = None,
        embed_dim: int = 768,
        depth: int = 12,
        heads: int = 12,
        retention: Retention = "1d",
        ablation: Ablation | None = None,
        pos_embed: Positions = "learn",
        init_values: float | None = 1e-5,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_ablation("ViR", ablation)
        dd = {"device": device, "dtype": dtype}
        self.num_classes, self.in_chans = num_classes, in_chans
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.multipass = ablation == "multipass"
        self.grad_checkpointing = False

        self.patch_embed = PatchEmbed(
            img_size, patch_size, in_chans, embed_dim, output_fmt="NHWC",
            strict_img_size=False, dynamic_img_pad=True, **dd,
        )  # fmt: skip
        self._check_patches(img_size)
        if pos_embed not in ("learn", "none"):
            raise ValueError(f"pos_embed={pos_embed!r}, expected 'learn' or 'none'.")
        positions = torch.empty(1, self.patch_embed.num_patches, embed_dim, **dd)
        self.pos_embed = nn.Parameter(positions) if pos_embed == "learn" else None
        has_class_token = ablation != "no_class_token"
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim, **dd)) if has_class_token else None
        default_pool: Pool = "token" if has_class_token else "avg"
        self.global_pool = self._check_pool(default_pool if global_pool is None else global_pool)
        self.pos_drop = nn.Dropout(pos_drop_rate)

        depth = depth_for(depth, ablation)
        drop_path = torch.linspace(0, drop_path_rate, depth, device="cpu").tolist()
        self.blocks = nn.ModuleList(
            RetentionBlock(
                embed_dim,
                heads,
                retention,
                ablation=ablation,
                init_values=init_values,
                proj_drop=proj_drop_rate,
                drop_path=drop_path[i],
                **dd,
            )
            for i in range(depth)
        )
        reduction = self.patch_embed.feat_ratio()
        self.feature_info = [
            {"module": f"blocks.{i}", "num_chs": embed_dim, "reduction": reduction} for i in range(depth)
        ]
        self.norm: nn.Module = TokenNorm(embed_dim, eps=1e-6, **dd)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes, **dd) if num_classes else nn.Identity()
        self.init_weights()

    def init_weights(self) -> None:
        if self.pos_embed is not None:
            trunc_normal_(self.pos_embed, std=0.02)
        if self.cls_token is not None:
            nn.init.normal_(self.cls_token, std=1e-6)
        self.apply(init_linear)

    def set_form(self, form: ops.Form, chunk: int | None = None) -> None:
        """Choose how retention is computed on this model; weights and logits stay the same."""
        set_form(self, form, chunk)

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Move the learned positions to another image size, to train on there."""
        trained_grid = self.patch_embed.grid_size
        self.patch_embed.set_input_size(img_size)
        self._check_patches(img_size)
        if self.pos_embed is None:
            return
        with torch.no_grad():
            moved = resample_abs_pos_embed(
                self.pos_embed, self.patch_embed.grid_size, trained_grid, num_prefix_tokens=0
            )
        self.pos_embed = nn.Parameter(moved, self.pos_embed.requires_grad)

    def _check_patches(self, img_size: int | tuple[int, int]) -> None:
        if not self.patch_embed.num_patches:
            side = self.patch_embed.patch_size[0]
            raise ValueError(f"img_size={img_size} has no whole patch of {side} pixels: choose at least {side}.")

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed", "cls_token"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {
            "stem": r"^cls_token|pos_embed|patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: Pool | None = None) -> None:
        self.num_classes = num_classes
        if global_pool is not None:
            self.global_pool = self._check_pool(global_pool)
        self.head = nn.Linear(self.embed_dim, num_classes, **get_device_dtype(self)) if num_classes else nn.Identity()
        self.head.apply(init_linear)
        self.head.train(self.training)

    def _check_pool(self, pool: Pool) -> Pool:
        known = ("", "avg") if self.cls_token is None else ("", "avg", "token")
        if pool not in known:
            raise ValueError(f"global_pool={pool!r}, expected one of {', '.join(map(repr, known))}.")
        return pool

    def _tokens(self, x: Tensor) -> tuple[Tensor, Grid]:
        """An image `b 3 height width` to tokens `b n c` and the grid on which they stand."""
        patches = self.patch_embed(x)
        rows, cols = patches.shape[1], patches.shape[2]
        tokens = add_positions(patches, self.pos_embed, self.patch_embed.grid_size)
        if self.multipass:
            tokens, rows = both_ways(tokens), 2 * rows
        # A convolution leaves channels outermost; every layer after it would stumble over that.
        tokens = tokens.contiguous() if self.cls_token is None else append_class_token(tokens, self.cls_token)
        return self.pos_drop(tokens), (rows, cols)

    def _block(self, block: nn.Module, x: Tensor, grid: Grid) -> Tensor:
        if self.grad_checkpointing and not torch.jit.is_scripting():
            return checkpoint(block, x, grid)
        return block(x, grid)

    def forward_features(self, x: Tensor) -> Tensor:
        x, grid = self._tokens(x)
        for block in self.blocks:
            x = self._block(block, x, grid)
        return self.norm(x)

    def pool(self, x: Tensor) -> Tensor:
        if self.global_pool == "token":
            return x[:, -1]
        if self.global_pool == "avg":
            return self._patches(x).mean(1)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.head_drop(self.pool(x))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def _patches(self, tokens: Tensor) -> Tensor:
        """Tokens of the patches alone, one for each."""
        patches = tokens if self.cls_token is None else tokens[:, :-1]
        return fold_both_ways(patches) if self.multipass else patches

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Any] | tuple[Tensor, list[Any]]:
        """Features after the chosen blocks; the class token comes beside them if `return_prefix_tokens`."""
        check_output_fmt(output_fmt, ("NCHW", "NLC"))
        wanted = take_indices(len(self.blocks), indices)
        blocks = self.blocks[: max(wanted) + 1] if stop_early else self.blocks
        map_grid = self.patch_embed.dynamic_feat_size((x.shape[2], x.shape[3]))
        x, grid = self._tokens(x)
        features: list[Any] = []
        for i, block in enumerate(blocks):
            x = self._block(block, x, grid)
            if i in wanted:
                tokens = self.norm(x) if norm else x
                patches = self._patches(tokens)
                patches = to_map(patches, map_grid) if output_fmt == "NCHW" else patches
                beside = return_prefix_tokens and self.cls_token is not None
                features.append((patches, tokens[:, -1:]) if beside else patches)
        return features if intermediates_only else (self.norm(x), features)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the chosen features do not need."""
        wanted = take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: max(wanted) + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return wanted


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: VisionRetention) -> dict[str, Tensor]:
    """Fit positions and patch weights of a checkpoint to the image and patch size of the model."""
    state_dict = dict(state_dict.get("model", state_dict.get("state_dict", state_dict)))
    weight = state_dict.get("patch_embed.proj.weight")
    if weight is not None and weight.shape[-2:] != model.patch_embed.proj.weight.shape[-2:]:
        state_dict["patch_embed.proj.weight"] = resample_patch_embed(weight, list(model.patch_embed.patch_size))
    positions = state_dict.get("pos_embed")
    if model.pos_embed is None or positions is None:
        return state_dict
    side, grid = isqrt(positions.shape[1]), model.patch_embed.grid_size
    if positions.shape[1] == model.pos_embed.shape[1] and side * side == positions.shape[1] and grid[0] != grid[1]:
        raise ValueError(
            f"the checkpoint holds {positions.shape[1]} positions, of a grid of {side} x {side} or of this model's "
            f"{grid[0]} x {grid[1]}: if square, load them into a model of their own img_size, then call "
            "set_input_size(); if not, model.load_state_dict() takes them as they are."
        )
    if positions.shape[1] != model.pos_embed.shape[1]:
        if side * side != positions.shape[1]:
            raise ValueError(
                f"the checkpoint holds {positions.shape[1]} positions, which are no square grid: create the model "
                "with the img_size it was trained at, load, then call set_input_size()."
            )
        state_dict["pos_embed"] = resample_abs_pos_embed(
            positions, model.patch_embed.grid_size, (side, side), num_prefix_tokens=0
        )
    return state_dict


def _cfg(**kwargs: Any) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": False,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
        **kwargs,
    }


# Patch size, width, depth, heads. The tiny one is ours, for small work.
SIZES: dict[str, dict[str, Any]] = {
    "vir_tiny_patch16_224": {"patch_size": 16, "embed_dim": 192, "depth": 12, "heads": 3},
    "vir_small_patch16_224": {"patch_size": 16, "embed_dim": 384, "depth": 12, "heads": 6},
    "vir_base_patch16_224": {"patch_size": 16, "embed_dim": 768, "depth": 12, "heads": 12},
    "vir_large_patch16_224": {"patch_size": 16, "embed_dim": 1024, "depth": 24, "heads": 16},
    "vir_large_patch14_224": {"patch_size": 14, "embed_dim": 1024, "depth": 24, "heads": 16},
}
default_cfgs = generate_default_cfgs({name: _cfg() for name in SIZES})


def _create(name: str, pretrained: bool, **kwargs: Any) -> VisionRetention:
    return build_model_with_cfg(
        VisionRetention,
        name,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"},
        **{**SIZES[name], **kwargs},
    )


@register_model
def vir_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionRetention:
    return _create("vir_tiny_patch16_224", pretrained, **kwargs)


@register_model
def vir_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionRetention:
    return _create("vir_small_patch16_224", pretrained, **kwargs)


@register_model
def vir_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionRetention:
    return _create("vir_base_patch16_224", pretrained, **kwargs)


@register_model
def vir_large_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionRetention:
    return _create("vir_large_patch16_224", pretrained, **kwargs)


@register_model
def vir_large_patch14_224(pretrained: bool = False, **kwargs: Any) -> VisionRetention:
    return _create("vir_large_patch14_224", pretrained, **kwargs)
