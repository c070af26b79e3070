"""From masks of boxes to masks of images, all at once: torchvision's way asks a GPU a dozen questions for every object,
and waits for each answer."""

import torch
from torch import Tensor
from torchvision.models.detection.transform import GeneralizedRCNNTransform

Found = dict[str, Tensor]
Size = tuple[int, int]  # height, width


def masks_in_image(masks: Tensor, boxes: Tensor, size: Size) -> Tensor:
    """Masks `n 1 s s` of boxes `n 4` as `n 1 height width`: every pixel takes what is at its centre, between the four
    numbers around it; beyond them there is nothing.

    Boxes lie straight, so that columns and rows are mixed one after the other, by a product each.
    """
    with torch.autocast(masks.device.type, enabled=False):
        left, top, right, bottom = boxes.float().unbind(1)
        down = _weights(top, bottom, size[0], masks.shape[2])
        across = _weights(left, right, size[1], masks.shape[3])
        return (down @ masks[:, 0].float() @ across.transpose(1, 2))[:, None]


def _weights(start: Tensor, end: Tensor, pixels: int, steps: int) -> Tensor:
    """How much of each step of a box the pixels of an axis take: `n pixels steps`."""
    centres = torch.arange(pixels, device=start.device) + 0.5
    places = (centres - start[:, None]) / (end - start).clamp(min=1)[:, None] * steps - 0.5
    return (1 - (places[:, :, None] - torch.arange(steps, device=start.device)).abs()).clamp(min=0)


class ToSizeAndBack(GeneralizedRCNNTransform):
    """torchvision's, but for the way back of the answers."""

    def postprocess(
        self, result: list[Found], image_shapes: list[Size], original_image_sizes: list[Size]
    ) -> list[Found]:
        if self.training:
            return result
        for found, small, whole in zip(result, image_shapes, original_image_sizes, strict=True):
            down, across = whole[0] / small[0], whole[1] / small[1]
            found["boxes"] = found["boxes"] * found["boxes"].new_tensor([across, down, across, down])
            if "masks" in found:
                found["masks"] = masks_in_image(found["masks"], found["boxes"], whole)
        return result
