"""Detection and segmentation: the paper's runs, and small ones on real data.

The paper starts from weights of ImageNet: give ours, or any classifier's, by `vir finetune CLASSIFIER --recipe NAME`.
"""

from dataclasses import replace
from typing import Any

from vir.train.recipes.base import Recipe, recipe

SHORT_SIDES = list(range(480, 801, 32))
ONE_DIMENSION: dict[str, Any] = {"retention": "1d"}
SMALL_HEADS: dict[str, Any] = {"box_head": "2fc", "width": 128, "hidden": 512}  # for small sets and small backbones


def _coco(model: str, **model_args: Any) -> Recipe:
    """Cascade Mask R-CNN as in the paper: AdamW, 1e-4, batch 16, 36 epochs; the rate falls by a cosine."""
    sizes = {"min_size": SHORT_SIDES, "max_size": 1333}
    crops = {"crop": (384, 600), "before_crop": (400, 500, 600)}
    return Recipe(
        model, sizes | model_args, "detection", crops, size=800, epochs=36, batch=16, lr=1e-4,
        warmup_epochs=1, min_lr=1e-6, clip=None, drop_path=0.2, augment="workers",
    )  # fmt: skip


@recipe
def hvir_1_coco() -> Recipe:
    """HViR-1 on COCO: 4.2 million images. Paper: box AP 51.7, mask AP 44.1. Not run by us."""
    return _coco("hvir_1")


@recipe
def hvir_1_coco_1d() -> Recipe:
    """HViR-1 in 1D on COCO: 4.2 million images. Paper: box AP 51.2, mask AP 43.8. Not run by us."""
    return _coco("hvir_1", **ONE_DIMENSION)


@recipe
def hvir_2_coco() -> Recipe:
    """HViR-2 on COCO: 4.2 million images. Paper: box AP 52.1, mask AP 45.2. Not run by us."""
    return _coco("hvir_2")


@recipe
def hvir_2_coco_1d() -> Recipe:
    """HViR-2 in 1D on COCO: 4.2 million images. The paper has no figure. Not run by us."""
    return _coco("hvir_2", **ONE_DIMENSION)


def _ade20k(model: str, **model_args: Any) -> Recipe:
    """UPerNet as in the paper: AdamW, 6e-5, batch 16, 160,000 steps, which are 127 epochs, at 512 px."""
    return Recipe(
        model, model_args, "segmentation", size=512, epochs=127, batch=16, lr=6e-5, weight_decay=0.01,
        warmup_epochs=1, min_lr=0.0, clip=None, colour_jitter=0.4, drop_path=0.2,
    )  # fmt: skip


@recipe
def hvir_1_ade20k() -> Recipe:
    """HViR-1 on ADE20K: 2.6 million images. Paper: mIoU 47.0. Not run by us."""
    return _ade20k("hvir_1")


@recipe
def hvir_1_ade20k_1d() -> Recipe:
    """HViR-1 in 1D on ADE20K: 2.6 million images. Paper: mIoU 46.9. Not run by us."""
    return _ade20k("hvir_1", **ONE_DIMENSION)


@recipe
def hvir_2_ade20k() -> Recipe:
    """HViR-2 on ADE20K: 2.6 million images. Paper: mIoU 49.7. Not run by us."""
    return _ade20k("hvir_2")


@recipe
def hvir_2_ade20k_1d() -> Recipe:
    """HViR-2 in 1D on ADE20K: 2.6 million images. The paper has no figure. Not run by us."""
    return _ade20k("hvir_2", **ONE_DIMENSION)


@recipe
def nuclei() -> Recipe:
    """Many small objects of one kind on a few hundred images, such as the nuclei of the Data Science Bowl 2018."""
    many = {"min_size": [320, 384, 448, 512], "max_size": 1024, "anchor_scale": 4.0, "detections": 400}
    narrow = {"width": 64, "hidden": 128}  # one class, and weights that are small to hand on
    return Recipe(
        "hvir_tiny", SMALL_HEADS | narrow | many, "detection", size=512, epochs=40, batch=8, lr=3e-4, warmup_epochs=2,
        clip=5.0, upside_down=0.5, colour_jitter=0.2, drop_path=0.1, judged_every=5,
    )  # fmt: skip


@recipe
def pedestrians() -> Recipe:
    """A few large objects on some hundred photographs, such as the pedestrians of Penn-Fudan."""
    few = {"min_size": [320, 384, 448], "max_size": 800}
    return replace(nuclei(), model_args=SMALL_HEADS | few, size=448, upside_down=0.0)


@recipe
def coco_mini() -> Recipe:
    """A few hundred images of COCO, learned by heart, to see that targets, losses and measures fit together."""
    as_it_is: dict[str, Any] = {"upside_down": 0.0, "colour_jitter": 0.0, "drop_path": 0.0}
    return replace(
        nuclei(), model_args=SMALL_HEADS | {"min_size": 512, "max_size": 800}, size=512, epochs=100, **as_it_is
    )  # fmt: skip


@recipe
def street_scenes() -> Recipe:
    """A few hundred street scenes with a class for every pixel, such as CamVid at 480 x 360, enlarged by half."""
    rare = {"hardest": 0.25, "overlap_weight": 1.0}  # poles and signs have few pixels, and count as much as roads
    return Recipe(
        "hvir_tiny", {"width": 80} | rare, "segmentation", {"crop": (540, 720)}, size=540, epochs=100, batch=16,
        lr=6e-4, warmup_epochs=5, ema=0.998, colour_jitter=0.5, drop_path=0.1, judged_every=10,
    )  # fmt: skip
