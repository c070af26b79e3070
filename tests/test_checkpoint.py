"""Trained models on disk: they come back as they were, and what is no checkpoint is said to be none."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vir.checkpoint import BadCheckpoint, Card, load_model, read, read_card, save_half, save_model, write
from vir.train.state import save_state

CARD = Card(
    "vir_tiny_patch16_224", ("cat", "dog"), 32, {"img_size": 32, "patch_size": 8, "depth": 2, "retention": "2d"},
    stretch=0.5, metrics={"top1": 90.0},
)  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    save_model(CARD.build(), CARD, file)
    return file


def test_a_model_comes_back_with_its_card(saved: Path) -> None:
    model, card = load_model(saved)
    assert card == CARD
    assert model.blocks[0].retention.stretch == 0.5
    weights, _ = read(saved)
    assert all(torch.equal(model.state_dict()[name], x) for name, x in weights.items())
    assert json.loads(saved.with_suffix(".json").read_text())["metrics"] == {"top1": 90.0}


def test_a_halved_copy_answers_alike(saved: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.safetensors"
    save_half(saved, small)
    assert small.stat().st_size < 0.6 * saved.stat().st_size
    image = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        whole, half = (load_model(file)[0](image) for file in (saved, small))
    assert half.dtype == torch.float32
    assert torch.allclose(whole, half, atol=1e-2)
    assert not torch.equal(whole, half)


def test_a_halved_copy_never_takes_the_place_of_its_source(saved: Path, tmp_path: Path) -> None:
    before = saved.read_bytes()
    (tmp_path / "link.safetensors").symlink_to(saved)
    for out in (saved, tmp_path / "." / "link.safetensors"):
        with pytest.raises(BadCheckpoint, match=r"is the checkpoint itself: .* Name another file"):
            save_half(saved, out)
    assert saved.read_bytes() == before


def test_the_state_of_a_training_is_no_model(tmp_path: Path) -> None:
    model, file = CARD.build(), tmp_path / "state.safetensors"
    save_state(file, model, torch.optim.AdamW(model.parameters()), None, {"epoch": 1}, write=True)
    for use in (load_model, read_card, lambda file: save_half(file, tmp_path / "half.safetensors")):
        with pytest.raises(BadCheckpoint, match=r"state\.safetensors is no model, but the state of a training"):
            use(file)


def test_what_is_no_checkpoint(saved: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(saved.read_bytes()[:-100])
    with pytest.raises(BadCheckpoint, match=r"is a folder, expected a \.safetensors file\. .* there is no best model"):
        load_model(tmp_path)
    (tmp_path / "best.safetensors").touch()
    with pytest.raises(BadCheckpoint, match=rf"is a folder, .* Give {tmp_path / 'best.safetensors'}\."):
        load_model(tmp_path)
    with pytest.raises(BadCheckpoint, match="not a whole safetensors file"):
        load_model(cut)
    other = tmp_path / "other.safetensors"
    save_file({"x": torch.ones(2)}, other)
    with pytest.raises(BadCheckpoint, match="no card of vir"):
        load_model(other)
    weights, header = read(saved)
    write(weights, header | {"format": 99}, cut)
    with pytest.raises(BadCheckpoint, match="format 99"):
        load_model(cut)
    weights.pop("head.bias")
    write(weights, header, cut)
    with pytest.raises(BadCheckpoint, match="do not fit vir_tiny"):
        load_model(cut)
