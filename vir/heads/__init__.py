"""Detection and segmentation on ViR, HViR or any backbone of timm."""

from vir.heads.builders import build_detector, build_segmentor

__all__ = ["build_detector", "build_segmentor"]
