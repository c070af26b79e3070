"""`auto` is a rule that can be asked, and the operator runs what the rule says."""

import pytest
import torch

from vir import ops
from vir.ops import forms_1d, forms_2d, kernels


def test_short_is_parallel_and_long_is_chunkwise() -> None:
    assert ops.plan_1d(197) == ops.Plan("parallel")
    assert ops.plan_1d(4097) == ops.Plan("chunkwise", 64)
    assert ops.plan_2d((14, 14)) == ops.Plan("parallel")
    assert ops.plan_2d((64, 64)) == ops.Plan("chunkwise", 16)


def test_what_the_caller_says_goes_first() -> None:
    assert ops.plan_1d(197, form="chunkwise", chunk=10) == ops.Plan("chunkwise", 10)
    assert ops.plan_1d(4097, form="recurrent") == ops.Plan("recurrent")
    assert ops.plan_2d((64, 64), form="scan", chunk=4) == ops.Plan("scan")
    assert ops.plan_2d((64, 64), chunk=4) == ops.Plan("chunkwise", 4)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("n", [196, 320, 321, 576, 900])
def test_the_operator_runs_the_plan(n: int, gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    for module, dims in ((forms_1d, "1d"), (forms_2d, "2d")):
        for name in ("parallel", "recurrent", "chunkwise"):
            form = getattr(module, name)

            def spy(*args, _form=form, _name=name, _dims=dims, **kwargs):  # type: ignore[no-untyped-def]
                ran.append((_dims, _name))
                return _form(*args, **kwargs)

            monkeypatch.setattr(module, name, spy)
    q, k, v = torch.randn(3, 1, n, 1, 4, requires_grad=gradients).unbind(0)
    side = round(n**0.5)
    ops.retention_1d(q, k, v, ops.decay(1))
    planned = [("1d", ops.plan_1d(n, gradients=gradients).form)]
    if side * side == n:
        ops.retention_2d(q, k, v, ops.decay(1), (side, side))
        planned.append(("2d", ops.plan_2d((side, side), gradients=gradients).form))
    assert ran == planned


def test_heads_that_do_not_fit_on_a_gpu_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = pytest.importorskip("vir.ops.triton.settings")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for capability, serves in ((8, 9), False), ((9, 0), True):
        settings.like_hopper.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert kernels.serve(80, torch.float32) == serves
        assert kernels.serve(80, torch.bfloat16)
        assert kernels.serve(64, torch.float32)
        assert not kernels.serve(129, torch.bfloat16)
    settings.like_hopper.cache_clear()
