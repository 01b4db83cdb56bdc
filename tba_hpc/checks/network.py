"""Checks of the network that connects the nodes.

A function ``check_X`` collects facts about this machine; ``judge_X`` turns them into findings.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from ipaddress import ip_address

import psutil

from tba_hpc.checks.facts import Facts, Finding, ok, problem, warning

VIRTUAL = re.compile(r"lo|docker\d|virbr|veth|br-|cni|flannel|cali|tun|tap|ifb|dummy|wg")
"""Pattern of name prefixes of network interfaces that lead to no other node."""

FAST = re.compile(r"ib|hsn|opa")
"""Pattern of name prefixes of InfiniBand, Slingshot and Omni-Path interfaces."""

NETWORK = "network"
"""Name of the finding about the network."""


def check_network(facts: Facts) -> Iterator[Finding]:
    """Check that MPI, gloo and NCCL can tell which network connects the nodes."""
    speeds: dict[str, int] = {}
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        own = [a.address for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)]
        usable = any(not address.startswith("fe80:") for address in own)
        if name in states and states[name].isup and usable and not VIRTUAL.match(name):
            speeds[name] = states[name].speed
    yield judge_network(speeds, facts.site.network_interface)
    if facts.site.network_interface is None:
        yield from judge_host_name(_addresses(), _best_first(speeds))


def _addresses() -> set[str]:
    """Return the addresses to which this machine's host name resolves here; empty if it does not."""
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return set()


def _best_first(speeds: Mapping[str, int]) -> list[str]:
    """Sort interfaces: those with names of fast networks first, and otherwise by their speed in Mbit/s."""
    return sorted(speeds, key=lambda name: (FAST.match(name) is None, -speeds[name], name))


def judge_host_name(addresses: Collection[str], interfaces: Sequence[str]) -> Iterator[Finding]:
    """Yield a finding if a node's name resolves to no address at which other nodes reach it.

    gloo, by which trainer ranks of several nodes connect, uses the address to which the name resolves. The
    finding omits the name, so that equal findings of several nodes can be joined.

    addresses: addresses to which the name resolves. interfaces: names of the network interfaces that lead to
    other nodes, the best first.
    """
    if all(ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        where = f"leads to {' and '.join(sorted(addresses))}" if addresses else "cannot be resolved"
        found = f"the node's own name {where} there, so that trainers of other nodes do not reach it"
        chosen = ": ".join(["network_interface", *interfaces[:1]])
        yield warning("host name", found, f"set {chosen} in the site file")


def judge_network(speeds: Mapping[str, int], chosen: str | None) -> Finding:
    """Return the finding about the network.

    speeds: speed of each interface that leads to other nodes, in Mbit/s, 0 if unknown. chosen: the site's
    network_interface.
    """
    if not speeds:
        return warning(NETWORK, "no interface leads to other nodes", "ask how nodes reach each other")
    names = _best_first(speeds)
    best = names[0]
    if chosen and chosen not in speeds:
        why = "is the loopback, which other nodes cannot reach" if chosen == "lo" else "does not exist here"
        found = f"network_interface: {chosen} {why}; there is {', '.join(names)}"
        return problem(NETWORK, found, f"set network_interface: {best} in the site file")
    if chosen or len(names) == 1:
        return ok(NETWORK, chosen or f"{best}, the only one")
    why = "fast by its name" if FAST.match(best) else "the fastest" if speeds[best] else "the first by name"
    return warning(
        NETWORK,
        f"{', '.join(names)}: libraries may not choose {best}, which is {why}",
        f"set network_interface: {best} in the site file (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, "
        "OMPI_MCA_btl_tcp_if_include)",
    )
