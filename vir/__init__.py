"""Vision Retention Networks. Importing this package registers the models ViR and HViR in timm."""

from vir import models, ops

__all__ = ["models", "ops"]
__version__ = "0.1.0"
