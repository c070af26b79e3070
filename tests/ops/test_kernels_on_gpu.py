"""The kernels on a GPU alone: large sizes, mistakes of Triton's compiler, PyTorch's compiler and CUDA graphs around."""

from collections.abc import Iterator

import pytest
import torch
from bounds import poisoned_and_fenced
from compare import KERNEL_TOLERANCE, close, relative_error, served
from torch import Tensor

from vir import ops

pytest.importorskip("triton")
from vir.ops.triton import operators

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _memory() -> Iterator[None]:
    with poisoned_and_fenced():
        yield


def test_auto_takes_the_kernels_on_a_gpu() -> None:
    where = {"device": "cuda", "dtype": torch.bfloat16}
    assert ops.plan_1d(197, **where).form == "kernel"
    assert ops.plan_2d((14, 14), **where).form == "kernel"
    assert ops.plan_1d(197, device="cuda", dtype=torch.float64).form == "parallel"
    assert ops.plan_1d(197, **where, head_dim=129).form == "parallel"
    assert ops.plan_1d(197, **where, chunk=32).form == "parallel"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "grid"), [(1025, (32, 32)), (4097, (64, 64)), (6000, (100, 60)), (8193, (16, 512))])
def test_large_sizes(n: int, grid: tuple[int, int], dtype: torch.dtype) -> None:
    """On fresh random inputs, against the parallel form in float64 with gradients."""
    generator = torch.Generator("cuda").manual_seed(torch.seed())
    q, k, v, grad = torch.randn(4, 1, n, 2, 64, device="cuda", generator=generator).to(dtype).unbind(0)
    gamma = ops.decay(2, device="cuda", dtype=torch.float64)

    def with_gradients(dims: str, form: ops.Form, dtype: torch.dtype) -> list[Tensor]:
        qkv = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        decay = gamma.to(torch.float64 if dtype == torch.float64 else torch.float32)
        if dims == "1d":
            out = ops.retention_1d(*qkv, decay, form=form)
        else:
            out = ops.retention_2d(*qkv, decay, grid, form=form)
        return [out, *torch.autograd.grad(out, qkv, grad.to(dtype))]

    for dims in ("1d", "2d"):
        got, want = with_gradients(dims, "kernel", dtype), with_gradients(dims, "parallel", torch.float64)
        for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            close(f"{dims} {name}", a, b, KERNEL_TOLERANCE[dtype])


def test_parallel_form_beyond_two_billion_scores() -> None:
    """More than 32 bits count: PyTorch's own kernels must not be asked for what they cannot do there."""
    heads, n = 9, 15_500
    if torch.cuda.mem_get_info()[0] < 2.5 * 4 * heads * n * n:
        pytest.skip("needs 22 GB of GPU memory")
    q, k, v = torch.randn(3, 1, n, heads, 16, device="cuda").unbind(0)
    gamma = ops.decay(heads, device="cuda")
    close("out", ops.retention_1d(q, k, v, gamma, form="parallel"), ops.retention_1d(q, k, v, gamma), 1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [32, 64, 128])
def test_transposed_dot_is_not_miscompiled(d: int, dtype: torch.dtype) -> None:
    """Triton 3.4 to 3.7 on Hopper was reported to get `dot(trans(a), b)` wrong in another library's gradient of k
    (flash-linear-attention issues 640, 826, 984). Ours has such products in every state: many lengths, many seeds."""
    served(d, dtype)
    gamma = ops.decay(4, device="cuda")
    for seed, n in enumerate((64, 65, 128, 200, 256, 511, 512, 1000)):
        generator = torch.Generator("cuda").manual_seed(seed)
        q, k, v, grad = torch.randn(4, 3, n, 4, d, device="cuda", generator=generator).to(dtype).unbind(0)
        _, dk, dv, _ = operators.sequence_backward(grad, None, q, k, v, gamma, d**-0.5, None)
        q64, grad64 = q.double(), grad.double()
        k64, v64 = k.double().requires_grad_(), v.double().requires_grad_()
        out = ops.retention_1d(q64, k64, v64, gamma.double(), form="parallel", scale=d**-0.5)
        want = torch.autograd.grad(out, (k64, v64), grad64)
        assert relative_error(dk, want[0]) < KERNEL_TOLERANCE[dtype], f"dk, n={n}"
        assert relative_error(dv, want[1]) < KERNEL_TOLERANCE[dtype], f"dv, n={n}"


def test_compiled_exported_and_in_a_cuda_graph() -> None:
    gamma = ops.decay(3, device="cuda")

    class Both(torch.nn.Module):
        def forward(self, qkv: Tensor) -> Tensor:
            q, k, v = qkv.unbind(2)
            return ops.retention_1d(q, k, v, gamma) + ops.retention_2d(q, k, v, gamma, (12, 11))

    qkv = torch.randn(2, 133, 3, 3, 64, device="cuda", dtype=torch.bfloat16)
    model = Both()
    want = model(qkv)
    assert torch.equal(torch.compile(model, fullgraph=True)(qkv), want)
    exported = torch.export.export(model, (qkv,))
    assert "vir.grid" in str(exported.graph)
    assert torch.equal(exported.module()(qkv), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(qkv)
    qkv.normal_()
    graph.replay()
    assert torch.equal(out, model(qkv))
