"""Triton's interpreter with a fence: a kernel that reads or writes outside the tensors it was given fails.

On a GPU such an access may pass unseen. This looks into the interpreter, of which no public part would do.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder

from vir.ops.triton import launch


@contextmanager
def fenced() -> Iterator[None]:
    fields: list[tuple[int, int]] = []
    prepared: set[str] = set()
    call, arguments, load, store = (
        InterpretedFunction.__call__,
        GridExecutor._init_args_hst,
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
    )

    def note_tensors(self: GridExecutor, args: Any, kwargs: Any) -> Any:
        given = arguments(self, args, kwargs)
        prepared.clear()
        storages = [x.untyped_storage() for x in (*given[0], *given[1].values()) if hasattr(x, "untyped_storage")]
        fields[:] = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]
        return given

    def check(pointers: Any, mask: Any) -> None:
        places = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)].astype(np.int64)
        size = pointers.get_element_ty().primitive_bitwidth // 8
        inside = np.zeros(places.shape, bool)
        for first, end in fields:
            inside |= (places >= first) & (places + size <= end)
        assert inside.all(), f"{(~inside).sum()} of {inside.size} accesses are outside the tensors"

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        check(pointers, mask)
        return load(self, pointers, mask, *rest, **named)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest, **named)

    def call_from_kernel(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        """Triton prepares its language for each call anew, which takes a third of all the time: once a launch is enough
        for the functions of a file."""
        if self.fn.__module__ in prepared:
            return self.rewrite()(*args, **kwargs)
        prepared.add(self.fn.__module__)
        return call(self, *args, **kwargs)

    with (
        patch.object(InterpretedFunction, "__call__", call_from_kernel),
        patch.object(GridExecutor, "_init_args_hst", note_tensors),
        patch.object(InterpreterBuilder, "create_masked_load", checked_load),
        patch.object(InterpreterBuilder, "create_masked_store", checked_store),
    ):
        yield


@contextmanager
def poisoned_and_fenced() -> Iterator[None]:
    """torch.empty gives NaN: what a kernel leaves unwritten is seen. So is what it touches outside, if interpreted."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    launch.forget()  # what the test before may have changed
    with fenced() if launch.INTERPRETED else nullcontext():
        yield
    torch.use_deterministic_algorithms(False)
