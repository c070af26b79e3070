"""The state of a run in one file of tensors and numbers: weights, their average, the optimizer, and where it stands."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from vir import checkpoint

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FILE = "state.safetensors"
MODEL, AVERAGE, OPTIMIZER = "model", "average", "optimizer"


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """For the first process, on the CPU; every process takes part, because a sharded model must be gathered."""
    return get_model_state_dict(model, options=WHOLE)


def save_state(
    file: Path, model: nn.Module, optimizer: Optimizer, average: nn.Module | None, stands: dict[str, Any], write: bool
) -> None:
    """Every process takes part; one of them writes."""
    weights = whole_weights(model)
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    if not write:
        return
    tensors: dict[str, Tensor] = {f"{MODEL}/{name}": x for name, x in weights.items()}
    if average is not None:
        tensors |= {f"{AVERAGE}/{name}": x for name, x in average.state_dict().items()}
    numbers: dict[str, Any] = {}
    for parameter, values in state["state"].items():
        for name, value in values.items():
            key = f"{OPTIMIZER}/{parameter}/{name}"
            if isinstance(value, Tensor):
                tensors[key] = value
            else:
                numbers[key] = value
    header = {**stands, "numbers": numbers, "groups": state["param_groups"]}
    # The file format holds every tensor once, so shared ones must be copied.
    checkpoint.write({name: x.clone() for name, x in tensors.items()}, header, file)


def load_state(
    file: Path,
    model: nn.Module,
    optimizer: Optimizer,
    average: nn.Module | None,
    check: Callable[[dict[str, Any]], None] = lambda stands: None,
) -> dict[str, Any]:
    """Put a saved state back, once it is checked whose it is; returns where the run stood."""
    tensors, header = checkpoint.read(file)
    check(header)
    parts: dict[str, dict[str, Any]] = {MODEL: {}, AVERAGE: {}, OPTIMIZER: {}}
    for key, value in tensors.items():
        part, _, name = key.partition("/")
        parts[part][name] = value
    set_model_state_dict(model, parts[MODEL], options=StateDictOptions(full_state_dict=True))
    if average is not None:
        average.load_state_dict(parts[AVERAGE])
    state: dict[str, dict[str, Any]] = {}
    numbers = {key.removeprefix(f"{OPTIMIZER}/"): value for key, value in header.pop("numbers").items()}
    for key, value in {**parts[OPTIMIZER], **numbers}.items():
        parameter, _, name = key.rpartition("/")
        state.setdefault(parameter, {})[name] = value
    whole = {"state": state, "param_groups": header.pop("groups")}
    set_optimizer_state_dict(model, optimizer, whole, options=StateDictOptions(full_state_dict=True))
    return header


def forget(folder: Path) -> None:
    """Remove what a run wrote that the next one would go on with; whatever else lies there is not ours."""
    for name in (FILE, "log.csv", "unreadable.txt"):
        (folder / name).unlink(missing_ok=True)
