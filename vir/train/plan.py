"""What a run will cost, told before it starts."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vir.checkpoint import Card
from vir.train.recipes import Recipe
from vir.train.setup import has_size, new_classifier, precision

BACKWARD = 3  # a step costs about three forward passes


@dataclass(frozen=True)
class Cost:
    parameters: int
    images: int  # seen over all epochs
    flops: float | None  # of the whole run; not told where it depends on what is found in the images
    bytes: int | None  # of a step on one process: weights, gradients, optimizer, activations


def cost(recipe: Recipe, classes: int, images: int, processes: int) -> Cost:
    """Counted on a model without memory. Retention is counted as plain PyTorch computes it: kernels keep less."""
    seen = images // recipe.batch * recipe.batch * (recipe.epochs + recipe.cooldown_epochs)
    if recipe.task != "classification":
        model = Card(recipe.model, ("",) * classes, recipe.size, recipe.model_args, task=recipe.task).build()
        return Cost(sum(p.numel() for p in model.parameters()), seen, None, None)
    sized = {"img_size": recipe.size} if has_size(recipe.model) else {}
    with torch.device("meta"):
        model = new_classifier(recipe, classes, **sized).train()
        image = torch.empty(2, 3, recipe.size, recipe.size)
    kept: dict[int, int] = {}

    def count(x: Tensor) -> Tensor:
        kept[id(x)] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x), FlopCounterMode(display=False) as counter:
        model(image)
    parameters = sum(p.numel() for p in model.parameters())
    half = 2 if precision(recipe) != "no" else 1
    activations = max(0, sum(kept.values()) - 4 * parameters) // 2 // half
    part = recipe.batch // (processes * recipe.accumulate)
    copies = 4 + (1 if recipe.ema else 0)  # weights, gradients and two moments, in float32
    return Cost(
        parameters, seen, BACKWARD * counter.get_total_flops() / 2 * seen, 4 * copies * parameters + part * activations
    )
