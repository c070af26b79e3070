import os
from collections.abc import Iterator

# Some virtual machines announce AMX and trap when it is used; bf16 must not depend on that.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # one worker per core already: more threads only get in each other's way

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported: they are then tested on the CPU

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU, tests that need one are left out."""
    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=[item for item in items if "gpu" in item.keywords])
        items[:] = [item for item in items if "gpu" not in item.keywords]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _same_numbers_and_threads_each_time() -> Iterator[None]:
    """Benchmarks set the number of threads: left so, they make the tests after them ten times as slow."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
