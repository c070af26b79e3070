"""Photographs that ship with scikit-image and scikit-learn, under names that say what they show."""

from importlib.resources import files
from pathlib import Path

PHOTOGRAPHS = {
    "a pavilion": ("sklearn.datasets.images", "china.jpg"),
    "a rocket": ("skimage.data", "rocket.jpg"),
    "a motorcycle": ("skimage.data", "motorcycle_left.png"),
    "a cup of coffee": ("skimage.data", "coffee.png"),
    "an astronaut": ("skimage.data", "astronaut.png"),
    "a cat": ("skimage.data", "chelsea.png"),
}


class NoPhotographs(ValueError):
    """The packages that ship them are not installed."""


def photographs() -> dict[str, Path]:
    try:
        return {name: Path(str(files(package) / file)) for name, (package, file) in PHOTOGRAPHS.items()}
    except ImportError as error:
        raise NoPhotographs(
            f"the demo's photographs come with scikit-image and scikit-learn ({error}): run "
            "pip install scikit-image scikit-learn, or name images of your own."
        ) from None
