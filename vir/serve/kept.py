"""Photographs that the page is about, in memory alone, and only for a while."""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from PIL import Image

MOST_BYTES = 512_000_000
SECONDS = 1800.0  # since the last use
CHECKS = 20  # in that time


class Forgotten(KeyError):
    """A photograph that was never here, or is no longer."""

    def __str__(self) -> str:
        return "this photograph is not, or no longer, in the server's memory. Choose it again."


class Kept:
    """Images under names that cannot be guessed; the longest unused go when there are too many bytes or it is late."""

    def __init__(
        self, most_bytes: int = MOST_BYTES, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.most_bytes, self.seconds, self.clock = most_bytes, seconds, clock
        self._images: OrderedDict[str, tuple[float, Image.Image]] = OrderedDict()  # the longest unused first
        self._lock = threading.Lock()
        self._clearing = False

    def add(self, image: Image.Image) -> str:
        name = secrets.token_urlsafe(12)
        with self._lock:
            self._images[name] = self.clock(), image
            self._forget()
            self._forget_later()
        return name

    def get(self, name: str) -> Image.Image:
        with self._lock:
            self._forget()
            if name not in self._images:
                raise Forgotten(name)
            image = self._images[name][1]
            self._images[name] = self.clock(), image
            self._images.move_to_end(name)
            return image

    @property
    def bytes(self) -> int:
        with self._lock:
            return self._bytes()

    def _bytes(self) -> int:
        return sum(_bytes_of(image) for _, image in self._images.values())

    def _forget(self) -> None:
        late = self.clock() - self.seconds
        while self._images and next(iter(self._images.values()))[0] < late:
            self._images.popitem(last=False)
        while len(self._images) > 1 and self._bytes() > self.most_bytes:  # the newest stays: somebody asks about it now
            self._images.popitem(last=False)

    def _forget_later(self) -> None:
        """Also if nobody asks again; the thread ends when there is nothing left."""
        if self._images and not self._clearing:
            self._clearing = True
            timer = threading.Timer(self.seconds / CHECKS, self._clear)
            timer.daemon = True  # the process does not wait for it
            timer.start()

    def _clear(self) -> None:
        with self._lock:
            self._clearing = False
            self._forget()
            self._forget_later()


def _bytes_of(image: Image.Image) -> int:
    return 3 * image.width * image.height
