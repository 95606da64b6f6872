"""Addresses of this machine: where a server listens, and under which name another machine finds it.

Guarantees: nothing is sent anywhere to find them out; an address that is none is refused before a server sees it.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

LOOPBACK = "127.0.0.1"


def listen_address(text: str) -> tuple[str, int | None]:
    """`0.0.0.0`, `10.0.0.5:6400`, `::` or `[::]:6400` as an address and, where it is named, a port.

    Raises ValueError with a sentence.
    """
    address, port = text, ""
    if text.startswith("["):
        address, closed, port = text[1:].partition("]")
        address, port = address if closed else "", port.removeprefix(":")
    elif text.count(":") == 1:
        address, _, port = text.partition(":")
    try:
        ipaddress.ip_address(address)
        number = int(port) if port else None
    except ValueError:
        number = -1
    if number is not None and not 0 < number < 65536:
        raise ValueError("an address of this machine, as in 0.0.0.0 (all of them), 10.0.0.5 or 10.0.0.5:6400")
    return address, number


def is_loopback(address: str) -> bool:
    """Whether only this machine itself can reach it."""
    return ipaddress.ip_address(address).is_loopback


def is_wildcard(address: str) -> bool:
    """Whether it stands for all addresses of this machine."""
    return ipaddress.ip_address(address).is_unspecified


def outward_addresses() -> list[str]:
    """IPv4 addresses under which others may reach this machine; the one of the way out comes first."""
    found = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # A datagram socket only looks up the route when it connects. The address is reserved for documentation.
        probe.connect(("192.0.2.1", 9))
        found.append(probe.getsockname()[0])
    with suppress(OSError):  # its own name may resolve to nothing
        found += [place[4][0] for place in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return [address for address in dict.fromkeys(found) if not is_loopback(address) and not is_wildcard(address)]


def in_url(address: str) -> str:
    """As a URL spells it: IPv6 stands in brackets."""
    return f"[{address}]" if ":" in address and not address.startswith("[") else address
