"""What numbers carry with them."""

import pytest
import torch

from vir.bench import measure
from vir.bench.gpu import WARM_UP, recorded_later, time_on_gpu


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


@pytest.mark.gpu
def test_a_second_call_records_and_later_ones_replay() -> None:
    x, calls = torch.zeros(1, device="cuda"), []

    def call() -> None:
        calls.append(1)
        x.add_(1)

    run = recorded_later(call)
    run()
    assert (len(calls), x.item()) == (1, 1)
    run()
    assert (len(calls), x.item()) == (2 + WARM_UP, 1 + WARM_UP)  # what is recorded does not run
    for _ in range(2):
        run()
    assert (len(calls), x.item()) == (2 + WARM_UP, 3 + WARM_UP)
