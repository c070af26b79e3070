"""Detection and segmentation on ViR, HViR or any backbone of timm."""

from vir.heads.builders import build_detector, build_segmentor
from vir.heads.pretrained import from_classifier, load_classifier

__all__ = ["build_detector", "build_segmentor", "from_classifier", "load_classifier"]
