"""Start kernels with as little work on the host as possible: small models wait for the host, not for the GPU."""

from typing import Any

import torch
import triton
from torch import Tensor

from vir.ops.triton.settings import Schedule

Numbers = tuple[int | float, ...]


class Step:
    """A launch of which all is known but the tensors: these come first in a kernel, then numbers, then constants.

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
        self.values: tuple = ()

    def run(self, *tensors: Tensor) -> None:
        device = tensors[0].device
        if not self.interpreted and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.run(*tensors)
        elif self.binary is not None:
            self.binary[self.grid](*tensors, *self.values)
        else:
            self._first_run(tensors)

    def _first_run(self, tensors: tuple[Tensor, ...]) -> None:
        """Compiles what is not known yet, and runs it."""
        warps, stages, registers = self.schedule
        options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
        binary = self.kernel[self.grid](*tensors, *self.numbers, **self.constants, **options)
        if not self.interpreted:
            names = self.kernel.arg_names[len(tensors) + len(self.numbers) :]
            self.values = *self.numbers, *(self.constants[name] for name in names)
            self.binary = binary
