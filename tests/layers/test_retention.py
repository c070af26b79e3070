"""A retention layer: its decay, its range."""

import pytest
import torch

from vir import ops
from vir.layers.retention import MultiHeadRetention, Retention, stretch_decay


@pytest.mark.parametrize("retention", ["1d", "2d"])
def test_a_stretched_decay_is_its_power(retention: Retention) -> None:
    """On a grid of twice the side, half the power of gamma fades as much over the same pixels."""
    layer = MultiHeadRetention(48, 3, retention).eval()
    x = torch.randn(2, 12, 48)
    before = layer(x, (3, 4))
    stretch_decay(layer, 0.5)
    q, k, v = layer.qkv(x).unflatten(-1, (3, 3, 16)).unbind(2)
    gamma = ops.decay(3) ** 0.5
    out = ops.retention_1d(q, k, v, gamma) if retention == "1d" else ops.retention_2d(q, k, v, gamma, (3, 4))
    assert torch.allclose(layer(x, (3, 4)), layer.proj(layer.norm(out.flatten(2))), atol=1e-6)
    assert not torch.allclose(layer(x, (3, 4)), before, atol=1e-4)
    with pytest.raises(ValueError, match="above 0"):
        stretch_decay(layer, 0.0)


def test_decays_of_two_kinds_side_by_side() -> None:
    torch._dynamo.reset()
    log, retnet = (MultiHeadRetention(48, 3, decay=kind).eval() for kind in ("log", "retnet"))
    retnet.load_state_dict(log.state_dict())
    x = torch.randn(2, 12, 48)
    compiled = [torch.compile(layer, backend="aot_eager") for layer in (log, retnet)]
    with torch.no_grad():
        outs = [layer(x, (3, 4)) for layer in (log, retnet)]
        assert not torch.allclose(*outs, atol=1e-4)
        for _ in range(2):
            for layer, out in zip(compiled, outs, strict=True):
                assert torch.allclose(layer(x, (3, 4)), out, atol=1e-5)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("retention", ["1d", "2d"])
def test_sums_that_leave_the_range_of_half_precision(retention: Retention, streamed: bool) -> None:
    layer = MultiHeadRetention(48, 3, retention).eval()
    with torch.no_grad():
        layer.qkv.weight.fill_(0.25), layer.qkv.bias.zero_()
        x = torch.ones(1, 400, 48)
        want = layer(x, (20, 20))
        layer.half()
        got = layer.stream(x.half(), 20, None)[0] if streamed else layer(x.half(), (20, 20))
    assert got.isfinite().all()
    assert (got - want).abs().max() < 1e-2
