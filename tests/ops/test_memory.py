"""Linear forms never build an n x n tensor: measured on 65,536 tokens, where one would take 16 GB a head."""

import pytest
import torch

from vir import ops
from vir.bench.measure import peak_memory

SIDE, HEAD_SIZE = 256, 64
GIGABYTE = 10**9


def peak_beyond_output(heads: int, retention: str, form: ops.Form) -> int:
    """Bytes that a call needs beyond its inputs and its output."""
    q, k, v = torch.randn(3, 1, SIDE * SIDE, heads, HEAD_SIZE).unbind(0)
    gamma = ops.decay(heads)

    def call() -> torch.Tensor:
        if retention == "1d":
            return ops.retention_1d(q, k, v, gamma, form=form)
        return ops.retention_2d(q, k, v, gamma, (SIDE, SIDE), form=form)

    with torch.inference_mode():
        peak = peak_memory(call)
    if peak is None:
        pytest.skip("this system does not tell the peak memory of a process")
    return peak - v.nbytes


@pytest.mark.parametrize(
    ("retention", "form"), [("1d", "chunkwise"), ("1d", "auto"), ("2d", "chunkwise"), ("2d", "auto")]
)
def test_chunkwise_with_the_heads_of_vir_small(retention: str, form: ops.Form) -> None:
    assert peak_beyond_output(6, retention, form) < GIGABYTE


@pytest.mark.parametrize(("retention", "form"), [("1d", "recurrent"), ("2d", "recurrent"), ("2d", "scan")])
def test_token_by_token(retention: str, form: ops.Form) -> None:
    assert peak_beyond_output(1, retention, form) < GIGABYTE


def test_the_measurement_sees_an_n_x_n_tensor() -> None:
    """The ruler itself: the parallel form at a sixteenth of the tokens, whose scores take 64 MB."""
    q, k, v = torch.randn(3, 1, 4096, 1, HEAD_SIZE).unbind(0)
    with torch.inference_mode():
        peak = peak_memory(lambda: ops.retention_1d(q, k, v, ops.decay(1), form="parallel"))
    if peak is None:
        pytest.skip("this system does not tell the peak memory of a process")
    assert peak > 4096 * 4096 * 4
