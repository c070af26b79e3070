"""Every kernel is compiled for real GPUs, which the interpreter does not do, and fits there."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
SHARED_KB = {80: 99, 90: 227}  # of a program: the least of those GPUs that take the same settings, an RTX of 8.6 or 8.9
KERNELS = {
    "walk", "walk_back", "line_states", "join_segments", "grid", "apply_states",
    "join_columns", "norm", "norm_back", "plus", "fold", "plus_rescaled", "group_norm_of_maps",
}  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "spilled"),
    [
        ("bfloat16", 64, 90, 96),
        ("bfloat16", 49, 90, 250),  # begin where no wide load can
        ("bfloat16", 40, 80, 96),
        ("bfloat16", 128, 80, 400),
        ("float32", 64, 80, 1000),
    ],
)
def test_kernels_are_compiled_and_fit(dtype: str, head_dim: int, capability: int, spilled: int) -> None:
    """Registers that do not suffice are spilled to memory: by some bytes, not by thousands."""
    command = [sys.executable, "-m", "vir.bench.offline", dtype, str(head_dim), "--capability", str(capability)]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(command, capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    assert "Warning" not in run.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in run.stdout.splitlines()[2:]]
    of_small_grids = {"quadrant"} if (capability, head_dim) == (90, 64) else set()
    assert {row[1].strip("`") for row in rows} == KERNELS | of_small_grids
    for row in rows:
        assert int(row[4]) <= spilled, row
        assert float(row[5]) <= SHARED_KB[capability], row
        assert row[6] == "", row


def test_interpreted_kernels_are_not_compiled() -> None:
    command = [sys.executable, "-m", "vir.bench.offline"]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert run.returncode == 1
    assert "TRITON_INTERPRET" in run.stderr
