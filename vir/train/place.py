"""The folder of a run: of one run at a time, never over what that began with, and known again when it goes on."""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from vir.train.setup import CannotTrain, Run


@contextmanager
def the_only_one(out: Path) -> Iterator[None]:
    """Of several runs in a folder, whose checkpoints and logs would mix, the first alone; of one run's processes, the
    first asks."""
    if int(os.environ.get("RANK", "0")):
        yield
        return
    lock = FileLock(out / ".lock")  # it falls with its process, however that ends
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise CannotTrain(f"another process trains in {out} now: wait for its end, or choose another --out.") from None
    except OSError as error:
        raise CannotTrain(f"{out} cannot be written to ({error}): choose another --out.") from None
    except NotImplementedError:  # a file system without locks
        pass
    try:
        yield
    finally:
        lock.release()


def check_start(run: Run) -> None:
    """That a run does not write over the weights that it begins with."""
    for name in ("best", "last"):
        written = run.out / f"{name}.safetensors"
        if run.start is not None and run.start.exists() and written.exists() and run.start.samefile(written):
            raise CannotTrain(f"{run.start} is where this run's own checkpoints go: choose another --out.")


def beginning(run: Run) -> dict[str, Any]:
    """What a run began with, to be compared when it goes on."""
    if run.start is None:
        return {}
    return {"checkpoint": f"{zlib.crc32(run.start.read_bytes()):08x}", "decay": run.decay}
