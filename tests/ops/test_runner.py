"""What a launch is started with, by a kernel that notes it: compiled ones need a GPU."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Barrier
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton import JITFunction

from vir.ops.triton.runner import Step, run_in_turn

Started = list[tuple[str, tuple]]


class Noting(JITFunction):
    """Stands in for a kernel `(x, length, SIZE, WIDE)`: compiling takes it a while, starting notes the arguments."""

    def __init__(self, name: str, started: Started, compiling: Callable[[], Any] = lambda: sleep(0.05)) -> None:
        self.name, self.started, self.compiling, self.compiled = name, started, compiling, 0

    @property
    def arg_names(self) -> list[str]:
        sleep(0.01)  # here another thread may come in between
        return ["x", "length", "SIZE", "WIDE"]

    def warmup(self, *given: Any, **options: Any) -> Any:
        self.compiled += 1
        self.options = options
        self.compiling()
        return {options["grid"]: lambda *args: self.started.append((self.name, args))}


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def step(kernel: Noting, kind: type[Step] = Step) -> Step:
    return kind(kernel, (3, 2), (7,), {"WIDE": True, "SIZE": 64}, (4, 1, None))


def test_constants_come_as_the_kernel_names_them() -> None:
    started: Started = []
    kernel = Noting("walk", started)
    one = step(kernel)
    for x in (torch.zeros(1), torch.ones(1)):
        one.run(x)
        assert started.pop() == ("walk", (x, 7, 64, True))
    assert kernel.compiled == 1
    asked = {"num_warps": 4, "num_stages": 1, "maxnreg": None, "enable_fp_fusion": True, "grid": (3, 2, 1)}
    assert kernel.options.items() >= asked.items()


def test_what_is_new_is_compiled_side_by_side_and_run_in_turn() -> None:
    started: Started = []
    together = Barrier(2, timeout=20)  # each waits in its compilation until the other has begun
    states, walk = (Noting(name, started, together.wait) for name in ("states", "walk"))
    x = torch.zeros(1)
    calls = (step(states), (x,)), (step(walk), (x,))
    for _ in range(2):
        run_in_turn(*calls)
    assert [name for name, _ in started] == ["states", "walk"] * 2
    assert states.compiled == walk.compiled == 1


class Overtaken(Step):
    """Another thread has compiled it, just after the first look at it."""

    looks = 0

    @property
    def start(self) -> Any:
        self.looks += 1
        return None if self.looks == 1 else vars(self)["start"]

    @start.setter
    def start(self, start: Any) -> None:
        vars(self)["start"] = start


def test_what_another_thread_has_compiled_meanwhile_is_run() -> None:
    started: Started = []
    x = torch.zeros(1)
    kinds = {"states": Step, "walk": Overtaken}
    calls = [(step(Noting(name, started), kind), (x,)) for name, kind in kinds.items()]
    for one, _ in calls:
        one.compile(x)
    run_in_turn(*calls)
    assert [name for name, _ in started] == ["states", "walk"]


def test_a_first_run_in_several_threads() -> None:
    """None starts a binary before its numbers are known."""
    started: Started = []
    one, x = step(Noting("walk", started)), torch.zeros(1)

    def arriving(number: int) -> None:
        sleep(0.004 * number)
        one.run(x)

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(arriving, range(20)))
    assert [args for _, args in started] == [(x, 7, 64, True)] * 20


def test_a_launch_goes_to_the_gpu_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    x: Any = SimpleNamespace(device=torch.device("cuda", 1))
    one = step(Noting("walk", []))
    one.compile(x)
    entered.clear()
    one.run(x)
    assert entered == [x.device]
