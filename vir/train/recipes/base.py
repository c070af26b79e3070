"""What a run is made of: everything but the data and the place of its results."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vir.checkpoint import Task
from vir.ops import Form

Precision = Literal["auto", "no", "bf16", "fp16"]
Decay = Literal["keep", "rescale"]
Where = Literal["workers", "device"]


@dataclass(frozen=True)
class Recipe:
    """Everything about a run but the data and the place of its results."""

    model: str  # or its backbone, where the task is not classification
    model_args: dict[str, Any] = field(default_factory=dict)
    task: Task = "classification"
    transform_args: dict[str, Any] = field(default_factory=dict)  # of vir.data.joint, for the other tasks
    size: int = 224  # pixels of a side
    epochs: int = 50
    batch: int = 128  # images of a step, over all processes
    optimizer: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    layer_decay: float | None = None
    warmup_epochs: int = 5
    warmup_lr: float = 1e-6
    min_lr: float = 1e-5
    cooldown_epochs: int = 0
    clip: float | None = 5.0
    ema: float | None = None
    smoothing: float = 0.1
    mixup: float = 0.0
    cutmix: float = 0.0
    randaugment: str | None = None
    colour_jitter: float = 0.0
    erasing: float = 0.0
    crop_scale: tuple[float, float] = (0.25, 1.0)
    flip: float = 0.5
    upside_down: float = 0.0  # share of images; what is seen from above has no upright
    quarter_turns: float = 0.0  # share of images turned by 90 degrees, on the device alone
    tilt: float = 0.0  # degrees either way, on the device alone
    augment: Where = "workers"  # or on the device, from images held there: for small sets, without RandAugment
    mosaic: int = 1  # images of a side laid side by side, of which a ViR learns every patch: to draw maps by streaming
    drop_path: float | None = None
    form: Form = "auto"  # of retention, to compare them: all give the same numbers
    precision: Precision = "auto"  # bf16 on a GPU that has it, full on a CPU
    accumulate: int = 1  # parts of a batch, where the whole does not fit
    checkpointing: bool = False  # of activations: less memory, more time
    recorded: bool = False  # on one GPU a step is recorded once and replayed: small models wait for the host else
    judged_every: int = 1  # epochs
    seed: int = 0


PIXELS = ("min_size", "max_size", "crop", "before_crop")  # arguments of dense tasks that go along with the size


def at_size(recipe: Recipe, size: int) -> Recipe:
    """The recipe at another size, with all that it gives in pixels."""
    share = size / recipe.size
    return replace(
        recipe, size=size, model_args=scaled(recipe.model_args, share),
        transform_args=scaled(recipe.transform_args, share),
    )  # fmt: skip


def scaled(args: dict[str, Any], share: float) -> dict[str, Any]:
    """Arguments with their pixels so many times as many."""

    def sides(value: Any) -> Any:
        if isinstance(value, int):
            return max(1, round(share * value))
        return type(value)(sides(side) for side in value)

    return {name: sides(value) if name in PIXELS else value for name, value in args.items()}


RECIPES: dict[str, Callable[[], Recipe]] = {}


def recipe(make: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """List a recipe under the name of its function."""
    RECIPES[make.__name__] = make
    return make


def plain(model: str, **changes: Any) -> Recipe:
    """Any model on a folder of images, without a recipe: moderate augmentation that suits some thousands of images."""
    return replace(Recipe(model, mixup=0.2, cutmix=0.5, erasing=0.1, colour_jitter=0.2), **changes)
