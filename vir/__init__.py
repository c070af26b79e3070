"""Vision Retention Networks."""
__version__ = "0.1.0"
