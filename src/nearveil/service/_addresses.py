"""Addresses of clients."""

import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from typing import Any


def network_of(client: Sequence[Any] | None) -> str:
    """Return whose limits count: an address; of IPv6 the network, because one machine has all addresses of it.

    Examples
    --------
    >>> [network_of(client) for client in (("192.0.2.1", 5), ("2001:db8::1:2", 5), None)]
    ['192.0.2.1', '2001:db8::/64', '']
    """
    address = str(client[0]) if client else ""
    if ":" not in address:
        return address
    with suppress(ValueError):
        return str(ipaddress.IPv6Network((address.partition("%")[0], 64), strict=False))
    return address
