"""The paper's classifiers, and small ones on real data; each says what it costs and should give.

Costs are in images seen, and in hours where we measured them. Accuracies of the paper come from code whose training
form differs from its formulas: they are quoted, not promised.
"""

from dataclasses import replace
from typing import Any

from vir.train.recipes.base import Recipe, recipe


def _hvir(model: str, drop_path: float) -> Recipe:
    """HViR as in the paper's appendix: LAMB, 300 epochs, batch 4096; what that leaves open, as is usual."""
    return Recipe(
        model, epochs=300, batch=4096, optimizer="lamb", lr=5e-3, weight_decay=0.12, warmup_epochs=20, min_lr=5e-6,
        cooldown_epochs=10, ema=0.9998, mixup=0.8, cutmix=1.0, randaugment="rand-m9-mstd0.5-inc1", colour_jitter=0.4,
        erasing=0.25, crop_scale=(0.08, 1.0), drop_path=drop_path,
    )  # fmt: skip


@recipe
def hvir_0_imagenet() -> Recipe:
    """HViR-0 on ImageNet-1K at 224 px: 384 million images. Paper: 81.1 %. Not run by us."""
    return _hvir("hvir_0", 0.2)


@recipe
def hvir_1_imagenet() -> Recipe:
    """HViR-1 on ImageNet-1K at 224 px: 384 million images. Paper: 82.6 %. Not run by us."""
    return _hvir("hvir_1", 0.2)


@recipe
def hvir_2_imagenet() -> Recipe:
    """HViR-2 on ImageNet-1K at 224 px: 384 million images. Paper: 83.3 %. Not run by us."""
    return _hvir("hvir_2", 0.2)


@recipe
def hvir_3_imagenet() -> Recipe:
    """HViR-3 on ImageNet-1K at 224 px: 384 million images. Paper: 84.6 %. Not run by us."""
    return _hvir("hvir_3", 0.3)


@recipe
def hvir_4_imagenet() -> Recipe:
    """HViR-4 on ImageNet-1K at 224 px: 384 million images. Paper: 84.8 %. Not run by us."""
    return _hvir("hvir_4", 0.3)


def _vir(model: str, **changes: Any) -> Recipe:
    """ViR on ImageNet, by what is known of the authors' settings: 310 epochs, the last 10 at the lowest rate."""
    base = Recipe(
        model, epochs=300, batch=4096, optimizer="lamb", lr=5e-3, weight_decay=0.05, warmup_epochs=20, min_lr=5e-6,
        cooldown_epochs=10, ema=0.9998, mixup=0.8, cutmix=1.0, randaugment="rand-m9-mstd0.5-inc1", colour_jitter=0.4,
        erasing=0.25, crop_scale=(0.08, 1.0), drop_path=0.2,
    )  # fmt: skip
    return replace(base, **changes)


@recipe
def vir_small_imagenet() -> Recipe:
    """ViR-S/16 on ImageNet-1K at 224 px: 397 million images. Paper: 81.0 %. Not run by us."""
    return _vir("vir_small_patch16_224")


@recipe
def vir_base_imagenet() -> Recipe:
    """ViR-B/16 on ImageNet-1K at 224 px: 397 million images. Paper: 82.6 %. Not run by us."""
    return _vir("vir_base_patch16_224")


@recipe
def vir_large_imagenet() -> Recipe:
    """ViR-L/16 on ImageNet-1K at 224 px: 397 million images. Paper: 83.7 %. Not run by us."""
    return _vir("vir_large_patch16_224", drop_path=0.3, checkpointing=True)


@recipe
def vir_large_imagenet21k() -> Recipe:
    """ViR-L/14 on ImageNet-21K at 224 px, the first half of the paper's 85.0 % and 86.1 %. Not run by us.

    Then `vir finetune` of its best checkpoint with the recipe vir_large_224 or vir_large_448.
    """
    return _vir("vir_large_patch14_224", epochs=90, cooldown_epochs=0, drop_path=0.1, ema=None, checkpointing=True)


def _finetuning(model: str, **changes: Any) -> Recipe:
    """Of trained weights, usually at a higher resolution: low rate, rates falling with depth, little augmentation."""
    base = Recipe(
        model, epochs=30, batch=512, lr=5e-5, weight_decay=1e-8, layer_decay=0.8, warmup_epochs=2, min_lr=1e-6,
        ema=0.9998, crop_scale=(0.08, 1.0), randaugment="rand-m9-mstd0.5-inc1", drop_path=0.2,
    )  # fmt: skip
    return replace(base, **changes)


@recipe
def vir_large_224() -> Recipe:
    """ViR-L/14 on ImageNet-1K at 224 px, from ImageNet-21K weights: 38 million images. Paper: 85.0 %. Not run by us."""
    return _finetuning("vir_large_patch14_224", checkpointing=True)


@recipe
def vir_large_448() -> Recipe:
    """ViR-L/14 on ImageNet-1K at 448 px, from ImageNet-21K weights: 38 million images. Paper: 86.1 %. Not run by us."""
    return _finetuning("vir_large_patch14_224", size=448, checkpointing=True)


@recipe
def vir_base_192() -> Recipe:
    """ViR-B/16 on ImageNet-1K at 192 px: where the paper's study of resolution begins. Not run by us.

    Then `vir finetune` with the recipe vir_base_higher and --size 224, 256, 384, 512; 1D, or 2D by vir_base_192_2d.
    """
    return _vir("vir_base_patch16_224", size=192)


@recipe
def vir_base_192_2d() -> Recipe:
    """The same in 2D."""
    return _vir("vir_base_patch16_224", size=192, model_args={"retention": "2d"})


@recipe
def vir_base_higher() -> Recipe:
    """A model of vir_base_192 moved to a higher resolution, which --size names. Not run by us."""
    return _finetuning("vir_base_patch16_224", size=384)


@recipe
def photographs() -> Recipe:
    """Any model from scratch on some thousands of small photographs, such as Imagenette: how we compare models."""
    return Recipe(
        "hvir_tiny", size=128, epochs=100, batch=128, lr=1e-3, warmup_epochs=8, ema=0.998, mixup=0.2, cutmix=0.5,
        drop_path=0.1, tilt=10.0, colour_jitter=0.3, erasing=0.25, augment="device", recorded=True, judged_every=5,
    )  # fmt: skip


@recipe
def land_use_map() -> Recipe:
    """A ViR that says of every patch of a large satellite image what it shows, learned from small images of one class
    each, such as EuroSAT: they are laid side by side at random, and every patch learns the class of its own. It learns
    no positions, which would be stretched over a larger image."""
    args = {"patch_size": 8, "retention": "2d", "global_pool": "avg", "pos_embed": "none"}
    return replace(land_use(), model="vir_tiny_patch16_224", model_args=args, size=64, mosaic=8)


@recipe
def land_use() -> Recipe:
    """Any model from scratch on tens of thousands of small satellite images, such as EuroSAT: they may lie any way, but
    their colours tell the classes apart, and it learns better without mixtures. Ours: HViR-tiny 97.9 % of EuroSAT."""
    return replace(
        photographs(), epochs=90, lr=2e-3, mixup=0.0, cutmix=0.0, crop_scale=(0.5, 1.0), upside_down=0.5,
        quarter_turns=0.5, tilt=0.0, colour_jitter=0.0, erasing=0.0,
    )  # fmt: skip
