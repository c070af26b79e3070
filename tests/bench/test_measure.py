"""What numbers carry with them."""

import pytest

from vir.bench import measure
from vir.bench.gpu import time_on_gpu


def test_triton_may_be_missing_or_come_by_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise measure.PackageNotFoundError(name)

    monkeypatch.setattr(measure, "version", missing)
    monkeypatch.setattr(measure.torch.cuda, "get_device_name", lambda: "some GPU")
    told = measure.provenance("cuda", "bf16")
    assert "triton" not in told
    assert told["hardware"] == "some GPU"


def test_nothing_is_timed_in_no_time() -> None:
    """Where every contender is out of memory."""
    assert time_on_gpu({}, 3) == {}
