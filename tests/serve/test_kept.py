"""Photographs are kept for a while, and not too many of them."""

import time

import pytest
from PIL import Image

from vir.serve.kept import Forgotten, Kept


def image() -> Image.Image:
    return Image.new("RGB", (10, 10))  # 300 bytes


def test_the_longest_unused_goes_first() -> None:
    kept = Kept(most_bytes=650)
    first, second = kept.add(image()), kept.add(image())
    kept.get(first)
    third = kept.add(image())
    assert kept.bytes == 600
    with pytest.raises(Forgotten, match="Choose it again"):
        kept.get(second)
    assert kept.get(first).size == kept.get(third).size == (10, 10)


def test_one_alone_may_be_larger_than_all() -> None:
    kept = Kept(most_bytes=10)
    old, new = kept.add(image()), kept.add(image())
    assert kept.get(new)
    with pytest.raises(Forgotten):
        kept.get(old)


def test_they_go_after_a_while() -> None:
    now = 0.0
    kept = Kept(seconds=60, clock=lambda: now)
    name = kept.add(image())
    now = 59
    assert kept.get(name)
    now = 118
    assert kept.get(name)  # counted from the last use
    now = 179
    with pytest.raises(Forgotten):
        kept.get(name)
    assert kept.bytes == 0


def test_they_go_even_if_nobody_asks() -> None:
    kept = Kept(seconds=0.05)
    kept.add(image())
    assert kept.bytes == 300
    deadline = time.monotonic() + 10
    while kept.bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert kept.bytes == 0
