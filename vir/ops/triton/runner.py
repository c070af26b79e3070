"""Start kernels with as little work on the host as possible: small models wait for the host, not for the GPU."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, ParamSpec

import torch
import triton
from torch import Tensor

from vir.ops.triton.settings import Schedule

Numbers = tuple[int | float, ...]
Looks = tuple[Any, ...]


def looks_of(x: Tensor, y: Tensor, z: Tensor) -> Looks:
    """All of three contiguous tensors, but their shapes, that decides which binary takes them: what PyTorch allocates
    is aligned, so that one look at the addresses tells most of it."""
    at = x.data_ptr(), y.data_ptr(), z.data_ptr()
    aligned = (at[0] | at[1] | at[2]) % 16 == 0
    return x.dtype, y.dtype, z.dtype, None if aligned else (at[0] % 16, at[1] % 16, at[2] % 16)


class Step:
    """A launch of which all is known but the tensors: these come first in a kernel, as they are or described as boxes,
    then numbers, then constants.

    Triton looks at every argument of every call to find the binary. A step is kept for tensors of one dtype, shape and
    alignment, so that the binary of its first run is that of all.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int], numbers: Numbers, constants: dict[str, Any], schedule: Schedule
    ) -> None:
        self.kernel = kernel
        self.grid = *grid, 1
        self.numbers = numbers
        self.constants = constants
        self.schedule = schedule
        self.interpreted = not isinstance(kernel, triton.JITFunction)
        self.binary: Any = None
        self.start: Any = None  # the binary with its grid: the last that is set
        self.several = True  # GPUs: a launch goes to the one that is current
        self.values: tuple = ()

    def run(self, *tensors: Any) -> None:
        if self.start is None:
            self._run_first(*tensors)
        elif self.several and tensors[0].device.index != torch.cuda.current_device():
            with torch.cuda.device(tensors[0].device):
                self.start(*tensors, *self.values)
        else:
            self.start(*tensors, *self.values)

    def _run_first(self, *tensors: Any) -> None:
        if self.interpreted:
            self.kernel[self.grid](*tensors, *self.numbers, **self.constants)
            return
        self.compile(*tensors)
        self.run(*tensors)

    @property
    def options(self) -> dict[str, Any]:
        """Of Triton's compiler. Products and sums are fused, as when its settings were measured: it asks to be told
        since 3.9, and 3.10 would else leave them apart."""
        warps, stages, registers = self.schedule
        return {"num_warps": warps, "num_stages": stages, "maxnreg": registers, "enable_fp_fusion": True}

    def compile(self, *tensors: Any) -> None:
        """Without running it: the kernel, and what starts it, which Triton 3.6 builds with a C compiler."""
        names = self.kernel.arg_names[len(tensors) + len(self.numbers) :]
        self.values = *self.numbers, *(self.constants[name] for name in names)
        self.several = torch.cuda.device_count() > 1
        with torch.cuda.device(tensors[0].device):  # a thread of its own would compile for the first GPU
            self.binary = self.kernel.warmup(*tensors, *self.numbers, **self.constants, **self.options, grid=self.grid)
            self.start = self.binary[self.grid]


Call = tuple[Step, tuple[Tensor, ...]]
Given = ParamSpec("Given")


def run_now(prepared: Callable[Given, tuple[Call, Tensor]]) -> Callable[Given, Tensor]:
    """Of a launch that is prepared with room for its result: the same, run at once."""

    @wraps(prepared)
    def run(*given: Given.args, **options: Given.kwargs) -> Tensor:
        (step, tensors), made = prepared(*given, **options)
        step.run(*tensors)
        return made

    return run


def run_in_turn(*calls: Call) -> None:
    """What a first run has to compile is compiled side by side: that takes as long as its slowest kernel."""
    new = [call for call in calls if call[0].start is None and not call[0].interpreted]
    if len(new) > 1:
        with ThreadPoolExecutor(len(new)) as pool:
            list(pool.map(lambda call: call[0].compile(*call[1]), new))
    for step, tensors in calls:
        step.run(*tensors)
