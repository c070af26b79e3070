"""The kind of retention, 1D or 2D, for the length of one question: the same weights serve both."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from vir.layers.retention import MultiHeadRetention, Retention


@contextmanager
def retention_as(model: nn.Module, kind: Retention) -> Iterator[None]:
    """Every layer is of this kind inside the block, and of its own again after it, whatever happened."""
    own = [(module, module.retention) for module in model.modules() if isinstance(module, MultiHeadRetention)]
    try:
        for module, _ in own:
            module.retention = kind
        yield
    finally:
        for module, kind_before in own:
            module.retention = kind_before
