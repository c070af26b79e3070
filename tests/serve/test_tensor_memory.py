"""Memory of one call: what is held at one time, not what was made in all."""

import torch

from vir.serve.memory import peak_of_tensors

MB = 2**20


def test_the_peak_counts_what_is_held_together() -> None:
    def one_after_the_other() -> None:
        for _ in range(3):
            torch.zeros(MB // 4)

    def together() -> None:
        made = [torch.zeros(MB // 4) for _ in range(3)]
        del made

    assert MB <= peak_of_tensors(one_after_the_other) < 1.1 * MB
    assert 3 * MB <= peak_of_tensors(together) < 3.1 * MB
