"""Which addresses an image may be fetched from: the public internet alone. Pure."""

from __future__ import annotations

import ipaddress

PUBLIC_6 = ipaddress.IPv6Network("2000::/3")
"""All that is assigned to the IPv6 internet; the rest is local, multicast, reserved, or IPv4 in another form."""
REFUSED_4 = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "0.0.0.0/8",  # this network
            "10.0.0.0/8",
            "100.64.0.0/10",  # carrier-grade NAT
            "127.0.0.0/8",
            "168.63.129.16/32",  # a cloud's host, at a public address
            "169.254.0.0/16",  # link-local, instance metadata among it
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.31.196.0/24",
            "192.52.193.0/24",
            "192.88.99.0/24",  # 6to4 relays
            "192.168.0.0/16",
            "192.175.48.0/24",
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, and broadcast
        ),
    )
)
REFUSED_6 = tuple(
    map(
        ipaddress.IPv6Network,
        (
            "2001::/23",  # protocol assignments, Teredo among them
            "2001:db8::/32",
            "2002::/16",  # 6to4
            "2620:4f:8000::/48",
            "3fff::/20",
        ),
    )
)


def is_public(address: str) -> bool:
    """False for what is private, loopback, link-local, multicast, reserved, special, or IPv4 inside IPv6; and for no address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv4Address):
        return not any(parsed in network for network in REFUSED_4)
    return parsed.scope_id is None and parsed in PUBLIC_6 and not any(parsed in network for network in REFUSED_6)
