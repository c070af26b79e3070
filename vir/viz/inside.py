"""The retention layers inside a model: where they stand, and what each is made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor, nn
from torchvision.transforms.v2.functional import normalize, pil_to_tensor

from vir import ops
from vir.checkpoint import Card
from vir.layers.patches import Grid
from vir.layers.retention import MultiHeadRetention
from vir.viz.style import CannotDraw


@dataclass(frozen=True)
class Layer:
    """One retention layer: its number from 0, and how many pixels of a side its patches have."""

    number: int
    module: MultiHeadRetention
    stride: int
    block: nn.Module  # in which it stands

    @property
    def gamma(self) -> Tensor:
        """As the layer itself takes it, stretched where the model was."""
        return ops.decay(self.module.heads, self.module.decay) ** self.module.stretch

    def grid(self, height: int, width: int) -> Grid:
        return ceil(height / self.stride), ceil(width / self.stride)  # both models halve an odd side upwards


def retention_layers(model: nn.Module) -> list[Layer]:
    """All of them, from the first to the last."""
    stages = getattr(model, "feature_info", [])
    layers: list[Layer] = []
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadRetention):
            strides = [stage["reduction"] for stage in stages if name.startswith(stage["module"] + ".")]
            if strides:
                block = model.get_submodule(name.rpartition(".")[0])
                layers.append(Layer(len(layers), module, int(strides[0]), block))
    if not layers:
        raise CannotDraw(
            f"{type(model).__name__} has no retention layers of a ViR or HViR backbone, expected a classifier of "
            "these. Give the checkpoint of one."
        )
    if any(getattr(module, "multipass", False) for module in model.modules()):
        raise CannotDraw(
            "this model reads its patches forth and back (multipass): each would have two places. Give another."
        )
    return layers


def chosen(layers: Sequence[Layer], numbers: Sequence[int]) -> list[Layer]:
    """Layers by their numbers; negative ones count from the last."""
    for number in numbers:
        if not -len(layers) <= number < len(layers):
            raise CannotDraw(
                f"layer {number} of {len(layers)} retention layers, expected 0 to {len(layers) - 1}; -1 is the last."
            )
    return [layers[i] for i in sorted({number % len(layers) for number in numbers})]


def check_classifier(card: Card) -> None:
    if card.task != "classification":
        raise CannotDraw(
            f"{card.model} was trained for {card.task}, expected a classifier. Give the checkpoint of one."
        )


def check_side(size: int, layers: Sequence[Layer]) -> int:
    """The largest patch of a model, if an image of this size has at least one of them."""
    patch = max(layer.stride for layer in layers)
    if size < patch:
        raise CannotDraw(f"{size} pixels of a side, expected at least the {patch} of a patch: take a larger size.")
    return patch


def whole(image: Image.Image, size: int, multiple: int) -> Image.Image:
    """The whole image with a shorter side of about `size` pixels, both sides whole patches: nothing is cropped."""
    scale = size / min(image.size)
    width, height = (max(1, round(side * scale / multiple)) * multiple for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def pixels_of(image: Image.Image, card: Card) -> Tensor:
    """`1 3 height width`, in the colours that the model was trained with."""
    return normalize(pil_to_tensor(image).float() / 255, list(card.mean), list(card.std))[None]


def square(image: Image.Image, card: Card, size: int) -> Tensor:
    """The middle of an image, cut as for classification: `1 3 size size`."""
    pixels: Tensor = create_transform(**card.preprocessing(size))(image)
    return pixels[None]


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
