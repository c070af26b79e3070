"""The kernels against what one would use instead: attention, flash-linear-attention, and the speed of memory."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vir import ops
from vir.bench.gpu import copy_bandwidth, recorded, relative_error, time_on_gpu
from vir.bench.measure import Timing

HEADS, HEAD_DIM = 12, 64
SHAPES = ((14, 128), (32, 64), (64, 16), (64, 1), (128, 4), (256, 1))  # patches of a side, batch
LARGEST_ERROR = 5e-3  # in bf16
QUADRATIC_LIMIT = 5000  # tokens; fla's parallel form is quadratic in them
OURS = ("kernel 1D", "kernel 2D")


@dataclass(frozen=True)
class Row:
    """One shape: milliseconds of every contender, forward and backward; an error where a kernel is wrong.

    On the GPU alone, as CUDA graphs; `called` is forward as called from Python, where a GPU may wait for its host.
    """

    side: int
    batch: int
    limit: float  # milliseconds to move q, k, v and the output once, at the speed of a copy
    forward: dict[str, float]
    called: dict[str, float]
    backward: dict[str, float]
    spread: float  # the widest between the quartiles, as a share of the median
    errors: dict[str, float] = field(default_factory=dict)  # relative, of our outputs and gradients

    @property
    def tokens(self) -> int:
        return self.side**2

    @property
    def right(self) -> bool:
        return all(error <= LARGEST_ERROR for error in self.errors.values())

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tokens": self.tokens, "right": self.right}


Contender = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def without_linear_attention() -> str:
    """Why flash-linear-attention is not measured; nothing where it is."""
    try:
        for name in ("fla.ops.retention", "fla.ops.simple_gla"):
            import_module(name)
    except ImportError as error:
        return str(error)
    return ""


def linear_attention_version(asked: bool) -> dict[str, str]:
    """For the origin of figures; empty where it is not measured."""
    if not asked or without_linear_attention():
        return {}
    return {"fla": import_module("fla").__version__}


def linear_attention(gamma: Tensor, tokens: int) -> dict[str, Contender]:
    """flash-linear-attention's kernels with our decays; none where it is not installed."""
    if without_linear_attention():
        return {}
    from fla.ops.retention import parallel_retention
    from fla.ops.simple_gla import chunk_simple_gla, fused_chunk_simple_gla

    log = gamma.log()
    found: dict[str, Contender] = {
        "fla chunk": partial(_first_of, chunk_simple_gla, g_gamma=log),
        "fla fused chunk": partial(_first_of, fused_chunk_simple_gla, g_gamma=log),
    }
    if tokens <= QUADRATIC_LIMIT:
        found["fla parallel"] = partial(_first_of, parallel_retention)  # takes no decays but its own
    return found


def _first_of(function: Callable, *tensors: Tensor, **options: Any) -> Tensor:
    return function(*tensors, **options)[0]


def _as_liked(name: str, *qkv: Tensor) -> tuple[Tensor, ...]:
    """flash-linear-attention copies views before it begins: it gets whole tensors, and that time is not counted."""
    return tuple(x.detach().contiguous().requires_grad_() for x in qkv) if name.startswith("fla") else qkv


def contenders(side: int, fla: bool) -> dict[str, Contender]:
    gamma = ops.decay(HEADS, device="cuda")
    grid = side, side
    return {
        "attention": attention,
        **(linear_attention(gamma, side**2) if fla else {}),
        "kernel 1D": lambda q, k, v: ops.retention_1d(q, k, v, gamma, form="kernel"),
        "kernel 2D": lambda q, k, v: ops.retention_2d(q, k, v, gamma, grid, form="kernel"),
        "PyTorch 1D": lambda q, k, v: ops.retention_1d(q, k, v, gamma, form="chunkwise"),
        "PyTorch 2D": lambda q, k, v: ops.retention_2d(q, k, v, gamma, grid, form="chunkwise"),
    }


def compare(shapes: list[tuple[int, int]], repeats: int, backward: bool, fla: bool) -> Iterator[Row]:
    bandwidth = copy_bandwidth()
    for side, batch in shapes:
        yield _row(side, batch, repeats, backward, contenders(side, fla), bandwidth)


def _row(side: int, batch: int, repeats: int, backward: bool, runs: dict[str, Contender], bandwidth: float) -> Row:
    shape = batch, side**2, 3, HEADS, HEAD_DIM
    qkv = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.requires_grad_() for x in qkv.unbind(2))  # views, as a layer makes them
    grad = torch.randn(v.shape, device="cuda", dtype=v.dtype)
    errors = _errors(runs, q, k, v, grad)
    limit = 4e3 * v.numel() * v.element_size() / bandwidth
    if any(not error <= LARGEST_ERROR for error in errors.values()):
        return Row(side, batch, limit, {}, {}, {}, 0.0, errors)
    with torch.no_grad():
        calls: dict[str, Callable[[], Any]] = {
            name: partial(run, *_as_liked(name, q, k, v)) for name, run in runs.items()
        }  # fmt: skip
        forward = _times(calls, repeats)
        called = time_on_gpu({name: calls[name] for name in forward}, repeats)
    back = {}
    if backward:
        back = _times({n: _gradients(run, _as_liked(n, q, k, v), grad) for n, run in runs.items()}, repeats)
    spread = max((t.spread for t in (*forward.values(), *back.values())), default=0.0)
    return Row(
        side, batch, limit, _milliseconds(forward), _milliseconds(called), _milliseconds(back), spread, errors
    )  # fmt: skip


def _milliseconds(times: dict[str, Timing]) -> dict[str, float]:
    return {name: 1e3 * time.median for name, time in times.items()}


def _times(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Timing]:
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = recorded(call)
        except torch.OutOfMemoryError:  # shown by its absence
            torch.cuda.empty_cache()
    return time_on_gpu(graphs, repeats)


def _gradients(run: Contender, qkv: tuple[Tensor, ...], grad: Tensor) -> Callable[[], Any]:
    out = None

    def call() -> Any:
        nonlocal out
        if out is None:
            out = run(*qkv)
        return torch.autograd.grad(out, qkv, grad, retain_graph=True)

    return call


def _errors(runs: dict[str, Contender], q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> dict[str, float]:
    """Of our kernels in the whole batch, seen in its first and last sample: against plain PyTorch in float32 there."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    seen = [0] if len(q) == 1 else [0, -1]
    errors = {}
    for name in OURS:
        out = runs[name](q, k, v)
        got = (out, *torch.autograd.grad(out, (q, k, v), grad))
        exact = [x.detach()[seen].float().requires_grad_() for x in (q, k, v)]
        want = runs[name.replace("kernel", "PyTorch")](*exact)
        wanted = (want, *torch.autograd.grad(want, exact, grad[seen].float()))
        for what, a, b in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
            errors[f"{name} {what}"] = relative_error(a[seen], b)
    return errors
