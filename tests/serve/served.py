"""The real command in a process of its own."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def served(*arguments: str) -> Iterator[str]:
    """The address on which vir serve listens."""
    command = [sys.executable, "-m", "vir", "serve", "--port", "0", "--no-open", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = re.search(r"http://\S+", server.stdout.readline())
            assert url is not None
            yield url.group()
        finally:
            server.terminate()
