"""Photographs and what pretends to be one."""

import struct
import zlib
from io import BytesIO

from PIL import Image

from vir.demo.photographs import photographs

PAVILION = photographs()["a pavilion"]
CAT = photographs()["a cat"]


def bomb(side: int = 30_000) -> bytes:
    """A whole PNG of side x side black dots in some kilobytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    pack = zlib.compressobj(9)
    row = bytes(1 + (side + 7) // 8)
    lines = b"".join(pack.compress(row * 100) for _ in range(side // 100)) + pack.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", lines) + chunk(b"IEND", b"")


def png(width: int, height: int) -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height), "gray").save(file, "PNG")
    return file.getvalue()
