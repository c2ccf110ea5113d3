"""Messages to systemd, where it started this process."""

import os
import socket
from contextlib import suppress

_ALIVE = b"READY=1\nWATCHDOG=1"


def tell_alive() -> None:
    """Give a sign of life to the service manager, if there is one that waits for it (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
        sending.setblocking(False)
        sending.sendto(_ALIVE, "\0" + address[1:] if address.startswith("@") else address)
