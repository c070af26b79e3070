"""The forms of retention against each other: is `auto` close to the best everywhere?"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from vir import ops
from vir.bench.measure import time_each

PARALLEL_LIMIT = 5000  # tokens; beyond it the n x n scores alone take gigabytes
RECURRENT_LIMIT = 1100  # tokens; beyond it a Python loop over tokens only costs patience


@dataclass(frozen=True)
class Row:
    retention: str
    tokens: int
    gradients: bool
    milliseconds: dict[str, float]
    chosen: str  # by auto, which runs that very form
    ratio: float  # of the chosen form to the best

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(sides: list[int], heads: int, head_dim: int, batch: int, repeats: int) -> Iterator[Row]:
    """Square grids of `side` patches, 1D and 2D, without and with gradients."""
    for retention in ("1d", "2d"):
        for gradients in (False, True):
            for side in sides:
                yield _row(retention, side, gradients, heads, head_dim, batch, repeats)


def _row(retention: str, side: int, gradients: bool, heads: int, head_dim: int, batch: int, repeats: int) -> Row:
    n = side * side
    gamma = ops.decay(heads)
    qkv = torch.randn(batch, n, 3, heads, head_dim, requires_grad=gradients)

    def call(form: ops.Form) -> Callable[[], None]:
        def run() -> None:
            q, k, v = qkv.unbind(2)
            out = _run(retention, q, k, v, gamma, side, form)
            if gradients:
                out.sum().backward()

        return run

    forms: list[ops.Form] = ["chunkwise"]
    forms += ["parallel"] if n <= PARALLEL_LIMIT else []
    if n <= RECURRENT_LIMIT:
        forms += ["recurrent"] if retention == "1d" else ["recurrent", "scan"]
    with torch.inference_mode(not gradients):
        timings = time_each({form: call(form) for form in forms}, repeats)
    milliseconds = {form: 1e3 * t.median for form, t in timings.items()}
    plan = ops.plan_1d(n, gradients=gradients) if retention == "1d" else ops.plan_2d((side, side), gradients=gradients)
    return Row(retention, n, gradients, milliseconds, plan.form, milliseconds[plan.form] / min(milliseconds.values()))


def _run(retention: str, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, side: int, form: ops.Form) -> Tensor:
    if retention == "1d":
        return ops.retention_1d(q, k, v, gamma, form=form)
    return ops.retention_2d(q, k, v, gamma, (side, side), form=form)
