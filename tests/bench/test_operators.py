"""vir bench ops without what it compares with."""

import sys

import pytest
import torch

from vir.bench.operators import linear_attention, linear_attention_version, without_linear_attention


def test_why_flash_linear_attention_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    assert "fla" in without_linear_attention()
    assert linear_attention(torch.ones(2), 64) == {}
    assert linear_attention_version(asked=True) == {}
