"""What a block adds to its tokens: the same by every way, with all that users hang on its layers."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from vir.layers import residual
from vir.layers.blocks import RetentionBlock
from vir.layers.residual import scaled_linear


@pytest.mark.parametrize("tokens", [3, 100])
def test_scaled_weights_are_a_scaled_result(tokens: int) -> None:
    """With many tokens the weights of a layer are scaled, with few its result: the same numbers and gradients."""
    linear, scale = nn.Linear(8, 6).double(), torch.randn(6, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, tokens, 8, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, tokens, 6, dtype=torch.float64)
    inputs = (x, scale, linear.weight, linear.bias)
    out, want = scaled_linear(linear, x, scale), linear(x) * scale
    assert torch.allclose(out, want, atol=1e-12)
    for a, b in zip(torch.autograd.grad(out, inputs, weights), torch.autograd.grad(want, inputs, weights), strict=True):
        assert torch.allclose(a, b, atol=1e-12)
    assert torch.equal(scaled_linear(linear, x, None), linear(x))


def replaced_forward(linear: nn.Linear) -> None:
    """As adapters do it."""
    usual, more = linear.forward, nn.Linear(linear.in_features, linear.out_features).double()
    linear.forward = lambda x: usual(x) + more(x)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "change",
    [
        replaced_forward,
        lambda linear: linear.register_forward_hook(lambda module, given, out: out + 1),
        lambda linear: linear.register_forward_pre_hook(lambda module, given: (given[0] + 1,)),
        lambda linear: prune.random_unstructured(linear, "weight", 0.5),
        nn.utils.parametrizations.weight_norm,
    ],
    ids=["replaced forward", "hook", "hook before", "pruned", "parametrized"],
)
def test_what_is_added_to_a_linear_layer_counts_with_and_without_gradients(change: Callable) -> None:
    block = RetentionBlock(32, 2, "1d", init_values=0.5).double().eval()
    x = torch.randn(2, 256, 32, dtype=torch.float64)
    bare = block(x, (16, 16))
    for linear in (block.retention.proj, block.mlp.fc2):
        with torch.no_grad():
            linear.weight *= 1 + torch.rand(32, 1)
        change(linear)
    with torch.no_grad():
        want = block(x, (16, 16))
    for _ in range(2):
        out = block(x, (16, 16))
        assert torch.allclose(out, want, atol=1e-12)
        out.sum().backward()
    assert all(weight.grad is not None for weight in block.parameters())
    assert not torch.allclose(want, bare, atol=1e-3)


@pytest.mark.parametrize("scaled", [0.3, None], ids=str)
def test_a_block_adds_the_same_with_and_without_gradients(scaled: float | None) -> None:
    """Without them its scales are applied where it adds, else inside its layers; a stream of one band adds likewise."""
    block = RetentionBlock(32, 2, "1d", init_values=scaled).double().eval()
    x = torch.randn(2, 12, 32, dtype=torch.float64)
    with torch.no_grad():
        without, (streamed, _) = block(x, (3, 4)), block.stream(x, 4, None)
    assert torch.allclose(block(x, (3, 4)), without, atol=1e-12)
    assert torch.allclose(streamed, without, atol=1e-12)
    if scaled is not None:
        block.ls1.gamma.data[0] += 1
        with torch.no_grad():
            assert not torch.allclose(block(x, (3, 4)), without, atol=1e-3)


@pytest.mark.parametrize("name", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_of_gradients_of_a_linear_layer_are_called(name: str) -> None:
    linear, seen = nn.Linear(8, 6), []
    getattr(linear, name)(lambda module, *grads: seen.append(module))
    scaled_linear(linear, torch.randn(2, 100, 8, requires_grad=True), torch.ones(6)).sum().backward()
    assert seen == [linear]


class OfAnotherKind(torch.Tensor):
    """As quantized and sharded weights are."""


def test_weights_of_another_kind_are_left_to_their_layer() -> None:
    linear = nn.Linear(8, 6)
    assert residual._is_only_weights(linear, nn.Linear)
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(OfAnotherKind))
    assert not residual._is_only_weights(linear, nn.Linear)
