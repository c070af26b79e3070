"""A classifier's weights for the backbone of a detector or a segmentor."""

from pathlib import Path
from typing import Any

from vir.checkpoint import BadCheckpoint, Card, card_of, found, read, read_card
from vir.heads.backbone import Backbone
from vir.layers.retention import MultiHeadRetention
from vir.models.vir import VisionRetention, checkpoint_filter_fn


def from_classifier(file: Path | str) -> dict[str, Any]:
    """The arguments of `build_detector` and `build_segmentor` that make the backbone of a classifier's checkpoint."""
    card = read_card(file)
    if card.task != "classification":
        raise BadCheckpoint(f"{file} holds a model for {card.task}, expected one for classification.")
    return {
        "name": card.model, "mean": list(card.mean), "std": list(card.std), "stretch": card.stretch, **card.model_args
    }  # fmt: skip


def load_classifier(backbone: Backbone, file: Path | str) -> list[str]:
    """Put a classifier's weights into the backbone; names of those without a place: its classifier, its last norm."""
    tensors, header = read(found(file))
    card = card_of(header, file)
    _check_retention(backbone, card, file)
    model = getattr(backbone.body, "model", None)
    tensors = {name: x.float() if x.is_floating_point() else x for name, x in tensors.items()}
    if isinstance(model, VisionRetention):  # its positions depend on the image size
        tensors = checkpoint_filter_fn(tensors, model)
    # timm's wrappers put `model.` before a name, or fold `stages.0` into `stages_0`.
    state = backbone.body.state_dict()
    places = {name.removeprefix("model.").replace(".", "_"): name for name in state}
    given = {name.replace(".", "_"): name for name in tensors}
    beyond = [name for flat, name in given.items() if flat not in places]
    # A weight beside the backbone is the classifier's; one inside it belongs to another backbone.
    inside = [name for name in beyond if any(place.startswith(f"{name.partition('.')[0]}_") for place in places)]
    wrong = [f"{name} has no place" for name in inside]
    wrong += [f"{place} is missing" for flat, place in places.items() if flat not in given]
    fitting = {place: tensors[given[flat]] for flat, place in places.items() if flat in given}
    wrong += [
        f"{place} is {tuple(x.shape)}, expected {tuple(state[place].shape)}"
        for place, x in fitting.items()
        if x.shape != state[place].shape
    ]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise BadCheckpoint(
            f"{file}: the weights of {card.model} do not fit the backbone: {'; '.join(wrong[:3])}{more}. "
            "Build the model with the arguments that from_classifier() gives."
        )
    backbone.body.load_state_dict(fitting)
    return beyond


def _check_retention(backbone: Backbone, card: Card, file: Path | str) -> None:
    """Weights fit both kinds of retention, and mean something to their own alone."""
    given, here = (
        {layer.retention for layer in model.modules() if isinstance(layer, MultiHeadRetention)}
        for model in (card.build(), backbone)
    )
    if given != here:
        kinds = [", ".join(sorted(kind)) or "none" for kind in (given, here)]
        raise BadCheckpoint(
            f"{file} was trained with retention {kinds[0]}, and the backbone has {kinds[1]}: build it with the "
            "arguments that from_classifier() gives."
        )
