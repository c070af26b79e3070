"""The address the page is served on."""

import errno
import socket


class CannotListen(OSError):
    """The address is taken, or is none of this machine."""


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens, so that the address is known to be free before anybody is told of it."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        raise CannotListen(
            f"cannot listen on {host}, port {port} ({error.strerror or error}). "
            + ("Take another --port, or 0 for a free one." if taken else "Name another --host: one of this machine.")
        ) from None


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # every address of the machine; this one works here
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
