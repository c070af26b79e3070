"""ViR and HViR; importing this package registers them in timm."""

from vir.models.hvir import HybridVisionRetention
from vir.models.vir import VisionRetention

__all__ = ["HybridVisionRetention", "VisionRetention"]
