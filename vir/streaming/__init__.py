"""Images larger than memory: a band of rows passes through all layers, each keeps its state, the next band is read."""

from vir.streaming.engine import Band, CannotStream, Streamer, stream
from vir.streaming.readers import Reader, open_reader

__all__ = ["Band", "CannotStream", "Reader", "Streamer", "open_reader", "stream"]
