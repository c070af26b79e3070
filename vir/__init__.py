"""Vision Retention Networks. Importing this package registers the models ViR and HViR in timm."""

from vir import models, ops
from vir.streaming import stream

__all__ = ["models", "ops", "stream"]
__version__ = "0.1.0"
