"""The state of a model that is sharded over processes (FSDP): saved whole, put back in shards. On the CPU, by gloo."""

import os
import subprocess
import sys
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file

import vir  # noqa: F401  (registers the models)
from vir.train.state import load_state, save_state, whole_weights

SCRIPT = """
import os, sys
from pathlib import Path
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
sys.path.insert(0, {tests!r})
from test_state import made, stepped
from vir.train.state import load_state, save_state, whole_weights

dist.init_process_group("gloo")
out, first = Path(sys.argv[1]), dist.get_rank() == 0
model = fully_shard(made())
assert any(type(p).__name__ == "DTensor" for p in model.parameters())
optimizer = stepped(model)
save_state(out / "sharded.safetensors", model, optimizer, None, {{"at": 1}}, write=first)
dist.barrier()
again = fully_shard(made(seed=1))
header = load_state(out / "sharded.safetensors", again, stepped(again), None)
assert header["at"] == 1
a, b = whole_weights(model), whole_weights(again)
assert bool(a) == first
assert all((a[name] == b[name]).all() for name in a)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # gloo, at the end of a process, now and then aborts it (PyTorch issue 190489)
"""


def made(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return timm.create_model("vir_tiny_patch16_224", img_size=16, patch_size=8, depth=1, num_classes=3)


def stepped(model: torch.nn.Module) -> torch.optim.Optimizer:
    """One step of training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    model(torch.randn(2, 3, 16, 16, generator=generator)).square().sum().backward()
    optimizer.step()
    return optimizer


def test_a_sharded_model_is_saved_whole_and_put_back(tmp_path: Path) -> None:
    file = tmp_path / "run.py"
    file.write_text(SCRIPT.format(tests=str(Path(__file__).parent)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]
    subprocess.run([*launch, str(tmp_path)], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    model = made()
    optimizer = stepped(model)
    save_state(tmp_path / "alone.safetensors", model, optimizer, None, {}, write=True)
    alone, sharded = (load_file(tmp_path / f"{name}.safetensors") for name in ("alone", "sharded"))
    assert alone.keys() == sharded.keys()
    assert sum(key.startswith("optimizer/") for key in alone) > 10
    for key, value in alone.items():
        torch.testing.assert_close(sharded[key], value, rtol=1e-4, atol=1e-6)
    load_state(tmp_path / "sharded.safetensors", model, optimizer, None)
    assert all(torch.equal(x, sharded[f"model/{name}"]) for name, x in whole_weights(model).items())
